"""The gate: may this step start on these GPUs now? A pure decision, and the thin edge that reads and reaps.

Rules (and nothing else): the GPUs are there and healthy; no process of anybody else computes on them; no memory
is held that only somebody's work explains.  Own orphans, and only they, may be ended: TERM, wait, KILL, each by
identity.  Foreign processes are never touched; the gate then says who holds what.  Standard library only.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Sequence

from remote_jobs.agent import gpus, owners, procs, smi_run
from remote_jobs.agent.gpu_model import Gpu

READS = 3
"""A closed gate is read again before it counts, so that a process that is just dying does not fail a launch."""
READ_AGAIN_S = 0.5
TERM_WAIT_S = 10.0
KILL_WAIT_S = 5.0
FREE_WAIT_S = 10.0


@dataclass
class GateReading:
    """One answer of the gate."""

    open: bool
    reasons: List[str] = field(default_factory=list)
    can_wait: bool = True
    """False when waiting cannot help: a missing, broken or unhealthy GPU, no driver."""
    foreign: bool = False
    """Something closes it that is no living job of this root: a launch need not queue behind it."""
    orphans: List[owners.Owner] = field(default_factory=list)
    """Own processes that may be reaped."""
    holders: List[owners.Owner] = field(default_factory=list)
    notes: List[str] = field(default_factory=list)
    document: Dict[str, object] = field(default_factory=dict)
    """The JSON of `orch gpus`, for all GPUs of the host."""
    power_w: List[Optional[int]] = field(default_factory=list)
    """Power draw of each GPU of the document, in its order; for people who watch."""
    survey: Dict[str, List[Dict[str, Any]]] = field(default_factory=dict)
    """See `survey`: which GPUs of the host are healthy, whoever holds them, and which are not."""
    reaped: List[Dict[str, Any]] = field(default_factory=list)
    took_s: float = 0.0

    def to_json(self) -> Dict[str, Any]:
        """JSON for events, `gate_closed` errors and the supervisor."""
        return {
            "open": self.open,
            "reasons": self.reasons,
            "can_wait": self.can_wait,
            "foreign": self.foreign,
            "orphans": [owners.as_row(owner) for owner in self.orphans],
            "holders": [owners.as_row(owner) for owner in self.holders],
            "notes": self.notes,
            "gpus": self.document,
            "survey": self.survey,
            "reaped": self.reaped,
            "reaped_text": reaped_text(self.reaped),
            "took_s": round(self.took_s, 3),
        }


def judge(
    report: gpus.GpuReport,
    *,
    expected: Optional[int] = None,
    wanted: Optional[Sequence[int]] = None,
    known: Optional[Mapping[int, owners.Owner]] = None,
    xids: Sequence[smi_run.Xid] = (),
    notes: Sequence[str] = (),
) -> GateReading:
    """Decide from data alone.

    Args:
        report: what nvidia-smi says.
        expected: GPUs that the host should have; None: whatever is there.
        wanted: indices that the step claims; None: all of the host.
        known: owner by pid, as far as they could be looked up.
        xids: lines of the kernel log.
        notes: what limits the view (container, hidepid).
    """
    known = known or {}
    for gpu in report.gpus:
        for process in gpu.processes:
            owner = known.get(process.pid or -1)
            if owner is not None:
                process.owner = owner.owner
    reading = GateReading(
        open=True,
        notes=list(notes),
        document=report.to_json(expected),
        power_w=[gpu.power_w for gpu in report.gpus],
        survey=survey(report, xids, expected),
    )
    if (wanted is not None and not wanted) or (wanted is None and expected == 0):
        return reading
    if not report.gpus:
        _close(reading, report.overall(expected).why, can_wait=False)
        return reading
    there = [gpu.index for gpu in report.gpus if gpu.index is not None]
    indices = sorted(set(wanted if wanted is not None else range(expected) if expected else there))
    by_index = {gpu.index: gpu for gpu in report.gpus}
    missing = [str(index) for index in indices if index not in by_index]
    if missing:
        said = "; ".join(report.reading.errors)
        text = "gpu {} is missing: {} of {} GPUs answer".format(
            ",".join(missing), len(by_index), expected or len(indices)
        )
        _close(reading, "{} ({})".format(text, said) if said else text, can_wait=False)
    for index in indices:
        if index in by_index:
            _judge_gpu(reading, report, by_index[index], known, xids)
    reading.reasons = _merged(reading.reasons)
    return reading


def _close(reading: GateReading, reason: str, *, can_wait: bool = True, foreign: bool = True) -> None:
    reading.open = False
    reading.foreign = reading.foreign or foreign
    reading.can_wait = reading.can_wait and can_wait
    reading.reasons.append(reason)


def _judge_gpu(
    reading: GateReading,
    report: gpus.GpuReport,
    gpu: Gpu,
    known: Mapping[int, owners.Owner],
    xids: Sequence[smi_run.Xid],
) -> None:
    verdict = report.verdict(gpu)
    if gpu.faults:
        _close(reading, "gpu {}: {}".format(gpu.index, verdict.why), can_wait=False)
        return
    for xid in xids:
        if xid.fatal and smi_run.same_gpu(xid.bus_id, gpu.bus_id):
            _close(reading, "gpu {}: {}".format(gpu.index, _xid_text(xid)))
    if verdict.clean:
        return
    for process in gpu.compute:
        owner = known.get(process.pid or -1) or owners.Owner(process.pid or 0, command=process.name)
        bucket = reading.orphans if owner.standing == "orphan" else reading.holders
        if all(other.pid != owner.pid for other in bucket):
            bucket.append(owner)
        size = "" if process.memory_mib is None else " with {} MiB".format(process.memory_mib)
        foreign = owner.standing == "foreign"
        _close(reading, "gpu {}: {}{}".format(gpu.index, owner.describe(), size), foreign=foreign)
    if not gpu.compute:
        _close(reading, "gpu {}: {}".format(gpu.index, verdict.why))


def _xid_text(xid: smi_run.Xid) -> str:
    what = smi_run.FATAL_XIDS[xid.number]
    return "Xid {} ({}) {:.0f} s ago; reset the GPU or reboot".format(xid.number, what, xid.age_s)


def survey(
    report: gpus.GpuReport, xids: Sequence[smi_run.Xid], expected: Optional[int]
) -> Dict[str, List[Dict[str, Any]]]:
    """Which GPUs work, whoever uses them: {"healthy": [{index, uuid, bus_id}], "faulty": [{..., why}]}.

    Faulty: what nvidia-smi says itself, a fatal Xid of late, or no answer though the host should have it.
    """
    found: Dict[str, List[Dict[str, Any]]] = {"healthy": [], "faulty": []}
    for gpu in report.gpus:
        row = {"index": gpu.index, "uuid": gpu.uuid, "bus_id": gpu.bus_id}
        fatal = next((x for x in xids if x.fatal and smi_run.same_gpu(x.bus_id, gpu.bus_id)), None)
        why = gpu.faults[0] if gpu.faults else _xid_text(fatal) if fatal is not None else None
        if why is None:
            found["healthy"].append(row)
        else:
            found["faulty"].append({**row, "why": why})
    there = {gpu.index for gpu in report.gpus}
    for index in range(expected or 0):
        if index not in there:
            why = "does not answer: {} of {} GPUs do".format(len(there), expected)
            found["faulty"].append({"index": index, "uuid": None, "bus_id": None, "why": why})
    return found


def _merged(reasons: Sequence[str]) -> List[str]:
    """The same reason on several GPUs becomes one line: `gpu 0,1,2: pid ...`."""
    by_text: Dict[str, List[str]] = {}
    for reason in reasons:
        head, separator, text = reason.partition(": ")
        if head.startswith("gpu ") and head[4:].isdigit() and separator:
            by_text.setdefault(text, []).append(head[4:])
        else:
            by_text.setdefault(reason, [])
    return ["gpu {}: {}".format(",".join(i), text) if i else text for text, i in by_text.items()]


# ---------------------------------------------------------------------------------------------------------- the edge


def look(
    expected: Optional[int],
    wanted_indices: Optional[Sequence[int]],
    jobs_root: Optional[str],
    *,
    job_id: Optional[str] = None,
    memory_mib: Optional[int] = None,
    reap: bool = False,
    reads: int = READS,
    timeout_s: float = smi_run.TIMEOUT_S,
) -> GateReading:
    """Read the GPUs and decide. A closed gate is read again; with `reap`, own orphans are ended first.

    Args:
        expected: GPUs that the host should have (inventory), None if unknown, 0 for a CPU host.
        wanted_indices: indices claimed by the step, None for all, empty for none.
        jobs_root: folder of our jobs (`<root>/jobs`), which tells own orphans; None knows none.
        job_id: the asking job: what its earlier attempts left behind is an orphan although the job lives.
        memory_mib: threshold of used memory beyond the driver's own (None: 15).
        reap: end own orphans and wait until their memory is free.
        reads: most readings of a closed gate.
        timeout_s: limit of one nvidia-smi call.
    """
    began = time.monotonic()
    if (wanted_indices is not None and not wanted_indices) or (wanted_indices is None and expected == 0):
        return GateReading(open=True, document=_no_gpus(expected))
    threshold = gpus.MEMORY_THRESHOLD_MIB if memory_mib is None else memory_mib
    seen = owners.view()

    def read() -> GateReading:
        return _read(expected, wanted_indices, jobs_root, job_id, threshold, seen, timeout_s)

    reading = read()
    for _ in range(reads - 1):
        if reading.open or not reading.can_wait or reading.orphans:
            break
        time.sleep(READ_AGAIN_S)
        reading = read()
    if reading.orphans and not reap:
        reading.notes.append("own orphans are left alone: end them by hand, or set `gate: {reap: own}`")
    elif reading.orphans:
        reaped = reap_own(reading.orphans)
        deadline = time.monotonic() + FREE_WAIT_S
        reading = read()
        while not reading.open and reading.can_wait and time.monotonic() < deadline and not reading.holders:
            time.sleep(READ_AGAIN_S)
            reading = read()
        reading.reaped = reaped
    reading.took_s = time.monotonic() - began
    return reading


def _read(
    expected: Optional[int],
    wanted: Optional[Sequence[int]],
    jobs_root: Optional[str],
    job_id: Optional[str],
    threshold_mib: int,
    seen: owners.View,
    timeout_s: float,
) -> GateReading:
    """One nvidia-smi call with the owners of what it lists."""
    report = gpus.parse(smi_run.run_smi(timeout_s=timeout_s), threshold_mib)
    pids = [p.pid for g in report.gpus for p in g.processes if p.pid is not None]
    known = owners.identify(pids, jobs_root, own_job=job_id, seen=seen) if pids else {}
    worth_saying = bool(pids) or not report.overall(expected).clean
    return judge(
        report,
        expected=expected,
        wanted=wanted,
        known=known,
        xids=smi_run.read_xids() or (),
        notes=seen.notes() if worth_saying else (),
    )


def _no_gpus(expected: Optional[int]) -> Dict[str, object]:
    return {"schema": 1, "gpus": [], "clean": True, "expected": expected, "why": "no GPU is asked for"}


def read_survey(expected: Optional[int]) -> Dict[str, List[Dict[str, Any]]]:
    """The survey of now; `healthy` and `faulty` are empty where nothing can be read and no GPU is expected."""
    return survey(gpus.parse(smi_run.run_smi()), smi_run.read_xids() or (), expected)


def report(
    jobs_root: Optional[str], expected: Optional[int], *, memory_mib: Optional[int] = None
) -> Dict[str, object]:
    """The JSON of `orch gpus HOST`: one reading with owners, and `holders` with age and command line for people."""
    reading = look(expected, None, jobs_root, memory_mib=memory_mib, reads=1)
    rows = [owners.as_row(owner) for owner in (*reading.orphans, *reading.holders)]
    return {**reading.document, "holders": rows, "notes": reading.notes}


def watched(expected: Optional[int]) -> Dict[str, Any]:
    """What the watch view shows of the GPUs: the document of `orch gpus`, each GPU with its ``power_w`` besides."""
    reading = look(expected, None, None, reads=1)
    rows: List[Dict[str, Any]] = list(reading.document.get("gpus") or [])  # type: ignore[call-overload]
    gpus_with_power = [{**row, "power_w": watts} for row, watts in zip(rows, reading.power_w)]
    return {**reading.document, "gpus": gpus_with_power or rows, "notes": reading.notes}


def reap_own(orphans: Sequence[owners.Owner]) -> List[Dict[str, Any]]:
    """End orphans: TERM, wait, KILL, wait; each signal only to the very process that was judged.

    Returns:
        One row per orphan: {pid, job, command, signal, gone, took_s}.
    """
    began = time.monotonic()
    rows: List[Dict[str, Any]] = []
    alive: Dict[int, procs.Proc] = {}
    for orphan in orphans:
        proc = procs.read_proc(orphan.pid)
        row = {"pid": orphan.pid, "job": orphan.job, "command": orphan.command, "signal": None, "gone": True}
        rows.append({**row, "took_s": 0.0})
        if orphan.standing == "orphan" and proc is not None and proc.start_ticks == orphan.start_ticks:
            alive[orphan.pid] = proc
    for signum, wait_s in ((signal.SIGTERM, TERM_WAIT_S), (signal.SIGKILL, KILL_WAIT_S)):
        for pid, proc in alive.items():
            if procs.send_signal(proc, signum):
                _row(rows, pid)["signal"] = procs.signal_name(signum)
        deadline = time.monotonic() + wait_s
        while alive and time.monotonic() < deadline:
            for pid in [pid for pid, proc in alive.items() if not procs.still_runs(proc)]:
                _row(rows, pid)["took_s"] = round(time.monotonic() - began, 3)
                del alive[pid]
            if alive:
                time.sleep(0.02)
    for pid in alive:
        _row(rows, pid)["gone"] = False
    return rows


def _row(rows: List[Dict[str, Any]], pid: int) -> Dict[str, Any]:
    return next(row for row in rows if row["pid"] == pid)


def reaped_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line that names what was ended."""
    parts = []
    for row in rows:
        how = "ended by {}".format(row["signal"]) if row["gone"] and row["signal"] else "was gone"
        parts.append("pid {} of job {} ({}) {}".format(
            row["pid"], row["job"], row["command"], how if row["gone"] else "does not die"
        ))  # fmt: skip
    return "; ".join(parts)
