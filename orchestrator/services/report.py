"""Everything that one page about a job needs, gathered from its host: nothing secret is in a job's records."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from orchestrator.core.answers import SPEC, fits
from orchestrator.core.errors import OrchError
from orchestrator.core.timeline import Timeline, gpu_hours
from orchestrator.services.history import forecast_score, took_s
from orchestrator.services.timeline import job_file, timeline
from orchestrator.services.wait import never_launched

if TYPE_CHECKING:
    from orchestrator.services.resolve import FoundJob
    from orchestrator.services.session import Session

TAIL_BYTES = 12 * 1024
"""Of the log of every attempt that failed."""
MAX_ATTEMPTS = 40


@dataclass(frozen=True)
class Failure:
    """One attempt that failed: what it died of, and the end of its log."""

    step: str
    attempt: int
    why: Mapping[str, Any]
    log_tail: bytes = b""


@dataclass(frozen=True)
class Report:
    """What the page shows."""

    view: Mapping[str, Any]
    timeline: Timeline
    made_at: datetime
    took_s: float | None
    gpu_hours: Mapping[str, float]
    spec: Mapping[str, Any] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    forecasts: Mapping[str, Any] | None = None
    complete: bool = True


def report(session: Session, job: FoundJob) -> Report:
    """Gather it. A host that does not answer leaves what this laptop knows, and the page says so.

    Raises:
        JobLost, HostError: nothing is known of the job. WrongState: its launch was cut short.
    """
    view, line = timeline(session, job)
    if view.get("reachable", True) and view.get("unfinished") and not view.get("steps"):
        raise never_launched(job)
    reachable = bool(view.get("reachable", True))
    spec: dict[str, Any] = {}
    failures: list[Failure] = []
    forecasts = None
    if reachable:
        spec = _spec(session, job)
        failures = _failures(session, job, view)
        forecasts = _forecasts(session, job)
    now = session.now()
    return Report(
        view, line, now, took_s(view, now), gpu_hours(view, now), spec, tuple(failures), forecasts, complete=reachable
    )


def _spec(session: Session, job: FoundJob) -> dict[str, Any]:
    try:
        found = json.loads(job_file(session, job, "spec.json") or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if fits(found, SPEC) else {}


def _failures(session: Session, job: FoundJob, view: Mapping[str, Any]) -> list[Failure]:
    agent = session.agent(job.host)
    failed = [
        (str(step["name"]), int(attempt["n"]))
        for step in view.get("steps") or []
        for attempt in step.get("attempts") or []
        if attempt.get("state") in {"failed", "lost"}
    ][-MAX_ATTEMPTS:]
    found = []
    for step, attempt in failed:
        try:
            why = agent.request("why", job=job.id, step=step, attempt=attempt)["why"]
        except OrchError as error:
            why = {"verdict": None, "evidence": [error.message]}
        found.append(Failure(step, attempt, why, _tail(session, job, step, attempt)))
    return found


def _tail(session: Session, job: FoundJob, step: str, attempt: int) -> bytes:
    import base64

    cursor = {
        "job": job.id, "step": step, "attempt": attempt, "inode": 0, "offset": -1,
        "tail_bytes": TAIL_BYTES, "max_bytes": TAIL_BYTES,
    }  # fmt: skip
    try:
        answer = session.agent(job.host).request("look", jobs=[job.id], logs=[cursor])
    except OrchError:
        return b""
    logs = [item for item in answer.get("logs") or [] if not item.get("missing")]
    return base64.b64decode(logs[0].get("data_b64") or "") if logs else b""


def _forecasts(session: Session, job: FoundJob) -> dict[str, Any] | None:
    try:
        runs = session.agent(job.host).request("history").get("runs") or []
    except OrchError:
        return None
    return forecast_score([run for run in runs if isinstance(run, dict) and run.get("job") == job.id])
