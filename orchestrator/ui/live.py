"""The live view of `orch watch` as a pure function: a view and a screen give the lines, each cropped to the width.

Two frames of the same state are equal, so nothing flickers. Parts: `tree` (jobs), `machines` (hosts and GPUs), `tail`
(log, last facts); here it is decided which of them get how much room.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from orchestrator.services.views import LogTail, WatchView, interesting_step
from orchestrator.ui.job import Moment, state_style
from orchestrator.ui.machines import gpu_lines, link_lines
from orchestrator.ui.screen import Screen, crop, fit, window
from orchestrator.ui.tail import log_lines, recent_lines
from orchestrator.ui.text import clock_time, one_line
from orchestrator.ui.tree import job_tree

KEYS = "q leave  l log  p processes  g gpus  s stop  r retry  ? help"
HELP = (
    "q, Ctrl-C   leave; the jobs go on",
    "up, down    choose a job (also k, j)",
    "l           show or hide the log of the chosen job's step",
    "p           show or hide its processes",
    "g           show or hide the GPUs",
    "s           stop the chosen job (asks first)",
    "r           take the chosen job up again (asks first)",
    "space       look now",
    "?           hide this help",
    "",
    "ready 14:32 - 14:38   when the job will be over, by our forecast",
    "looked 2s ago         how old what you see is; next: when it is looked at again, unless something happens first",
)
LEAST_ROOM = 3
LEAST_JOBS = 4
LEAST_LOG = 4
ROOM_FOR_GPUS = 10
ROOM_FOR_NEWS = 18
"""From this height of the body on, the last facts keep a fifth of it, however many jobs there are."""


def render(view: WatchView, screen: Screen, moment: Moment) -> list[Text]:
    """The whole screen: at most ``screen.height`` lines of at most ``screen.width`` columns."""
    head = [_title(view, screen, moment), *link_lines(view, moment), Text("")]
    foot = [_foot(screen)]
    room = max(LEAST_ROOM, screen.height - len(head) - len(foot))
    if screen.help:
        body = [Text(f"  {line}") for line in HELP]
    else:
        body = _body(view, screen, moment, room)
    body = fit(body, room)
    # The foot stays at the bottom, so that the eye finds the keys while the rest grows and shrinks.
    lines = [*head, *body, *([Text("")] * (room - len(body))), *foot]
    return [crop(line, screen.width, unicode=screen.unicode) for line in [*lines[: screen.height - 1], lines[-1]]]


def _body(view: WatchView, screen: Screen, moment: Moment, room: int) -> list[Text]:
    tree = job_tree(view, screen, moment)
    least = 0
    if screen.log:
        least = max(LEAST_LOG, room // 3) + 1
    elif screen.recent and room >= ROOM_FOR_NEWS:
        least = min(len(screen.recent), room // 5) + 1
    # Where not every job is in sight, or the log wants room, the GPUs are summed up in one line.
    spare = max(room - least - len(tree.lines) - 1, 1 if room >= ROOM_FOR_GPUS else 0)
    gpus = gpu_lines(view, screen, _gpu_host(view, screen), spare) if screen.gpus else []
    gpus = [Text(""), *gpus] if gpus else []
    jobs = window(tree.lines, max(LEAST_JOBS, room - least - len(gpus)), tree.focus)
    left = room - len(jobs) - len(gpus) - 1
    below: list[Text] = []
    if screen.log:
        below = _log(view.log, screen, left)
    elif screen.recent and left > 0:
        below = recent_lines(screen.recent[-left:], moment)
    return [*jobs, *gpus, *([Text(""), *below] if below else [])]


def _log(log: LogTail | None, screen: Screen, room: int) -> list[Text]:
    if log is None:
        return [Text("log: not here yet", "bright_black")]
    head, *lines = log_lines(log, screen)
    return [head, *lines[-max(1, room - 1) :]]


def _gpu_host(view: WatchView, screen: Screen) -> str | None:
    """With several hosts, the one whose GPUs matter now: the chosen job's."""
    if len(view.hosts) <= 1:
        return None
    job = view.jobs.get(screen.chosen or "") or next(iter(view.jobs.values()), None)
    return str(job["host"]) if job else None


def _title(view: WatchView, screen: Screen, moment: Moment) -> Text:
    states: dict[str, int] = {}
    for job in view.jobs.values():
        states[str(job.get("state"))] = states.get(str(job.get("state")), 0) + 1
    line = Text.assemble(("orch watch", "bold"), "  ")
    for index, (state, count) in enumerate(states.items()):
        line.append(", " if index else "").append(f"{count} {state}", state_style(state))
    if not states:
        line.append("no active jobs", "bright_black")
    clock = clock_time(moment.now, moment.now, moment.zone, seconds=True)
    return line.append(" " * max(2, screen.width - line.cell_len - len(clock))).append(clock)


def _foot(screen: Screen) -> Text:
    if screen.question:
        return Text(f"{screen.question} [y/N]", "bold yellow")
    if screen.message:
        return Text.assemble((one_line(screen.message), "bold"), ("   " + KEYS, "bright_black"))
    return Text(KEYS, "bright_black")


def details(job: Mapping[str, Any]) -> str:
    """The step whose log a key press shows: running, failed, or the last started."""
    step = interesting_step(list(job.get("steps") or []))
    return str(step["name"]) if step else ""
