"""The lower part of the live view: the end of a log, or the last facts. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rich.text import Text

from orchestrator.services.views import LogTail
from orchestrator.ui.changes import Change
from orchestrator.ui.job import Moment
from orchestrator.ui.screen import Screen
from orchestrator.ui.text import clean, clock_time, one_line, parse_time

TONE_STYLE: Mapping[str, str] = {"good": "green", "bad": "bold red", "warn": "yellow", "plain": ""}
_ERROR = re.compile(r"(?i)\b(?:\w*error|traceback|\w*exception|fatal|critical|panic|killed|out of memory|failed)\b")
_NO_ERROR = re.compile(r"(?i)\b(?:0|no) (?:\w+ )?(?:errors?|failed)\b")
_WARNING = re.compile(r"(?i)\bwarn(?:ing)?\b")


def recent_lines(recent: Sequence[Change], moment: Moment) -> list[Text]:
    """The last facts, oldest first."""
    lines = []
    jobs = {change.job for change in recent if change.job}
    for change in recent:
        at = clock_time(parse_time(change.at), moment.now, moment.zone, seconds=True)
        where = " ".join(part for part in (change.job if len(jobs) > 1 else "", change.step) if part)
        where = where or change.job or change.host
        lines.append(
            Text.assemble((f"  {at}  ", "bright_black"), f"{where}: ", (change.text, TONE_STYLE[change.tone]))
        )
    return lines


def log_lines(log: LogTail, screen: Screen) -> list[Text]:
    """Head line and the log's last lines: carriage returns collapsed, control sequences gone, errors coloured."""
    head = Text.assemble((f"log of {one_line(log.step)}, attempt {log.attempt or 'newest'}", "bold"))
    rows = log.data.decode("utf-8", "replace").split("\n")
    if rows and not rows[-1]:
        rows.pop()
    shown = [clean(row).rstrip() for row in rows[-screen.height :]]
    return [head, *(Text(f"  {line}", _style(line)) for line in shown)]


def _style(line: str) -> str:
    if _ERROR.search(line) and not _NO_ERROR.search(line):
        return "red"
    return "yellow" if _WARNING.search(line) else ""
