"""Jobs in the live view: steps and attempts as a tree, phases with time spent and left, bars with their end. Pure.

Lines are built by hand instead of with nested tables: what is shown at 60 and at 200 columns is decided here, nothing
is reflowed. With several jobs the chosen one is unfolded, each other one is one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from rich.text import Text

from orchestrator.core.states import OVER
from orchestrator.services.views import LogTail, WatchView, interesting_step
from orchestrator.ui.job import (
    Json,
    Moment,
    age_words,
    bar_counts,
    bar_eta_words,
    bar_label,
    bar_percent,
    changes_words,
    current_attempt,
    current_bar,
    current_phase,
    eta_words,
    exit_words,
    job_duration,
    launch_words,
    lost_words,
    process_line,
    rate_words,
    state_style,
    step_words,
    verdict_words,
)
from orchestrator.ui.parts import rows
from orchestrator.ui.screen import WIDE, Line, Screen, gauge
from orchestrator.ui.sparks import figures_line
from orchestrator.ui.text import clock_time, duration, one_line, parse_time, plural, seconds_between

INDENT = 5
ATTEMPTS_SHOWN = 4
PHASES_SHOWN = 5
BARS_SHOWN = 4
PROCESSES_SHOWN = 12
QUIET_S = 60.0
"""A log without a new byte for longer than this is mentioned."""
ACTIVE = frozenset({"running", "stopping", "ready"})


@dataclass
class Tree:
    """The lines of all jobs, and which of them the eye should find: what runs in the chosen job."""

    lines: list[Line] = field(default_factory=list)
    focus: range = range(0)


def job_tree(view: WatchView, screen: Screen, moment: Moment) -> Tree:
    """Every job, in order of appearance."""
    jobs = list(view.jobs.values())
    if not jobs:
        return Tree([Text("  nothing runs; start something with: orch launch PLAN", "bright_black")])
    chosen = screen.chosen if screen.chosen in view.jobs else str(jobs[0]["id"])
    tree = Tree()
    columns = _columns(jobs, many_hosts=len(view.hosts) > 1)
    for job in jobs:
        if job["id"] != chosen:
            tree.lines.append(partial(_folded, job, columns, moment))
            continue
        if tree.lines:
            tree.lines.append(Text(""))
        start = len(tree.lines)
        log = view.log if view.log is not None and view.log.job == job["id"] else None
        tree.lines.extend(_head(job, "> " if len(jobs) > 1 else "", screen, moment))
        tree.lines.extend(_steps(job, screen, moment, log))
        tree.focus = range(start, len(tree.lines))
        if job is not jobs[-1]:
            tree.lines.append(Text(""))
    return tree


# ------------------------------------------------------------------------------------------------------------ one line


def _columns(jobs: Sequence[Json], *, many_hosts: bool) -> tuple[int, int, int]:
    """Widths of id, state and host (0: one host only, its name is in the line above)."""
    return (
        max(len(str(job.get("id"))) for job in jobs),
        max(len(str(job.get("state"))) for job in jobs),
        max(len(one_line(str(job.get("host")))) for job in jobs) if many_hosts else 0,
    )


def _folded(job: Json, columns: tuple[int, int, int], moment: Moment) -> Text:
    state = str(job.get("state"))
    line = Text(f"  {job.get('id')!s:<{columns[0]}}  ")
    line.append(f"{state:<{columns[1]}}", state_style(state))
    if columns[2]:
        line.append(f"  {one_line(str(job.get('host'))):<{columns[2]}}", "bright_black")
    eta = "" if state in OVER else eta_words(job.get("eta"), moment)
    if eta:
        line.append(f"  {eta}", "cyan")
    words = age_words(job) or _now_words(job, moment)
    line.append(f"  {words}", "yellow" if age_words(job) else "") if words else None
    return line


def _now_words(job: Json, moment: Moment) -> str:
    """Where a folded job is: the step under way with its phase and bar, or how it ended."""
    state = str(job.get("state"))
    if state == "lost":
        return lost_words(job)
    step = interesting_step(list(job.get("steps") or []))
    if step is None and launch_words(job):
        return launch_words(job)
    if step is None:
        waiting = [str(item["waiting"]) for item in job.get("steps") or [] if item.get("waiting")]
        return one_line(waiting[0]) if waiting else ""
    attempt = current_attempt(step)
    if state in OVER:
        took = f"took {job_duration(job, moment)}"
        verdict = verdict_words((attempt or {}).get("verdict")) if state == "failed" else ""
        return ", ".join(word for word in (took, f"{step['name']}: {verdict}" if verdict else "") if word)
    phase, bar = current_phase(attempt), current_bar(attempt)
    percent = bar_percent(bar) if bar else None
    words = [
        f"attempt {attempt['n']}" if attempt and int(attempt.get("n") or 1) > 1 else "",
        one_line(str(phase.get("name"))) if phase else "",
        "" if bar is None or percent is None else f"{bar_counts(bar)} {percent:.0f}%",
        one_line(str(step["waiting"])) if step.get("waiting") else "",
    ]
    return f"{one_line(str(step['name']))}: " + (", ".join(word for word in words if word) or str(step["state"]))


# ----------------------------------------------------------------------------------------------------------- unfolded


def _head(job: Json, marker: str, screen: Screen, moment: Moment) -> list[Text]:
    state = str(job.get("state"))
    head = Text.assemble((marker, "bold"), (str(job.get("id")), "bold"), "  ", (state, state_style(state)))
    head.append(f"  on {one_line(str(job.get('host')))}")
    if job.get("started_at"):
        head.append(f"  {job_duration(job, moment)}")
    facts = []
    eta = eta_words(job.get("eta"), moment) if state not in OVER else ""
    if eta:
        facts.append(Text(eta, "bold cyan"))
    if state == "lost":
        facts.append(Text(lost_words(job), "red"))
    if launch_words(job):
        facts.append(Text(launch_words(job), "yellow"))
    if job.get("stop_requested") and state not in OVER:
        facts.append(Text("stop requested", "yellow"))
    age = age_words(job)
    if age:
        facts.append(Text(f"({age})", "yellow"))
    if not facts:
        return [head]
    tail = Text("  ").join(facts)
    if head.cell_len + 2 + tail.cell_len <= screen.width:
        return [head.append("  ").append_text(tail)]
    return [head, Text("   ").append_text(tail)]


def _steps(job: Json, screen: Screen, moment: Moment, log: LogTail | None) -> list[Text]:
    found = rows(list(job.get("steps") or []))
    width = max((2 * row.depth + len(one_line(row.name)) for row in found), default=0)
    lines: list[Text] = []
    for index, row in enumerate(found):
        step, name = row.step, "  " * row.depth + one_line(row.name)
        branch, trunk = _branches(screen, last=index == len(found) - 1)
        state = str(step.get("state"))
        line = Text.assemble((f" {branch} ", "bright_black"), f"{name:<{width}}  ")
        line.append(f"{state:<10}", state_style(state))
        attempts = list(step.get("attempts") or [])
        unfolded = bool(attempts) and not row.depth and (state in ACTIVE or len(attempts) > 1)
        words = row.summary or (_short_words(step, moment) if unfolded else step_words(step, moment))
        line.append(f"  {words}" if words else "")
        line.rstrip()
        lines.append(line)
        if unfolded:
            figures = log if log is not None and log.step == step["name"] else None
            for attempt in attempts[-ATTEMPTS_SHOWN:]:
                own = figures if figures is not None and figures.attempt == attempt.get("n") else None
                lines.extend(_attempt(attempt, trunk, screen, moment, own, many=len(attempts) > 1))
    return lines


def _short_words(step: Json, moment: Moment) -> str:
    """What the step's own line says when its attempts are shown below."""
    parts = []
    if step.get("state") == "retry_wait" and step.get("retry_at"):
        at = clock_time(parse_time(step["retry_at"]), moment.now, moment.zone, seconds=True)
        parts.append(f"next attempt {at}")
    if step.get("waiting"):
        parts.append(one_line(str(step["waiting"])))
    if len(step.get("attempts") or []) > 1:
        parts.append(plural(len(step["attempts"]), "attempt"))
    return ", ".join(parts)


