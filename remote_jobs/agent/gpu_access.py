"""A step's way to its GPUs: the claim against other orch jobs, then the gate against everybody else.

Thin: the rules are in gate.py and claims.py.  Standard library only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple

from remote_jobs import protocol
from remote_jobs.agent import fewer_gpus

# Imported where used: a job without GPUs should not pay for reading nvidia-smi's many formats.
if TYPE_CHECKING:
    from remote_jobs.agent.claims import Claim, Claimer
    from remote_jobs.agent.jobdir import Layout


def claimer() -> "Claimer":
    """A new claimer; one per supervisor, since it keeps the places in the queue."""
    from remote_jobs.agent.claims import Claimer

    return Claimer()


def claim_gpus(
    keeper: "Claimer", spec: protocol.JobSpec, step: protocol.StepSpec, among: Optional[List[int]] = None
) -> Tuple[Optional["Claim"], str]:
    """(claim, "") when the step holds its GPUs now, else (None, who holds them). FIFO among orch jobs; ``among`` limits the choice."""
    try:
        return keeper.claim(spec.id, step.name, step.gpus, spec.host_gpus, among)
    except (OSError, ValueError) as exc:
        return None, str(exc)


def usable(reading: Optional[Dict[str, Any]], without: Sequence[str] = ()) -> Optional[List[int]]:
    """Indices that a step may claim: clean ones, and those that only orch jobs hold (the claim queues behind these).

    None when the reading says nothing about single GPUs: then any may be claimed and the gate decides. ``without``:
    GPUs that failed this step before.
    """
    faulty = [row.get("index") for row in ((reading or {}).get("survey") or {}).get("faulty") or ()]
    shown = ((reading or {}).get("gpus") or {}).get("gpus") or []
    good = [
        int(gpu["index"])
        for gpu in shown
        if gpu.get("index") is not None
        and gpu["index"] not in faulty
        and not fewer_gpus.is_left_out(gpu, without)
        and (
            gpu.get("clean")
            or (gpu.get("processes") and all(str(p.get("owner", "")).startswith("job:") for p in gpu["processes"]))
        )
    ]
    return good if shown else None


def starts_smaller(step: protocol.StepSpec, reading: Dict[str, Any]) -> str:
    """How a step could start at once though GPUs are broken, since its plan allows fewer; empty when it could not."""
    changes, how = fewer_gpus.change(step, step.params, reading.get("survey") or {}, [])
    free = usable(reading) or []
    return how if changes and len(free) >= int(changes.get(fewer_gpus.GPUS, step.gpus)) else ""


def read_gate(layout: "Layout", spec: protocol.JobSpec, indices: Optional[List[int]]) -> Dict[str, Any]:
    """One reading of the gate for these GPUs (None = all): {open, reasons, can_wait, gpus, reaped}.

    Own orphans are ended first when the plan allows it (`gate: {reap: own}`, the default).
    """
    from remote_jobs.agent import gate

    options = spec.gate
    reading = gate.look(
        expected=spec.host_gpus,
        wanted_indices=indices,
        jobs_root=layout.jobs,
        job_id=spec.id,
        memory_mib=options.get("memory_mib"),
        reap=str(options.get("reap") or "own") == "own",
    )
    return reading.to_json()
