"""Taking up a job whose supervisor is gone: what still runs of it, ending that, and changed parameters.

Standard library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from typing import Any, Dict, List, Mapping, Sequence

from remote_jobs import protocol
from remote_jobs.agent import procs
from remote_jobs.agent.attempt import ladder
from remote_jobs.agent.jobdir import JobDir, read_json


def recorded_processes(job: JobDir, index: int, name: str, n: int) -> List[protocol.ProcessId]:
    """Identities written down for one attempt (attempt.json), as far as it can be read."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        record = read_json(job.attempt_path(index, name, n, protocol.ATTEMPT_FILE))
        if record.get("process"):
            return [protocol.from_dict(protocol.ProcessId, record["process"])]
    return []


def left_running(job: JobDir, index: int, step: protocol.StepSpec, n: int) -> List[procs.Proc]:
    """Live processes of an attempt that lost its supervisor: by marker, session and recorded identity."""
    recorded = recorded_processes(job, index, step.name, n)
    boot = procs.boot_id()
    sessions = []
    for item in recorded:
        # A session id is a pid: only trusted while its leader, or someone of its members with our marker, lives.
        if item.boot_id == boot:
            leader = procs.read_proc(item.pid)
            if leader is None or leader.start_ticks == item.start_ticks:
                sessions.append(item.pid)
    marked = procs.find_job(job.id, recorded=recorded)
    known = {proc.session for proc in marked}
    return procs.find_job(job.id, recorded=recorded, sessions=[sid for sid in sessions if sid in known])


def end_processes(left: Sequence[procs.Proc], step: "protocol.StepSpec | None" = None) -> None:
    """TERM, the step's grace, KILL. Blocks; only used before a supervisor's loop starts."""
    rungs = ladder(step) if step is not None else [(int(signal.SIGTERM), 15.0), (int(signal.SIGKILL), 5.0)]
    alive = list(left)
    for signum, wait_s in rungs:
        for proc in alive:
            procs.send_signal(proc, signum)
        deadline = time.monotonic() + wait_s
        while alive and time.monotonic() < deadline:
            alive = [proc for proc in alive if _still(proc)]
            if alive:
                time.sleep(0.05)
        if not alive:
            return


def _still(proc: procs.Proc) -> bool:
    now = procs.read_proc(proc.pid)
    return now is not None and now.start_ticks == proc.start_ticks and now.state not in "ZX"


def with_overrides(step: protocol.StepSpec, overrides: Mapping[str, Any]) -> protocol.StepSpec:
    """The step with `orch retry --set step.key=value` applied; `step.with.key` reaches the parameters.

    Unknown keys are left out: the controller checks them before they are sent.
    """
    record: Dict[str, Any] = protocol.to_dict(step)
    for path, value in overrides.items():
        name, _, rest = str(path).partition(".")
        parts = rest.split(".") if rest else []
        if name != step.name or not parts:
            continue
        if parts[0] == "with":
            parts[0] = "params"
        target = record
        for part in parts[:-1]:
            child = target.get(part)
            if not isinstance(child, dict):
                child = {}
                target[part] = child
            target = child
        target[parts[-1]] = value
    known = {field.name for field in dataclasses.fields(protocol.StepSpec)}
    return protocol.StepSpec(**{key: value for key, value in record.items() if key in known})