def _branches(screen: Screen, *, last: bool) -> tuple[str, str]:
    if screen.unicode:
        return ("└", " ") if last else ("├", "│")
    return ("`", " ") if last else ("|", "|")


def _attempt(
    attempt: Json, trunk: str, screen: Screen, moment: Moment, log: LogTail | None, *, many: bool
) -> list[Text]:
    state = str(attempt.get("state"))
    running = attempt.get("ended_at") is None
    lines: list[Text] = []
    indent = f" {trunk}   "

    def add(text: Text | str, style: str = "") -> None:
        piece = text if isinstance(text, Text) else Text(text, style)
        lines.append(Text.assemble((indent, "bright_black"), piece))

    if many or not running:
        words = [
            exit_words(attempt.get("exit_status")) if state != "succeeded" else "",
            verdict_words(attempt.get("verdict")),
            duration(seconds_between(attempt.get("started_at"), attempt.get("ended_at"), moment.now)),
            "with " + changes_words(attempt["changes"]) if attempt.get("changes") else "",
        ]
        add(
            Text.assemble(
                f"attempt {attempt.get('n')}  ",
                (state, state_style(state)),
                "  " + ", ".join(word for word in words if word),
            )
        )
    if not running:
        return lines
    phases = _phases(attempt, moment)
    if phases is not None:
        add(phases)
    for bar in _bars(attempt):
        add(bar_line(bar, screen, moment))
    figures = figures_line(log.metrics, screen.width - INDENT, screen) if log is not None else None
    if figures is not None:
        add(figures)
    quiet_s = attempt.get("log_quiet_s")
    if quiet_s is not None and quiet_s > QUIET_S:
        add(f"no output for {duration(quiet_s)}", "yellow")
    if screen.processes:
        processes = list(attempt.get("processes") or [])
        for process in processes[:PROCESSES_SHOWN]:
            add(process_line(process))
        if len(processes) > PROCESSES_SHOWN:
            add(f"... and {len(processes) - PROCESSES_SHOWN} more processes", "bright_black")
    return lines


