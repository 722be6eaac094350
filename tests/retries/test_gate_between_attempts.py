"""Between two attempts: our own processes gone, the memory back, the gate asked again; and not a moment longer."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.retries.box import Box, events
from tests.support.host_side import ended, look
from tests.support.jobdir import alive, command_line, kill, pids
from tests.support.waiting import wait_until

LAG_S = 2.0
SLACK_S = 8.0  # a busy machine; a plain poll of 15 s or a backoff is far beyond


@pytest.fixture
def foreigner() -> Iterator[subprocess.Popen[bytes]]:
    """Somebody else's process: no marker, not a child of ours."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], env={"PATH": os.defpath})
    yield process
    process.kill()
    process.wait()


def on_gpu(run: str, **more: object) -> dict[str, object]:
    return {"name": "work", "run": run, "gpus": 2, **more}


FAIL_ONCE = "[ $ORCH_ATTEMPT = 2 ] && { date +%s.%N > second; exit 0; }; kill -9 $$"


def test_a_retry_waits_for_a_foreign_process_and_starts_when_it_is_gone(
    box: Box, foreigner: subprocess.Popen[bytes]
) -> None:
    job = box.launch(on_gpu("touch up; [ $ORCH_ATTEMPT = 1 ] && until [ -e go ]; do sleep 0.05; done; " + FAIL_ONCE), host_gpus=2)
    wait_until((box.work / "up").exists, "the first attempt runs")
    box.smi.hold(0, foreigner.pid, 40_000)
    box.release_go()
    wait_until(lambda: job.state == "retry_wait", "it failed")
    box.skip_backoff(job)
    wait_until(lambda: job.state == "gated", "the gate is closed", seen=job.kinds)
    assert f"pid {foreigner.pid}" in box.step(job)["waiting"]
    foreigner.kill()
    foreigner.wait()
    freed = time.time()
    assert ended(job) == "succeeded"
    assert float((box.work / "second").read_text()) - freed < LAG_S + SLACK_S
    assert alive(os.getpid())


def test_memory_that_is_not_back_yet_holds_the_retry_back(box: Box) -> None:
    """No process is left, but the driver still says that memory is in use (as it does for seconds after a kill)."""
    job = box.launch(on_gpu("touch up; [ $ORCH_ATTEMPT = 1 ] && until [ -e go ]; do sleep 0.05; done; " + FAIL_ONCE), host_gpus=2)
    wait_until((box.work / "up").exists, "the first attempt runs")
    box.smi.save(used_mib={"1": 90_000})
    box.release_go()
    job.wait_for_kind("attempt_judged")
    time.sleep(1.0)
    assert "retry_scheduled" not in job.kinds(), "the attempt is not over while its memory is in use"
    box.smi.save(used_mib={})
    box.hurry(job, "succeeded")


def test_what_an_attempt_left_on_the_gpus_is_ended_before_the_next(box: Box) -> None:
    """An engine that left session, parent and environment behind is found, named and ended."""
    run = (
        "[ $ORCH_ATTEMPT = 2 ] && exit 0; env -i setsid sleep 600 & echo $! > engine; "
        "until [ -e go ]; do sleep 0.05; done; kill -9 $$"
    )
    job = box.launch(on_gpu(run), host_gpus=2)
    wait_until(lambda: (box.work / "engine").exists() and (box.work / "engine").read_text().strip(), "the engine runs")
    engine = int((box.work / "engine").read_text())
    box.smi.hold(0, engine, 112_000)
    box.release_go()
    box.hurry(job, "succeeded")
    assert not alive(engine)
    named = [process["pid"] for data in events(job, "stragglers") + events(job, "reaped") for process in data["processes"]]
    assert engine in named


def test_the_gate_that_never_opens_ends_as_gpu_busy_and_why_says_who(
    box: Box, foreigner: subprocess.Popen[bytes]
) -> None:
    job = box.launch(on_gpu("touch up; until [ -e go ]; do sleep 0.05; done; kill -9 $$"), host_gpus=2, gate={"wait_s": 1.0})
    wait_until((box.work / "up").exists, "the first attempt runs")
    box.smi.hold(1, foreigner.pid, 40_000)
    box.release_go()
    box.hurry(job, "failed")
    [failed] = events(job, "step_failed")
    assert failed["verdict"]["class"] == "gpu_busy"
    assert f"pid {foreigner.pid}" in failed["reason"]
    assert foreigner.poll() is None, "a foreign process is never touched"


