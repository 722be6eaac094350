"""What `squeue` and `sacct` print, as rows, and which row is ours. Pure: no I/O, no clock.

Slurm hands out an id again after a reset or a wrap-around, and then an old record describes somebody else's job: a
row counts only when id *and* name are ours (the name holds our job's id and the number of the submission) and it was
not submitted before we did so.  Formats: squeue(1), sacct(1), with SLURM_TIME_FORMAT=%s.  Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, Mapping, Optional

SQUEUE_FORMAT = "%i|%j|%T|%V|%S|%e|%N|%Y|%r"
SACCT_FORMAT = "JobID,JobName,State,Submit,Start,End,NodeList,Reason"
WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
RUNNING = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"})
ENDED = frozenset(
    {
        "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL",
        "DEADLINE", "REVOKED",
    }
)  # fmt: skip
GONE = "GONE"
"""Our word: Slurm answered and knows no such job (any more), and accounting is off or does not know it either."""
SKEW_S = 600.0
"""How far the clocks of this machine and of Slurm's may be apart."""
_REASONS: Mapping[str, str] = {
    "Resources": "nodes or GPUs are not free yet",
    "Priority": "other jobs come first",
    "Dependency": "waits for another job",
    "BeginTime": "its start time has not come",
    "JobHeldUser": "held by you; scontrol release {id}",
    "JobHeldAdmin": "held by an administrator",
    "ReqNodeNotAvail": "a node it needs is down, drained or reserved",
    "PartitionDown": "the partition is down",
    "PartitionNodeLimit": "it asks for more nodes than the partition allows",
    "PartitionTimeLimit": "its time limit is above the partition's: lower time_limit",
    "QOSMaxJobsPerUserLimit": "you run as many jobs as your QOS allows",
    "QOSMaxGRESPerUser": "you hold as many GPUs as your QOS allows",
    "AssocGrpGRES": "your account holds as many GPUs as it may",
    "AssocMaxJobsLimit": "your account runs as many jobs as it may",
    "BadConstraints": "no node has what it asks for: look at constraint, gres and gpus",
    "launch_failed_requeued_held": "its start failed and it is held; scontrol release {id}",
}


@dataclass
class Row:
    """One job as Slurm shows it. Times are epoch seconds, None when not known."""

    id: str
    name: str
    state: str
    submitted: Optional[float] = None
    start: Optional[float] = None
    end: Optional[float] = None
    nodes: str = ""
    reason: str = ""

    @property
    def ended(self) -> bool:
        """True when Slurm will never run it again under this id."""
        return self.state in ENDED or self.state == GONE

    @property
    def waiting(self) -> bool:
        """True before it runs (again)."""
        return self.state in WAITING


def _number(text: str) -> Optional[float]:
    try:
        value = float(text)
    except ValueError:
        return None  # N/A, Unknown, None
    return value if value > 0 else None


def _word(text: str) -> str:
    """A state without what may follow it: ``CANCELLED by 1000``, ``CANCELLED+``."""
    return (text.split() or [""])[0].rstrip("+")


def parse_squeue(text: str) -> List[Row]:
    """Rows of `squeue --noheader --format=SQUEUE_FORMAT`; lines of another form are left out."""
    rows = []
    for line in text.splitlines():
        parts = line.split("|")
        if len(parts) < 9:
            continue
        job, name, state, submitted, start, end, nodes, planned, *reason = parts
        rows.append(
            Row(
                job, name, _word(state), _number(submitted), _number(start), _number(end),
                nodes or ("" if planned == "(null)" else planned), "|".join(reason),
            )
        )  # fmt: skip
    return rows


def parse_sacct(text: str) -> List[Row]:
    """Rows of `sacct --noheader --parsable2 --allocations --format=SACCT_FORMAT`."""
    rows = []
    for line in text.splitlines():
        parts = line.split("|")
        if len(parts) >= 8 and "." not in parts[0]:
            job, name, state, submitted, start, end, nodes, reason = parts[:8]
            nodes = "" if nodes == "None assigned" else nodes
            rows.append(Row(job, name, _word(state), _number(submitted), _number(start), _number(end), nodes, reason))
    return rows


def ours(rows: Iterable[Row], job: Optional[str], name: str, submitted: float) -> Optional[Row]:
    """The newest row that is this submission's, or None.

    Args:
        job: Slurm's id; None when our `sbatch` never heard it: then the name alone finds it.
        name: the name we gave it.
        submitted: when we called `sbatch`, epoch seconds.
    """
    found = [
        row
        for row in rows
        if row.name == name
        and job in (None, row.id)
        and (row.submitted is None or row.submitted >= submitted - SKEW_S)
    ]
    return max(found, key=lambda row: row.submitted or 0.0, default=None)


def reason_words(row: Row) -> str:
    """Why a job waits: Slurm's word, and what it means where we know it."""
    word = row.reason.split(",")[0].split(":")[0].strip("()")
    if word in ("", "None"):
        return "the scheduler has not looked at it yet"
    meaning = _REASONS.get(word, "").format(id=row.id)
    return "{} ({})".format(row.reason, meaning) if meaning else row.reason


def to_record(row: Row) -> Dict[str, Any]:
    """The row as JSON."""
    return dict(vars(row))


def from_record(record: Mapping[str, Any]) -> Row:
    """A row from its JSON."""
    return Row(**{key: record[key] for key in Row.__dataclass_fields__ if key in record})
