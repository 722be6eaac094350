"""Forecast how long a bar or a job will still take, with a range and a confidence; score forecasts afterwards.

Why this file exists: tqdm's own remaining time follows its last few items, so one stall or one burst from the page
cache throws it off by a factor. Here the items seen so far are cut where the pace changed for good; the pace since
then is averaged with outliers held down; and usual times of earlier runs (same bar, host and model) are blended in,
the less the more this bar has shown. Pure functions of plain numbers.

Must not import anything but the standard library.
"""

from __future__ import annotations

import math
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

MAX_PIECES = 256
_MIN_REGIME = 3
_OUTLIER = 3.0
"""An item that took so many times the median is a stall: it counts, but not as if every later item were like it."""
_HEAD = 1.7
"""A first piece this many times faster or slower than the rest is no sample of the rest."""
_CLEAR_CUT = 25.0
"""F value from which a change of pace is taken for real (chance alone passes it once in some hundred loads)."""
_HISTORY_SPREAD = 0.15
"""Usual relative spread of the same load's total from day to day; one known run alone counts as twice that."""
_PACE_RISK = 0.1
"""Uncertainty of a pace seen so far, as a share of the rest: it may change, the more so the less has been seen."""
_LAST_SHARD = 0.45
"""The last shard of a checkpoint is the remainder: on average it costs about so much of a full one."""


class Forecast(NamedTuple):
    """Seconds from the last update. ``confidence`` is low, medium or high."""

    remaining_s: float
    low_s: float
    high_s: float
    confidence: str

    def to_json(self) -> Dict[str, object]:
        """Rounded, for event records and answers."""
        return {
            "remaining_s": round(self.remaining_s, 1),
            "low_s": round(self.low_s, 1),
            "high_s": round(self.high_s, 1),
            "confidence": self.confidence,
        }


class History(NamedTuple):
    """What earlier runs of the same bar took: seconds per item, and how many runs that is the median of."""

    s_per_item: float
    runs: int


def _pieces(samples: Sequence[Tuple[float, int]]) -> List[Tuple[float, int]]:
    """(seconds per item, items) between samples; clock readings of whole seconds are shared out over fast items."""
    pieces: List[Tuple[float, int]] = []
    start_s, start_n = samples[0]
    for shown_s, done in samples[1:]:
        at_s = shown_s + 0.5  # the clock shows whole seconds, cut off: on average half a second more has passed
        items = done - start_n
        took_s = at_s - start_s
        # Whole seconds say little about items of less than a few: collect until the clock has moved.
        if items <= 0 or (took_s < 1.5 and done != samples[-1][1]):
            continue
        pieces.append((max(took_s, 0.0) / items, items))
        start_s, start_n = at_s, done
    return pieces[-MAX_PIECES:]


def _weighted_median(pieces: Sequence[Tuple[float, int]]) -> float:
    ordered = sorted(pieces)
    half = sum(items for _, items in ordered) / 2.0
    seen = 0
    for pace, items in ordered:
        seen += items
        if seen >= half:
            return pace
    return ordered[-1][0] if ordered else 0.0


def _regime_start(pieces: Sequence[Tuple[float, int]]) -> int:
    """Index of the first piece of the present pace: the cut behind which logarithms of paces differ most clearly."""
    count = len(pieces)
    if count < 2 * _MIN_REGIME:
        return 0
    logs = [math.log(max(pace, 1e-3)) for pace, _ in pieces]
    # A clock of whole seconds alone makes paces scatter; no cut is clearer than that.
    blur = sum(min(1.0, 0.4 / max(pace * items, 0.4)) ** 2 for pace, items in pieces)
    sums = [0.0]
    squares = [0.0]
    for value in logs:
        sums.append(sums[-1] + value)
        squares.append(squares[-1] + value * value)
    best, best_gain = 0, 0.0
    whole = squares[-1] - sums[-1] ** 2 / count
    for cut in range(_MIN_REGIME, count - _MIN_REGIME + 1):
        left = squares[cut] - sums[cut] ** 2 / cut
        right_sum = sums[-1] - sums[cut]
        right = squares[-1] - squares[cut] - right_sum**2 / (count - cut)
        gain = whole - left - right
        step = abs(right_sum / (count - cut) - sums[cut] / cut)
        clear = gain > _CLEAR_CUT * max(left + right, blur) / (count - 2)
        if gain > best_gain and step > 0.3 and clear:
            best, best_gain = cut, gain
    return best


