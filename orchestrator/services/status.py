"""Where jobs stand, on all hosts at once; what is not reachable is shown as that, with the last known state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import JobLost
from orchestrator.services.look import HostLook, look_at_all, remember, remembered_view
from orchestrator.services.resolve import resolve_many

if TYPE_CHECKING:
    from orchestrator.services.session import Session


def status(session: Session, jobs: Sequence[str], *, host: str | None = None) -> dict[str, Any]:
    """``{"jobs": [...], "hosts": [...]}`` for the ids or prefixes given, or for every job of every host.

    With an empty ledger the hosts are asked all the same, so jobs are found again.
    """
    wanted = resolve_many(session, jobs, host=host) if jobs else []
    hosts = list(dict.fromkeys(job.host for job in wanted)) if jobs else session.host_names(host)
    looks = look_at_all(
        session, hosts, processes=True, **({"jobs": [job.id for job in wanted]} if jobs else {})
    )
    views: list[dict[str, Any]] = []
    for item in looks:
        if item.reachable:
            remember(session, item.jobs)
            views.extend(item.jobs)
        else:
            views.extend(_remembered(session, item, {job.id for job in wanted}))
    if jobs:
        views = _in_order(views, [job.id for job in wanted], looks)
    return {"jobs": views, "hosts": [item.summary() for item in looks]}


def _remembered(session: Session, item: HostLook, wanted: set[str]) -> list[dict[str, Any]]:
    rows = [
        row for row in session.ledger.jobs() if row.host == item.host and (not wanted or row.id in wanted)
    ]
    return [remembered_view(row.view, row.seen_at, session.now()) for row in rows if row.view]


def _in_order(
    views: Sequence[dict[str, Any]], wanted: Sequence[str], looks: Sequence[HostLook]
) -> list[dict[str, Any]]:
    by_id = {view["id"]: view for view in views}
    missing = [job for job in wanted if job not in by_id]
    unreadable = {
        job: text for item in looks for job, text in ((item.answer or {}).get("unreadable") or {}).items()
    }
    if missing and all(item.reachable for item in looks):
        job = missing[0]
        reason = unreadable.get(job) or "its folder is not there any more"
        raise JobLost(f"job {job}: {reason}", "see what the hosts have with: orch status")
    return [by_id[job] for job in wanted if job in by_id]
