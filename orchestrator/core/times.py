"""ISO times as they stand in records, turned into moments and back. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

YEARS = range(1970, 2300)
"""Whatever a host writes: a time outside these is none, and none of them overflows when a zone or a span is added."""


def parse_time(iso: Any) -> datetime | None:
    """Aware time of an ISO string with Z or an offset; None when it is none."""
    if not isinstance(iso, str):
        return None
    try:
        moment = datetime.fromisoformat(iso)
    except ValueError:
        return None
    if moment.year not in YEARS:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def iso(moment: datetime) -> str:
    """ISO UTC with Z and whole seconds, as all our JSON."""
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def age_s(since: str | None, now: datetime) -> float | None:
    """Seconds since an ISO time, never negative; None when unknown."""
    moment = parse_time(since)
    return None if moment is None else round(max(0.0, (now - moment).total_seconds()), 1)
