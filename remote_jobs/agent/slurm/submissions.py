"""Submissions of a job, in its directory: `slurm/<n>/` holds script, intent and what Slurm answered.

The first one may be a task of an array that several jobs share (see arrays.py); its name is then the array's.

`mkdir` of the number claims it, and the name in the queue is made of job id and number: so a submission whose answer
was lost is found again by its name and never made twice.  Whatever Slurm last said of the newest one lies in
`slurm.json`, for looks and for people.  Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional

from remote_jobs import protocol
from remote_jobs.agent.jobdir import JobDir, Layout, Lock, read_json, write_atomic, write_json
from remote_jobs.agent.slurm import client, queue, script

FOLDER = "slurm"
ARRAY = "array"
SEEN_FILE = "slurm.json"
INTENT_FILE, ANSWER_FILE, SCRIPT_FILE, OUTPUT_FILE = "intent.json", "answer.json", "script", "output"
LOST_ANSWER_S = 90.0
"""An intent without an answer is older than any `sbatch` that may still be under way."""


@dataclass
class Submission:
    """One call of `sbatch`. ``id`` is None while (or because) its answer is not known."""

    n: int
    name: str
    at: float
    """Wall clock before the call, epoch seconds."""
    id: Optional[str]
    path: str
    array: Optional[str] = None
    """The first job of the array that it is a task of."""
    task: Optional[int] = None

    @property
    def started(self) -> bool:
        """True once the batch script of a task has begun: it opens this file first."""
        return os.path.exists(os.path.join(self.path, OUTPUT_FILE))


def newest(job: JobDir) -> Optional[Submission]:
    """The newest submission, or None."""
    numbers = _numbers(job)
    return read(job, numbers[-1]) if numbers else None


def _numbers(job: JobDir) -> List[int]:
    with contextlib.suppress(OSError):
        return sorted(int(name) for name in os.listdir(job.at(FOLDER)) if name.isdigit())
    return []


def read(job: JobDir, n: int) -> Submission:
    """One submission, as far as it can be read."""
    found = read_folder(job.at(FOLDER, str(n)))
    found.n, found.name = n, found.name or script.job_name(job.id, n)
    if found.id is None and found.array is not None:
        answered = answer(os.path.join(os.path.dirname(job.path), found.array, FOLDER, ARRAY))
        if answered:
            found.id = "{}_{}".format(answered, found.task)
            with contextlib.suppress(OSError):
                note_answer(found.path, found.id)
    return found


def read_folder(path: str) -> Submission:
    """What a submission's own folder holds, that of an array too: its number is 0, its name empty where not written."""
    intent = _record(path, INTENT_FILE)
    at = intent.get("at")
    if at is None:
        with contextlib.suppress(OSError):
            at = os.stat(path).st_mtime
    return Submission(0, intent.get("name") or "", float(at or 0.0), answer(path), path, intent.get("array"), intent.get("task"))


def answer(path: str) -> Optional[str]:
    """The id that Slurm gave what was submitted from this folder, None while it is not known."""
    return _record(path, ANSWER_FILE).get("id")


def _record(path: str, name: str) -> Dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return dict(read_json(os.path.join(path, name)))
    return {}


def submit(layout: Layout, job: JobDir, spec: protocol.JobSpec, *, n: int, again: bool = False) -> Submission:
    """Submit number ``n``, unless somebody has or does so right now.

    Args:
        again: an earlier call for this number is known not to have arrived.

    Raises:
        client.Unanswered: it may have arrived; `newest` has no id, and the queue tells by the name.
        client.Refused: Slurm said no; the number is free again.
        OSError: the job's directory cannot be written.
    """
    path = job.at(FOLDER, str(n))
    os.makedirs(job.at(FOLDER), mode=0o700, exist_ok=True)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return _again(layout, job, spec, path, n) if again else read(job, n)
    try:
        return _submit(layout, job, spec, path, n)
    except (client.Refused, client.Unanswered) as exc:
        if not getattr(exc, "arrived", False):
            shutil.rmtree(path, ignore_errors=True)
        raise


def _again(layout: Layout, job: JobDir, spec: protocol.JobSpec, path: str, n: int) -> Submission:
    """Repeat a lost submission, one agent at a time; whatever comes of it, the number stays claimed."""
    lock = Lock(path + ".lock")
    if lock.acquire(patience_s=0.0):
        try:
            known = read(job, n)
            if known.id is None and time.time() - known.at >= LOST_ANSWER_S:
                return _submit(layout, job, spec, path, n)
        finally:
            lock.release()
    return read(job, n)


def _submit(layout: Layout, job: JobDir, spec: protocol.JobSpec, path: str, n: int) -> Submission:
    argv = script.sbatch_argv(spec, script.job_name(job.id, n), os.path.join(path, SCRIPT_FILE), os.path.join(path, OUTPUT_FILE))
    write_atomic(os.path.join(path, SCRIPT_FILE), script.batch_script([*supervisor_argv(layout, spec), job.id]).encode("utf-8"), mode=0o700)
    write_json(os.path.join(path, INTENT_FILE), {"v": protocol.VERSION, "at": time.time(), "argv": argv})
    note_id(job, n, client.sbatch(argv, {script.SUPERVISOR_ENV: job.id}))
    return read(job, n)


def note_id(job: JobDir, n: int, slurm_id: str) -> None:
    """Write down the id that Slurm gave a submission."""
    note_answer(job.at(FOLDER, str(n)), slurm_id)


def note_answer(path: str, slurm_id: str) -> None:
    """The same for a submission's folder."""
    write_json(os.path.join(path, ANSWER_FILE), {"v": protocol.VERSION, "id": slurm_id, "at": time.time()})


def supervisor_argv(layout: Layout, spec: protocol.JobSpec) -> List[str]:
    """The supervisor's command in the allocation, without the job's id, which comes last; of the job's own release."""
    from remote_jobs.agent.command import release_dir

    entry = os.path.join(layout.releases, spec.release or "-")
    if not os.path.exists(os.path.join(entry, "__main__.py")):
        entry = release_dir()
    if not os.path.exists(os.path.join(entry, "__main__.py")):
        entry = os.path.join(entry, "remote_jobs", "agent", "__main__.py")
    return [sys.executable, "-I", "-S", entry, "supervise", "--root", layout.root, "--slurm", "--job"]


def seen(job: JobDir) -> Dict[str, Any]:
    """What Slurm last said of the newest submission: {n, id, row, error}; empty when nothing is known."""
    with contextlib.suppress(OSError, ValueError):
        record = read_json(job.at(SEEN_FILE))
        if isinstance(record, dict):
            return record
    return {}


def note_seen(job: JobDir, submission: Submission, row: Optional[queue.Row], error: Optional[str]) -> bool:
    """Write that down when it differs from what was known; True when it did. An error keeps the last row."""
    before = seen(job)
    shown = queue.to_record(row) if row is not None else None
    if row is None and before.get("n") == submission.n:
        shown = before.get("row")
    record: Dict[str, Any] = {"v": protocol.VERSION, "n": submission.n, "id": submission.id, "row": shown, "error": error}
    if {key: before.get(key) for key in record} == record:
        return False
    write_json(job.at(SEEN_FILE), record, durable=False)
    return True


def row_of(record: Mapping[str, Any]) -> Optional[queue.Row]:
    """The row in what `seen` gave."""
    return queue.from_record(record["row"]) if record.get("row") else None
