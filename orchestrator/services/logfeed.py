"""The end of one attempt's log and the figures in it, followed by byte offset while a view is open.

Several looks may be under way at once (a long poll and a key press): each piece counts only when it joins what is
there, so none is shown twice.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Mapping
from typing import Any

from orchestrator.core.metrics import Metrics
from orchestrator.services.views import LogTail

TAIL_BYTES = 32 * 1024


class LogFeed:
    """Follows the newest attempt of one step. Threads may share it."""

    def __init__(self, job: str, step: str) -> None:
        self.job, self.step = job, step
        self._lock = threading.Lock()
        self._attempt = self._inode = 0
        self._offset = -1
        self._data = b""
        self._metrics = Metrics()

    def cursor(self, newest_attempt: int) -> dict[str, Any]:
        """What to ask a host for; a newer attempt than the one followed starts anew.

        Args:
            newest_attempt: its number as the last look knew it; 0 when unknown.
        """
        with self._lock:
            if newest_attempt > self._attempt > 0:
                self._attempt, self._inode, self._offset, self._data = newest_attempt, 0, -1, b""
                self._metrics = Metrics()
            return {
                "job": self.job,
                "step": self.step,
                "attempt": self._attempt,
                "inode": self._inode if self._offset >= 0 else 0,
                "offset": self._offset,
                "tail_bytes": TAIL_BYTES,
                "max_bytes": TAIL_BYTES,
            }

    def take(self, answer: Mapping[str, Any]) -> LogTail | None:
        """The tail after a look's answer; None when the answer says nothing about this log."""
        with self._lock:
            found = False
            for item in answer.get("logs") or []:
                if item.get("job") == self.job and item.get("step") == self.step and not item.get("missing"):
                    self._join(item)
                    found = True
            if not found:
                return None
            return LogTail(self.job, self.step, self._attempt, self._data, self._metrics.snapshot())

    def _join(self, item: Mapping[str, Any]) -> None:
        start, end, attempt = int(item["offset"]), int(item["end"]), int(item["attempt"])
        fresh = base64.b64decode(item.get("data_b64") or "")
        if attempt < self._attempt:
            return  # overtaken by another look
        again = bool(item.get("rotated")) or self._offset < 0 or attempt > self._attempt
        if not again and start < self._offset:
            fresh = fresh[self._offset - start :]
            if not fresh:
                return
        elif again or start > self._offset:
            self._metrics.skip()
        self._metrics.feed(fresh)
        self._data = (fresh if again else self._data + fresh)[-TAIL_BYTES:]
        self._attempt, self._inode, self._offset = attempt, int(item["inode"]), end
        if not item.get("caught_up", True):
            self._offset = -1  # it is written faster than we read: go on at its end
