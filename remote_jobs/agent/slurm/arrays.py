"""Jobs that are submitted together, as the tasks of one array: the ranges of a split on a Slurm host.

Only the first submission is common.  Each task runs the supervisor of its own job, and retries and follow-ons are
submissions of that job alone.  A job's spec names all jobs of its array in `slurm.array`; whoever brings the last of
them submits.  `slurm/array/` in the first job's directory is to the array what `slurm/<n>/` is to a submission.
Standard library only.
"""

from __future__ import annotations

import os
import shutil
import time
from typing import Any, Dict, List, Mapping

from remote_jobs import protocol
from remote_jobs.agent.jobdir import JobDir, Layout, Lock, write_atomic, write_json
from remote_jobs.agent.slurm import client, queue, reading, script, submissions
from remote_jobs.agent.slurm.submissions import FOLDER, INTENT_FILE, SCRIPT_FILE, Submission


def members(spec: protocol.JobSpec) -> List[str]:
    """Ids of the jobs of this job's array, in the order of their tasks; empty when it is in none."""
    return [str(job) for job in (spec.slurm or {}).get("array") or []]


def task_numbers(spec: protocol.JobSpec) -> List[int]:
    """Numbers of an array's tasks: they count from 1, as ranges do."""
    return list(range(1, len(members(spec)) + 1))


def submit(layout: Layout, spec: protocol.JobSpec) -> bool:
    """Submit the array that this job belongs to; False while jobs of it are missing: the last one's launch does it.

    Raises:
        client.Unanswered: it may have arrived; the queue tells by the name. client.Refused: Slurm said no, nothing is
            submitted. OSError: the directories cannot be written.
    """
    jobs = [layout.job(name) for name in members(spec)]
    if not all(os.path.exists(job.spec_path) for job in jobs):
        return False
    path = os.path.join(jobs[0].at(FOLDER), submissions.ARRAY)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return _go_on(layout, jobs, path)
    tasks = {n: job for n, job in enumerate(jobs, 1) if submissions.newest(job) is None and _open(job)}
    try:
        _sbatch(layout, jobs[0], path, tasks)
    except (client.Refused, client.Unanswered) as exc:
        if not getattr(exc, "arrived", False):
            for job in tasks.values():
                shutil.rmtree(job.at(FOLDER, "1"), ignore_errors=True)
            shutil.rmtree(path, ignore_errors=True)
        raise
    return True


def again(layout: Layout, job: JobDir, spec: protocol.JobSpec, lost: Submission) -> None:
    """Repeat a submission that never reached Slurm: with the others of its array that are lost as well.

    Raises:
        As `submissions.submit`.
    """
    head = layout.job(lost.array) if lost.array is not None else None
    if head is None or not os.path.exists(head.spec_path):
        submissions.submit(layout, job, spec, n=lost.n, again=True)
    else:
        jobs = [layout.job(name) for name in members(head.spec())]
        _repeat(layout, jobs, os.path.join(head.at(FOLDER), submissions.ARRAY))


def _go_on(layout: Layout, jobs: List[JobDir], path: str) -> bool:
    """The array is submitted, or somebody was at it: a job without a submission then came too late, or that one died."""
    if submissions.answer(path) is None:
        known = submissions.read_folder(path)
        asked = reading.read_queue(layout, 0.0)
        found = queue.named(asked.rows, script.job_name(jobs[0].id, submissions.ARRAY), known.at)
        if asked.error is not None:
            raise client.Unanswered(asked.error)
        if found:
            submissions.note_answer(path, found[0].array)
        elif time.time() - known.at < submissions.LOST_ANSWER_S:
            raise client.Unanswered("an earlier submission may still arrive; launch again in a minute")
        else:
            _repeat(layout, jobs, path)
            return True
    started = False
    for job in jobs:
        if submissions.newest(job) is None and _open(job):
            submissions.submit(layout, job, job.spec(), n=1)
            started = True
    return started


def _repeat(layout: Layout, jobs: List[JobDir], path: str) -> None:
    lock = Lock(path + ".lock")
    if not lock.acquire(patience_s=0.0):
        return  # another agent is at it
    try:
        known = submissions.read_folder(path)
        if submissions.answer(path) is not None or time.time() - known.at < submissions.LOST_ANSWER_S:
            return
        tasks = {}
        for n, job in enumerate(jobs, 1):
            newest = submissions.newest(job)
            if _open(job) and (newest is None or (newest.array == jobs[0].id and newest.id is None)):
                tasks[n] = job
        if tasks:
            _sbatch(layout, jobs[0], path, tasks)
    finally:
        lock.release()


def _open(job: JobDir) -> bool:
    return not os.path.exists(job.result_path)


def _sbatch(layout: Layout, head: JobDir, path: str, tasks: Mapping[int, JobDir]) -> None:
    name = script.job_name(head.id, submissions.ARRAY)
    at = time.time()
    spec = head.spec()
    intent: Dict[str, Any] = {"v": protocol.VERSION, "at": at, "name": name, "array": head.id}
    outputs = {}
    for number, job in tasks.items():
        folder = job.at(FOLDER, "1")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        write_json(os.path.join(folder, INTENT_FILE), {**intent, "task": number})
        outputs[number] = (job.id, os.path.join(folder, submissions.OUTPUT_FILE))
    argv = script.sbatch_argv(spec, name, os.path.join(path, SCRIPT_FILE), "/dev/null", tasks=sorted(tasks))
    text = script.array_script(submissions.supervisor_argv(layout, spec), outputs)
    write_atomic(os.path.join(path, SCRIPT_FILE), text.encode("utf-8"), mode=0o700)
    write_json(os.path.join(path, INTENT_FILE), {**intent, "argv": argv})
    submissions.note_answer(path, client.sbatch(argv, {}))
    for job in tasks.values():
        submissions.read(job, 1)  # each keeps its own id: the first job may be deleted before the others