class _Pace(NamedTuple):
    """``ahead_s``: mean seconds per item expected for the rest; ``spread``: relative, of one item; ``items`` it rests on."""

    ahead_s: float
    spread: float
    items: int


def _drift(held: Sequence[Tuple[float, int]], left: int) -> float:
    """Factor between the mean pace of the rest and of ``held``, when paces rise or fall steadily (else 1.0).

    A least-squares line through (item, pace), its slope shrunk by its own uncertainty, carried on over the rest.
    """
    count = len(held)
    if count < 6:
        return 1.0
    at = 0.0
    xs: List[float] = []
    for _, items in held:
        xs.append(at + items / 2.0)
        at += items
    ys = [pace for pace, _ in held]
    mean_x = sum(xs) / count
    mean_y = sum(ys) / count
    var_x = sum((x - mean_x) ** 2 for x in xs)
    if var_x <= 0 or mean_y <= 0:
        return 1.0
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys)) / var_x
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in zip(xs, ys))
    squared_t = slope**2 * var_x * (count - 2) / max(rest, 1e-9 * mean_y**2)
    slope *= max(0.0, 1.0 - 6.0 / squared_t) if squared_t > 0 else 0.0
    level = mean_y + slope * (at - mean_x)
    ahead = level + slope * left / 2.0
    low, high = (0.5, 1.15)
    level = max(level, 0.25 * mean_y)
    return min(max(ahead, low * level), high * level) / mean_y


def _present_pace(pieces: Sequence[Tuple[float, int]], left: int) -> _Pace:
    """The pace to expect, from the present regime."""
    start = _regime_start(pieces)
    now = list(pieces[start:])
    again = _regime_start(now)
    now = now[again:]
    while len(now) > 2:
        # The head often goes its own pace: a lazy first item, a few files from the page cache.
        rest = _weighted_median(now[1:])
        if rest > 0 and 1 / _HEAD < now[0][0] / rest < _HEAD:
            break
        now = now[1:]
    median = _weighted_median(now)
    ceiling = _OUTLIER * median if median > 0 else math.inf
    held = [(min(pace, ceiling), items) for pace, items in now]
    items_seen = sum(items for _, items in held)
    mean_s = sum(pace * items for pace, items in held) / max(items_seen, 1)
    if mean_s <= 0:
        return _Pace(0.0, 1.0, 0)
    spread = math.sqrt(sum(items * (pace - mean_s) ** 2 for pace, items in held) / max(items_seen, 1)) / mean_s
    return _Pace(mean_s * _drift(held, left), spread, items_seen)


