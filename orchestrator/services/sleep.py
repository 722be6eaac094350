"""Whether this laptop slept, known to every thread at once: the first that asks finds out and tells."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from orchestrator.core.schedule import SLEEP_GAP_S


class SleepClock:
    """Compares the wall clock, which goes on while a machine is suspended, with the monotonic one, which does not.

    Args:
        told: called with the seconds slept, once for each sleep, before anybody hears of it from `woke_mono`; None: nobody.
    """

    def __init__(self, told: Callable[[float], None] | None = None) -> None:
        self._told = told
        self._lock = threading.Lock()
        self._ahead_s = time.time() - time.monotonic()
        self._woke_mono = float("-inf")

    def woke_mono(self) -> float:
        """Monotonic time (s) at which the last sleep was noticed, which may be now; minus infinity without one."""
        with self._lock:
            before_s, self._ahead_s = self._ahead_s, time.time() - time.monotonic()
            if self._ahead_s - before_s > SLEEP_GAP_S:
                self._woke_mono = time.monotonic()
                if self._told is not None:
                    self._told(self._ahead_s - before_s)
            return self._woke_mono
