"""What `squeue` and `sacct` print, as rows, and which row is ours. Pure: no I/O, no clock.

Slurm hands out an id again after a reset or a wrap-around, and then an old record describes somebody else's job: a
row counts only when id *and* name are ours (the name holds our job's id and the number of the submission) and it was
not submitted before we did so.  The tasks of an array share one name; each is a row with an id such as ``17_2``.
Formats: squeue(1), sacct(1), with SLURM_TIME_FORMAT=%s and SLURM_BITSTR_LEN=0.  Standard library only.
"""

from __future__ import annotations

import dataclasses
import re
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
_SEVERAL = re.compile(r"(\d+)_\[([\d,:-]+)(?:%\d+)?\]")
"""Tasks of an array that wait (or were cancelled waiting) as one row: ``17_[1,3-9:2%4]``."""
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
    "JobArrayTaskLimit": "as many tasks of its array run as array_limit allows",
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
    def array(self) -> str:
        """Slurm's id of the array, or of the job where it is in none."""
        return self.id.partition("_")[0]

    @property
    def task(self) -> Optional[int]:
        """Number of the task in its array."""
        task = self.id.partition("_")[2]
        return int(task) if task.isdigit() else None

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
    """Rows of `squeue --noheader --format=SQUEUE_FORMAT`, one a task; lines of another form are left out."""
    rows: List[Row] = []
    for line in text.splitlines():
        parts = line.split("|")
        if len(parts) < 9:
            continue
        job, name, state, submitted, start, end, nodes, planned, *reason = parts
        rows += _tasks(
            Row(
                job, name, _word(state), _number(submitted), _number(start), _number(end),
                nodes or ("" if planned == "(null)" else planned), "|".join(reason),
            )
        )  # fmt: skip
    return rows


def _tasks(row: Row) -> List[Row]:
    """A row for each task that this one stands for."""
    match = _SEVERAL.fullmatch(row.id)
    if match is None:
        return [row]
    numbers: List[int] = []
    for item in match.group(2).split(","):
        span, _, step = item.partition(":")
        first, _, last = span.partition("-")
        numbers += range(int(first), int(last or first) + 1, int(step or 1))
    return [dataclasses.replace(row, id="{}_{}".format(match.group(1), number)) for number in numbers]


def parse_sacct(text: str) -> List[Row]:
    """Rows of `sacct --noheader --parsable2 --allocations --format=SACCT_FORMAT`, one a task."""
    rows: List[Row] = []
    for line in text.splitlines():
        parts = line.split("|")
        if len(parts) >= 8 and "." not in parts[0]:
            job, name, state, submitted, start, end, nodes, reason = parts[:8]
            nodes = "" if nodes == "None assigned" else nodes
            rows += _tasks(Row(job, name, _word(state), _number(submitted), _number(start), _number(end), nodes, reason))
    return rows


def ours(
    rows: Iterable[Row], job: Optional[str], name: str, submitted: float, task: Optional[int] = None
) -> Optional[Row]:
    """The newest row that is this submission's, or None.

    Args:
        job: Slurm's id; None when our `sbatch` never heard it: then the name alone finds it.
        name: the name we gave it.
        submitted: when we called `sbatch`, epoch seconds.
        task: its number where it is a task of an array, whose name all tasks share.
    """
    found = [
        row for row in named(rows, name, submitted) if (row.task == task if job is None else row.id == job)
    ]
    return max(found, key=lambda row: row.submitted or 0.0, default=None)


def left_its_array(rows: Iterable[Row], job: str, name: str, submitted: float) -> bool:
    """True when other tasks of a task's array are in the queue and it is not.

    A task that is cancelled while it waits leaves no row of its own; the row of the whole array may say CANCELLED.
    """
    array, underscore, _ = job.partition("_")
    shown = [row.id for row in named(rows, name, submitted) if row.array == array]
    return bool(underscore and shown) and job not in shown


def named(rows: Iterable[Row], name: str, submitted: float) -> List[Row]:
    """The rows of this name that were not submitted before we did so."""
    return [row for row in rows if row.name == name and (row.submitted is None or row.submitted >= submitted - SKEW_S)]


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
