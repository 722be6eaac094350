"""What the queue says, asked seldom: the answer is kept in a file, so many agents (every `orch status` starts one) ask once.

Silence is no answer: a submission that a reading says nothing of is neither waiting nor gone.  Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from typing import List, Optional, Sequence

from remote_jobs.agent.jobdir import Layout, Lock, read_json, write_json
from remote_jobs.agent.slurm import client, queue
from remote_jobs.agent.slurm.submissions import Submission

NEWS_S = 5.0
"""A submission younger than this need not be in the queue yet."""
CACHE_FILE = "slurm-queue.json"


@dataclass
class Reading:
    """One answer of the queue: ``at`` is when it was asked (epoch seconds); with ``error`` the rows mean nothing."""

    at: float = 0.0
    rows: List[queue.Row] = field(default_factory=list)
    error: Optional[str] = None
    accounted: Optional[List[queue.Row]] = None
    """What accounting says of jobs that are in no row; None when it was not asked."""


def read_queue(layout: Layout, every_s: float) -> Reading:
    """The queue as of at most ``every_s`` ago; asked again when older. Only one agent of a root asks at a time."""
    path = os.path.join(layout.root, CACHE_FILE)
    kept = _cached(path)
    if 0 <= time.time() - kept.at < every_s:
        return kept
    lock = Lock(path + ".lock")
    if not lock.acquire(patience_s=client.TIMEOUT_S):
        return _cached(path)
    try:
        kept = _cached(path)
        if 0 <= time.time() - kept.at < every_s:
            return kept  # somebody else has asked meanwhile
        asked = Reading(time.time())
        try:
            asked.rows = client.squeue()
        except client.Unanswered as exc:
            asked.error = str(exc)
        with contextlib.suppress(OSError):
            record = {"at": asked.at, "error": asked.error, "rows": [queue.to_record(row) for row in asked.rows]}
            write_json(path, record, durable=False)
        return asked
    finally:
        lock.release()


def _cached(path: str) -> Reading:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        record = read_json(path)
        return Reading(float(record["at"]), [queue.from_record(row) for row in record["rows"]], record["error"])
    return Reading()


def find_row(reading: Reading, submission: Submission) -> Optional[queue.Row]:
    """What a reading says of a submission; None when it is silent on it (too new, or nothing was answered)."""
    if reading.error is not None or reading.at < submission.at:
        return None
    known = (submission.id, submission.name, submission.at)
    found = queue.ours(reading.rows, *known, submission.task)
    if found is not None or submission.id is None:
        return found
    if not submission.started and queue.left_its_array(reading.rows, submission.id, submission.name, submission.at):
        return queue.Row(submission.id, submission.name, "CANCELLED", reason="taken out of its array")
    if reading.at < submission.at + NEWS_S:
        return None
    if reading.accounted is None:
        reading.accounted = ask_accounting(reading, [submission])
    found = queue.ours(reading.accounted, *known)
    return found or queue.Row(submission.id, submission.name, queue.GONE)


def ask_accounting(reading: Reading, submitted: Sequence[Submission]) -> List[queue.Row]:
    """One `sacct` for all submissions that the queue no longer shows; no call when there are none."""
    missing = [
        one
        for one in submitted
        if one.id is not None
        and reading.at >= one.at + NEWS_S
        and queue.ours(reading.rows, one.id, one.name, one.at) is None
    ]
    if not missing or reading.error is not None:
        return []
    age_s = reading.at - min(one.at for one in missing) + 3600.0
    return client.sacct([str(one.id) for one in missing], age_s)
