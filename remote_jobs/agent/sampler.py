"""GPU figures for the watch view, read in the background at most every ten seconds.

nvidia-smi takes half a second, or for ever: a look never waits for it and shows the age of what it has.
Standard library only.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Dict, Optional

EVERY_S = 10.0


class Sampler:
    """Keeps the newest reading; samples only while somebody asks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reading: Optional[Dict[str, Any]] = None
        self._read_at = 0.0
        self._running = False

    def want(self, expected: Optional[int]) -> None:
        """Start a reading unless one runs or is fresh."""
        with self._lock:
            if self._running or (self._reading is not None and time.monotonic() - self._read_at < EVERY_S):
                return
            self._running = True
        threading.Thread(target=self._sample, args=(expected,), daemon=True).start()

    def _sample(self, expected: Optional[int]) -> None:
        from remote_jobs.agent import gate

        reading: Optional[Dict[str, Any]]
        try:
            reading = gate.watched(expected)
        except Exception as exc:  # shown to the person who watches, never fatal
            reading = {"gpus": [], "clean": False, "why": "{}: {}".format(type(exc).__name__, exc)}
        with self._lock:
            self._reading, self._read_at, self._running = reading, time.monotonic(), False

    def latest(self) -> Optional[Dict[str, Any]]:
        """The newest reading with `age_s`, or None."""
        with self._lock:
            if self._reading is None:
                return None
            return {**self._reading, "age_s": round(time.monotonic() - self._read_at, 1)}
