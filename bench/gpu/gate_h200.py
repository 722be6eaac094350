"""On a real GPU host: a real orphan is made, closes the gate, is named, reaped as ours, and its GPU verified free.

    python bench/gpu/gate_h200.py [--root FOLDER]     needs torch with CUDA in this Python, nvidia-smi, one free GPU

One JSON line per stage with its seconds; exit status 1 when a stage did not show what it must. Stages: idle (gate open,
`orch gpus` document), orphan (a CUDA process whose parent was killed: closed, named), reap (ended by TERM, memory free),
working (a lost job whose main process works: closed, not touched), foreign (a process without our marker: closed, not
touched), claims (two claimers of one GPU), wiped (setproctitle-like loss of the marker: known by its session).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from remote_jobs import protocol  # noqa: E402 - the path above comes first
from remote_jobs.agent import claims, gate, procs, smi_run  # noqa: E402
from remote_jobs.agent.jobdir import EventLog, Layout  # noqa: E402

HOLDER = """
import sys, time, torch
x = torch.empty(int(sys.argv[1]) << 20, dtype=torch.uint8, device="cuda:0")
x.fill_(1); torch.cuda.synchronize()
print("holding", flush=True)
time.sleep(600)
"""
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""
HELD_MIB = 8000
failures: list[str] = []


def show(stage: str, began: float, **facts: Any) -> None:
    """One JSON line."""
    print(json.dumps({"stage": stage, "took_s": round(time.monotonic() - began, 3), **facts}), flush=True)


def must(stage: str, said: str, holds: object) -> None:
    """Note a stage that did not show what it must."""
    if not holds:
        failures.append(f"{stage}: {said}")
        print(json.dumps({"stage": stage, "FAILED": said}), flush=True)


@contextlib.contextmanager
def holder(job: str | None, *, keep_parent: bool) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """(parent, pid of the CUDA process): a parent that started one; it is killed unless it is to be kept."""
    env = {k: v for k, v in os.environ.items() if k != protocol.MARKER_ENV}
    if job:
        env[protocol.MARKER_ENV] = job
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(HELD_MIB), HOLDER],
        env=env, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    try:
        if not keep_parent:
            parent.send_signal(signal.SIGKILL)
            parent.wait()
        yield parent, pid
    finally:
        for target in (parent.pid, pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline and procs.read_proc(pid) is not None:
            time.sleep(0.05)


def make_job(layout: Layout, job_id: str, mains: list[protocol.ProcessId]) -> None:
    """A job's directory as a killed supervisor leaves it: started, no final event, its lock free."""
    job = layout.job(job_id)
    os.makedirs(job.path, exist_ok=True)
    log = EventLog(job)
    for main in mains:
        data = {"process": protocol.to_dict(main)}
        log.append(
            protocol.Event(log.seq + 1, "", 0.0, protocol.EventKind.ATTEMPT_STARTED.value, "s", 1, data)
        )
    log.close()


def gpu0(reading: gate.GateReading) -> dict[str, Any]:
    """GPU 0 in the `orch gpus` document of a reading."""
    return next(gpu for gpu in reading.document["gpus"] if gpu["index"] == 0)  # type: ignore[attr-defined]


def main() -> int:
    """Run every stage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--root", default=None, help="orch root for the made-up jobs (default: a temporary folder)"
    )
    args = parser.parse_args()
    folder = args.root or tempfile.mkdtemp(prefix="orch-gate-")
    layout = Layout(folder)
    layout.prepare()

    began = time.monotonic()
    raw = smi_run.run_smi()
    show("nvidia-smi", began, bytes=len(raw), form="xml" if "<nvidia_smi_log" in raw else raw[:200])
    began = time.monotonic()
    idle = gate.look(None, [0], layout.jobs)
    show("idle", began, open=idle.open, reasons=idle.reasons, notes=idle.notes, gpus=idle.document)
    must("idle", "the gate is open on an idle GPU", idle.open)

    with holder("gate-test-orphan", keep_parent=True) as (parent, pid):
        main_id = procs.identity(parent.pid)
        assert main_id is not None
        make_job(layout, "gate-test-orphan", [main_id])
        began = time.monotonic()
        working = gate.look(None, [0], layout.jobs, reap=True)
        show("working", began, open=working.open, reasons=working.reasons, reaped=working.reaped)
        must(
            "working",
            "a lost job whose main process works is not touched",
            not working.open and procs.read_proc(pid),
        )
        must(
            "working",
            "it says how to take it up",
            any("orch retry gate-test-orphan" in r for r in working.reasons),
        )

        parent.send_signal(signal.SIGKILL)  # now its CUDA process is a real orphan (ppid 1)
        parent.wait()
        row = procs.read_proc(pid)
        began = time.monotonic()
        closed = gate.look(None, [0], layout.jobs, reads=1)
        show("orphan", began, open=closed.open, reasons=closed.reasons, pid=pid, ppid=row.ppid if row else None,
             gpu=gpu0(closed))  # fmt: skip
        must(
            "orphan",
            "the gate is closed and names the pid",
            not closed.open and any(str(pid) in r for r in closed.reasons),
        )
        must("orphan", "it is known as ours", gpu0(closed)["processes"][0]["owner"] == "job:gate-test-orphan")
        began = time.monotonic()
        reaped = gate.look(None, [0], layout.jobs, reap=True)
        show(
            "reap",
            began,
            open=reaped.open,
            reaped=reaped.reaped,
            text=gate.reaped_text(reaped.reaped),
            gpu=gpu0(reaped),
        )
        must("reap", "the orphan is gone and the GPU is free", reaped.open and gpu0(reaped)["clean"])

    with holder(None, keep_parent=False) as (parent, pid):
        began = time.monotonic()
        foreign = gate.look(None, [0], layout.jobs, reap=True)
        show("foreign", began, open=foreign.open, reasons=foreign.reasons, foreign=foreign.foreign)
        must("foreign", "a foreign process is named and lives", not foreign.open and procs.read_proc(pid))
    with holder(None, keep_parent=True) as (parent, pid):
        main_id = procs.identity(parent.pid)
        assert main_id is not None
        make_job(layout, "gate-test-wiped", [main_id])
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        began = time.monotonic()
        wiped = gate.look(None, [0], layout.jobs, reap=True)
        show("wiped", began, open=wiped.open, reaped=wiped.reaped)
        must(
            "wiped",
            "an orphan without marker is known by its session and reaped",
            wiped.open and wiped.reaped,
        )

    began = time.monotonic()
    claimers = claims.Claimer(os.path.join(folder, "claims")), claims.Claimer(os.path.join(folder, "claims"))
    first, _ = claimers[0].claim("one", "s", [0])
    second, reason = claimers[1].claim("two", "s", [0])
    show("claims", began, first=first is not None, second=second is not None, reason=reason)
    must("claims", "one of two gets the GPU", first is not None and second is None)
    claimers[1].forget("two", "s")
    if first is not None:
        first.release()
    print(json.dumps({"stage": "all", "ok": not failures, "failures": failures}), flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
