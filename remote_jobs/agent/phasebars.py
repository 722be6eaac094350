"""What a step says of its own phase ("17 of 25") as a bar of explain's shape, with our forecast of its end.

Why: a program that prints `::orch` lines is promised the same as one that prints tqdm bars.  A phase for which the log
has a bar already gets no second one.  Counts come from any program: they are believed only as far as they make sense.
Pure: the clock is an argument.  Standard library only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Sequence, Tuple

from remote_jobs.protocol import is_count

if TYPE_CHECKING:
    from remote_jobs.logs.eta import Forecast

_MAX_SAMPLES = 512


class PhaseBars:
    """Feed it the phases each time the log grew; `missing` makes bars of the counts of those that run."""

    def __init__(self) -> None:
        self._counts: Dict[Tuple[Any, ...], _Count] = {}

    def take(self, phases: Sequence[Mapping[str, Any]], mono: float) -> bool:
        """Note how far the running phases are; True when one has moved. ``mono``: the clock now, in s."""
        known, moved = self._counts, False
        self._counts = {}
        for phase in _counting(phases):
            count = self._counts[_key(phase)] = known.get(_key(phase)) or _Count(mono)
            moved = count.take(whole(phase.get("done")), whole(phase.get("total")), mono) or moved
        return moved

    def missing(self, phases: Sequence[Mapping[str, Any]], bars: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
        """Bars of the running phases that say how far they are and have none among ``bars``."""
        found = []
        for phase in _counting(phases):
            count = self._counts.get(_key(phase))
            if count is not None and not any(_is_of(bar, phase) for bar in bars):
                before = phases[: phases.index(phase)]
                instance = 1 + sum(other.get("name") == phase.get("name") for other in before)
                found.append({**count.bar(), "label": str(phase.get("name")), "instance": instance})
        return found


class _Count:
    """How far one phase is, and how it came there."""

    def __init__(self, mono: float) -> None:
        self._began = self._moved_at = mono
        self._samples: List[Tuple[float, int]] = []
        self._done: Optional[int] = None
        self._total: Optional[int] = None
        self._forecast: Optional["Forecast"] = None

    def take(self, done: Optional[int], total: Optional[int], mono: float) -> bool:
        """Note the newest counts; True when they differ from the last ones."""
        if (done, total) == (self._done, self._total):
            return False
        self._done, self._total, self._moved_at = done, total, mono
        if done is not None:
            if self._samples and done < self._samples[-1][1]:
                self._samples.clear()  # it began anew
            self._samples.append((float(int(mono - self._began)), done))  # whole seconds, like a bar's own clock
            if len(self._samples) > _MAX_SAMPLES:
                del self._samples[1::2]
        self._forecast = self._forecast_of(total) if total and self._samples else None
        return True

    def _forecast_of(self, total: int) -> Optional["Forecast"]:
        from remote_jobs.logs import (  # the package of the log rules: only ever loaded once the job runs
            bars,
            eta,
        )

        forecast = eta.forecast(self._samples, total)
        return forecast if forecast is not None and forecast.high_s <= bars.MAX_SECONDS else None

    def bar(self) -> Dict[str, Any]:
        """All of the bar but its name."""
        done, total, ahead = self._done or 0, self._total or None, self._forecast
        return {
            "worker": None, "pid": None, "done": done, "total": total,
            "percent": None if total is None else min(100, 100 * done // total),
            "elapsed_s": round(self._moved_at - self._began, 1), "remaining_s": None, "s_per_item": self._s_per_item(),
            "eta_s": None if ahead is None else round(ahead.remaining_s, 1),
            "eta_low_s": None if ahead is None else round(ahead.low_s, 1),
            "eta_high_s": None if ahead is None else round(ahead.high_s, 1),
            "eta_confidence": None if ahead is None else ahead.confidence,
            "line": None, "seg": None,
        }  # fmt: skip

    def _s_per_item(self) -> Optional[float]:
        """Seconds per item since the first count; None before anything was seen to move."""
        if len(self._samples) < 2:
            return None
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        return round((last_s - first_s) / (last - first), 4) if last > first and last_s > first_s else None


def whole(value: Any) -> Optional[int]:
    """A count as a program may print it; None for what is none."""
    return int(value) if is_count(value) else None


def _counting(phases: Sequence[Mapping[str, Any]]) -> List[Mapping[str, Any]]:
    """Those that run and say how far they are; a total of 0 says nothing."""
    running = [phase for phase in phases if phase.get("state") == "running"]
    return [phase for phase in running if whole(phase.get("done")) is not None or whole(phase.get("total"))]


def _is_of(bar: Mapping[str, Any], phase: Mapping[str, Any]) -> bool:
    """A bar that moved since the phase began and counts as many (any bar, when the phase does not say how many)."""
    moved = (bar.get("line") or 0) >= (phase.get("started_line") or 0)
    total = whole(phase.get("total"))
    return moved and (not total or bar.get("total") == total)


def _key(phase: Mapping[str, Any]) -> Tuple[Any, ...]:
    return (phase.get("name"), phase.get("started_line"))
