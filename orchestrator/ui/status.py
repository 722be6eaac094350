"""`orch status` for people: one block a job, one line a step. Pure; off a terminal the lines are taken as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from orchestrator.ui.job import (
    Json,
    Moment,
    age_words,
    eta_words,
    job_duration,
    launch_words,
    lost_words,
    process_line,
    state_style,
    step_words,
)
from orchestrator.ui.parts import rows
from orchestrator.ui.text import duration, one_line, seconds_between

NOTES = 3
"""Notes shown of a job; there may be twenty."""


def status_lines(
    jobs: Sequence[Json], hosts: Sequence[Json], moment: Moment, *, processes: bool = False
) -> list[Text]:
    """All lines of a status answer (``jobs`` and ``hosts`` as in its JSON)."""
    lines: list[Text] = []
    for job in jobs:
        if lines:
            lines.append(Text(""))
        lines.extend(job_lines(job, moment, processes=processes))
        if len(jobs) == 1 or str(job.get("state")) != "succeeded":  # in a list, what went well has nothing to add
            lines.extend(note_lines(job, moment))
    if not jobs:
        lines.append(Text("No jobs. Start one with: orch launch PLAN"))
    trouble = host_lines(hosts)
    if trouble:
        lines.extend([Text(""), *trouble])
    return lines


def job_lines(job: Json, moment: Moment, *, processes: bool = False) -> list[Text]:
    """Head line and step lines of one job, without its notes."""
    state = str(job.get("state"))
    head = Text.assemble(
        (str(job.get("id")), "bold"),
        "  ",
        (state, state_style(state)),
        f"  on {one_line(str(job.get('host')))}",
    )
    for words in (
        job_duration(job, moment) if job.get("started_at") else "",
        eta_words(job.get("eta"), moment) if state not in {"succeeded", "failed", "stopped"} else "",
        lost_words(job) if state == "lost" else "",
        launch_words(job),
    ):
        if words:
            head.append(f"  {words}")
    age = age_words(job)
    if age:
        head.append(f"  ({age})", "yellow")
    found = rows(list(job.get("steps") or []))
    name_width = max((len(row.name) + 2 * row.depth for row in found), default=0)
    lines = [head]
    for row in found:
        step, name = row.step, "  " * row.depth + one_line(row.name)
        step_state = str(step.get("state"))
        line = Text("  ")
        line.append(f"{name:<{name_width}}  ")
        line.append(f"{step_state:<10}", state_style(step_state))
        line.append(f"  {row.summary or step_words(step, moment)}")
        line.rstrip()
        lines.append(line)
        if processes:
            running = [one for attempt in step.get("attempts") or [] for one in attempt.get("processes") or []]
            lines.extend(Text(f"    {process_line(one)}") for one in running)
    return lines


def note_lines(job: Json, moment: Moment) -> list[Text]:
    """The newest notes of a job: what the host did or saw beside its steps, or offers to do."""
    notes: list[Any] = list(job.get("notes") or [])
    lines = []
    for note in notes[-NOTES:]:
        ago = seconds_between(note.get("at"), None, moment.now)
        when = f" ({duration(ago)} ago)" if ago is not None else ""
        lines.append(Text(f"  note{when}: {one_line(str(note.get('text')))}", "yellow"))
    if len(notes) > NOTES:
        lines.append(Text(f"  {len(notes) - NOTES} earlier notes: orch status {job.get('id')} --json", "dim"))
    return lines


def host_lines(hosts: Sequence[Json]) -> list[Text]:
    """What people must know about the hosts asked: not reachable, clocks apart, records nobody could read."""
    lines = []
    for host in hosts:
        name = one_line(str(host.get("name")))
        error: Any = host.get("error")
        if error:
            said = one_line(str(error.get("message")))  # most begin with the host's name
            lines.append(Text(said if said.startswith(f"{name}: ") else f"{name}: {said}", "red"))
            if error.get("hint"):
                lines.append(Text(f"  {one_line(str(error['hint']))}"))
        words = skew_words(host.get("skew_s"))
        if words:
            lines.append(Text(f"{name}: {words}", "yellow"))
        for job, message in (host.get("unreadable") or {}).items():
            lines.append(Text(f"{name}: job {one_line(str(job))}: {one_line(str(message))}", "yellow"))
    return lines


def skew_words(skew_s: float | None) -> str:
    """A difference of clocks over 2 s, in words; nothing below."""
    if skew_s is None or abs(skew_s) <= 2:
        return ""
    side = "ahead of" if skew_s > 0 else "behind"
    return f"the host's clock is {duration(abs(skew_s))} {side} this laptop's"
