"""Every known log, through the JSON contract: given cases, logs of real runs, and logs written for this suite."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from remote_jobs.logs import FAILURE_CLASSES, explain_bytes, iter_updates

DATA = Path(__file__).resolve().parents[1] / "data" / "logs"


def load(folder, index):
    with (DATA / folder / index).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


CASES = load("cases", "cases.jsonl")
PROGRESS = [case for case in CASES if case["kind"] == "progress"]
JUDGED = [(case["id"], "cases", case["file"], None, case["expected"]) for case in CASES if case["kind"] != "progress"]
JUDGED += [(case["id"], "real", case["file"], case["exit_status"], case["expected"]) for case in load("real", "logs.jsonl")]
JUDGED += [(case["id"], "own", case["file"], case["exit_status"], case["expected"]) for case in load("own", "own.jsonl")]


@pytest.mark.parametrize("case", PROGRESS, ids=lambda case: case["id"])
def test_every_bar_update_is_read_as_printed(case):
    data = (DATA / "cases" / case["file"]).read_bytes()
    got = [update.to_json() for update in iter_updates(iter([data]))]
    expected = []
    for printed in case["expected"]["tuples"]:
        known = dict(printed)
        known["label"] = known.pop("bar")
        known["s_per_item"] = known.pop("s_per_it")
        expected.append(known)
    assert got == expected


@pytest.mark.parametrize("case", PROGRESS, ids=lambda case: case["id"])
def test_each_restart_of_a_bar_is_its_own_instance(case):
    answer = explain_bytes((DATA / "cases" / case["file"]).read_bytes())
    got = [(bar["label"], bar["total"], bar["done"], bar["elapsed_s"], bar["line"]) for bar in answer["bars"]]
    known = case["expected"]["phases"]
    assert got == [(bar["bar"], bar["total"], bar["done"], bar["elapsed_s"], bar["last_line"]) for bar in known]
    assert answer["failure"] is None


@pytest.mark.parametrize(("name", "folder", "file", "exit_status", "expected"), JUDGED, ids=[case[0] for case in JUDGED])
def test_the_verdict_is_what_an_engineer_would_say(name, folder, file, exit_status, expected):
    answer = explain_bytes((DATA / folder / file).read_bytes(), exit_status)
    failure = answer["failure"]
    if expected["failure_class"] is None:
        assert failure is None
        return
    assert failure is not None
    assert failure["class"] in {expected["failure_class"], *expected["also_accept"]}
    if failure["class"] == expected["failure_class"] and expected["retry_helps"]:
        assert failure["retry"] == expected["retry_helps"]
    match = expected.get("root_cause_match")
    if match:
        assert failure["root_cause"] is not None
        assert any(part in failure["root_cause"]["text"] for part in match.split("|"))
    if expected.get("root_cause_line_no"):
        assert failure["root_cause"]["line"] in expected["root_cause_line_no"]
    if expected.get("waiting_for_input"):
        assert answer["waiting_for_input"]["text"] == failure["root_cause"]["text"]


def macro_f1(pairs):
    """Mean F1 over the classes that occur; pairs of (expected, got)."""
    scores = []
    for name in {expected for expected, _ in pairs}:
        hit = sum(expected == name == got for expected, got in pairs)
        wrong = sum(expected != name == got for expected, got in pairs)
        missed = sum(expected == name != got for expected, got in pairs)
        scores.append(2 * hit / (2 * hit + wrong + missed))
    return sum(scores) / len(scores)


def test_macro_f1_over_all_classes_is_at_least_095():
    pairs = []
    for _, folder, file, exit_status, expected in JUDGED:
        failure = explain_bytes((DATA / folder / file).read_bytes(), exit_status)["failure"]
        got = failure["class"] if failure else None
        pairs.append((expected["failure_class"], expected["failure_class"] if got in expected["also_accept"] else got))
    assert macro_f1(pairs) >= 0.95
    assert {expected for expected, _ in pairs if expected} == set(FAILURE_CLASSES)


def test_answers_have_the_shape_of_the_contract():
    answer = explain_bytes((DATA / "cases" / "021_kv_cache_too_small_after_clean_load.log").read_bytes())
    assert answer["schema"] == 1
    assert set(answer) == {"schema", "bars", "phases", "failure", "waiting_for_input"}
    bar = answer["bars"][0]
    assert {"label", "instance", "worker", "pid", "done", "total", "percent", "elapsed_s", "remaining_s", "s_per_item", "eta_s", "line", "seg"} <= set(bar)
    assert (bar["worker"], bar["pid"], bar["instance"]) == ("EngineCore", 7359, 1)
    assert set(answer["failure"]) == {"class", "retry", "root_cause", "signature", "summary", "advice", "evidence"}
    assert set(answer["phases"][0]) == {"name", "state", "started_line", "ended_line", "took_s"}
    assert json.loads(json.dumps(answer)) == answer


def test_a_healthy_run_that_was_cut_anywhere_is_no_failure():
    """Without an exit status a log that just stops proves nothing: look at every tenth line of healthy logs."""
    for name in ("vllm026_h200_tp2_extract_ok", "speculators09_train_ok", "vllm032_cpu_offline_extract_ok"):
        lines = (DATA / "real" / (name + ".log")).read_bytes().splitlines(keepends=True)
        for cut in range(1, len(lines), 10):
            assert explain_bytes(b"".join(lines[:cut]))["failure"] is None, (name, cut)


def test_exit_status_and_signals_are_evidence():
    log = b"loading\n"
    for status, expected in ((-9, "killed"), (137, "killed"), (-15, "killed"), (143, "killed"), (130, "killed"), (129, "killed"),
                             (-11, "segfault"), (139, "segfault"), (-7, "shm"), (135, "shm"), (127, "missing_file"), (1, "unknown")):
        failure = explain_bytes(log, status)["failure"]
        assert failure["class"] == expected, status
        assert failure["root_cause"] is None
        assert any(str(status) in line for line in failure["evidence"])
    assert explain_bytes(log, 0)["failure"] is None


def test_the_hosts_own_records_turn_a_kill_into_an_oom_kill():
    from remote_jobs.logs import LogReader

    reader = LogReader()
    reader.feed(b"loading\n")
    failure = reader.finish(-9, ["[123.4] Out of memory: Killed process 77 (python3)"])["failure"]
    assert failure["class"] == "host_oom"
    assert "Killed process 77" in failure["evidence"][0]


def test_log_files_are_small():
    size = sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file())
    assert size < 3 << 20
    assert not re.search(rb"/work/", b"".join(path.read_bytes() for path in DATA.rglob("*.log")))
