"""Room on the disk: an extraction can be a terabyte, and a full disk stops more than this job.

Before each file the free space is compared with a reserve. Too little: the run pauses and says so, and goes on when
somebody (or the trainer) made room.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable

from remote_jobs.steps.extraction.progress import Progress

POLL_S = 2.0
SAY_EVERY_S = 60.0
DEFAULT_RESERVE_BYTES = 2 * 1024**3
DEFAULT_RESERVE_SHARE = 0.02
"""Without --min-free-gib: 2 GiB, or 2 % of a file system smaller than 100 GiB."""


def free_bytes(folder: str) -> int:
    """Bytes that this user may still write under a folder."""
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def default_reserve(folder: str) -> int:
    """Bytes to leave free on the file system of a folder."""
    stat = os.statvfs(folder)
    return min(DEFAULT_RESERVE_BYTES, int(stat.f_blocks * stat.f_frsize * DEFAULT_RESERVE_SHARE))


class DiskBudget:
    """Keeps `reserve_bytes` free on the file system of `folder`."""

    def __init__(
        self, folder: str, reserve_bytes: int, wait_s: float, progress: Progress, stopped: Callable[[], None]
    ) -> None:
        """`wait_s`: longest pause in s. `stopped()` raises when the run was told to end, so that a pause ends too."""
        self._folder = folder
        self._reserve_bytes = reserve_bytes
        self._wait_s = wait_s
        self._progress = progress
        self._stopped = stopped

    def warn(self, needed_bytes: int) -> None:
        """Say before the start when the rest of the run does not fit."""
        room = free_bytes(self._folder) - self._reserve_bytes
        if needed_bytes > room:
            self._progress.say(
                f"Disk: the remaining samples need {_gib(needed_bytes)}, {_gib(max(0, room))} can be used in {self._folder} "
                f"({_gib(self._reserve_bytes)} are left free). The run will pause when it is full, until room is made."
            )

    def wait_for(self, needed_bytes: int) -> None:
        """Return when a file of this size fits; pause until then.

        Raises:
            OSError: ENOSPC, when the pause lasted `wait_s`.
        """
        if free_bytes(self._folder) - self._reserve_bytes >= needed_bytes:
            return
        began = said = time.monotonic()
        self._say(needed_bytes)
        while free_bytes(self._folder) - self._reserve_bytes < needed_bytes:
            self._stopped()
            now = time.monotonic()
            if now - began >= self._wait_s:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._folder)
            if now - said >= SAY_EVERY_S:
                said = now
                self._say(needed_bytes)
            time.sleep(min(POLL_S, max(0.05, self._wait_s / 10)))
        self._progress.say(f"Disk: room was made after {time.monotonic() - began:.0f} s, going on.")

    def _say(self, needed_bytes: int) -> None:
        self._progress.say(
            f"Disk: paused, {_gib(free_bytes(self._folder))} free in {self._folder}, the next file needs {_gib(needed_bytes)} "
            f"and {_gib(self._reserve_bytes)} are to stay free (--min-free-gib). Waiting up to {self._wait_s:.0f} s for room."
        )


def _gib(number: int) -> str:
    return f"{number / 1024**3:.2f} GiB" if number >= 10 * 1024**2 else f"{number / 1024:.0f} KiB"
