"""What a renderer of `watch` gets: hosts, jobs and a log's end, as plain data. Nothing here asks anybody.

Must import nothing but the standard library and what is as light, so that renderers load quickly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from remote_jobs.agent.causes import failed_steps


@dataclass
class HostView:
    """What is known about one host's link and machine."""

    name: str
    link: str = "connecting"
    """connecting, connected, waking (this laptop slept; nothing is judged before the next look), reconnecting, refused."""
    problem: str | None = None
    looked_at: datetime | None = None
    next_look_at: datetime | None = None
    round_trip_s: float | None = None
    skew_s: float | None = None
    gpus: dict[str, Any] | None = None

    @property
    def seen_at(self) -> datetime | None:
        """What the host's own clock showed at its last answer; None while it does not answer, or shows no year of ours."""
        if self.looked_at is None or self.link != "connected":
            return None
        try:
            return self.looked_at + timedelta(seconds=self.skew_s or 0.0)
        except OverflowError:
            return None


@dataclass
class LogTail:
    """The end of one attempt's log, and the figures that were found in it, by name and oldest first."""

    job: str
    step: str
    attempt: int
    data: bytes = b""
    metrics: dict[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass
class WatchView:
    """Everything a renderer shows. ``jobs`` are the JSON views of `orch status`, in order of appearance."""

    hosts: dict[str, HostView] = field(default_factory=dict)
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    log: LogTail | None = None


def interesting_step(steps: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The step whose log a person means: the one under way (no service), else the one that failed first, else the last
    started.
    """
    started = [step for step in steps if step.get("attempts")]
    busy = [step for step in started if step["state"] in {"running", "stopping", "retry_wait", "gated"}]
    working = [step for step in busy if not step.get("service")]
    for found in (working, failed_steps(started)[:1], busy):
        if found:
            return found[-1]
    plain = [step for step in started if not step.get("service")]
    return max(
        plain or started, key=lambda step: str(step["attempts"][-1].get("started_at") or ""), default=None
    )
