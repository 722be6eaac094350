"""Past and present jobs: what the hosts recorded, and what only this laptop still knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import OrchError

if TYPE_CHECKING:
    from orchestrator.services.session import Session


def history(
    session: Session, *, host: str | None = None, plan: str | None = None, limit: int = 50, local: bool = False
) -> dict[str, Any]:
    """``{"jobs": [...], "hosts": [...]}``, newest first. Hosts that do not answer are covered by the ledger."""
    from orchestrator.services.look import look_at_all, remember

    hosts = session.host_names(host)
    looks = [] if local else look_at_all(session, hosts)
    for item in looks:
        remember(session, item.jobs)
    runs = {} if local else _runs(session, [item.host for item in looks if item.reachable])
    rows = [row for row in session.ledger.jobs() if row.view and (host is None or row.host == host)]
    jobs = [_entry(row.view, runs.get(row.id)) for row in rows]
    if plan is not None:
        jobs = [job for job in jobs if job["name"] == plan]
    jobs.sort(key=lambda job: str(job["created_at"] or ""), reverse=True)
    return {"jobs": jobs[:limit], "hosts": [item.summary() for item in looks]}


def _runs(session: Session, hosts: list[str]) -> dict[str, dict[str, Any]]:
    """Each host's own history, keyed by job; a host without one is none the worse."""
    from orchestrator.services.parallel import in_parallel

    def ask(host: str) -> list[dict[str, Any]]:
        try:
            return list(session.agent(host).request("history").get("runs") or [])
        except OrchError:
            return []

    runs = [run for found in in_parallel(hosts, ask) for run in found if isinstance(run, dict)] if hosts else []
    return {str(run["job"]): run for run in runs if run.get("job")}


def _entry(view: dict[str, Any], run: dict[str, Any] | None) -> dict[str, Any]:
    steps = []
    for step in view.get("steps") or []:
        attempts = step.get("attempts") or []
        steps.append(
            {
                "name": step.get("name"),
                "state": step.get("state"),
                "attempts": len(attempts),
                "verdicts": [
                    attempt["verdict"].get("class") for attempt in attempts if isinstance(attempt.get("verdict"), dict)
                ],
            }
        )
    return {
        "id": view["id"],
        "name": view.get("name"),
        "host": view.get("host"),
        "state": view.get("state"),
        "created_at": view.get("created_at"),
        "started_at": view.get("started_at"),
        "ended_at": view.get("ended_at"),
        "attempts": sum(step["attempts"] for step in steps),
        "steps": steps,
        "run": run,
    }
