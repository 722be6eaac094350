"""The gate with real processes and a stand-in nvidia-smi: who is reaped, who never is, and what is said."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from remote_jobs import protocol
from remote_jobs.agent import gate, gpus, owners, procs, smi_run
from remote_jobs.agent.jobdir import EventLog, JobDir, Layout
from tests.gate.smi import FakeSmi
from tests.gate.xml_variants import text_of, variants
from tests.support.waiting import wait_until

Spawn = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSmi:
    fake = FakeSmi(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{fake.path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv(smi_run.SMI_ENV, raising=False)
    return fake


@pytest.fixture
def root(tmp_path: Path) -> str:
    layout = Layout(str(tmp_path / "root"))
    layout.prepare()
    return layout.jobs


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(
        job: str | None = None, *, stubborn: bool = False, session: bool = True
    ) -> subprocess.Popen[bytes]:
        env = {k: v for k, v in os.environ.items() if k != protocol.MARKER_ENV}
        if job:
            env[protocol.MARKER_ENV] = job
        command = ["sleep", "300"]
        if stubborn:
            code = (
                "import signal,time;signal.signal(15,signal.SIG_IGN);print('up',flush=True);time.sleep(300)"
            )
            command = [sys.executable, "-S", "-c", code]
        out = subprocess.PIPE if stubborn else None
        process = subprocess.Popen(command, env=env, start_new_session=session, stdout=out)
        if process.stdout is not None:
            process.stdout.readline()
        started.append(process)
        return process

    yield begin
    for process in started:
        with contextlib.suppress(OSError):
            process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def make_job(root: str, job_id: str, mains: list[protocol.ProcessId], *, final: bool = False) -> JobDir:
    """A job's directory as its supervisor leaves it: events, and a free lock."""
    job = Layout(os.path.dirname(root)).job(job_id)
    os.makedirs(job.path)
    log = EventLog(job)
    for main in mains:
        data = {"process": protocol.to_dict(main)}
        log.append(
            protocol.Event(log.seq + 1, "", 0.0, protocol.EventKind.ATTEMPT_STARTED.value, "s", 1, data)
        )
    if final:
        log.append(
            protocol.Event(log.seq + 1, "", 0.0, protocol.EventKind.FINISHED.value, data={"state": "failed"})
        )
    log.close()
    Path(job.lock_path()).touch()
    return job


def gone() -> protocol.ProcessId:
    """Identity of a process that does not run any more."""
    child = subprocess.Popen(["sleep", "300"])
    found = procs.identity(child.pid)
    child.kill()
    child.wait()
    assert found is not None
    return found


def identity(process: subprocess.Popen[bytes]) -> protocol.ProcessId:
    found = procs.identity(process.pid)
    assert found is not None
    return found


def is_gone(pid: int) -> bool:
    proc = procs.read_proc(pid)
    return proc is None or proc.state in "ZX"


# ------------------------------------------------------------------------------------------------------------ reading


def test_idle_gpus_open_the_gate(smi: FakeSmi, root: str) -> None:
    reading = gate.look(2, [0, 1], root)
    assert reading.open
    assert reading.document["clean"] is True


def test_a_cpu_host_passes_without_nvidia_smi(monkeypatch: pytest.MonkeyPatch, root: str) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert gate.look(0, None, root).open
    assert gate.look(8, [], root).open


def test_no_nvidia_smi_closes_the_gate_and_waiting_cannot_help(
    monkeypatch: pytest.MonkeyPatch, root: str
) -> None:
    monkeypatch.setenv(smi_run.SMI_ENV, "/nonexistent/nvidia-smi")
    reading = gate.look(2, [0], root)
    assert not reading.open
    assert not reading.can_wait
    assert "nvidia-smi" in reading.reasons[0]


def test_a_hanging_nvidia_smi_is_given_up_and_killed(smi: FakeSmi, root: str) -> None:
    smi.save(hang_s=60)
    began = time.monotonic()
    reading = gate.look(2, [0, 1], root, timeout_s=0.5)
    assert time.monotonic() - began < 30, "not the minute that it hangs"
    assert not reading.open
    assert "hangs" in reading.reasons[0]
    left = [
        p
        for p in procs.table().values()
        if str(smi.path) in procs.command_line(p.pid) and p.state not in "ZX"
    ]
    assert left == []


