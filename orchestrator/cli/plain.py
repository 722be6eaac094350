"""`orch watch` off a terminal: one dated line per change, never wrapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from orchestrator.ui.changes import Change, host_change, in_order, job_changes
from orchestrator.ui.console import out
from orchestrator.ui.job import Moment
from orchestrator.ui.status import skew_words
from orchestrator.ui.text import duration

if TYPE_CHECKING:
    from orchestrator.services.session import Session
    from orchestrator.services.watch import Update, Watch

CHECK_EVERY_S = 3600.0


def run_plain(session: Session, watching: Watch, write: Callable[[str], None] = out) -> int:
    """Print changes until everything watched has ended; the exit status."""
    skewed: set[str] = set()
    broken: set[str] = set()
    while not watching.done():
        updates = watching.next(CHECK_EVERY_S)
        found = [change for update in updates for change in _changes(session, watching, update, broken)]
        for change in in_order(found):
            write(change.line())
        for host in watching.view.hosts.values():
            words = skew_words(host.skew_s)
            if words and host.name not in skewed:
                skewed.add(host.name)
                write(host_change(host.name, words, Moment(session.now())).line())
    if not watching.view.jobs and watching.all:
        session.say("orch: nothing runs; start something with: orch launch PLAN")
    return watching.exit_status()


def _changes(session: Session, watching: Watch, update: Update, broken: set[str]) -> list[Change]:
    moment = Moment(session.now())
    if update.link is not None:
        return _link_change(watching, update, moment, broken)
    if update.job is None:
        return []
    seen_at = watching.view.hosts[update.host].seen_at
    return job_changes(update.before, watching.view.jobs[update.job], moment, seen_at=seen_at)


def _link_change(watching: Watch, update: Update, moment: Moment, broken: set[str]) -> list[Change]:
    host = watching.view.hosts[update.host]
    if update.link == "waking":
        broken.add(host.name)
        words = f"this laptop slept for {duration(update.slept_s)}; looking again"
        return [host_change(host.name, words, moment)]
    if update.link == "connected":
        if host.name not in broken:
            return []
        broken.discard(host.name)
        return [host_change(host.name, "answers again", moment, "good")]
    broken.add(host.name)
    words = "unreachable" if update.link == "reconnecting" else "refused"
    tail = "; trying again, the jobs are not affected" if update.link == "reconnecting" else ""
    return [host_change(host.name, f"{words}: {host.problem}{tail}", moment)]
