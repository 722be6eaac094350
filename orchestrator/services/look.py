"""One look at one or many hosts, and the JSON view of each job in it. Hosts are asked in parallel.

An unreachable host is an answer too: the last known states with their age. Nothing is judged from "unknown".
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from orchestrator.core.answers import check_record
from orchestrator.core.errors import OrchError, ProtocolError
from orchestrator.core.times import age_s
from orchestrator.services.parallel import in_parallel

if TYPE_CHECKING:
    from orchestrator.services.session import Session

LOOK_TIMEOUT_S = 20.0
"""How long an answer may be overdue before the link counts as dead; the time that a long poll is held comes on top."""
MAX_WALL_S = 1e11
"""A wall clock beyond this (the year 5138) is no clock."""
TERMINAL = frozenset({"succeeded", "failed", "stopped"})


@dataclass
class HostLook:
    """What one host answered, or why it did not."""

    host: str
    answer: dict[str, Any] | None = None
    error: OrchError | None = None
    skew_s: float | None = None
    jobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def reachable(self) -> bool:
        """True when the host answered this look."""
        return self.answer is not None

    def summary(self) -> dict[str, Any]:
        """The host's entry in JSON answers."""
        return {
            "name": self.host,
            "reachable": self.reachable,
            "skew_s": None if self.skew_s is None else round(self.skew_s, 1),
            "error": None if self.error is None else self.error.to_json()["error"],
            "unreadable": dict((self.answer or {}).get("unreadable") or {}),
        }


def job_view(host: str, job: str, record: Mapping[str, Any], *, age: float | None) -> dict[str, Any]:
    """JSON of one job from its record in a look's answer."""
    state = dict(record.get("state") or {})
    spec = dict(record.get("spec") or {})
    return {
        "id": job,
        "name": state.get("name") or spec.get("name") or job,
        "host": host,
        "reachable": True,
        "age_s": age,
        "state": state.get("state") or ("queued" if record.get("unfinished") else "lost"),
        "seq": state.get("seq", 0),
        "eta": state.get("eta"),
        "created_at": state.get("created_at") or spec.get("created_at"),
        "started_at": state.get("started_at"),
        "ended_at": state.get("ended_at"),
        "stop_requested": bool(state.get("stop_requested")),
        "alive": record.get("alive"),
        "lost": record.get("lost"),
        "unfinished": bool(record.get("unfinished")),
        "workdir": spec.get("workdir"),
        "plan_sha256": spec.get("plan_sha256"),
        "notes": list(state.get("notes") or []),
        **({"slurm": state["slurm"]} if state.get("slurm") else {}),
        "steps": list(state.get("steps") or []),
    }


def remembered_view(view: Mapping[str, Any], seen_at: str | None, now: datetime) -> dict[str, Any]:
    """JSON of one job as last seen (``view``, at ``seen_at``), for a host that does not answer."""
    return {**view, "reachable": False, "age_s": age_s(seen_at, now)}


def look(session: Session, host: str, *, timeout_s: float | None = None, **request: Any) -> HostLook:
    """Ask one host; errors of the host become part of the answer, our own are raised."""
    result = HostLook(host)
    sent_at, sent = session.now(), time.monotonic()
    try:
        answer = session.agent(host).request("look", timeout_s=timeout_s or LOOK_TIMEOUT_S, **request)
    except OrchError as error:
        result.error = error
        return result
    took = time.monotonic() - sent
    take_answer(result, answer, (sent_at, took))
    return result


def take_answer(result: HostLook, answer: dict[str, Any], asked: tuple[datetime, float]) -> None:
    """Fill in a look from an agent's answer. ``asked``: when, and how long it took (s).

    A job whose record makes no sense is unreadable.
    """
    sent_at, took = asked
    result.answer = answer
    theirs = answer.get("wall")
    if isinstance(theirs, (int, float)) and abs(theirs) < MAX_WALL_S:
        # The answer was written at its end, however long the poll was held: compare with the moment it came.
        result.skew_s = float(theirs) - (sent_at.timestamp() + took)
    for job, record in (answer.get("jobs") or {}).items():
        try:
            check_record(job, record)
        except ProtocolError as error:
            answer["unreadable"] = {**(answer.get("unreadable") or {}), job: str(error)}
            continue
        result.jobs.append(job_view(result.host, job, record, age=0.0))
    result.jobs.sort(key=lambda view: str(view.get("created_at") or ""), reverse=True)


def remember(session: Session, views: Sequence[Mapping[str, Any]]) -> None:
    """Keep what was seen in the ledger: the index of jobs, and the last known state for when a host is away."""
    session.ledger.saw(views, session.now())


def look_at_all(session: Session, hosts: Sequence[str], **request: Any) -> list[HostLook]:
    """Ask hosts in parallel, in the order given. Raises only errors that are not a host's."""
    if len(hosts) > 1:
        session.pool  # noqa: B018 - opened once, here, not in a race by the threads
    return in_parallel(hosts, lambda host: look(session, host, **request))
