"""More time for steps that run: their limits are moved, what runs is not touched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import JobLost
from orchestrator.core.numbers import check_seconds
from orchestrator.core.schema import MAX_DURATION_S
from orchestrator.services.look import look
from orchestrator.services.resolve import FoundJob
from orchestrator.services.stop import control
from orchestrator.services.wait import the_job

if TYPE_CHECKING:
    from orchestrator.services.session import Session


def extend(session: Session, job: FoundJob, more_s: float, *, step: str | None = None) -> dict[str, Any]:
    """Add ``more_s`` to the time limits of a job's steps, or of one: the answer of `control` with ``limits_s``.

    Raises:
        UsageError: no time to add, no such step, or what is meant has no limit. WrongState: it is over.
        JobLost: nothing runs that could have more time.
    """
    check_seconds("time to add", more_s, MAX_DURATION_S, zero=False)
    result = look(session, job.host, jobs=[job.id])
    if result.error is not None:
        raise result.error
    view = the_job(result.jobs, job, (result.answer or {}).get("unreadable") or {})
    if view["state"] == "lost":
        raise JobLost(f"job {job.id} on {job.host} is lost: nothing can have more time", f"orch retry {job.id}")
    return control(session, job, "extend", step=step, timeout_s=more_s)
