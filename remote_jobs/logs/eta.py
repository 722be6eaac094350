"""Forecast how long a bar will still take, with a range and a confidence.

Must not import anything but the standard library; pure functions.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence, Tuple

from remote_jobs.logs.bars import BarUpdate


class Forecast(NamedTuple):
    """Seconds from the last update. ``confidence``: low, medium or high."""

    remaining_s: float
    low_s: float
    high_s: float
    confidence: str


def forecast(*args: object) -> None:
    """Placeholder."""


def forecast_bar(samples: Sequence[Tuple[float, int]], update: BarUpdate) -> Optional[Forecast]:
    """Placeholder."""
    if update.total is None or not update.done or update.elapsed_s is None:
        return None
    r = update.elapsed_s / update.done * (update.total - update.done)
    return Forecast(r, r * 0.5, r * 2, "low")
