"""`orch watch` on a terminal: keys in, frames out. What a frame shows is decided in ui.live.

Leaving never touches a job; stopping and retrying ask first.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from orchestrator.cli.keys import Keys
from orchestrator.cli.painter import Painter
from orchestrator.core.errors import OrchError
from orchestrator.core.states import OVER
from orchestrator.services.resolve import FoundJob
from orchestrator.ui.changes import host_change, job_changes
from orchestrator.ui.console import console, out
from orchestrator.ui.job import Moment
from orchestrator.ui.live import details, render
from orchestrator.ui.screen import Screen
from orchestrator.ui.status import status_lines
from orchestrator.ui.text import duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from orchestrator.services.session import Session
    from orchestrator.services.views import LogTail
    from orchestrator.services.watch import Update, Watch

TICK_S = 0.1
FRAME_EVERY_S = 0.1
"""Two frames are at least this far apart, however much happens."""
EAGER_S = 2.0
"""This long after a key every answer is drawn at once: somebody waits for it."""
MAX_RECENT = 200


def run_live(session: Session, watching: Watch) -> int:
    """Show the live view until the person leaves or everything named has ended; the exit status."""
    terminal = console()
    view = LiveWatch(session, watching, terminal)
    with Keys() as keys, Painter(terminal) as painter, _signals(keys, painter):
        shown: tuple[object, ...] = ()
        painted_at = 0.0
        while not view.left and not (view.over() and view.drawn):
            updates = watching.next(TICK_S)
            view.take(updates)
            for key in keys.pressed():
                view.key(key)
            # A frame when something is new, the clock moved a second, or the terminal has another size.
            stamp = (int(session.now().timestamp()), terminal.size, view.version)
            if stamp != shown and time.monotonic() - painted_at >= FRAME_EVERY_S:
                painter.paint(view.frame(), (terminal.size.width, terminal.size.height))
                view.drawn, shown, painted_at = True, stamp, time.monotonic()
    for line in status_lines(list(watching.view.jobs.values()), [], Moment(session.now())):
        terminal.print(line, soft_wrap=True)
    if view.left and not view.over():
        out("left; the jobs go on. Look again with: orch watch")
        return 0
    return watching.exit_status()


@contextmanager
def _signals(keys: Keys, painter: Painter) -> Iterator[None]:
    """Ctrl-Z gives the person's screen back and `fg` takes it again; a TERM ends the view in order."""
    if sys.platform == "win32":
        yield
        return

    def pause(_number: int, _frame: FrameType | None) -> None:
        painter.leave()
        keys.release()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)  # stands still here until `fg`; not at all where no shell could say that
        signal.signal(signal.SIGTSTP, pause)
        keys.take()
        painter.enter()

    def end(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    handlers = {
        signal.SIGTSTP: pause,
        signal.SIGTERM: end,
        signal.SIGHUP: end,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
        self._log_drawn: LogTail | None = None
        self._eager_until = 0.0

    def over(self) -> bool:
        """True when the jobs named have ended; a view of everything stays open."""
        return not self.watching.all and self.watching.done()

    def frame(self) -> list[Text]:
        """The lines of the screen now."""
        self.screen.width, self.screen.height = self.terminal.size
        self.chosen()
        return render(self.watching.view, self.screen, Moment(self.session.now()))

    def take(self, updates: list[Update]) -> None:
        """Note what happened."""
        moment = Moment(self.session.now())
        if self.screen.log and self.watching.view.log is not self._log_drawn:
            self._log_drawn = self.watching.view.log
            self.version += 1
        for update in updates:
            self.version += self._matters(update)
            if update.job is not None and (update.before is not None or len(self.watching.view.jobs) == 1):
                seen_at = self.watching.view.hosts[update.host].seen_at
                after = self.watching.view.jobs[update.job]
                self.screen.recent += job_changes(update.before, after, moment, seen_at=seen_at)
            elif update.link == "waking":
                words = f"this laptop slept for {duration(update.slept_s)}; looking again"
                self.screen.recent.append(host_change(update.host, words, moment))
            elif update.link in {"reconnecting", "refused"}:
                problem = self.watching.view.hosts[update.host].problem
                self.screen.recent.append(host_change(update.host, f"{update.link}: {problem}", moment))
        del self.screen.recent[:-MAX_RECENT]
        if updates:
            self._follow_log()

    def _matters(self, update: Update) -> bool:
        """True for what is drawn at once; bars that moved a little wait for the next second."""
        if update.job is None or update.before is None or time.monotonic() < self._eager_until:
            return True
        view = self.watching.view.jobs[update.job]
        return bool(update.before["seq"] != view["seq"] or update.before["state"] != view["state"])

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
        self._eager_until = time.monotonic() + EAGER_S
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
            self.screen.processes = not self.screen.processes
            self.watching.show_processes(wanted=self.screen.processes)
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
            self._follow_log()

    def _toggle_log(self) -> None:
        self.screen.log = not self.screen.log
        self._follow_log()
        if self.screen.log and self.watching.wishes.log is None:
            self.screen.log, self.screen.message = False, "no log yet"

    def _follow_log(self) -> None:
        """The log of the step under way: its figures are drawn while it is hidden as well."""
        job = self.chosen()
        step = details(self.watching.view.jobs[job.id]) if job else ""
        self.watching.follow_log(job.id if job else None, step, shown=self.screen.log)

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
            self.watching.nudge(job.host)

        threading.Thread(target=work, name=f"{action}-{job_id}", daemon=True).start()
