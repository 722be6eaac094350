"""Following a growing log, phases, own markers, and the judgement whether a job stands still."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from remote_jobs.logs import Follower, History, explain_bytes
from remote_jobs.logs.stall import Signals, bar_limit_s, judge_stall

DATA = Path(__file__).resolve().parents[1] / "data" / "logs"


def phases_of(name):
    return [(p["name"], p["state"]) for p in explain_bytes((DATA / "real" / name).read_bytes())["phases"]]


def test_phases_of_an_offline_extraction_in_order():
    names = [name for name, _ in phases_of("vllm026_h200_tp2_extract_ok.log")]
    expected = ["start", "engine_start", "load_weights", "load_drafter", "compile", "profile", "kv_cache", "graph_capture", "init_engine", "extract", "shutdown"]
    assert names == expected


def test_all_shards_loaded_is_not_ready():
    data = (DATA / "real" / "vllm032_cpu_hidden_states_server_ok.log").read_bytes()
    at = data.index(b"Loading weights took")
    before = explain_bytes(data[:at])
    assert before["bars"][-1]["percent"] == 100
    assert "ready" not in [p["name"] for p in before["phases"]]
    ready = data.index(b"Application startup complete.")
    assert [p["name"] for p in explain_bytes(data[: ready + 40])["phases"]][-1] == "ready"


def test_the_load_phase_carries_the_time_that_the_log_states():
    answer = explain_bytes((DATA / "cases" / "021_kv_cache_too_small_after_clean_load.log").read_bytes())
    load = next(p for p in answer["phases"] if p["name"] == "load_weights")
    assert (load["started_line"], load["ended_line"], load["took_s"], load["state"]) == (3, 25, 293.46, "done")


def test_the_running_phase_fails_with_the_job():
    data = b"Starting to load model x...\nRuntimeError: CUDA out of memory. Tried to allocate 2 GiB\n"
    assert [(p["name"], p["state"]) for p in explain_bytes(data, 1)["phases"]] == [("load_weights", "failed")]


def test_training_of_speculators_has_epochs_validation_and_checkpoints():
    names = [name for name, _ in phases_of("speculators09_train_ok.log")]
    assert names[0] == "train"
    assert {"save_checkpoint", "validate"} <= set(names)
    train = [state for name, state in phases_of("speculators09_train_ok.log") if name == "train"]
    assert train == ["done"]


def test_own_markers_make_phases_with_counts():
    follower = Follower()
    follower.feed(b'::orch {"phase": "extract", "state": "start", "done": 0, "total": 64}\nnoise\n')
    updates = follower.feed(b'::orch {"phase": "extract", "state": "progress", "done": 8}\n')
    assert follower.snapshot()["phases"] == [{"name": "extract", "state": "running", "started_line": 1, "ended_line": None, "took_s": None, "done": 8, "total": 64}]
    follower.feed(b'::orch {"phase": "extract", "state": "done", "done": 64, "total": 64}\n')
    assert follower.snapshot()["phases"][0]["state"] == "done"
    assert [u.kind for u in updates] in ([], ["phase"])


@pytest.mark.parametrize("text", [b"::orch {", b"::orch []", b"::orch 3", b'::orch {"phase": 3}', b" ::orch {}", b'x ::orch {"phase": "a"}'])
def test_malformed_or_indented_markers_are_ignored(text):
    follower = Follower()
    follower.feed(text + b"\n")
    assert follower.snapshot()["phases"] == []


def test_a_bar_is_seen_before_its_line_ends():
    follower = Follower()
    updates = follower.feed(b"\rLoading shards:  50%|##  | 1/2 [00:10<00:10, 10.00s/it]")
    assert [(u.kind, u.data["done"]) for u in updates] == [("bar", 1)]
    updates = follower.feed(b"\rLoading shards: 100%|####| 2/2 [00:20<00:00, 10.00s/it]")
    assert [(u.kind, u.data["done"]) for u in updates] == [("bar", 2)]
    assert len(follower.snapshot()["bars"]) == 1


def test_history_changes_the_forecast_of_a_followed_bar():
    text = b"\rLoading shards:  10%|#  | 1/10 [00:02<00:18,  2.00s/it]"
    alone, known = Follower(), Follower({"Loading shards": History(20.0, 3)})
    alone.feed(text)
    known.feed(text)
    assert known.snapshot()["bars"][0]["eta_s"] > 2 * alone.snapshot()["bars"][0]["eta_s"]


def test_a_question_is_reported_at_once_and_taken_back_when_answered():
    follower = Follower()
    updates = follower.feed(b"loading\nDo you wish to run the custom code? [y/N] ")
    assert [(u.kind, u.line) for u in updates] == [("prompt", 2)]
    assert follower.snapshot()["waiting_for_input"] == {"line": 2, "text": "Do you wish to run the custom code? [y/N]"}
    follower.feed(b"y\nrunning\n")
    assert follower.snapshot()["waiting_for_input"] is None


def test_the_follower_keeps_at_most_64_bars():
    follower = Follower()
    for n in range(500):
        follower.feed(f"\rbar{n}:  50%|## | 1/2 [00:01<00:01,  1.00s/it]\n".encode())
    assert len(follower.snapshot()["bars"]) == 64
    json.dumps(follower.snapshot())


STEADY = [(20.0 * n, n) for n in range(11)]


def test_limit_is_five_times_the_median_item_and_at_least_two_minutes():
    assert bar_limit_s([(0, 0), (1, 1), (2, 2)]) == 120.0
    assert bar_limit_s([(0, 0), (60, 1), (120, 2), (5000, 3)]) == 300.0
    assert bar_limit_s([(0, 0), (60, 1)]) is None


def signals(**known):
    given = {"now_s": 10_000.0, "log_grew_at_s": 10_000.0 - 50, "bar_moved_at_s": 10_000.0 - 50}
    return Signals(**{**given, **known})


@pytest.mark.parametrize(
    ("known", "state"),
    [
        ({}, "moving"),
        ({"waits_for_input": "Password:"}, "waiting_for_input"),
        ({"log_grew_at_s": 9_000.0, "bar_moved_at_s": 9_000.0, "gpu_utilization_pct": [0, 0], "read_bytes_moved_at_s": 9_000.0}, "hung"),
        ({"log_grew_at_s": 9_000.0, "bar_moved_at_s": 9_000.0, "read_bytes_moved_at_s": 9_990.0, "gpu_utilization_pct": [0]}, "slow"),
        ({"log_grew_at_s": 9_000.0, "bar_moved_at_s": 9_000.0, "read_bytes_moved_at_s": 9_000.0, "io_wait": True}, "slow"),
        ({"log_grew_at_s": 9_990.0, "bar_moved_at_s": 9_000.0, "gpu_utilization_pct": [0]}, "suspect"),
        ({"log_grew_at_s": 9_860.0, "bar_moved_at_s": 9_860.0, "gpu_utilization_pct": [50, 60], "read_bytes_moved_at_s": 9_000.0}, "suspect"),
        ({"log_grew_at_s": 9_000.0, "bar_moved_at_s": 9_000.0, "gpu_utilization_pct": [100, 100], "read_bytes_moved_at_s": 9_000.0}, "hung"),
        ({"log_grew_at_s": 9_870.0, "bar_moved_at_s": 9_870.0}, "suspect"),
        ({"log_grew_at_s": 9_000.0, "bar_moved_at_s": None, "phase": "compile", "gpu_utilization_pct": [0]}, "moving"),
        ({"log_grew_at_s": 1_000.0, "bar_moved_at_s": 1_000.0, "service_ready": True}, "moving"),
    ],
)
def test_stall_is_judged_from_several_signals(known, state):
    standing = judge_stall(signals(**known), STEADY)
    assert standing.state == state, standing


def test_the_steps_own_limit_counts_and_zero_means_never():
    silent = signals(log_grew_at_s=0.0, bar_moved_at_s=0.0, gpu_utilization_pct=[0.0], read_bytes_moved_at_s=0.0)
    assert judge_stall(silent, STEADY, hang_s=0).state == "moving"
    assert judge_stall(silent, STEADY, hang_s=20_000).state == "moving"
    assert judge_stall(silent, STEADY, hang_s=5_000).state == "hung"


def test_a_phase_that_was_long_before_may_be_long_again():
    quiet = signals(log_grew_at_s=10_000.0 - 3_000, bar_moved_at_s=None, phase="compile", gpu_utilization_pct=[0.0], read_bytes_moved_at_s=0.0)
    assert judge_stall(quiet).state == "hung"
    assert judge_stall(quiet, usual_phase_s=2_000).state == "moving"
