"""One attempt's log on disk: opened before the child starts, followed by offset, kept under its limit.

Offsets never change their meaning: when a log outgrows its limit the middle is punched out (a hole reads as
zeros and takes no space), start and end stay.  Standard library only.  Source: fallocate(2).
"""

from __future__ import annotations

import ctypes
import os
from typing import Iterator, Optional, Tuple

_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
_READ_BYTES = 1 << 20
_BEHIND_BYTES = 64 << 20
_TAIL_AFTER_SKIP = 1 << 20


class LogFile:
    """The writing end is handed to the job; this object reads what arrived and enforces the limit."""

    def __init__(self, path: str, limit_bytes: int) -> None:
        self.path = path
        self.limit_bytes = limit_bytes
        self.write_fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._read_fd = os.open(path, os.O_RDONLY)
        self.offset = 0
        self.skipped_bytes = 0
        self.gap: Optional[Tuple[int, int]] = None

    def close_writer(self) -> None:
        """The child has its copy; ours would keep the file open for nothing."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def close(self) -> None:
        """Close both ends."""
        self.close_writer()
        if self._read_fd >= 0:
            os.close(self._read_fd)
            self._read_fd = -1

    def size(self) -> int:
        """Bytes written so far (holes included). Follows the file we opened, also after a rename."""
        return os.fstat(self._read_fd).st_size

    def new_chunks(self, budget_bytes: int = 8 << 20) -> Iterator[bytes]:
        """Bytes that arrived since the last call, at most ``budget_bytes``; far behind, the middle is skipped."""
        size = self.size()
        if size < self.offset:
            self.offset = 0  # truncated under us: what is there now is new
        if size - self.offset > _BEHIND_BYTES:
            self.skipped_bytes += size - _TAIL_AFTER_SKIP - self.offset
            self.offset = size - _TAIL_AFTER_SKIP
        while budget_bytes > 0:
            chunk = os.pread(self._read_fd, min(_READ_BYTES, budget_bytes), self.offset)
            if not chunk:
                return
            self.offset += len(chunk)
            budget_bytes -= len(chunk)
            yield chunk

    def enforce_limit(self) -> bool:
        """Punch out the middle once the bytes on disk pass the limit. True when something was freed."""
        status = os.fstat(self._read_fd)
        if status.st_blocks * 512 <= self.limit_bytes or self.limit_bytes <= 0:
            return False
        block = 4096
        start = min(self.limit_bytes // 8, 64 << 20) // block * block
        end = (status.st_size - self.limit_bytes // 2) // block * block
        if end <= start or (self.gap is not None and end <= self.gap[1]):
            return False
        fd = os.open(self.path, os.O_WRONLY)
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            done = libc.fallocate(
                ctypes.c_int(fd),
                ctypes.c_int(_PUNCH_HOLE | _KEEP_SIZE),
                ctypes.c_longlong(start),
                ctypes.c_longlong(end - start),
            )
        except (OSError, AttributeError):
            return False
        finally:
            os.close(fd)
        if done != 0:
            return False
        self.gap = (start, end)
        return True
