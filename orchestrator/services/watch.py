"""Follow jobs on any number of hosts: one thread a host looks (`follow`), one queue brings the answers together here.

A link that breaks is a fact about the host, never about a job; after this laptop slept, nothing is judged before one
look was answered or refused. The view is only changed by the thread that calls `next`, so a renderer needs no lock.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from orchestrator.core.errors import JobLost
from orchestrator.core.schedule import CLOCK_EVERY_S, wake_pause_s
from orchestrator.core.states import OVER
from orchestrator.services.follow import Answer, Follower, Wishes
from orchestrator.services.logfeed import LogFeed
from orchestrator.services.look import HostLook, remember, remembered_view
from orchestrator.services.outcome import exit_status, worst
from orchestrator.services.resolve import FoundJob
from orchestrator.services.sleep import SleepClock
from orchestrator.services.views import HostView, WatchView
from orchestrator.services.wait import first_line, worth_waiting

if TYPE_CHECKING:
    from orchestrator.services.session import Session


@dataclass(frozen=True)
class Update:
    """One thing that changed: a job (its view before), or a host's link (with the time that this laptop slept)."""

    host: str
    job: str | None = None
    before: dict[str, Any] | None = None
    link: str | None = None
    slept_s: float | None = None


@dataclass(frozen=True)
class _Woke:
    slept_s: float


