"""Was the disk of a job's logs full while something wrote to them?  Then lines may be missing, and a note says so.

A program that ignores errors of its writes goes on without a word.  The note is written once there is room, or when
nothing runs any more: while the disk is full it could not be read by anybody, and would cost the reserve that the last
records need.  Standard library only.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Mapping, Optional

from remote_jobs.agent.attempt import utc_now
from remote_jobs.protocol import EventKind

if TYPE_CHECKING:
    from remote_jobs.agent.supervisor import Supervisor

EVERY_S = 0.5
FULL_BYTES, ROOM_BYTES = 64 << 10, 4 << 20
"""Less is full; more is room again. The supervisor's own reserve, which it gives up on a full disk, is in between."""
SAID = "the disk of the job's logs was full"
MOST = 20
"""Notes of one supervisor: a disk may fill again and again."""


class FullDisk:
    """The supervisor's part: one look at the file system's counters now and then."""

    def __init__(self, boss: "Supervisor") -> None:
        self._boss = boss
        self._due = 0.0
        self._since: Optional[str] = None
        self._said = 0

    def met(self) -> bool:
        """Has an attempt that ended this moment met a full disk?  Looked at now: the job may be over before the next tick."""
        if self._since is None and self._is_full():
            self._since = utc_now()
        return self._since is not None

    def tick(self, now: float) -> None:
        """Look when it is time; never raises for what a disk does."""
        if now < self._due or self._said >= MOST:
            return
        self._due = now + EVERY_S
        writing = any(one.attempt is not None and one.attempt.exit_status is None for one in self._boss.steppers)
        if self._since is None:
            if writing and self._is_full():
                self._since = utc_now()
        elif not writing or (free_bytes(self._boss.job.path) or 0) > ROOM_BYTES:
            self.say()

    def say(self) -> None:
        """Write down what was seen and not said yet: there is room, nothing runs any more, or the job is over."""
        if self._since is None:
            return
        text = "{} from {} to {}: lines may be missing in them".format(SAID, _clock(self._since), _clock(utc_now()))
        self._since, self._said = None, self._said + 1
        self._boss.emit(EventKind.NOTE, text=text)

    def _is_full(self) -> bool:
        free = free_bytes(self._boss.job.path)
        return free is not None and free < FULL_BYTES


def free_bytes(path: str) -> Optional[int]:
    """What we may still write there; None when that cannot be known."""
    with contextlib.suppress(OSError):
        found = os.statvfs(path)
        return (found.f_bfree if os.geteuid() == 0 else found.f_bavail) * found.f_frsize
    return None


def said(state: Mapping[str, Any]) -> "list[str]":
    """What the notes of a job say of this."""
    texts = [str(note.get("text")) for note in state.get("notes") or []]
    return [text for text in texts if text.startswith(SAID)]


def _clock(at: str) -> str:
    """Date and time of an event, without its fractions."""
    return at[:19].replace("T", " ") + " UTC"
