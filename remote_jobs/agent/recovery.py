"""Taking up a job whose supervisor is gone: what still runs of it, ending that, and changed parameters.

Standard library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from typing import TYPE_CHECKING, Any, Dict, Iterable, List, Mapping, Optional, Sequence, Set

from remote_jobs import protocol
from remote_jobs.agent import fewer_gpus, limits, procs
from remote_jobs.agent.attempt import ladder
from remote_jobs.agent.command import Places
from remote_jobs.agent.jobdir import JobDir, read_json
from remote_jobs.agent.markers import Markers
from remote_jobs.protocol import EventKind

if TYPE_CHECKING:
    from remote_jobs.agent.supervisor import Supervisor

BEGAN, CRASHED = "orch: a supervisor begins, pid ", "orch: the supervisor crashed: "
"""Lines of a supervisor's log; the second when a defect of ours, and nobody's kill, ended it. The newest of both counts."""
_CRASH_LOG_BYTES = 64 << 10
_LOST_LOG_BYTES = 4 << 20


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


def end_processes(left: Sequence[procs.Proc], step: protocol.StepSpec) -> None:
    """TERM, the step's grace, KILL. Blocks; only used before a supervisor's loop starts."""
    alive = list(left)
    pids = {proc.pid for proc in left}
    for signum, wait_s in ladder(step):
        # As in a stop: a training main process forwards TERM itself, a second one would mean "now, without saving".
        chosen = [proc for proc in alive if proc.ppid not in pids] if step.uses == "train" else alive
        for proc in alive if signum == signal.SIGKILL else chosen:
            procs.send_signal(proc, signum)
        deadline = time.monotonic() + wait_s
        while alive and time.monotonic() < deadline:
            alive = [proc for proc in alive if procs.still_runs(proc)]
            if alive:
                time.sleep(0.05)
        if not alive:
            return


@dataclasses.dataclass
class Past:
    """What a step's events say of it since it was last reopened."""

    changes: Dict[str, Any] = dataclasses.field(default_factory=dict)
    history: List[Dict[str, Any]] = dataclasses.field(default_factory=list)
    kept: int = 0
    lost: Optional[Dict[str, Any]] = None
    """The last of ``history``, when it had lost its supervisor and was ended only now."""


def replay(name: str, events: Iterable[Mapping[str, Any]]) -> Past:
    """Changed parameters and failed attempts of a step, as the supervisor that wrote these events knew them."""
    past = Past()
    judged: Dict[str, Any] = {}
    for event in events:
        kind, data = event.get("kind"), event.get("data") or {}
        if kind in ("reopened", "retry_requested"):
            for parameter in parameters_set(name, data.get("set") or {}):
                past.changes.pop(parameter, None)
        if kind == "reopened":
            past.history = []
        if event.get("step") != name:
            continue
        if kind in ("attempt_started", "step_queued"):  # queued: a GPU was left out before any attempt
            past.changes.update(data.get("changes") or {})
        elif kind == "attempt_judged":
            judged = {"verdict": data.get("verdict"), "progress": data.get("progress") or 0, "n": event.get("attempt")}
            past.kept = max(past.kept, int(judged["progress"]))
        elif kind in ("retry_scheduled", "step_failed"):
            past.changes.update(data.get("changes") or {})
            if judged.get("verdict"):
                past.history.append(judged)
            judged = {}
    return past


def steps_stopped(events: Iterable[Mapping[str, Any]]) -> Set[str]:
    """Steps that somebody asked to stop, alone, since the job was last reopened."""
    found: Set[str] = set()
    for event in events:
        if event.get("kind") == "reopened":
            found.clear()
        elif event.get("kind") == "stop_requested" and event.get("step"):
            found.add(str(event["step"]))
    return found


def parameters_set(name: str, given: Mapping[str, Any]) -> List[str]:
    """Parameters of a step that options such as ``step.with.key=value`` set."""
    found: List[str] = []
    for path, value in given.items():
        parts = str(path).split(".")
        if parts == [name, fewer_gpus.GPUS]:  # how many is a person's word now, and which ones is open again
            found += fewer_gpus.RESIZED
        if parts[:2] == [name, "env"]:
            found += parts[2:3] if len(parts) > 2 else list(value) if isinstance(value, dict) else []
        if parts[:2] == [name, "service"]:
            found.append(limits.READY_WITHIN)
        if parts[:2] == [name, "with"]:
            found += parts[2:3] if len(parts) > 2 else list(value) if isinstance(value, dict) else []
    return found


