"""Follow jobs on any number of hosts: one thread a host asks by long polls, one queue brings the answers together.

A link that breaks is a fact about the host, never about a job. The view is only changed by the thread that calls
`next`, so a renderer needs no lock.
"""

from __future__ import annotations

import base64
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from orchestrator.core.errors import JobLost, OrchError
from orchestrator.core.states import OVER
from orchestrator.services.look import HostLook, look, remember, remembered_view
from orchestrator.services.outcome import exit_status, worst
from orchestrator.services.pace import Pace
from orchestrator.services.resolve import FoundJob
from orchestrator.services.views import HostView, LogTail, WatchView
from orchestrator.services.wait import first_line, worth_waiting

if TYPE_CHECKING:
    from orchestrator.services.session import Session

DISCOVER_EVERY_S = 15.0
"""While everything is watched, how often a host is asked for jobs that somebody else has started."""
LIVE_INTERVAL_S = 5.0
"""A live view looks at least this often: bars move between events."""
LOG_INTERVAL_S = 1.0
LOG_TAIL_BYTES = 32 * 1024


@dataclass(frozen=True)
class Update:
    """One thing that changed: a job (its view before), a host's link, or the log's tail."""

    host: str
    job: str | None = None
    before: dict[str, Any] | None = None
    link: str | None = None


