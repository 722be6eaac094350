"""Past and present jobs: what the hosts recorded, and what only this laptop still knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from statistics import median
from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import OrchError, ProtocolError
from orchestrator.core.numbers import check_whole
from orchestrator.core.timeline import gpu_hours
from orchestrator.core.times import parse_time
from orchestrator.services.look import HostLook, look_at_all, remember
from orchestrator.services.parallel import in_parallel

if TYPE_CHECKING:
    from orchestrator.services.session import Session


def history(
    session: Session,
    *,
    host: str | None = None,
    plan: str | None = None,
    limit: int = 50,
    local: bool = False,
) -> dict[str, Any]:
    """``{"jobs", "hosts", "forecasts", "gpu_hours"}``, the jobs newest first. Hosts that do not answer are covered by the ledger.

    Raises:
        UsageError: ``limit`` is below 1.
    """
    check_whole("limit", limit, 1)
    hosts = session.host_names(host)
    looks = [] if local else look_at_all(session, hosts)
    for item in looks:
        remember(session, item.jobs)
    _mirror(session, [item for item in looks if item.reachable])
    runs = {str(run["job"]): run.get("attempts") or [] for run in session.ledger.runs(host)}
    rows = [row for row in session.ledger.jobs() if (host is None or row.host == host)]
    jobs = [_entry(row.view, runs.get(row.id, []), session.now()) for row in rows if row.view]
    if plan is not None:
        jobs = [job for job in jobs if job["name"] == plan]
    jobs.sort(key=lambda job: str(job["created_at"] or ""), reverse=True)
    shown = {str(job["id"]) for job in jobs}
    every = [attempt for job, attempts in runs.items() if job in shown for attempt in attempts]
    return {
        "jobs": jobs[:limit],
        "hosts": [item.summary() for item in looks],
        "forecasts": forecast_score(every),
        "gpu_hours": {
            key: round(sum(job["gpu_hours"][key] for job in jobs[:limit]), 6) for key in ("spent", "lost")
        },
    }


def plan_names(session: Session, *, host: str | None = None) -> list[str]:
    """Names of the plans that jobs seen from here are of, newest first; a launch that was cut short has none."""
    return list(dict.fromkeys(str(row.view.get("name")) for row in session.ledger.jobs(host) if row.view and row.view.get("steps")))


def _mirror(session: Session, looks: Sequence[HostLook]) -> None:
    """Copy the hosts' own history (durations, forecasts) into the ledger; a host without one is none the worse, one
    that answers with nonsense is told as such.
    """
    by_host = {item.host: item for item in looks}

    def ask(host: str) -> list[dict[str, Any]]:
        try:
            return list(session.agent(host).request("history")["runs"])
        except ProtocolError as error:
            by_host[host].error = error
            return []
        except OrchError:
            return []

    for host, runs in zip(by_host, in_parallel(list(by_host), ask), strict=True):
        by_job: dict[str, list[dict[str, Any]]] = {}
        for run in runs:
            by_job.setdefault(run["job"], []).append(run)
        session.ledger.mirror_runs(host, [{"job": job, "attempts": rows} for job, rows in by_job.items()])


def forecast_score(attempts: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """How good the ETAs were: ``{"count", "median_error", "printed_median_error"}``, or None without any.

    Every bar's forecast at 25, 50 and 75 % is kept by the host and compared with what was left in truth. Errors are
    shares of that (0.1 = off by a tenth); ``printed`` is the remaining time that the bar itself showed.
    """
    made = [
        forecast
        for attempt in attempts
        for forecast in attempt.get("forecasts") or []
        if forecast.get("true_s") and forecast.get("forecast_s") is not None
    ]
    if not made:
        return None
    printed = [one for one in made if one.get("printed_s") is not None]

    def error(one: Mapping[str, Any], key: str) -> float:
        return abs(float(one[key]) - float(one["true_s"])) / max(1.0, float(one["true_s"]))

    return {
        "count": len(made),
        "median_error": round(median(error(one, "forecast_s") for one in made), 3),
        "printed_median_error": round(median(error(one, "printed_s") for one in printed), 3) if printed else None,
    }


def took_s(view: Mapping[str, Any], now: datetime) -> float | None:
    """Seconds from the first attempt's start to the job's end, or to now; None when nothing has started."""
    start = parse_time(view.get("started_at"))
    if start is None:
        return None
    return round(max(0.0, ((parse_time(view.get("ended_at")) or now) - start).total_seconds()), 1)


def _entry(view: dict[str, Any], attempts_kept: Sequence[Mapping[str, Any]], now: datetime) -> dict[str, Any]:
    steps = []
    for step in view.get("steps") or []:
        attempts = step.get("attempts") or []
        steps.append(
            {
                "name": step.get("name"),
                "state": step.get("state"),
                "attempts": len(attempts),
                "verdicts": [
                    attempt["verdict"].get("class")
                    for attempt in attempts
                    if isinstance(attempt.get("verdict"), dict)
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
        "took_s": took_s(view, now),
        "gpu_hours": gpu_hours(view, now),
        "attempts": sum(step["attempts"] for step in steps),
        "steps": steps,
        "forecasts": forecast_score(attempts_kept),
    }
