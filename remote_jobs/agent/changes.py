"""Told by the kernel that a job's folder changed (inotify), so that a long poll sleeps instead of looking.

Without inotify (another libc, no watches left, a network file system, where another machine's writes raise
nothing here) `watch` answers False and the caller polls.  Format: inotify(7).  Standard library only; no state of
jobs is read here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Dict, Mapping

_IN_MODIFY, _IN_MOVED_TO, _IN_CREATE, _IN_DELETE_SELF, _IN_MOVE_SELF, _IN_IGNORED = 0x2, 0x80, 0x100, 0x400, 0x800, 0x8000
RENAMED_INTO = _IN_MOVED_TO | _IN_DELETE_SELF | _IN_MOVE_SELF
"""For a job's folder: records are replaced by rename, so the temporary files before it wake nobody."""
ENTRIES = RENAMED_INTO | _IN_CREATE
"""For the folder of all jobs: a new one appears by mkdir."""
WRITTEN = _IN_MODIFY | _IN_DELETE_SELF | _IN_MOVE_SELF
"""For a log: bytes were added, or it was truncated or replaced."""
_HEADER_BYTES = 16
_MAX_WATCHES = 512
"""More than this is polled: watches are a limited resource that all programs of a user share."""


class Changes:
    """Kernel watches on files and folders. ``fd`` is readable when one of them changed, -1 without inotify."""

    def __init__(self, *, usable: bool) -> None:
        self.fd = -1
        self._watches: Dict[str, int] = {}
        with contextlib.suppress(OSError, AttributeError):
            self._libc = ctypes.CDLL(None, use_errno=True)
            if usable:
                self.fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)

    def watch(self, wanted: Mapping[str, int]) -> bool:
        """Watch these paths (path -> mask) and no other; False when the caller has to poll instead."""
        if self.fd < 0 or len(wanted) > _MAX_WATCHES:
            return False
        for path in set(self._watches) - set(wanted):
            self._libc.inotify_rm_watch(self.fd, self._watches.pop(path))
        for path in set(wanted) - set(self._watches):
            number = self._libc.inotify_add_watch(self.fd, os.fsencode(path), wanted[path])
            if number < 0:
                return False
            self._watches[path] = number
        return True

    def take(self) -> None:
        """Empty the queue. What was deleted or replaced is forgotten, so that `watch` sets it again."""
        gone = set()
        with contextlib.suppress(BlockingIOError):
            while True:
                data = os.read(self.fd, 1 << 16)
                at = 0
                while at + _HEADER_BYTES <= len(data):
                    if int.from_bytes(data[at + 4 : at + 8], "little") & (_IN_IGNORED | _IN_DELETE_SELF | _IN_MOVE_SELF):
                        gone.add(int.from_bytes(data[at : at + 4], "little"))
                    at += _HEADER_BYTES + int.from_bytes(data[at + 12 : at + 16], "little")
        if gone:
            self._watches = {path: number for path, number in self._watches.items() if number not in gone}