def of_another_boot(job: JobDir, index: int, name: str, n: int) -> bool:
    """True when an attempt's main process was started before the host's last boot."""
    return any(item.boot_id != procs.boot_id() for item in recorded_processes(job, index, name, n))


def kept_by(job: JobDir, index: int, step: protocol.StepSpec, n: int, places: Places) -> int:
    """Samples or checkpoints that a lost attempt kept: files counted, training states, or its log's markers."""
    from remote_jobs.agent import counting, judge

    if step.done and step.done.get("count"):
        return counting.count_files(places.workdir, str(places.filled(step.done["count"])))
    if step.uses == "train":
        return judge.saved_training_step(places.output(step.name))
    markers = Markers()
    with contextlib.suppress(OSError), open(job.attempt_path(index, step.name, n, protocol.LOG_FILE), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LOST_LOG_BYTES))
        markers.feed(file.read(_LOST_LOG_BYTES))
    return markers.work_done()


def past_of(boss: "Supervisor", step: protocol.StepSpec, index: int) -> Past:
    """A step's past by the events of earlier supervisors; an attempt that they left running is ended. Blocks."""
    past = replay(step.name, boss.replayed)
    attempts = boss.fold.attempts(step.name)
    if attempts and attempts[-1]["state"] not in protocol.ATTEMPT_TERMINAL:
        past.lost = _bury(boss, step, index, attempts[-1])
        past.kept = max(past.kept, past.lost["progress"])
        past.history.append(past.lost)
    return past


def _bury(boss: "Supervisor", step: protocol.StepSpec, index: int, last: Mapping[str, Any]) -> Dict[str, Any]:
    """End what still runs of an attempt that lost its supervisor, and record it as lost: {verdict, progress, n}."""
    from remote_jobs.agent import judge

    n = int(last["n"])
    left = left_running(boss.job, index, step, n)
    end_processes(left, step)
    rebooted = of_another_boot(boss.job, index, step.name, n)
    verdict = boss.epitaph or judge.lost_verdict(
        last, [proc.pid for proc in left], rebooted=rebooted, crashed=boss.crashed_before
    )
    kept = kept_by(boss.job, index, step, n, boss.places)
    ended = "stopped" if boss.cancelled else "lost"
    boss.emit(EventKind.ATTEMPT_ENDED, step.name, n, state=ended, exit_status=None, reason=verdict["summary"])
    boss.emit(EventKind.ATTEMPT_JUDGED, step.name, n, state=ended, verdict=verdict, progress=kept)
    return {"verdict": verdict, "progress": kept, "n": n}


def identities(rows: Iterable[Mapping[str, Any]]) -> List[protocol.ProcessId]:
    """Identities of processes named by pid in a reading of the gate; empty when one of them is gone already."""
    found = [procs.identity(int(row["pid"])) for row in rows if row.get("pid")]
    return [item for item in found if item is not None] if all(found) else []


def crash(job: JobDir) -> Optional[str]:
    """What the last supervisor of a job crashed of; None when it did not. For jobs that are lost."""
    try:
        with open(job.at(protocol.SUPERVISOR_LOG), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _CRASH_LOG_BYTES))
            lines = file.read(_CRASH_LOG_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return None
    last = next((line for line in reversed(lines) if line.startswith((BEGAN, CRASHED))), "")
    return last[len(CRASHED) :] if last.startswith(CRASHED) else None


def with_overrides(step: protocol.StepSpec, overrides: Mapping[str, Any]) -> protocol.StepSpec:
    """The step with `orch retry --set step.key=value` applied; `step.with.key` reaches the parameters.

    Unknown keys are left out, since the controller checks them before they are sent; null means the field's default.
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
    return protocol.StepSpec(**{key: value for key, value in record.items() if key in known and value is not None})