def test_driver_errors_are_explained(smi: FakeSmi, root: str) -> None:
    smi.save(
        text="Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.1\n",
        status=18,
    )
    reading = gate.look(2, [0, 1], root)
    assert not reading.open
    assert not reading.can_wait
    assert "reboot the host or reload the module" in reading.reasons[0]


def test_only_the_wanted_gpus_count(smi: FakeSmi, root: str, spawn: Spawn) -> None:
    smi.hold(1, spawn().pid)
    assert gate.look(2, [0], root).open
    assert not gate.look(2, [0, 1], root, reads=1).open


def test_a_missing_gpu_is_named(smi: FakeSmi, root: str) -> None:
    reading = gate.look(8, None, root)
    assert not reading.open
    assert not reading.can_wait
    assert "gpu 2,3,4,5,6,7 is missing: 2 of 8 GPUs answer" in reading.reasons[0]


def test_a_dying_process_does_not_close_the_gate(smi: FakeSmi, root: str, spawn: Spawn) -> None:
    process = spawn()
    smi.hold(0, process.pid)
    timer = subprocess.Popen(
        [sys.executable, "-S", "-c", f"import time,os;time.sleep(.4);os.kill({process.pid},9)"]
    )
    try:
        reading = gate.look(2, [0, 1], root, reads=20)
        assert reading.open
    finally:
        timer.wait()


def test_memory_of_nobody_visible_closes_the_gate(smi: FakeSmi, root: str) -> None:
    smi.save(used_mib={"1": 5000})
    reading = gate.look(2, [0, 1], root, reads=1)
    assert not reading.open
    assert reading.can_wait
    assert reading.reasons[0].startswith("gpu 1: 5000 MiB used and no process visible")
    assert gate.look(2, [0, 1], root, reads=1, memory_mib=6000).open


# ------------------------------------------------------------------------------------------------------ whose it is


def test_a_foreign_process_is_named_with_user_age_and_command_and_never_touched(
    smi: FakeSmi, root: str, spawn: Spawn
) -> None:
    process = spawn()
    smi.hold(0, process.pid, 4000)
    reading = gate.look(2, [0, 1], root, reap=True)
    assert not reading.open
    assert reading.can_wait
    assert f"gpu 0: pid {process.pid} of user {procs.user_name(os.getuid())}" in reading.reasons[0]
    assert "sleep 300" in reading.reasons[0]
    assert "with 4000 MiB" in reading.reasons[0]
    assert reading.foreign
    assert process.poll() is None
    shown = reading.document["gpus"][0]["processes"][0]["owner"]  # type: ignore[index]
    assert shown == f"user:{procs.user_name(os.getuid())}"


def test_an_orphan_of_a_finished_job_is_reaped_and_named(smi: FakeSmi, root: str, spawn: Spawn) -> None:
    orphan = spawn("old-job")
    make_job(root, "old-job", [gone()], final=True)
    smi.hold(0, orphan.pid, 112000, name="VLLM::EngineCore")
    reading = gate.look(2, [0, 1], root, job_id="new-job", reap=True)
    assert reading.open
    assert is_gone(orphan.pid)
    assert reading.reaped[0]["pid"] == orphan.pid
    assert f"pid {orphan.pid} of job old-job" in reading.to_json()["reaped_text"]
    assert "ended by TERM" in reading.to_json()["reaped_text"]


def test_an_orphan_of_a_lost_job_whose_main_process_is_gone_is_reaped(
    smi: FakeSmi, root: str, spawn: Spawn
) -> None:
    orphan = spawn("lost-job")
    make_job(root, "lost-job", [gone()])
    smi.hold(1, orphan.pid)
    assert gate.look(2, [0, 1], root, reap=True).open
    assert is_gone(orphan.pid)


def test_a_lost_job_whose_main_process_works_closes_the_gate_and_is_never_reaped(
    smi: FakeSmi, root: str, spawn: Spawn
) -> None:
    main, worker = spawn("lost-job"), spawn("lost-job")
    make_job(root, "lost-job", [identity(main)])
    smi.hold(0, worker.pid)
    reading = gate.look(2, [0, 1], root, reap=True)
    assert not reading.open
    assert "`orch retry lost-job` takes it up" in reading.reasons[0]
    assert worker.poll() is None
    assert reading.reaped == []