def _phases(attempt: Json, moment: Moment) -> Text | None:
    phases = list(attempt.get("phases") or [])
    if not phases:
        took = seconds_between(attempt.get("started_at"), None, moment.now)
        return Text(f"for {duration(took)}") if took is not None else None
    line = Text("... " if len(phases) > PHASES_SHOWN else "", "bright_black")
    for index, phase in enumerate(phases[-PHASES_SHOWN:]):
        state = str(phase.get("state"))
        if index:
            line.append(" > ", "bright_black")
        took = phase.get("took_s")
        if took is None and state == "running":
            began = phase.get("started_at") or (attempt.get("started_at") if len(phases) == 1 else None)
            took = seconds_between(began, None, moment.now)
        style = "bold cyan" if state == "running" else "red" if state == "failed" else "green"
        line.append(one_line(str(phase.get("name"))), style)
        line.append(f" {duration(took)}" if took is not None else "")
        left = phase.get("left_s")
        if state == "running" and left is not None:
            line.append(f", {duration(left)} left" if left > 0 else ", longer than usual", "" if left > 0 else "yellow")
    return line


def _bars(attempt: Json) -> list[Json]:
    """Bars worth a line: those that move, else the last one; at most four."""
    bars = list(attempt.get("bars") or [])
    moving = [bar for bar in bars if (bar_percent(bar) or 0.0) < 100.0]
    return moving[-BARS_SHOWN:] or bars[-1:]


def bar_line(bar: Json, screen: Screen, moment: Moment) -> Text:
    """One bar: label, drawing, percent, counts, end, rate. A narrow terminal costs the label and the drawing first."""
    percent = bar_percent(bar)
    facts = [bar_counts(bar), bar_eta_words(bar, moment)]
    if screen.width >= WIDE:
        facts.append(rate_words(bar))
    right = "  ".join(fact for fact in facts if fact)
    label = bar_label(bar)
    room = screen.width - INDENT - len(right) - (2 if percent is None else 9)  # for label and drawing
    wide = screen.width >= WIDE
    cells = 0 if percent is None else max(10 if wide else 6, min(40, screen.width // (4 if wide else 8), room - len(label)))
    keep = max(8, room - cells)
    if len(label) > keep:
        label = label[: keep - 1] + "…" if screen.unicode else label[: keep - 1] + "~"
    line = Text(f"{label}  ")
    if percent is not None:
        line.append_text(gauge(percent / 100, cells, "cyan", screen))
        line.append(f" {percent:3.0f}%  ")
    line.append(right)
    return line
