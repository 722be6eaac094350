"""A job's timeline: its view and the GPU readings that its supervisor kept, asked of its host."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from orchestrator.core.answers import READING, fits
from orchestrator.core.errors import HostRefused
from orchestrator.core.timeline import Timeline, of_view
from orchestrator.services.look import look, remember, remembered_view
from orchestrator.services.wait import the_job

if TYPE_CHECKING:
    from orchestrator.services.resolve import FoundJob
    from orchestrator.services.session import Session

CHUNK_BYTES = 1 << 20
MAX_BYTES = 16 << 20


def timeline(session: Session, job: FoundJob, *, local: bool = False) -> tuple[dict[str, Any], Timeline]:
    """(the job's view, its timeline). An unreachable host gives what this laptop saw last, without GPU readings.

    Raises:
        JobLost: the host has no such job. HostError: it does not answer, and nothing is remembered.
    """
    result = None if local else look(session, job.host, jobs=[job.id])
    if result is not None and result.error is None:
        view = the_job(result.jobs, job, (result.answer or {}).get("unreadable") or {})
        remember(session, [view])
        return view, of_view(view, session.now(), _readings(session, job))
    row = session.ledger.job(job.id)
    if row is None or row.view is None:
        if result is not None and result.error is not None:
            raise result.error
        raise _unseen(job)
    if result is not None and result.error is not None:
        session.say(f"orch: {job.host} does not answer: this is what was seen last, at {row.seen_at}")
    view = remembered_view(row.view, row.seen_at, session.now())
    return view, of_view(view, session.now())


def _unseen(job: FoundJob) -> Exception:
    from orchestrator.core.errors import NoSuchJob

    return NoSuchJob(f"this laptop has not seen {job.id} yet", "ask its host: leave out --local")


def job_file(session: Session, job: FoundJob, name: str, limit: int = MAX_BYTES) -> bytes:
    """A file of the job's directory from its start, at most ``limit`` bytes; empty when it is not there."""
    agent = session.agent(job.host)
    path = f"{agent.hello()['root']}/jobs/{job.id}/{name}"
    data = b""
    while len(data) < limit:
        try:
            wanted = min(CHUNK_BYTES, limit - len(data))
            answer = agent.request("get", path=path, offset=len(data), length=wanted)
        except HostRefused:
            return data
        chunk = bytes(answer.get("payload") or b"")
        data += chunk
        if len(chunk) < wanted or answer.get("eof"):
            break
    return data


def _readings(session: Session, job: FoundJob) -> Iterator[dict[str, Any]]:
    for line in job_file(session, job, "usage.jsonl").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if fits(record, READING):
            yield record
