"""One host's part of watching: a thread that looks by long polls at the pace of the schedule, and nothing else.

A look tells what is; what it means is judged in `watch`. Three things make a look come early: a key press, this laptop
waking up, and the network's return; the last two are spread at random, so that many hosts are not met at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator.core.schedule import wake_pause_s
from orchestrator.core.states import OVER
from orchestrator.services.logfeed import LogFeed
from orchestrator.services.look import HostLook, look
from orchestrator.services.pace import Pace
from orchestrator.services.views import LogTail
from orchestrator.services.wait import worth_waiting

if TYPE_CHECKING:
    from orchestrator.services.session import Session

DISCOVER_EVERY_S = 15.0
"""While everything is watched, how often a host is asked for jobs that somebody else has started."""
LIVE_INTERVAL_S = 5.0
"""A live view looks at least this often: bars move between events."""
LOOKS_APART_S = 0.25
"""With many hosts, a live view's looks are on average this far apart; events come at once all the same."""
BREATH_S = 0.1
"""Between an answer and the next look. A job whose state changes all the time is not looked at all the time."""
LOG_BREATH_S = 0.3
"""The same while a log is on the screen: each line that a job prints ends the long poll."""


@dataclass
class Wishes:
    """What the view wants to see; set by the caller's thread, read by those of the hosts."""

    live: bool = False
    interval_s: float | None = None
    processes: bool = False
    log: LogFeed | None = None
    log_host: str | None = None
    log_shown: bool = False
    newest_attempt: int = 0
    hosts: int = 1

    @property
    def live_interval_s(self) -> float:
        """A live view looks at each host at least this often; at many hosts a little less."""
        return max(LIVE_INTERVAL_S, LOOKS_APART_S * self.hosts)


@dataclass
class Answer:
    """One look, as it goes to the caller's thread."""

    look: HostLook
    sent_mono: float
    took_s: float
    held_s: float
    next_in_s: float
    log: LogTail | None = None
    seen: dict[str, int] = field(default_factory=dict)


