"""What Slurm says of a job that ended without our final event, as a verdict in explain's shape. Pure.

States: squeue(1), JOB STATE CODES.  Standard library only.
"""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional, Tuple

from remote_jobs.agent.slurm.queue import GONE, Row

# state -> (class, retry, summary, advice)
_ENDS: Mapping[str, Tuple[str, str, str, str]] = {
    "NODE_FAIL": (
        "killed", "yes", "a node of the allocation failed ({nodes})",
        "nothing to change; if it is always the same node: sbatch: [--exclude=NODE]",
    ),
    "BOOT_FAIL": (
        "killed", "yes", "a node of the allocation did not boot ({nodes})",
        "nothing to change; if it is always the same node: sbatch: [--exclude=NODE]",
    ),
    "PREEMPTED": (
        "killed", "yes", "a job of higher priority took the nodes (preempted)",
        "use a partition or qos that is not preempted, or let it be tried again",
    ),
    "TIMEOUT": (
        "killed", "yes", "the allocation's time limit was over",
        "raise time_limit in the inventory, or split the work",
    ),
    "DEADLINE": ("config", "no", "Slurm's deadline for the job passed", "take --deadline out of sbatch:"),
    "OUT_OF_MEMORY": (
        "host_oom", "after_change", "a process of the job went over the memory limit of the allocation",
        "ask for more in the inventory: sbatch: [--mem=0] takes all memory of the node",
    ),
    "CANCELLED": ("killed", "no", "it was cancelled (scancel)", ""),
    "REVOKED": ("killed", "yes", "another cluster of the federation took the job", ""),
    GONE: (
        "killed", "yes", "Slurm no longer knows the job, and its directory has no final event",
        "nothing to change; with accounting (slurmdbd) its end could be told",
    ),
}  # fmt: skip


def of_end(row: Row) -> Dict[str, Any]:
    """Verdict of the attempts that a job's end at Slurm's hands cut short."""
    default = ("killed", "yes", "the batch script was ended from outside ({reason})", "")
    klass, retry, summary, advice = _ENDS.get(row.state, default)
    text = summary.format(nodes=row.nodes or "not named", reason=row.reason or row.state)
    return _verdict(klass, retry, "slurm_" + row.state.lower(), "Slurm job {}: {}".format(row.id, text), advice, row)


def requeued(job: str, restarts: int) -> Dict[str, Any]:
    """Slurm started the same job again: its node failed, it was preempted, or somebody said so."""
    summary = "Slurm job {}: requeued after a node failure, a preemption or by hand (restart {})".format(job, restarts)
    return _verdict("killed", "yes", "slurm_requeued", summary, "")


def no_progress(job: str) -> Dict[str, Any]:
    """The time limit is near and nothing was kept since the allocation began: another one would go the same way."""
    summary = "Slurm job {}: the time limit came before the step kept anything".format(job)
    return _verdict("killed", "no", "slurm_time_limit", summary, "raise time_limit in the inventory, then: orch retry JOB")


def _verdict(
    klass: str, retry: str, signature: str, summary: str, advice: str, row: Optional[Row] = None
) -> Dict[str, Any]:
    evidence = [] if row is None else ["Slurm: job {} {} {}".format(row.id, row.state, row.reason).rstrip()]
    if row is not None and row.nodes:
        evidence.append("nodes: {}".format(row.nodes))
    return {
        "class": klass, "retry": retry, "root_cause": None, "signature": signature, "summary": summary,
        "advice": advice, "evidence": evidence,
    }  # fmt: skip