def test_a_running_job_is_left_alone(smi: FakeSmi, root: str, spawn: Spawn) -> None:
    worker = spawn("busy-job")
    job = make_job(root, "busy-job", [gone()])
    smi.hold(0, worker.pid)
    with open(job.lock_path(), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        reading = gate.look(2, [0, 1], root, reap=True)
    assert not reading.open
    assert "job busy-job" in reading.reasons[0]
    assert "its job runs" in reading.reasons[0]
    assert not reading.foreign
    assert worker.poll() is None


def test_leftovers_of_an_earlier_attempt_of_the_asking_job_are_reaped(
    smi: FakeSmi, root: str, spawn: Spawn
) -> None:
    left = spawn("me")
    job = make_job(root, "me", [gone()])
    smi.hold(0, left.pid)
    with open(job.lock_path(), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert gate.look(2, [0, 1], root, job_id="me", reap=True).open
    assert is_gone(left.pid)


@pytest.mark.parametrize("mains", ["none recorded", "of another boot"])
def test_what_cannot_be_known_is_never_reaped(smi: FakeSmi, root: str, spawn: Spawn, mains: str) -> None:
    worker = spawn("odd-job")
    recorded = [] if mains == "none recorded" else [protocol.ProcessId(1, 1, "another-boot")]
    make_job(root, "odd-job", recorded)
    smi.hold(0, worker.pid)
    assert not gate.look(2, [0, 1], root, reap=True).open
    assert worker.poll() is None


def test_a_job_of_another_root_is_foreign(smi: FakeSmi, root: str, spawn: Spawn) -> None:
    worker = spawn("somebody-elses-job")
    smi.hold(0, worker.pid)
    reading = gate.look(2, [0, 1], root, reap=True)
    assert not reading.open
    assert "job somebody-elses-job" in reading.reasons[0]
    assert worker.poll() is None


def test_a_stubborn_orphan_is_killed(
    smi: FakeSmi, root: str, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "TERM_WAIT_S", 0.3)
    orphan = spawn("old-job", stubborn=True)
    make_job(root, "old-job", [gone()], final=True)
    smi.hold(0, orphan.pid)
    reading = gate.look(2, [0, 1], root, reap=True)
    assert reading.open
    assert reading.reaped[0]["signal"] == "KILL"


def test_reap_none_leaves_orphans_and_says_so(smi: FakeSmi, root: str, spawn: Spawn) -> None:
    orphan = spawn("old-job")
    make_job(root, "old-job", [gone()], final=True)
    smi.hold(0, orphan.pid)
    reading = gate.look(2, [0, 1], root)
    assert not reading.open
    assert "{reap: own}" in reading.notes[-1]
    assert orphan.poll() is None


def test_without_a_marker_the_session_of_the_recorded_main_process_tells(
    smi: FakeSmi, root: str, tmp_path: Path
) -> None:
    """The marker is wiped (setproctitle), the main process is killed: its child in the same session is ours."""
    code = (
        "import os,sys,time\n"
        "pid=os.fork()\n"
        "print(pid or os.getpid(),flush=True) if pid else None\n"
        "time.sleep(300)\n"
    )
    env = {k: v for k, v in os.environ.items() if k != protocol.MARKER_ENV}
    main = subprocess.Popen(
        [sys.executable, "-S", "-c", code], env=env, start_new_session=True, stdout=subprocess.PIPE
    )
    assert main.stdout is not None
    worker = int(main.stdout.readline())
    try:
        make_job(root, "wiped", [identity(main)])
        smi.hold(0, worker)
        assert "works: `orch retry wiped`" in gate.look(2, [0, 1], root, reap=True).reasons[0]
        main.kill()
        main.wait()
        reading = gate.look(2, [0, 1], root, reap=True)
        assert reading.open
        assert is_gone(worker)
    finally:
        main.stdout.close()
        main.kill()
        main.wait()
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


def test_a_reused_session_number_is_not_ours(smi: FakeSmi, root: str, spawn: Spawn) -> None:
    """Somebody else's session has the number that our dead main process had."""
    stranger = spawn()
    old = protocol.ProcessId(stranger.pid, 1, procs.boot_id())
    make_job(root, "old-job", [old], final=True)
    smi.hold(0, stranger.pid)
    reading = gate.look(2, [0, 1], root, reap=True)
    assert not reading.open
    assert "of user " in reading.reasons[0]
    assert stranger.poll() is None


def test_a_reused_pid_is_not_signalled(spawn: Spawn) -> None:
    process = spawn("old-job")
    owner = owners.Owner(process.pid, job="old-job", start_ticks=1, standing="orphan")
    assert gate.reap_own([owner])[0]["signal"] is None
    assert process.poll() is None


def test_only_orphans_are_ever_signalled(spawn: Spawn) -> None:
    process = spawn()
    found = procs.read_proc(process.pid)
    assert found is not None
    for standing in ("foreign", "running", "working"):
        gate.reap_own([owners.Owner(process.pid, start_ticks=found.start_ticks, standing=standing)])
    assert process.poll() is None


def test_a_process_that_does_not_exist_here_is_unknown(smi: FakeSmi, root: str) -> None:
    smi.hold(0, 4194000, ghost=True)
    reading = gate.look(2, [0, 1], root, reads=1)
    assert "pid 4194000 of an unknown user: no such process any more" in reading.reasons[0]


# ------------------------------------------------------------------------------------------------- pure decisions


def test_in_a_container_no_pid_is_looked_up_and_it_is_said() -> None:
    seen = owners.View(pids_are_ours=False)
    known = owners.identify([os.getpid()], None, seen=seen)
    assert known[os.getpid()].owner == "unknown"
    assert "container" in seen.notes()[0]


def test_hidden_processes_are_said() -> None:
    assert "hidepid" in owners.View(others_hidden=True).notes()[0]


@pytest.mark.parametrize("name", ["row_remap_pending", "volatile_ecc", "err_everywhere", "fabric_not_up"])
def test_unhealthy_gpus_close_the_gate_for_good(name: str) -> None:
    reading = gate.judge(gpus.parse(text_of(variants()[name])), expected=2)
    assert not reading.open
    assert not reading.can_wait


def test_a_recent_fatal_xid_closes_the_gate_of_its_gpu() -> None:
    report = gpus.parse(text_of(variants()["idle"]))
    line = "4,900,{us},-;NVRM: Xid (PCI:0000:00:06): 79, pid=1234, GPU has fallen off the bus."
    recent = smi_run.parse_xids([line.format(us=1_000_000)], now_s=61.0)
    reading = gate.judge(report, expected=2, xids=recent)
    assert reading.reasons == ["gpu 0: Xid 79 (GPU fell off the bus) 60 s ago; reset the GPU or reboot"]
    assert gate.judge(report, expected=2, wanted=[1], xids=recent).open
    old = smi_run.parse_xids([line.format(us=1_000_000)], now_s=100_000.0)
    assert gate.judge(report, expected=2, xids=old).open


def test_a_programs_xid_does_not_close_the_gate() -> None:
    report = gpus.parse(text_of(variants()["idle"]))
    lines = ["4,900,1000000,-;NVRM: Xid (PCI:0000:00:06): 31, pid=77, name=python, Ch 00000008, MMU Fault"]
    assert gate.judge(report, expected=2, xids=smi_run.parse_xids(lines, 2.0)).open


def test_the_same_holder_on_several_gpus_is_one_reason() -> None:
    report = gpus.parse(text_of(variants()["same_pid_on_both"]))
    known = {900: owners.Owner(900, "user:ann", user="ann", command="python train.py")}
    reading = gate.judge(report, expected=2, known=known)
    assert reading.reasons == ["gpu 0,1: pid 900 of user ann (python train.py) with 500 MiB"]


def test_a_reading_is_json() -> None:
    report = gpus.parse(text_of(variants()["same_pid_on_both"]))
    document: dict[str, Any] = json.loads(json.dumps(gate.judge(report, expected=2).to_json()))
    assert document["open"] is False
    assert document["gpus"]["schema"] == 1


def test_the_document_for_people_names_holders(smi: FakeSmi, root: str, spawn: Spawn) -> None:
    process = spawn()
    smi.hold(0, process.pid)
    shown = gate.report(root, 2)
    holder = shown["holders"][0]  # type: ignore[index]
    assert holder["command"] == "sleep 300"
    assert holder["since_s"] >= 0
    wait_until(lambda: procs.read_proc(process.pid) is not None, "the process is left alone")