def test_a_step_that_some_of_the_gpus_would_do_for_does_not_wait_for_ever_either(
    box: Box, foreigner: subprocess.Popen[bytes]
) -> None:
    """One of two GPUs is wanted, and foreign work holds both: gated, then gpu_busy, as where all are wanted."""
    first = {"name": "prepare", "run": "touch up; until [ -e go ]; do sleep 0.05; done"}
    job = box.launch(first, {**on_gpu("true"), "gpus": 1, "needs": ["prepare"]}, host_gpus=2, gate={"wait_s": 1.0})
    wait_until((box.work / "up").exists, "the first step runs")
    for gpu in (0, 1):
        box.smi.hold(gpu, foreigner.pid, 40_000)
    box.release_go()
    box.hurry(job, "failed")
    [gated] = events(job, "step_gated")
    assert f"pid {foreigner.pid}" in gated["reasons"][0]
    assert box.why(job)["verdict"]["class"] == "gpu_busy"


def test_a_missing_gpu_is_said_at_once_and_not_waited_for(box: Box) -> None:
    """Two GPUs answer, the host should have three: thirty minutes at the gate would not bring it back."""
    job = box.launch({"name": "prepare", "run": "true"}, {**on_gpu("true"), "needs": ["prepare"], "gpus": 3}, host_gpus=3)
    assert ended(job, within_s=40) == "failed"
    found = box.why(job)
    assert (found["step"], found["attempt"], found["verdict"]["class"]) == ("work", None, "gpu_hardware")
    assert "gpu 2 is missing" in found["verdict"]["summary"]


@pytest.mark.parametrize("where", ["gate", "cleanup", "backoff"])
def test_a_stop_between_attempts_is_final(where: str, box: Box, foreigner: subprocess.Popen[bytes]) -> None:
    job = box.launch(on_gpu("touch up; until [ -e go ]; do sleep 0.05; done; touch again; kill -9 $$"), host_gpus=2)
    wait_until((box.work / "up").exists, "the first attempt runs")
    if where == "gate":
        box.smi.hold(0, foreigner.pid)
    elif where == "cleanup":
        box.smi.save(used_mib={"0": 50_000})
    box.release_go()
    job.wait_for_kind("attempt_judged")
    if where != "cleanup":
        job.wait_for_kind("retry_scheduled")
    if where == "gate":
        box.skip_backoff(job)
        job.wait_for_kind("step_gated")
    assert box.control(job, "stop")["acknowledged"] is True
    assert ended(job) == "stopped"
    assert job.kinds().count("attempt_started") == 1
    assert not box.agent.request("look", jobs=[job.id])["jobs"][job.id]["alive"]


def test_a_driver_that_hangs_does_not_make_a_dead_supervisor_look_alive(box: Box) -> None:
    """The gate's reading is a fork of the supervisor: it must not keep the lock that says "alive"."""
    job = box.launch({"name": "prepare", "run": "until [ -e go ]; do sleep 0.05; done"}, {**on_gpu("true"), "needs": ["prepare"]}, host_gpus=2)
    job.wait_for_kind("attempt_started")
    box.smi.save(hang_s=600)
    box.release_go()
    supervisor = job.supervisor
    wait_until(lambda: nvidia_smis(box), "the driver is asked, and hangs")
    kill(supervisor)
    wait_until(lambda: look(box.agent, job.id)["state"]["state"] == "lost", "it is known to be lost")
    box.smi.save(hang_s=0)
    box.control(job, "retry")
    box.hurry(job, "succeeded")
    for pid in nvidia_smis(box):
        kill(pid)


def nvidia_smis(box: Box) -> list[int]:
    """Running stand-ins of nvidia-smi of this test."""
    return [pid for pid in pids() if str(box.bin / "nvidia-smi") in command_line(pid) and alive(pid)]
