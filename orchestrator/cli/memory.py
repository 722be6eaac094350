"""Keeps a long-lived program with hundreds of mostly idle threads small.

glibc gives threads memory pools of their own, up to eight a core, and each keeps what it once needed; Python threads
hardly allocate at the same time, so two pools serve them as well (mallopt(3), M_ARENA_MAX). Elsewhere nothing is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys

_M_ARENA_MAX = -8


def share_memory_pools() -> None:
    """Call before the threads are started."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)
