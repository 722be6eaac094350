"""When what of a job ran: attempts, their phases and their GPUs as spans of time, and the GPU hours that they cost.

Pure: a job's view and the host's readings come in; who draws it is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from orchestrator.core.times import parse_time

LOST_STATES = frozenset({"failed", "lost"})


@dataclass(frozen=True)
class Span:
    """A stretch of time with a name and a state (running, succeeded, failed, done ...)."""

    label: str
    start: datetime
    end: datetime
    state: str

    @property
    def seconds(self) -> float:
        """Its length."""
        return max(0.0, (self.end - self.start).total_seconds())


@dataclass(frozen=True)
class Lane:
    """One attempt: its whole span, the phases inside, and the indices of the GPUs that it held."""

    step: str
    attempt: int
    span: Span
    phases: tuple[Span, ...] = ()
    gpus: tuple[int, ...] = ()
    verdict: str = ""
    bars: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Reading:
    """GPU use at one moment: {index: (utilisation in %, share of the memory that is used)}, None where unknown."""

    at: datetime
    gpus: Mapping[int, tuple[float | None, float | None]]


@dataclass(frozen=True)
class Timeline:
    """All of it, oldest first."""

    job: str
    name: str
    host: str
    state: str
    start: datetime
    end: datetime
    lanes: tuple[Lane, ...] = ()
    readings: tuple[Reading, ...] = field(default=())

    @property
    def gpus(self) -> list[int]:
        """Every GPU that an attempt held or that was read."""
        held = {index for lane in self.lanes for index in lane.gpus}
        return sorted(held | {index for reading in self.readings for index in reading.gpus})

    @property
    def phase_names(self) -> list[str]:
        """Names of phases in order of first appearance, for a legend."""
        return list(dict.fromkeys(phase.label for lane in self.lanes for phase in lane.phases))


def of_view(view: Mapping[str, Any], now: datetime, readings: Iterable[Mapping[str, Any]] = ()) -> Timeline:
    """The timeline of a job's view; what still runs ends at ``now``.

    Args:
        view: the job's JSON as in `orch status`.
        now: the host's clock, near enough.
        readings: lines of the host's usage.jsonl.
    """
    lanes = sorted(
        (
            lane
            for step in view.get("steps") or []
            for attempt in step.get("attempts") or []
            if (lane := _lane(step, attempt, now)) is not None
        ),
        key=lambda lane: lane.span.start,
    )
    start = parse_time(view.get("started_at")) or parse_time(view.get("created_at")) or now
    end = parse_time(view.get("ended_at")) or now
    for lane in lanes:
        start, end = min(start, lane.span.start), max(end, lane.span.end)
    read = tuple(reading for record in readings if (reading := _reading(record)) is not None)
    return Timeline(
        str(view["id"]), str(view.get("name")), str(view.get("host")), str(view.get("state")),
        start, max(end, start + timedelta(seconds=1)), tuple(lanes),
        tuple(sorted(read, key=lambda item: item.at)),
    )  # fmt: skip


def _lane(step: Mapping[str, Any], attempt: Mapping[str, Any], now: datetime) -> Lane | None:
    start = parse_time(attempt.get("started_at"))
    if start is None:
        return None
    end = parse_time(attempt.get("ended_at")) or now
    state = str(attempt.get("state"))
    verdict = attempt.get("verdict") or {}
    phases = []
    for phase in attempt.get("phases") or []:
        began = parse_time(phase.get("started_at"))
        if began is not None:
            took = phase.get("took_s")
            ended = began + timedelta(seconds=float(took)) if took is not None else end
            phases.append(Span(str(phase.get("name")), began, min(max(began, ended), end), str(phase.get("state"))))
    return Lane(
        str(step["name"]), int(attempt.get("n") or 0), Span(str(step["name"]), start, max(start, end), state),
        tuple(phases), tuple(int(index) for index in attempt.get("gpus") or []),
        str(verdict.get("class") or ""), tuple(attempt.get("bars") or []),
    )  # fmt: skip


def _reading(record: Mapping[str, Any]) -> Reading | None:
    at = parse_time(record.get("at"))
    gpus: dict[int, tuple[float | None, float | None]] = {}
    for row in record.get("gpus") or []:
        if isinstance(row, list) and len(row) == 4 and row[0] is not None:
            share = row[2] / row[3] if row[2] is not None and row[3] else None
            gpus[int(row[0])] = (None if row[1] is None else float(row[1]), share)
    return Reading(at, gpus) if at is not None and gpus else None


def gpu_hours(view: Mapping[str, Any], now: datetime) -> dict[str, float]:
    """``{"spent": h, "lost": h}``: GPU time of all attempts, and of it what had to be done again.

    A failed or lost attempt is lost whole when it kept no work (samples, checkpoints) beyond what earlier attempts had;
    else only its phases before the last one are: loading and compiling come again, the work that was kept does not.
    """
    spent = lost = 0.0
    for step in view.get("steps") or []:
        kept = 0
        for attempt in step.get("attempts") or []:
            lane = _lane(step, attempt, now)
            if lane is None or not lane.gpus:
                continue
            hours = len(lane.gpus) * lane.span.seconds / 3600
            spent += hours
            more, kept = int(attempt.get("kept") or 0) > kept, max(kept, int(attempt.get("kept") or 0))
            if lane.span.state in LOST_STATES:
                lost += hours if not more else min(hours, len(lane.gpus) * _setup_s(lane.phases) / 3600)
    return {"spent": round(spent, 6), "lost": round(lost, 6)}


def _setup_s(phases: Sequence[Span]) -> float:
    """Time until the last phase began, as far as phases tell."""
    return (phases[-1].start - phases[0].start).total_seconds() if len(phases) > 1 else 0.0


def mean_utilisation(timeline: Timeline) -> float | None:
    """Mean of all readings' utilisation in %, or None without any."""
    values = [use for reading in timeline.readings for use, _ in reading.gpus.values() if use is not None]
    return sum(values) / len(values) if values else None


def ticks(start: datetime, end: datetime, most: int = 8) -> list[tuple[datetime, str]]:
    """Round moments of an axis with their labels: time since the start."""
    total = max(1.0, (end - start).total_seconds())
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800)
    week = steps[-1]
    every = next((step for step in steps if total / step <= most), week * math.ceil(total / most / week))
    return [
        (start + timedelta(seconds=at), _elapsed(at, every)) for at in range(0, int(total) + 1, every)
    ]


def _elapsed(seconds: int, every: int) -> str:
    if seconds == 0:
        return "0"
    if every < 60:
        return f"{seconds}s" if seconds < 60 else f"{seconds // 60}m{seconds % 60:02d}s"
    if every < 3600:
        return f"{seconds // 60}m" if seconds < 3600 else f"{seconds // 3600}h{seconds // 60 % 60:02d}m"
    return f"{seconds // 3600}h" if seconds < 86400 * 2 else f"{seconds / 86400:g}d"
