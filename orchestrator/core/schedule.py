"""How long to wait between two looks at a host: quick while things happen, rare while nothing does.

0.5 s after a change, then doubling to 60 s; never past the moment at which something is expected to end; after a
laptop's sleep spread at random, so that many watchers do not all come back in the same second. Pure: clocks are
arguments.
"""

from __future__ import annotations

import random
from collections.abc import Callable

FIRST_S = 0.5
CAP_S = 60.0
NEAR_END = 0.5
"""Share of the time to an expected end that one wait may use: looks get closer as the end does."""
SLEEP_GAP_S = 5.0
"""Wall clock ahead of the monotonic clock by more than this: the laptop slept (or its clock was set forward)."""
CLOCK_EVERY_S = 1.0
"""How often a watch compares the two clocks when nobody asks: a sleep is known this long after it at the latest."""
WAKE_SPREAD_S = 3.0
JITTER = 0.2


def wake_pause_s(uniform: Callable[[float, float], float] = random.uniform) -> float:
    """Seconds to wait before a host is met again after a sleep or an outage: many are not met in the same moment."""
    return uniform(0.0, WAKE_SPREAD_S)


class LookSchedule:
    """The pace of looks at one host.

    Args:
        min_interval_s: never look more often (the inventory's ``min_look_interval_s``).
        max_interval_s: never wait longer (``--interval``); default 60 s. A smaller one than ``min_interval_s`` loses.
        uniform: source of jitter, a function like ``random.uniform``.
    """

    def __init__(
        self,
        *,
        min_interval_s: float = 0.0,
        max_interval_s: float | None = None,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._floor_s = max(0.0, min_interval_s)
        self._cap_s = max(self._floor_s, CAP_S if max_interval_s is None else max_interval_s)
        self._uniform = uniform
        self._quiet_s = FIRST_S
        self._failures = 0
        self._mono: float | None = None
        self._wall: float | None = None

    def after_answer(
        self, mono_s: float, *, changed: bool, ends_in_s: float | None = None, wall_s: float | None = None
    ) -> float:
        """Seconds to wait after a look that was answered.

        Args:
            mono_s: the monotonic clock.
            changed: something is different from the look before.
            ends_in_s: when the next phase, attempt or job is expected to end, if known.
            wall_s: the wall clock, to notice that the laptop slept in between.
        """
        slept = self._slept(mono_s, wall_s)
        self._failures = 0
        wait_s = FIRST_S if changed or slept else self._quiet_s
        self._quiet_s = min(CAP_S, wait_s * 2)
        if ends_in_s is not None:
            wait_s = min(wait_s, max(FIRST_S, ends_in_s * NEAR_END))
        return self._bounded(wait_s, slept=slept)

    def after_error(self, mono_s: float, *, wall_s: float | None = None) -> float:
        """Seconds to wait after a look that failed: doubling as well, always with jitter."""
        slept = self._slept(mono_s, wall_s)
        self._failures = 1 if slept else self._failures + 1
        self._quiet_s = FIRST_S  # news are likely once the host is back
        wait_s = min(CAP_S, FIRST_S * 2.0 ** min(self._failures, 20))
        return self._bounded(wait_s * self._uniform(1 - JITTER, 1 + JITTER), slept=slept)

    def _bounded(self, wait_s: float, *, slept: bool) -> float:
        wait_s = min(max(wait_s, self._floor_s), self._cap_s)
        return wait_s + wake_pause_s(self._uniform) if slept else wait_s

    def _slept(self, mono_s: float, wall_s: float | None) -> bool:
        """True when much more wall time than monotonic time has passed since the last call."""
        slept = False
        if wall_s is not None:
            if self._mono is not None and self._wall is not None:
                slept = (wall_s - self._wall) - (mono_s - self._mono) > SLEEP_GAP_S
            self._mono, self._wall = mono_s, wall_s
        return slept