@dataclass
class _Answer:
    look: HostLook
    asked_at: datetime
    took_s: float
    held_s: float
    next_in_s: float
    log: LogTail | None = None


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
        self.live = live
        self.interval_s = interval_s
        self.processes = False
        self.log: LogTail | None = None
        self.view = WatchView()
        self._asked: dict[str, list[str]] = {}
        for job in jobs:
            self._asked.setdefault(job.host, []).append(job.id)
        for name in session.host_names(host) if self.all else list(self._asked):
            self.view.hosts[name] = HostView(name)
        self._answers: queue.Queue[_Answer | BaseException] = queue.Queue()
        self._stop = threading.Event()
        self._met: set[str] = set()

    def __enter__(self) -> Self:
        session = self.session
        session.pool  # noqa: B018 - opened once, before the threads
        for name in self.view.hosts:
            threading.Thread(target=self._follow, args=(name,), name=f"watch-{name}", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()

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
                updates.extend(self._take(item))
                item = self._answers.get_nowait()
        except queue.Empty:
            return updates

    def nudge(self) -> None:
        """Look at every host now, whatever its long poll does."""
        for name in self.view.hosts:
            threading.Thread(target=self._once, args=(name,), name=f"nudge-{name}", daemon=True).start()

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

    def _take(self, answer: _Answer) -> list[Update]:
        host, result = self.view.hosts[answer.look.host], answer.look
        now = self.session.now()
        updates: list[Update] = []
        if result.error is not None:
            link = "reconnecting" if worth_waiting(result.error, met=host.name in self._met) else "refused"
            if not self.all and (link == "refused" or host.name not in self._met):
                raise result.error
            if link != host.link or host.problem is None:
                updates.append(Update(host.name, link=link))
            host.link, host.problem = link, first_line(result.error)
            host.next_look_at = _later(now, answer.next_in_s)
            updates.extend(self._show_remembered(host.name, now))
            return updates
        self._met.add(host.name)
        if host.link != "connected":
            updates.append(Update(host.name, link="connected"))
        host.link, host.problem = "connected", None
        host.looked_at, host.next_look_at = now, _later(now, answer.next_in_s)
        host.round_trip_s = (
            max(0.0, answer.took_s - answer.held_s) if answer.held_s == 0 else host.round_trip_s
        )
        host.skew_s = result.skew_s
        reading = (result.answer or {}).get("gpus")
        host.gpus = reading or host.gpus
        changed = []
        for view in result.jobs:
            before = self.view.jobs.get(view["id"])
            if before is not None and before.get("reachable") and view["seq"] < before["seq"]:
                continue  # an older answer that was overtaken
            if before is None and self.all and view["state"] in OVER and view["state"] != "lost":
                continue
            self.view.jobs[view["id"]] = view
            updates.append(Update(host.name, job=view["id"], before=before))
            if before is None or before["seq"] != view["seq"] or before["state"] != view["state"]:
                changed.append(view)
        if changed:
            remember(self.session, changed)
        if answer.log is not None and self.log is not None and answer.log.job == self.log.job:
            self.view.log = answer.log
        self._missing(result)
        return updates

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

    # --------------------------------------------------------------------------------------------- one host's thread

    def _follow(self, host: str) -> None:
        try:
            self._loop(host)
        except BaseException as error:  # raised in the caller's thread by `next`
            self._answers.put(error)

    def _loop(self, host: str) -> None:
        pace = Pace(self.session, host, cap_s=self.interval_s)
        seen: dict[str, int] = {}
        active: list[str] | None = None
        discover_at, wait_s = 0.0, 0.0
        while not self._stop.is_set():
            discovering = self.all and (active is None or not active or time.monotonic() >= discover_at)
            request: dict[str, Any] = {"processes": self.processes, "gpus": self.live}
            if self.live:
                request["expected"] = self.session.host(host).gpus
            if discovering:
                request["active_only"] = True
                if active is None or active:
                    wait_s = 0.0
            else:
                request["jobs"] = active if self.all else self._asked[host]
            wait_s = self._limit(wait_s, discover_at if self.all and active else None)
            ended = self._ask(host, request, seen, wait_s, pace)
            if ended is None:
                return
            result, wait_s = ended
            if result.error is not None:
                if self._stop.wait(wait_s):
                    return
                wait_s = 0.0
                continue
            for view in result.jobs:
                seen[view["id"]] = view["seq"]
                if view["state"] == "lost":
                    seen[view["id"] + ":lost"] = 1
            if self.all:
                ids = [view["id"] for view in result.jobs if view["state"] not in OVER]
                if discovering:
                    discover_at = time.monotonic() + DISCOVER_EVERY_S
                    gone = [job for job in active or [] if job not in {view["id"] for view in result.jobs}]
                    ids += gone  # ended between two looks: ask for its end by name
                active = ids

    def _limit(self, wait_s: float, until: float | None) -> float:
        if self.live:
            wait_s = min(wait_s, LOG_INTERVAL_S if self.log is not None else LIVE_INTERVAL_S)
        if self.interval_s is not None:
            wait_s = min(wait_s, self.interval_s)
        if until is not None:
            wait_s = min(wait_s, max(0.1, until - time.monotonic()))
        return wait_s

    def _ask(
        self, host: str, request: dict[str, Any], seen: Mapping[str, int], wait_s: float, pace: Pace
    ) -> tuple[HostLook, float] | None:
        """One look, put on the queue; None when this host is not asked again."""
        log = self._cursor(host, request)
        started, asked_at = time.monotonic(), self.session.now()
        result = look(self.session, host, seen=dict(seen), wait_s=wait_s, **request)
        took = time.monotonic() - started
        if self._stop.is_set():
            return None
        if result.error is not None:
            pause = pace.after_error()
            self._answers.put(_Answer(result, asked_at, took, wait_s, pause))
            return (result, pause) if worth_waiting(result.error, met=host in self._met) else None
        changed = any(seen.get(view["id"]) != view["seq"] for view in result.jobs)
        following = self._limit(pace.after(result.jobs, changed=changed), None)
        self._answers.put(_Answer(result, asked_at, took, wait_s, following, _with_log(log, result)))
        return result, following

    def _cursor(self, host: str, request: dict[str, Any]) -> LogTail | None:
        log = self.log
        view = self.view.jobs.get(log.job) if log is not None else None
        if log is None or view is None or view["host"] != host:
            return None
        newest = max(
            (
                int(item["n"])
                for step in view["steps"]
                if step["name"] == log.step
                for item in step["attempts"]
            ),
            default=0,
        )
        if newest > log.attempt > 0:
            log.attempt, log.inode, log.offset, log.data = newest, 0, -1, b""
        request["logs"] = [
            {
                "job": log.job,
                "step": log.step,
                "attempt": log.attempt,
                "inode": 0,
                "offset": -1,
                "tail_bytes": LOG_TAIL_BYTES,
                "max_bytes": LOG_TAIL_BYTES,
            }
        ]
        if log.offset >= 0:
            request["logs"][0].update(inode=log.inode, offset=log.offset)
        return log

    def _once(self, host: str) -> None:
        request: dict[str, Any] = {"processes": self.processes, "gpus": self.live}
        request["jobs"] = (
            list(self._asked[host])
            if not self.all
            else [view["id"] for view in list(self.view.jobs.values()) if view["host"] == host]
        )
        started, asked_at = time.monotonic(), self.session.now()
        try:
            result = look(self.session, host, **request)
        except OrchError:
            return
        if result.error is None and not self._stop.is_set():
            self._answers.put(_Answer(result, asked_at, time.monotonic() - started, 0.0, LIVE_INTERVAL_S))


def _with_log(log: LogTail | None, result: HostLook) -> LogTail | None:
    """The tail with what this answer added. The cursor object is the thread's own; the view gets it whole."""
    if log is None:
        return None
    for item in (result.answer or {}).get("logs") or []:
        if item.get("missing") or item.get("step") != log.step:
            continue
        fresh = base64.b64decode(item.get("data_b64") or "")
        again = bool(item.get("rotated")) or log.offset < 0
        log.data = (fresh if again else log.data + fresh)[-LOG_TAIL_BYTES:]
        log.inode, log.offset, log.attempt = int(item["inode"]), int(item["end"]), int(item["attempt"])
    return log


def _later(now: datetime, seconds: float) -> datetime:
    from datetime import timedelta

    return now + timedelta(seconds=seconds)