def forecast(
    samples: Sequence[Tuple[float, int]],
    total: int,
    *,
    printed_s_per_item: Optional[float] = None,
    history: Optional[History] = None,
    quiet_s: float = 0.0,
    last_is_smaller: bool = False,
) -> Optional[Forecast]:
    """Forecast the rest of a bar.

    Args:
        samples: (elapsed_s, done) as printed, rising; the first may be (0, 0).
        total: items in all.
        printed_s_per_item: the rate the bar printed last, better than the clock for fast items.
        history: usual pace of this bar on this host and model, if earlier runs are known.
        last_is_smaller: the items are shards of a checkpoint, of which the last is a remainder.
        quiet_s: seconds since the last update; a bar that stands still is not going to be earlier for it.

    Returns:
        None when nothing is known (no item done, no history).
    """
    if not samples:
        return None
    done = samples[-1][1]
    left = total - done
    if left <= 0:
        return Forecast(0.0, 0.0, 0.0, "high")
    pieces = _pieces(samples) if len(samples) > 1 else []
    seen = samples[-1][1] - samples[0][1]
    elapsed_s = samples[-1][0] - samples[0][0]
    pace = _present_pace(pieces, left) if pieces else _Pace(0.0, 1.0, 0)
    if printed_s_per_item is not None and (pace.ahead_s <= 0 or elapsed_s < 5):
        pace = _Pace(printed_s_per_item, 0.5, min(seen, 4))
    known = history if history is not None and history.s_per_item > 0 else None
    if pace.ahead_s <= 0 and known is None:
        return None
    ahead = left - (1.0 - _LAST_SHARD if last_is_smaller and left >= 1 else 0.0)
    remaining_s = pace.ahead_s * ahead
    spread = pace.spread
    if known is not None:
        usual_s = max(known.s_per_item * total - elapsed_s, 0.1 * known.s_per_item * left)
        if remaining_s <= 0:
            remaining_s, spread = usual_s, 0.5
        else:
            # Both with their own uncertainty: of the pace seen (and that it may change), of the total known.
            chance = remaining_s * pace.spread / math.sqrt(max(pace.items, 1))
            change = _PACE_RISK * (left / total) * (1.0 + 3.0 / math.sqrt(max(seen, 1))) * max(remaining_s, usual_s)
            own_sd = math.hypot(chance, change)
            usual_sd = known.s_per_item * total * _HISTORY_SPREAD * (2.0 if known.runs < 3 else 1.0)
            own = usual_sd**2 / max(own_sd**2 + usual_sd**2, 1e-12)
            remaining_s = own * remaining_s + (1 - own) * usual_s
    if quiet_s > 0:
        remaining_s = max(remaining_s - quiet_s, 0.1 * remaining_s)
    share = done / float(total)
    wide = 1.0 + min(2.0, 0.15 + spread * 0.5 + (1.0 - share) * 0.9 / math.sqrt(1.0 + seen / 4.0))
    confidence = "high" if wide < 1.4 and seen >= 8 else "medium" if wide < 1.9 and (seen >= 3 or known is not None) else "low"
    return Forecast(remaining_s, remaining_s / wide, remaining_s * wide, confidence)


def forecast_job(phases_left_s: Sequence[Tuple[float, float]], bar: Optional[Forecast]) -> Optional[Forecast]:
    """Forecast a job: its running bar and the phases still to come.

    Args:
        phases_left_s: (usual seconds, relative spread) of each later phase on this host and model, from history.
        bar: forecast of the bar that runs now, if one does.

    Returns:
        None when neither is known. Spreads add as independent ones.
    """
    if bar is None and not phases_left_s:
        return None
    middle = bar.remaining_s if bar is not None else 0.0
    below = (bar.remaining_s - bar.low_s) ** 2 if bar is not None else 0.0
    above = (bar.high_s - bar.remaining_s) ** 2 if bar is not None else 0.0
    for usual_s, spread in phases_left_s:
        middle += usual_s
        below += (usual_s * min(spread, 0.9)) ** 2
        above += (usual_s * spread) ** 2
    low_s = max(0.0, middle - math.sqrt(below))
    high_s = middle + math.sqrt(above)
    confidence = bar.confidence if bar is not None else "medium"
    if bar is not None and not phases_left_s and confidence == "high":
        confidence = "medium"  # what comes behind the bar is unknown
    return Forecast(middle, low_s, high_s, confidence)


class Score(NamedTuple):
    """How good a forecast was: absolute and relative error, and whether the truth lay within the range."""

    error_s: float
    relative: float
    within: bool


def score(made: Forecast, actual_s: float) -> Score:
    """Score a forecast once the end is known (``actual_s`` seconds after it was made)."""
    error_s = abs(made.remaining_s - actual_s)
    return Score(error_s, error_s / max(actual_s, 1.0), made.low_s <= actual_s <= made.high_s)


def learn(paces_s: Sequence[float]) -> Optional[History]:
    """History of a bar from the overall paces (seconds per item) of its earlier runs, newest last; the last 9 count."""
    recent = sorted(pace for pace in paces_s[-9:] if pace > 0)
    if not recent:
        return None
    return History(recent[len(recent) // 2], len(recent))
