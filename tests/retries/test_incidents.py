"""What is kept of a failed attempt, how hangs are ended, and that no secret is kept anywhere."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tests.retries.box import Box, bundle, events
from tests.support.host_side import JOB, ended
from tests.support.jobdir import alive, command_line
from tests.support.waiting import wait_until

HANG = "echo working on it; touch up; exec sleep 600"
LEAVES = "(setsid {line} & until [ \"$(cat /proc/$!/comm)\" = {name} ]; do sleep 0.05; done)"
"""Leaves a process behind, and goes on once its program is the one that it is told to run."""
PY_SPY = """#!/bin/bash
[ "$1" = dump ] && echo "Thread $4 (idle): MainThread" && echo "    all_reduce (torch/distributed.py:1)"
"""


def stacks(box: Box, attempt: int = 1) -> list[dict[str, Any]]:
    path = box.root / "jobs" / JOB / "steps" / "1-work" / "attempts" / str(attempt) / "incident" / "stacks.json"
    found: list[dict[str, Any]] = json.loads(path.read_bytes())
    return found


def test_the_bundle_holds_what_an_engineer_would_ask_for(box: Box) -> None:
    step = {
        "name": "work", "run": f"echo the last words; {LEAVES.format(line='sleep 600', name='sleep')}; exit 3", "env": {"NCCL_DEBUG": "INFO"},
        "retry": {"attempts": 2},
    }  # fmt: skip
    job = box.launch(step)
    job.wait_for_kind("retry_scheduled")
    found = bundle(job)
    assert found["verdict"]["class"] == "unknown"
    assert found["exit_status"] == 3
    assert found["environment"]["NCCL_DEBUG"] == "INFO"
    assert found["environment"]["ORCH_JOB"] == job.id
    assert [row["command"] for row in found["left_processes"]] == ["sleep 600"]
    assert {"pid", "ppid", "user", "state", "rss_mib", "wchan"} <= set(found["left_processes"][0])
    assert "nvidia_smi_log" in found["gpus"] or "GPU" in found["gpus"]
    assert {row["path"] for row in found["disk"]} >= {str(box.work)}
    assert found["disk"][0]["free_bytes"] > 0
    assert found["memory"]["MemTotal"] > found["memory"]["MemAvailable"] > 0
    assert isinstance(found["kernel"], list)
    assert "patches" in found
    assert found["release"] == box.side.release.name
    tail = job.log(1, "work").parent / "incident" / "log.tail"
    assert tail.read_text() == "the last words\n"
    decision = json.loads((tail.parent / "decision.json").read_bytes())
    assert decision["retry"] is True
    for path in tail.parent.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
    why = box.why(job, attempt=1)
    assert {"job", "step", "attempt", "verdict", "exit_status", "evidence", "changed_next", "incident"} <= set(why)
    assert why["incident"] == str(tail.parent)
    box.control(job, "stop")
    ended(job)


def test_a_hang_gives_its_stacks_before_it_is_ended_and_counts_as_an_attempt(box: Box) -> None:
    """Also when the program answers TERM with exit status 0: a hang is no success."""
    polite = "trap 'exit 0' TERM; echo working on it; touch up; while :; do sleep 600 & wait; done"
    job = box.launch({"name": "work", "run": polite, "hang_s": 2.0, "grace_s": 2.0, "retry": {"attempts": 2}})
    box.hurry(job, "failed", within_s=90)
    attempts = box.step(job)["attempts"]
    assert [item["verdict"]["signature"] for item in attempts] == ["hang", "hang"]
    assert [item["state"] for item in attempts] == ["failed", "failed"]
    assert bundle(job)["verdict"]["signature"] == "hang"
    rows = stacks(box)
    assert any("sleep 600" in row["command"] for row in rows)
    assert all(row["state"] not in "ZX" and "wchan" in row for row in rows), "taken while it lived"
    kinds = job.kinds()
    assert kinds.index("hang_suspected") < kinds.index("stop_sent") < kinds.index("attempt_ended")


def test_py_spy_is_used_where_it_is(box: Box) -> None:
    path = box.bin / "py-spy"
    path.write_text(PY_SPY)
    path.chmod(0o755)
    job = box.launch({"name": "work", "run": HANG, "hang_s": 1.0, "grace_s": 1.0, "retry": {"attempts": 1}})
    assert ended(job, within_s=60) == "failed"
    assert any("all_reduce" in row.get("py_spy", "") for row in stacks(box))


def test_a_py_spy_that_never_answers_holds_up_neither_the_loop_nor_a_stop(box: Box) -> None:
    path = box.bin / "py-spy"
    path.write_text("#!/bin/bash\nexec sleep 600\n")
    path.chmod(0o755)
    job = box.launch({"name": "work", "run": HANG, "hang_s": 1.0, "grace_s": 1.0})
    job.wait_for_kind("hang_suspected", within_s=40)
    assert box.control(job, "stop")["acknowledged"] is True
    assert ended(job) == "stopped"
    assert not [pid for pid in map(int, filter(str.isdigit, (p.name for p in Path("/proc").iterdir())))
                if alive(pid) and str(path) in command_line(pid)]  # fmt: skip


def test_work_and_a_busy_processor_are_no_hang(box: Box) -> None:
    """Silent for longer than `hang_s`, but computing: slow, not hung."""
    run = "echo compiling; timeout 6 sh -c 'while :; do :; done'; exit 0"
    job = box.launch({"name": "work", "run": run, "hang_s": 2.0, "retry": {"attempts": 1}})
    assert ended(job, within_s=60) == "succeeded"


def test_a_question_fails_at_once_and_is_not_asked_again(box: Box) -> None:
    run = "printf 'Do you wish to run the custom code? [y/N] '; exec sleep 600"
    job = box.launch({"name": "work", "run": run, "grace_s": 1.0, "retry": {"attempts": 5}})
    assert ended(job, within_s=40) == "failed"
    assert box.verdicts(job) == ["waiting_for_input"]
    assert "custom code" in box.why(job)["verdict"]["root_cause"]["text"]


def test_a_time_limit_counts_as_an_attempt_and_leaves_stacks(box: Box) -> None:
    job = box.launch({"name": "work", "run": HANG, "timeout_s": 0.5, "grace_s": 1.0, "retry": {"attempts": 1}})
    assert ended(job, within_s=40) == "failed"
    assert box.step(job)["attempts"][0]["verdict"]["signature"] == "timeout"
    assert stacks(box)


def test_secrets_are_nowhere_but_in_their_file(box: Box) -> None:
    """A shell puts the value into its child's argv, a program into its last words, and a copy under another name."""
    secret = "hf_" + "Q9x" * 8
    run = (
        LEAVES.format(line="sh -c \"sleep 600; : $HF_TOKEN\"", name="sh") + "; export COPY=\"https://u:$HF_TOKEN@hub\"; "
        "echo \"RuntimeError: refused $HF_TOKEN\" >&2; exit 1"
    )
    step = {"name": "work", "run": run, "secrets": ["HF_TOKEN"], "env": {"MY_API_KEY": "not-declared"}, "grace_s": 1.0}
    job = box.launch(step, secrets={"work": {"HF_TOKEN": secret}})
    job.wait_for_kind("retry_scheduled")
    wait_until(lambda: job.state == "retry_wait", "the state is written")
    holders = {
        str(path.relative_to(job.path)): path.stat().st_mode & 0o777
        for path in job.path.rglob("*")
        if path.is_file() and secret.encode() in path.read_bytes()
    }
    log = str(job.log(1, "work").relative_to(job.path))
    assert holders.pop(log, None) == 0o600  # what the program itself prints is its own; nothing copies it
    assert holders == {"secrets.json": 0o600}
    found = bundle(job)
    assert found["environment"]["HF_TOKEN"] == found["environment"]["MY_API_KEY"] == "***"
    assert any("***" in row["command"] for row in found["left_processes"])
    assert secret not in json.dumps(box.why(job))
    for pid in job.supervisors():
        assert secret.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    box.hurry(job, "failed")
    assert not (job.path / "secrets.json").exists()


def test_the_supervisor_stays_small_through_it_all(box: Box) -> None:
    run = "for i in $(seq 3000); do echo line $i of the log of an attempt; done; kill -9 $$"
    job = box.launch({"name": "work", "run": run})
    job.wait_for_kind("retry_scheduled")
    box.skip_backoff(job)
    job.wait_for_kind("retry_scheduled", count=2)
    status = Path(f"/proc/{job.supervisor}/status").read_text()
    [peak_kib] = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")]
    assert peak_kib < 25 * 1024
    started = time.monotonic()
    box.control(job, "stop")
    assert ended(job) == "stopped"
    assert time.monotonic() - started < 20
    assert events(job, "finished") == [{"state": "stopped"}]
