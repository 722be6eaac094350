"""How long to wait between looks at one host: the adaptive schedule with the inventory's limits, on a real clock.

The schedule itself (`core.schedule`) is pure; this file feeds it with what was just seen.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.core.schedule import LookSchedule

if TYPE_CHECKING:
    from orchestrator.services.session import Session


HELD_S = 25.0
"""Longest time that a look is held on the host. The schedule would allow 60 s, but a link that died in silence is only
noticed when an answer is overdue, and nobody should wait longer than a minute to hear of it."""


class Pace:
    """The pace of looks at one host."""

    def __init__(self, session: Session, host: str, *, cap_s: float | None = None) -> None:
        self.floor_s = session.host(host).min_look_interval_s or 0.0
        self._schedule = LookSchedule(
            min_interval_s=self.floor_s, max_interval_s=HELD_S if cap_s is None else min(cap_s, HELD_S)
        )

    def at_least(self, wait_s: float) -> float:
        """A time to hold a look on the host, not shorter than the inventory's ``min_look_interval_s``."""
        return max(wait_s, self.floor_s)

    def owed_s(self, sent_mono: float) -> float:
        """Seconds still to pass before the next look, since one was sent at ``sent_mono``: news end a look early, and
        the inventory's ``min_look_interval_s`` holds all the same.
        """
        return max(0.0, self.floor_s - (time.monotonic() - sent_mono))

    def after(self, views: Sequence[Mapping[str, Any]], *, changed: bool) -> float:
        """Seconds that the next look may wait on the host, after an answer."""
        ends = [
            float(view["eta"]["low_s"])
            for view in views
            if isinstance(view.get("eta"), Mapping) and view["eta"].get("low_s") is not None
        ]
        return self._schedule.after_answer(
            time.monotonic(), changed=changed, ends_in_s=min(ends, default=None), wall_s=time.time()
        )

    def after_error(self) -> float:
        """Seconds to wait before trying a host again that did not answer."""
        return self._schedule.after_error(time.monotonic(), wall_s=time.time())