class Watch:
    """A context manager; `next` brings what changed, `view` is the whole.

    Args:
        session: inventory, ledger and connections.
        jobs: these; none: every active job of the hosts.
        host: only this host, when no jobs are named.
        interval_s: look at least this often.
        live: ask for processes, GPUs and moving bars as a person's view needs them.
    """

    def __init__(
        self,
        session: Session,
        jobs: Sequence[FoundJob],
        *,
        host: str | None = None,
        interval_s: float | None = None,
        live: bool = False,
    ) -> None:
        self.session = session
        self.all = not jobs
        self.wishes = Wishes(live=live, interval_s=interval_s)
        self.view = WatchView()
        self._begun: set[str] = set()
        """Jobs whose launch was not finished when they were looked at."""
        self._asked: dict[str, list[str]] = {}
        for job in jobs:
            self._asked.setdefault(job.host, []).append(job.id)
        for name in session.host_names(host) if self.all else list(self._asked):
            self.view.hosts[name] = HostView(name)
        self.wishes.hosts = len(self.view.hosts)
        self._answers: queue.Queue[Answer | _Woke | BaseException] = queue.Queue()
        self._clock = SleepClock(self._woke)
        self._followers = {
            name: Follower(session, name, self._asked.get(name), self.wishes, self._answers.put, self._clock.woke_mono)
            for name in self.view.hosts
        }
        self._stop = threading.Event()

    def __enter__(self) -> Self:
        session = self.session
        session.pool  # noqa: B018 - opened once, before the threads
        for follower in self._followers.values():
            follower.start()
        threading.Thread(target=self._watch_clock, name="watch-clock", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for follower in self._followers.values():
            follower.stop()

    # ------------------------------------------------------------------------------------------- the caller's thread

    def next(self, timeout_s: float) -> list[Update]:
        """What changed within ``timeout_s``; empty when nothing did.

        Raises:
            HostError: with jobs named, their host cannot be asked at all. JobLost: a named job does not exist.
        """
        updates: list[Update] = []
        try:
            item = self._answers.get(timeout=max(0.0, timeout_s))
            while True:
                if isinstance(item, BaseException):
                    raise item
                updates.extend(self._wake(item) if isinstance(item, _Woke) else self._take(item))
                item = self._answers.get_nowait()
        except queue.Empty:
            return updates

    def nudge(self, host: str | None = None) -> None:
        """Look at a host now, or at every one, whatever the long polls do."""
        for name in self._followers if host is None else [host]:
            self._followers[name].hurry()

    def show_processes(self, *, wanted: bool) -> None:
        """Ask for the processes of running attempts, or no more."""
        self.wishes.processes = wanted
        if wanted:
            self.nudge()

    def follow_log(self, job: str | None, step: str = "", *, shown: bool = False) -> None:
        """Follow the log of a job's step: for its figures, or also because it is on the screen."""
        wishes, view = self.wishes, self.view.jobs.get(job or "")
        if view is None or not step:
            wishes.log = wishes.log_host = self.view.log = None
            return
        same = wishes.log is not None and (wishes.log.job, wishes.log.step) == (job, step)
        wishes.newest_attempt = max(
            (
                int(attempt["n"])
                for item in view["steps"]
                if item["name"] == step
                for attempt in item["attempts"]
            ),
            default=0,
        )
        eager = shown and not (same and wishes.log_shown)
        wishes.log_shown = shown
        if not same:
            self.view.log = None
            wishes.log_host, wishes.log = str(view["host"]), LogFeed(str(job), step)
        if not same or eager:
            self.nudge(str(view["host"]))

    def done(self) -> bool:
        """True when there is nothing left to wait for."""
        views = self.view.jobs.values()
        if not self.all:
            wanted = [job for jobs in self._asked.values() for job in jobs]
            return all(job in self.view.jobs and self.view.jobs[job]["state"] in OVER for job in wanted)
        heard = all(host.link != "connecting" for host in self.view.hosts.values())
        return heard and all(view["state"] in OVER for view in views)

    def exit_status(self) -> int:
        """Status of the worst end among the jobs watched; 3 when all hosts refused us."""
        if self.view.hosts and all(host.link == "refused" for host in self.view.hosts.values()):
            return 3
        return worst([exit_status(view) for view in self.view.jobs.values()])

    def _wake(self, item: _Woke) -> list[Update]:
        updates = []
        for host in self.view.hosts.values():
            if host.link != "refused":
                host.link, host.problem = "waking", None
                updates.append(Update(host.name, link="waking", slept_s=item.slept_s))
        return updates

    def _take(self, answer: Answer) -> list[Update]:
        host, result = self.view.hosts[answer.look.host], answer.look
        now = self.session.now()
        updates: list[Update] = []
        host.next_look_at = now + timedelta(seconds=answer.next_in_s)
        if result.error is not None:
            met = self._followers[host.name].met
            link = "reconnecting" if worth_waiting(result.error, met=met) else "refused"
            if not self.all and (link == "refused" or not met):
                raise result.error
            if link != host.link or host.problem is None:
                updates.append(Update(host.name, link=link))
            host.link, host.problem = link, first_line(result.error)
            updates.extend(self._show_remembered(host.name, now))
            return updates
        if host.link != "connected":
            updates.append(Update(host.name, link="connected"))
            if host.link == "reconnecting":
                self._network_is_back(host.name)
        host.link, host.problem, host.looked_at = "connected", None, now
        if answer.held_s == 0:
            host.round_trip_s = answer.took_s
        host.skew_s = result.skew_s
        host.gpus = (result.answer or {}).get("gpus") or host.gpus
        updates.extend(self._take_jobs(result))
        if answer.log is not None:
            feed = self.wishes.log
            if feed is not None and (feed.job, feed.step) == (answer.log.job, answer.log.step):
                self.view.log = answer.log
        self._missing(result)
        return updates

    def _take_jobs(self, result: HostLook) -> list[Update]:
        updates, changed = [], []
        for view in result.jobs:
            before = self.view.jobs.get(view["id"])
            if before is not None and before.get("reachable") and view["seq"] < before["seq"]:
                continue  # an older answer that was overtaken
            if before is None and self.all and view["state"] in OVER and view["state"] != "lost":
                continue
            self.view.jobs[view["id"]] = self._shown(view)
            updates.append(Update(result.host, job=view["id"], before=before))
            if before is None or before["seq"] != view["seq"] or before["state"] != view["state"]:
                changed.append(view)
        if changed:
            remember(self.session, changed)
        return updates

    def _shown(self, view: dict[str, Any]) -> dict[str, Any]:
        """The view for people: at the first look, an unfinished launch may be a supervisor that is just being started."""
        if not view["unfinished"] or view["id"] in self._begun:
            return view
        self._begun.add(view["id"])
        return {**view, "unfinished": False}

    def _network_is_back(self, host: str) -> None:
        """One host answers again: the others need not sit out their pauses."""
        for name, follower in self._followers.items():
            if name != host and self.view.hosts[name].link == "reconnecting":
                follower.hurry(after_s=wake_pause_s())

    def _missing(self, result: HostLook) -> None:
        have = {view["id"] for view in result.jobs}
        unreadable = (result.answer or {}).get("unreadable") or {}
        for job in self._asked.get(result.host, []) if not self.all else []:
            if job not in have and job not in self.view.jobs:
                reason = unreadable.get(job) or "its folder is not there"
                raise JobLost(f"job {job} on {result.host} is unknown: {reason}", "see: orch status")

    def _show_remembered(self, host: str, now: datetime) -> list[Update]:
        updates = []
        for view in self.view.jobs.values():
            if view["host"] == host:
                view["reachable"] = False
        wanted = set(self._asked.get(host, []))
        for row in self.session.ledger.jobs():
            known = row.id in self.view.jobs
            if row.host != host or known or not row.view or (wanted and row.id not in wanted):
                continue
            if self.all and row.view.get("state") in OVER:
                continue
            self.view.jobs[row.id] = remembered_view(row.view, row.seen_at, now)
            updates.append(Update(host, job=row.id))
        return updates

    # --------------------------------------------------------------------------------- the clock's thread and the hosts'

    def _watch_clock(self) -> None:
        while not self._stop.wait(CLOCK_EVERY_S):
            self._clock.woke_mono()

    def _woke(self, slept_s: float) -> None:
        self._answers.put(_Woke(slept_s))
        for follower in self._followers.values():
            follower.hurry(after_s=wake_pause_s())
