"""Files counted by a step's `done: {count: GLOB}`: its progress while it runs, and the proof of its work at the end.

A glob may walk a network disk that hangs, so the supervisor counts in a side task only.  Standard library only.
"""

from __future__ import annotations

import glob
import os
from typing import Any, Dict, List, Optional

from remote_jobs import protocol
from remote_jobs.agent.command import Places
from remote_jobs.agent.side import SideTask

EVERY_S = 15.0
TIMEOUT_S = 120.0


def count_files(workdir: str, pattern: str) -> int:
    """Number of files that match a glob (`**` recursive) relative to workdir."""
    return sum(1 for _ in glob.iglob(os.path.join(workdir, os.path.expanduser(pattern)), recursive=True))


def bar(step: protocol.StepSpec, counted: int) -> Dict[str, Any]:
    """The count of `done.count` as a bar of explain's shape."""
    done = step.done or {}
    total = done.get("equals", done.get("at_least"))
    percent = int(100 * counted / int(total)) if total else None
    return {
        "label": str(done.get("count")), "instance": 1, "worker": None, "pid": None, "done": counted, "total": total,
        "percent": percent, "elapsed_s": None, "remaining_s": None, "s_per_item": None, "eta_s": None,
        "line": None, "seg": None,
    }  # fmt: skip


class FileCount:
    """Counts now and then while one attempt runs."""

    def __init__(self) -> None:
        self.files: Optional[int] = None
        """The newest count; None before the first."""
        self._task: Optional[SideTask] = None
        self._next_at = 0.0

    def tasks(self) -> List[SideTask]:
        """The count under way."""
        return [self._task] if self._task is not None else []

    def tick(self, now: float, step: protocol.StepSpec, places: Places) -> bool:
        """Count when that is due; True when the number has changed. ``now`` is monotonic, in s."""
        if not (step.done or {}).get("count"):
            return False
        if self._task is None:
            if now >= self._next_at:
                workdir, pattern = places.workdir, str(places.filled((step.done or {})["count"]))
                self._task = SideTask(lambda: count_files(workdir, pattern), timeout_s=TIMEOUT_S)
                self._next_at = now + EVERY_S
            return False
        if not self._task.ready():
            return False
        task, self._task = self._task, None
        if task.error is not None or task.result == self.files:
            return False
        self.files = task.result
        return True
