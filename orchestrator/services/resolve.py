"""From what a person typed to a job: ids may be shortened to a unique start; an empty ledger is refilled by asking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.core.errors import NoSuchJob, OrchError, UsageError
from orchestrator.core.ids import match_job
from orchestrator.core.schema import nearest
from orchestrator.services.look import HostLook, look_at_all, remember

if TYPE_CHECKING:
    from orchestrator.services.session import Session


@dataclass(frozen=True)
class FoundJob:
    """A job and the host it is on."""

    id: str
    host: str


def resolve(session: Session, prefix: str, *, host: str | None = None) -> FoundJob:
    """The one job that a person means.

    Raises:
        NoSuchJob: nothing fits, and every host of the inventory was asked.
        AmbiguousJob: several fit.
        HostError: nothing fits here, and a host that might know it did not answer.
    """
    return resolve_many(session, [prefix], host=host)[0]


def resolve_many(session: Session, prefixes: Sequence[str], *, host: str | None = None) -> list[FoundJob]:
    """The jobs that a person means, in the order typed, each once. Asks hosts only for ids not seen from here."""
    known = _known(session, host)
    looks: list[HostLook] | None = None
    found: list[FoundJob] = []
    for prefix in prefixes:
        if not isinstance(prefix, str):
            raise UsageError(f"{prefix!r} names no job", "a job's id as text, or the start of one")
        job = _match(prefix, known)
        if job is None and looks is None:
            looks = look_at_all(session, session.host_names(host))
            for item in looks:
                remember(session, item.jobs)
                known.update({view["id"]: item.host for view in item.jobs})
            job = _match(prefix, known)
        if job is None:
            raise _unknown(prefix, known, looks or [])
        if job not in found:
            found.append(job)
    _told(session, found)
    return found


def _told(session: Session, jobs: Sequence[FoundJob]) -> None:
    """Whoever names a job has learnt its id: a launch that was cut short before it could say it is over with that."""
    for job in jobs:
        row = session.ledger.job(job.id)
        if row is not None and not row.confirmed:
            session.ledger.confirm(job.id, session.now())


def _known(session: Session, host: str | None) -> dict[str, str]:
    hosts = set(session.host_names(host))
    return {row.id: row.host for row in session.ledger.jobs() if row.host in hosts}


def _match(prefix: str, known: dict[str, str]) -> FoundJob | None:
    job = match_job(prefix, known)
    return None if job is None else FoundJob(job, known[job])


def _unknown(prefix: str, known: dict[str, str], looks: Sequence[HostLook]) -> OrchError:
    away = [item for item in looks if item.error is not None]
    if away:
        # It may well be on the host that did not answer: that is the thing to say, with that host's own reason.
        error = away[0].error
        assert error is not None
        return error
    hosts = ", ".join(item.host for item in looks) or "the inventory"
    alike = nearest(prefix, list(known), cutoff=0.5)
    return NoSuchJob(
        f"no job {prefix!r} on {hosts}", f"did you mean {alike}?" if alike else "list them with: orch status"
    )
