"""`::orch {...}` lines of a growing log: what a step says of itself, newest per phase.

Standard library only; bounded memory.
"""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

from remote_jobs.protocol import MARKER_LINE, read_marker

_PREFIX = MARKER_LINE.encode("ascii")
_MAX_LINE_BYTES = 8192
_MAX_PHASES = 64


class Markers:
    """Keeps the newest marker of each (phase, state)."""

    def __init__(self) -> None:
        self._rest = b""
        self._at_line_start = True
        self._newest: Dict[Tuple[str, str], Dict[str, Any]] = {}

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the log; a marker stands alone at the start of its line."""
        data = self._rest + chunk
        self._rest = b""
        start = 0 if self._at_line_start else data.find(b"\n") + 1
        if start == 0 and not self._at_line_start:
            return
        while True:
            found = data.find(_PREFIX, start)
            if found < 0:
                break
            end = data.find(b"\n", found)
            if end < 0:
                break
            if found == 0 or data[found - 1 : found] in (b"\n", b"\r"):
                self._take(data[found + len(_PREFIX) : min(end, found + _MAX_LINE_BYTES)])
            start = end + 1
        last = data.rfind(b"\n") + 1
        tail = data[last:]
        # Only the beginning of a line can become a marker: a bar's endless line is not kept.
        keep = tail.startswith(_PREFIX[: len(tail)]) if len(tail) < len(_PREFIX) else tail.startswith(_PREFIX)
        self._at_line_start = keep and len(tail) <= _MAX_LINE_BYTES
        self._rest = tail if self._at_line_start else b""

    def _take(self, raw: bytes) -> None:
        marker = read_marker(raw.decode("utf-8", "replace"))
        if marker is None:
            return
        key = (marker["phase"], marker["state"])
        if key in self._newest or len(self._newest) < _MAX_PHASES:
            self._newest[key] = marker

    def newest(self) -> List[Dict[str, Any]]:
        """Newest marker of each phase and state."""
        return list(self._newest.values())

    def work_done(self) -> int:
        """Largest `done` of any phase but those that load: samples, steps or checkpoints."""
        counts = [marker.get("done", 0) for marker in self.newest() if not marker["phase"].startswith("load")]
        return int(max(counts, default=0))
