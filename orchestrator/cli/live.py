"""`orch watch` on a terminal: keys in, frames out. What a frame shows is decided in ui.live.

Leaving never touches a job; stopping and retrying ask first.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from orchestrator.cli.keys import Keys
from orchestrator.core.errors import OrchError
from orchestrator.core.states import OVER
from orchestrator.services.resolve import FoundJob
from orchestrator.services.views import LogTail
from orchestrator.ui.changes import host_change, job_changes
from orchestrator.ui.console import console, out
from orchestrator.ui.job import Moment
from orchestrator.ui.live import Screen, details, render
from orchestrator.ui.status import status_lines

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from orchestrator.services.session import Session
    from orchestrator.services.watch import Update, Watch

TICK_S = 0.1
MAX_RECENT = 200


def run_live(session: Session, watching: Watch) -> int:
    """Show the live view until the person leaves or everything named has ended; the exit status."""
    from rich.console import Group
    from rich.live import Live

    terminal = console()
    view = LiveWatch(session, watching, terminal)
    with (
        Keys() as keys,
        Live(console=terminal, screen=True, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        shown: tuple[object, ...] = ()
        while not view.left and not (view.over() and view.drawn):
            updates = watching.next(TICK_S)
            view.take(updates)
            for key in keys.pressed():
                view.key(key)
            # A frame when something is new, the clock moved a second, or the terminal has another size.
            stamp = (int(session.now().timestamp()), terminal.size, view.version)
            if stamp != shown:
                live.update(Group(*view.frame()), refresh=True)
                view.drawn, shown = True, stamp
    for line in status_lines(list(watching.view.jobs.values()), [], Moment(session.now())):
        terminal.print(line, soft_wrap=True)
    if view.left and not view.over():
        out("left; the jobs go on. Look again with: orch watch")
        return 0
    return watching.exit_status()


class LiveWatch:
    """State of one live view: what was chosen, what is asked, what happened lately."""

    def __init__(self, session: Session, watching: Watch, terminal: Console) -> None:
        self.session, self.watching, self.terminal = session, watching, terminal
        encoding = (getattr(sys.stdout, "encoding", None) or "").lower()
        self.screen = Screen(unicode="utf" in encoding)
        self.left = False
        self.drawn = False
        self.version = 0
        self._asked: tuple[str, str] | None = None

    def over(self) -> bool:
        """True when the jobs named have ended; a view of everything stays open."""
        return not self.watching.all and self.watching.done()

    def frame(self) -> list[Text]:
        """The lines of the screen now."""
        width, height = self.terminal.size
        self.screen.width, self.screen.height = width, height
        return render(self.watching.view, self.screen, Moment(self.session.now()))

    def take(self, updates: list[Update]) -> None:
        """Note what happened."""
        moment = Moment(self.session.now())
        for update in updates:
            self.version += 1
            if update.job is not None and (update.before is not None or len(self.watching.view.jobs) == 1):
                self.screen.recent += job_changes(update.before, self.watching.view.jobs[update.job], moment)
            elif update.link in {"reconnecting", "refused"}:
                problem = self.watching.view.hosts[update.host].problem
                self.screen.recent.append(host_change(update.host, f"{update.link}: {problem}", moment))
        del self.screen.recent[:-MAX_RECENT]

    def chosen(self) -> FoundJob | None:
        """The job that keys act on."""
        jobs = self.watching.view.jobs
        if self.screen.chosen not in jobs:
            self.screen.chosen = next(iter(jobs), None)
        if self.screen.chosen is None:
            return None
        return FoundJob(self.screen.chosen, str(jobs[self.screen.chosen]["host"]))

    def key(self, key: str) -> None:
        """Act on one key."""
        self.version += 1
        if self._asked is not None:
            action, job = self._asked
            self._asked, self.screen.question = None, None
            if key.lower() == "y":
                self._control(action, job)
            return
        self.screen.message = None
        if key in {"q", "Q", "escape"}:
            self.left = True
        elif key == "?":
            self.screen.help = not self.screen.help
        elif key == "p":
            self.screen.processes = self.watching.processes = not self.screen.processes
            self.watching.nudge()
        elif key == "g":
            self.screen.gpus = not self.screen.gpus
        elif key == "l":
            self._toggle_log()
        elif key in {"up", "k", "down", "j"}:
            self._choose(-1 if key in {"up", "k"} else 1)
        elif key == "space":
            self.watching.nudge()
        elif key in {"s", "r"}:
            self._ask("stop" if key == "s" else "retry")

    def _choose(self, step: int) -> None:
        jobs = list(self.watching.view.jobs)
        if jobs:
            self.chosen()
            self.screen.chosen = jobs[(jobs.index(str(self.screen.chosen)) + step) % len(jobs)]
            if self.watching.log is not None:
                self.watching.log = self.watching.view.log = None
                self._toggle_log()

    def _toggle_log(self) -> None:
        if self.watching.log is not None:
            self.watching.log = self.watching.view.log = None
            return
        job = self.chosen()
        step = details(self.watching.view.jobs[job.id]) if job else ""
        if job is None or not step:
            self.screen.message = "no log yet"
            return
        self.watching.log = LogTail(job.id, step, 0)
        self.watching.nudge()

    def _ask(self, action: str) -> None:
        job = self.chosen()
        if job is None:
            return
        ended = self.watching.view.jobs[job.id]["state"] in OVER
        if action == "stop" and ended:
            self.screen.message = "it has ended"
            return
        self._asked = (action, job.id)
        self.screen.question = f"{action} {job.id} on {job.host}?"

    def _control(self, action: str, job_id: str) -> None:
        job = FoundJob(job_id, str(self.watching.view.jobs[job_id]["host"]))
        self.screen.message = f"{action} {job_id} ..."

        def work() -> None:
            from orchestrator.services.stop import control

            try:
                answer = control(self.session, job, action)
                self.screen.message = f"{job_id} {answer['state']}"
            except OrchError as error:
                self.screen.message = error.message
            self.version += 1
            self.watching.nudge()

        threading.Thread(target=work, name=f"{action}-{job_id}", daemon=True).start()