class Follower:
    """Looks at one host until told to stop.

    Args:
        session: connections and inventory.
        host: its name.
        jobs: these; None: whatever is active there.
        wishes: shared by all followers.
        put: takes each answer, and an exception when nothing more will come.
        woke_mono: tells when this laptop last woke up.
    """

    def __init__(
        self,
        session: Session,
        host: str,
        jobs: Sequence[str] | None,
        wishes: Wishes,
        put: Callable[[Answer | BaseException], None],
        woke_mono: Callable[[], float],
    ) -> None:
        self.session, self.host, self.jobs, self.wishes, self.put = session, host, jobs, wishes, put
        self._woke_mono = woke_mono
        self.met = False
        """This host has answered before."""
        self._pace = Pace(session, host, cap_s=wishes.interval_s)
        self._stopped = threading.Event()
        self._call = threading.Event()
        self._active: list[str] | None = None
        self._resting = False
        self._sent_mono = float("-inf")

    def start(self) -> None:
        """Begin to look."""
        threading.Thread(target=self._run, name=f"watch-{self.host}", daemon=True).start()

    def stop(self) -> None:
        """Look no more; a look under way is left to itself."""
        self._stopped.set()
        self._call.set()

    def hurry(self, *, after_s: float = 0.0) -> None:
        """Look now (or a little later), whatever the long poll does."""
        threading.Thread(target=self._aside, args=(after_s,), name=f"look-{self.host}", daemon=True).start()

    # -------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:  # raised in the caller's thread by `next`
            self.put(error)

    def _loop(self) -> None:
        seen: dict[str, int] = {}
        discover_at, wait_s = 0.0, 0.0
        while not self._stopped.is_set():
            everything = self.jobs is None
            discovering = everything and (not self._active or time.monotonic() >= discover_at)
            if discovering and (self._active is None or self._active):
                wait_s = 0.0
            until = discover_at if everything and self._active else None
            request = self._request(discovering=discovering)
            result, wait_s = self._ask(request, seen, self._limit(wait_s, until))
            if result is None:
                return
            if result.error is not None:
                self._rest(wait_s)
                wait_s = 0.0
                continue
            seen.update((view["id"], view["seq"]) for view in result.jobs)
            if everything:
                ids = [view["id"] for view in result.jobs if view["state"] not in OVER]
                if discovering:
                    discover_at = time.monotonic() + DISCOVER_EVERY_S
                    there = {view["id"] for view in result.jobs}
                    # Ended between two looks: ask for its end by name.
                    ids += [job for job in self._active or [] if job not in there]
                self._active = ids
            breath_s = LOG_BREATH_S if self._shows_log() else BREATH_S
            self._rest(max(breath_s, self._pace.owed_s(self._sent_mono)), callable_early=False)

    def _request(self, *, discovering: bool) -> dict[str, Any]:
        request: dict[str, Any] = {"processes": self.wishes.processes, "gpus": self.wishes.live}
        if self.wishes.live:
            request["expected"] = self.session.host(self.host).gpus
        if discovering:
            request["active_only"] = True
        else:
            request["jobs"] = list(self._active or []) if self.jobs is None else list(self.jobs)
        return request

    def _limit(self, wait_s: float, until: float | None = None) -> float:
        if self.wishes.live:
            wait_s = min(wait_s, self.wishes.live_interval_s)
        if self.wishes.interval_s is not None:
            wait_s = min(wait_s, self.wishes.interval_s)
        if until is not None:
            wait_s = min(wait_s, max(BREATH_S, until - time.monotonic()))
        return self._pace.at_least(wait_s) if wait_s > 0 else wait_s

    def _ask(
        self, request: dict[str, Any], seen: dict[str, int], wait_s: float
    ) -> tuple[HostLook | None, float]:
        """One look, handed on; (None, 0) when this host is not to be asked again."""
        feed = self._with_log(request)
        sent = self._sent_mono = time.monotonic()
        result = look(self.session, self.host, seen=dict(seen), wait_s=wait_s, **request)
        took_s = time.monotonic() - sent
        if self._stopped.is_set():
            return None, 0.0
        if result.error is not None:
            if sent < self._woke_mono():
                return result, wake_pause_s()  # it began before the sleep, which broke it: no news of the host
            pause_s = self._pace.after_error()
            self.put(Answer(result, sent, took_s, wait_s, pause_s))
            return (result if worth_waiting(result.error, met=self.met) else None), pause_s
        self.met = True
        changed = any(seen.get(view["id"]) != view["seq"] for view in result.jobs)
        following_s = self._limit(self._pace.after(result.jobs, changed=changed))
        self.put(Answer(result, sent, took_s, wait_s, following_s, feed.take(result.answer or {}) if feed else None))
        return result, following_s

    def _aside(self, delay_s: float) -> None:
        """One look beside the long poll; while resting after an error, the end of the rest instead."""
        if self._stopped.wait(delay_s):
            return
        if self._resting:
            self._call.set()
            return
        if self._pace.owed_s(self._sent_mono) > 0:
            return  # the inventory says how often this host may be asked
        request = self._request(discovering=self.jobs is None and self._active is None)
        feed = self._with_log(request)
        sent = self._sent_mono = time.monotonic()
        try:
            result = look(self.session, self.host, **request)
        except BaseException as error:  # raised in the caller's thread by `next`
            self.put(error)
            return
        if result.error is None and not self._stopped.is_set():
            took_s = time.monotonic() - sent
            log = feed.take(result.answer or {}) if feed else None
            self.put(Answer(result, sent, took_s, 0.0, self._limit(LIVE_INTERVAL_S), log))

    def _shows_log(self) -> bool:
        return self.wishes.log_shown and self.wishes.log_host == self.host

    def _with_log(self, request: dict[str, Any]) -> LogFeed | None:
        feed = self.wishes.log
        if feed is None or self.wishes.log_host != self.host:
            return None
        # Figures are read along and wake nobody; a log on the screen ends the long poll when it grows.
        kind = "logs" if self.wishes.log_shown else "quiet_logs"
        request[kind] = [feed.cursor(self.wishes.newest_attempt)]
        return feed

    def _rest(self, seconds: float, *, callable_early: bool = True) -> None:
        if not callable_early:
            self._stopped.wait(seconds)
            return
        self._resting = True
        self._call.wait(seconds)
        self._resting = False
        self._call.clear()
