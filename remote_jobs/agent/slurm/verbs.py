"""What launch, stop and retry do differently for a job in Slurm; called by agent/launching.py. Standard library only."""

from __future__ import annotations

import contextlib
import os
import re
import time
from typing import Any, Mapping

from remote_jobs import protocol
from remote_jobs.agent.jobdir import JobDir, Layout, read_json, write_json
from remote_jobs.agent.slurm import arrays, client, keeper, queue, script, submissions
from remote_jobs.agent.slurm.reading import find_row, read_queue
from remote_jobs.agent.slurm.submissions import Submission

CANCELLED_WITHIN_S = 8.0
REFUSED_HINT = "correct partition, account, qos, gres or time_limit of the host {} in the inventory"
_ONLY_A_NUMBER = re.compile(r"^Job \d+ to")
"""`--test-only` names an id that no job ever gets."""
_MAY_WAIT = ("nodes are busy", "node configuration is not available (down", "Required node not available")


def claim_folder(job: JobDir) -> None:
    """Mark the job as Slurm's, before its spec is written."""
    os.makedirs(job.at(submissions.FOLDER), mode=0o700, exist_ok=True)


def renew(job: JobDir, spec_record: Mapping[str, Any]) -> bool:
    """Give a job that was never submitted the spec of the launch that takes it up: the inventory may have been corrected
    since Slurm refused its array. False when there is a submission, which stays what it is.

    Raises:
        OSError: the job's directory cannot be written.
    """
    if submissions.newest(job) is not None:
        return False
    write_json(job.spec_path, spec_record)
    return True


def test_only(spec: protocol.JobSpec) -> str:
    """What Slurm would do with this job, in its words: `Job 7 to start at ...`. Nothing is submitted.

    Raises:
        client.Refused: it would be refused for good. client.Unanswered: see there.
    """
    argv = script.sbatch_argv(spec, script.job_name(spec.id, 0), "/dev/null", "/dev/null", tasks=arrays.task_numbers(spec))
    try:
        said = client.call(["sbatch", "--test-only", *argv[2:-1], "--wrap=true"], errors=True)
    except client.Refused as exc:
        if not any(word in str(exc) for word in _MAY_WAIT):
            raise
        return "no node can take it now ({}): it would wait".format(exc)
    return _ONLY_A_NUMBER.sub("would", " ".join(said.split())) or "Slurm would take it"


def start(layout: Layout, job: JobDir, spec: protocol.JobSpec, secrets: Mapping[str, Any]) -> bool:
    """Submit a job that was just made, or go on with a submission whose answer was lost; False when it is under way.

    Raises:
        client.Refused, client.Unanswered, OSError: the job's folder stays, a resend goes on.
    """
    known = submissions.newest(job)
    if known is not None and known.id is not None:
        return False
    _keep_secrets(job, secrets)
    if known is not None:
        asked = read_queue(layout, 0.0)
        row = find_row(asked, known)
        if row is not None:
            submissions.note_id(job, known.n, row.id)
            return False
        if asked.error is not None:
            raise client.Unanswered(asked.error)
        if time.time() - known.at < submissions.LOST_ANSWER_S:
            raise client.Unanswered("an earlier submission may still arrive; launch again in a minute")
        arrays.again(layout, job, spec, known)
        return True
    if not job.read_events():
        keeper.settle(layout, job)
    if arrays.members(spec):
        return arrays.submit(layout, spec)
    submissions.submit(layout, job, spec, n=1)
    return True


def deliver(layout: Layout, job: JobDir, spec: protocol.JobSpec, action: str, secrets: Mapping[str, Any]) -> None:
    """Bring a posted request to whoever can obey it: the supervisor, the queue, or nobody's job any more.

    Raises:
        client.Refused, client.Unanswered: Slurm; the request stays posted. OSError: the job's directory.
    """
    known = submissions.newest(job)
    row = None
    if known is not None and not keeper.over(job, spec):
        row = find_row(read_queue(layout, 0.0), known)
        if row is not None and row.waiting and action == "stop":
            row = _cancelled(layout, known, row)
        if row is not None and not row.ended:
            submissions.note_seen(job, known, row, None)
            if not row.waiting:
                client.wake(row.id)
            return
        if row is None:
            return  # not seen in the queue yet, or Slurm is silent: a supervisor that lives reads its requests itself
    if action == "retry":
        _keep_secrets(job, secrets)
    if keeper.settle(layout, job) != "ok" or keeper.over(job, spec):
        if known is not None:
            submissions.note_seen(job, known, row, None)
        return
    submissions.submit(layout, job, spec, n=known.n + 1 if known is not None else 1)


def _cancelled(layout: Layout, known: Submission, row: queue.Row) -> queue.Row:
    """Take a waiting job out of the queue; its row then, which runs if it has just been started."""
    client.cancel(row.id, waiting_only=True)
    deadline = time.monotonic() + CANCELLED_WITHIN_S
    while row.waiting and time.monotonic() < deadline:
        time.sleep(0.2)
        row = find_row(read_queue(layout, 0.0), known) or row
    return row


def _keep_secrets(job: JobDir, given: Mapping[str, Any]) -> None:
    """Values for the supervisor that will start some time: a 0600 file, deleted when the job ends."""
    if not given:
        return
    kept: Any = {}
    with contextlib.suppress(OSError, ValueError):
        kept = read_json(job.at(protocol.SECRETS_FILE))
    write_json(job.at(protocol.SECRETS_FILE), {**(kept if isinstance(kept, dict) else {}), **given})
