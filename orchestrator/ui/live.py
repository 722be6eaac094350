"""The live view of `orch watch` as a pure function: a view and a screen give the lines, each cropped to the width.

Lines are built by hand instead of with nested tables: what is shown at 60 and at 200 columns is decided here, nothing
is reflowed, and two frames of the same state are equal, so nothing flickers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from orchestrator.services.views import HostView, LogTail, WatchView, interesting_step
from orchestrator.ui.changes import Change
from orchestrator.ui.job import (
    Json,
    Moment,
    age_words,
    bar_counts,
    bar_eta_words,
    bar_label,
    bar_percent,
    changes_words,
    eta_words,
    exit_words,
    job_duration,
    lost_words,
    process_line,
    rate_words,
    state_style,
    step_words,
    verdict_words,
)
from orchestrator.ui.status import skew_words
from orchestrator.ui.text import (
    clean,
    clock_time,
    duration,
    one_line,
    parse_time,
    plural,
    seconds_between,
)

TONE_STYLE: Mapping[str, str] = {"good": "green", "bad": "bold red", "warn": "yellow", "plain": ""}
LINK_STYLE: Mapping[str, str] = {
    "connected": "green",
    "connecting": "bright_black",
    "reconnecting": "yellow",
    "refused": "bold red",
}
WIDE = 100
"""From this width on a bar also shows its rate, and its drawing is longer."""
INDENT = 5
KEYS = "q leave  l log  p processes  g gpus  s stop  r retry  ? help"
HELP = (
    "q, Ctrl-C   leave; the jobs go on",
    "up, down    choose a job (also j, k)",
    "l           show or hide the log of the chosen job's step",
    "p           show or hide its processes",
    "g           show or hide the GPUs",
    "s           stop the chosen job (asks first)",
    "r           take the chosen job up again (asks first)",
    "space       look now",
    "?           hide this help",
)


@dataclass
class Screen:
    """What the person at the keyboard chose, and the size of the terminal."""

    width: int = 80
    height: int = 24
    chosen: str | None = None
    processes: bool = False
    gpus: bool = True
    help: bool = False
    unicode: bool = True
    question: str | None = None
    message: str | None = None
    recent: list[Change] = field(default_factory=list)


def render(view: WatchView, screen: Screen, moment: Moment) -> list[Text]:
    """The whole screen: at most ``screen.height`` lines of at most ``screen.width`` columns."""
    head = [_title(view, moment), *_link_lines(view, moment), Text("")]
    foot = [_foot(screen)]
    room = max(3, screen.height - len(head) - len(foot))
    if screen.help:
        body = [Text(f"  {line}") for line in HELP]
    else:
        body = _body(view, screen, moment, room)
    body = _fit(body, room)
    # The foot stays at the bottom, so that the eye finds the keys while the rest grows and shrinks.
    lines = [*head, *body, *([Text("")] * (room - len(body))), *foot]
    return [_crop(line, screen.width) for line in lines[: screen.height]]


def _body(view: WatchView, screen: Screen, moment: Moment, room: int) -> list[Text]:
    jobs = job_blocks(view, screen, moment)
    extra: list[Text] = []
    if screen.gpus:
        extra.extend(gpu_lines(view, screen))
    log = log_lines(view.log, screen) if view.log is not None else []
    used = len(jobs) + len(extra)
    if log:
        space = max(room // 3, room - used - 1)
        jobs = _fit(jobs, max(4, room - min(len(log), space) - len(extra) - 1))
        return [*jobs, *extra, Text(""), log[0], *log[1:][-(space - 1) :]]
    left = room - used - 2
    recent = recent_lines(screen.recent, moment)[-left:] if left > 1 and screen.recent else []
    return [*jobs, *extra, *([Text(""), *recent] if recent else [])]


def _title(view: WatchView, moment: Moment) -> Text:
    states: dict[str, int] = {}
    for job in view.jobs.values():
        states[str(job.get("state"))] = states.get(str(job.get("state")), 0) + 1
    words = ", ".join(f"{count} {state}" for state, count in states.items()) or "no active jobs"
    return Text.assemble(
        ("orch watch", "bold"), f"  {clock_time(moment.now, moment.now, moment.zone, seconds=True)}  {words}"
    )


def _link_lines(view: WatchView, moment: Moment) -> list[Text]:
    return [_link_line(host, moment) for host in view.hosts.values()]


def _link_line(host: HostView, moment: Moment) -> Text:
    line = Text.assemble((one_line(host.name), ""), "  ", (host.link, LINK_STYLE.get(host.link, "")))
    if host.looked_at is not None:
        line.append(f"  looked {duration(max(0.0, (moment.now - host.looked_at).total_seconds()))} ago")
    if host.link in {"connected", "reconnecting"} and host.next_look_at is not None:
        left = (host.next_look_at - moment.now).total_seconds()
        line.append(f", next {'now' if left < 0.5 else 'in ' + duration(round(left))}")
    if host.round_trip_s is not None and host.link == "connected":
        line.append(f", {host.round_trip_s * 1000:.0f} ms away")
    if host.problem:
        line.append(f"  {one_line(host.problem)}", "yellow")
    skew = skew_words(host.skew_s)
    if skew:
        line.append(f"  {skew}", "yellow")
    return line


def job_blocks(view: WatchView, screen: Screen, moment: Moment) -> list[Text]:
    """Every job as a tree; with several, only the chosen one is unfolded to its attempts."""
    lines: list[Text] = []
    jobs = list(view.jobs.values())
    chosen = screen.chosen or (str(jobs[0]["id"]) if jobs else None)
    for job in jobs:
        if lines:
            lines.append(Text(""))
        unfolded = len(jobs) == 1 or job["id"] == chosen
        marker = "" if len(jobs) == 1 else ("> " if job["id"] == chosen else "  ")
        lines.extend(_job_head(job, marker, screen, moment))
        lines.extend(_steps(job, screen, moment, unfolded=unfolded))
    return lines or [Text("  nothing runs; start something with: orch launch PLAN", "bright_black")]


def _job_head(job: Json, marker: str, screen: Screen, moment: Moment) -> list[Text]:
    state = str(job.get("state"))
    head = Text(marker)
    head.append(str(job.get("id")), "bold")
    head.append("  ")
    head.append(state, state_style(state))
    head.append(f"  on {one_line(str(job.get('host')))}")
    if job.get("started_at"):
        head.append(f"  {job_duration(job, moment)}")
    facts = []
    eta = eta_words(job.get("eta"), moment) if state not in {"succeeded", "failed", "stopped", "lost"} else ""
    if eta:
        facts.append(Text(eta, "bold cyan"))
    if state == "lost":
        facts.append(Text(lost_words(job), "red"))
    age = age_words(job)
    if age:
        facts.append(Text(f"({age})", "yellow"))
    if not facts:
        return [head]
    tail = Text("  ").join(facts)
    if head.cell_len + 2 + tail.cell_len <= screen.width:
        return [head.append("  ").append_text(tail)]
    return [head, Text("   ").append_text(tail)]


def _steps(job: Json, screen: Screen, moment: Moment, *, unfolded: bool) -> list[Text]:
    steps = list(job.get("steps") or [])
    width = max((len(str(step["name"])) for step in steps), default=0)
    lines: list[Text] = []
    for index, step in enumerate(steps):
        last = index == len(steps) - 1
        branch, trunk = _branches(screen, last=last)
        state = str(step.get("state"))
        line = Text(f" {branch} ", "bright_black")
        line.append(f"{one_line(str(step['name'])):<{width}}  ", "")
        line.append(f"{state:<10}", state_style(state))
        attempts = list(step.get("attempts") or [])
        open_step = unfolded and attempts and (state in {"running", "stopping", "ready"} or len(attempts) > 1)
        words = _short_words(step, moment) if open_step else step_words(step, moment)
        line.append(f"  {words}" if words else "")
        lines.append(line)
        if open_step:
            for attempt in attempts[-4:]:
                lines.extend(_attempt(attempt, trunk, screen, moment, many=len(attempts) > 1))
    return lines


def _short_words(step: Json, moment: Moment) -> str:
    """What the step's own line says when its attempts are shown below."""
    parts = []
    if step.get("state") == "retry_wait" and step.get("retry_at"):
        parts.append(
            f"next attempt {clock_time(parse_time(step['retry_at']), moment.now, moment.zone, seconds=True)}"
        )
    if step.get("waiting"):
        parts.append(one_line(str(step["waiting"])))
    if len(step.get("attempts") or []) > 1:
        parts.append(plural(len(step["attempts"]), "attempt"))
    return ", ".join(parts)


def _branches(screen: Screen, *, last: bool) -> tuple[str, str]:
    if screen.unicode:
        return ("└", " ") if last else ("├", "│")
    return ("`", " ") if last else ("|", "|")


def _attempt(attempt: Json, trunk: str, screen: Screen, moment: Moment, *, many: bool) -> list[Text]:
    state = str(attempt.get("state"))
    running = attempt.get("ended_at") is None
    lines: list[Text] = []
    indent = f" {trunk}   "
    if many or not running:
        line = Text(indent, "bright_black")
        line.append(f"attempt {attempt.get('n')}  ")
        line.append(state, state_style(state))
        words = [
            exit_words(attempt.get("exit_status")) if state != "succeeded" else "",
            verdict_words(attempt.get("verdict")),
            duration(seconds_between(attempt.get("started_at"), attempt.get("ended_at"), moment.now)),
            "with " + changes_words(attempt["changes"]) if attempt.get("changes") else "",
        ]
        line.append("  " + ", ".join(word for word in words if word))
        lines.append(line)
    if not running:
        return lines
    phases = _phases(attempt, moment)
    if phases is not None:
        lines.append(Text(indent, "bright_black").append_text(phases))
    lines.extend(
        Text(indent, "bright_black").append_text(bar_line(bar, screen, moment)) for bar in _bars(attempt)
    )
    if screen.processes:
        lines.extend(
            Text(indent, "bright_black").append(process_line(process))
            for process in (attempt.get("processes") or [])[:12]
        )
    return lines


def _phases(attempt: Json, moment: Moment) -> Text | None:
    phases = list(attempt.get("phases") or [])
    if not phases:
        took = seconds_between(attempt.get("started_at"), None, moment.now)
        return Text(f"for {duration(took)}") if took is not None else None
    line = Text("")
    for phase in phases[-5:]:
        state = str(phase.get("state"))
        if line.plain:
            line.append(" > ", "bright_black")
        took = phase.get("took_s")
        if took is None and state == "running":
            took = seconds_between(phase.get("started_at") or attempt.get("started_at"), None, moment.now)
        style = "bold cyan" if state == "running" else "red" if state == "failed" else "green"
        line.append(one_line(str(phase.get("name"))), style)
        line.append(f" {duration(took)}" if took is not None else "")
        left = phase.get("left_s")
        line.append(f", {duration(left)} left" if left is not None and state == "running" else "")
    return line


def _bars(attempt: Json) -> list[Json]:
    """Bars worth a line: those that move, else the last one; at most four."""
    bars = list(attempt.get("bars") or [])
    moving = [bar for bar in bars if (bar_percent(bar) or 0.0) < 100.0]
    return moving[-4:] or bars[-1:]


def bar_line(bar: Json, screen: Screen, moment: Moment) -> Text:
    """One bar: label, drawing, percent, counts, end, rate. A narrow terminal costs the label and the drawing first."""
    percent = bar_percent(bar)
    facts = [bar_counts(bar), bar_eta_words(bar, moment)]
    if screen.width >= WIDE:
        facts.append(rate_words(bar))
    right = "  ".join(fact for fact in facts if fact)
    cells = 0 if percent is None else max(6, min(40, screen.width // (4 if screen.width >= WIDE else 8)))
    label = bar_label(bar)
    room = screen.width - INDENT - len(right) - (cells + 9 if cells else 2)
    if len(label) > room:
        keep = max(8, room)
        label = label if len(label) <= keep else label[: keep - 3] + "..."
    line = Text(f"{label}  ")
    if percent is not None:
        full = round(cells * percent / 100)
        filled, empty = ("━", "━") if screen.unicode else ("#", ".")
        line.append(filled * full, "cyan")
        line.append(empty * (cells - full), "bright_black" if screen.unicode else "")
        line.append(f" {percent:3.0f}%  ")
    line.append(right)
    return line


def gpu_lines(view: WatchView, screen: Screen) -> list[Text]:
    """One row per GPU of each host that has some."""
    lines: list[Text] = []
    for host in view.hosts.values():
        reading = host.gpus or {}
        gpus = list(reading.get("gpus") or [])
        if not gpus:
            continue
        age = reading.get("age_s")
        lines.append(Text(""))
        lines.append(
            Text.assemble((f"GPUs of {one_line(host.name)}", "bold"), f"  {duration(age)} old" if age else "")
        )
        lines.extend(_gpu_row(gpu, screen) for gpu in gpus)
    return lines


def _gpu_row(gpu: Json, screen: Screen) -> Text:
    used, total = gpu.get("memory_used_mib"), gpu.get("memory_total_mib")
    line = Text(f"  {gpu.get('index', '?')!s:>2}  ")
    if used is not None and total:
        cells = max(6, min(20, screen.width // 8))
        full = min(cells, round(cells * float(used) / float(total)))
        filled, empty = ("━", "━") if screen.unicode else ("#", ".")
        line.append(filled * full, "magenta")
        line.append(empty * (cells - full), "bright_black" if screen.unicode else "")
        line.append(f" {float(used) / 1024:5.1f}/{float(total) / 1024:.0f} GiB")
    utilization = gpu.get("utilization_pct")
    line.append(f"  {utilization:3.0f}%" if utilization is not None else "    -")
    power = gpu.get("power_w")
    line.append(f"  {power:.0f} W" if power is not None else "")
    owners = list(dict.fromkeys(str(item.get("owner")) for item in gpu.get("processes") or []))
    line.append(f"  {one_line(', '.join(owners))}" if owners else "  free" if gpu.get("clean") else "")
    if gpu.get("health") not in {None, "ok"}:
        line.append(f"  {one_line(str(gpu['health']))}", "bold red")
    return line


def recent_lines(recent: Sequence[Change], moment: Moment) -> list[Text]:
    """The last facts, oldest first."""
    lines = []
    for change in recent:
        at = clock_time(parse_time(change.at), moment.now, moment.zone, seconds=True)
        where = change.step or change.job or change.host
        lines.append(
            Text.assemble((f"  {at}  ", "bright_black"), f"{where}: ", (change.text, TONE_STYLE[change.tone]))
        )
    return lines


def log_lines(log: LogTail, screen: Screen) -> list[Text]:
    """Head line and the log's last lines: carriage returns collapsed, control sequences gone, errors coloured."""
    lines = [Text(f"log of {one_line(log.step)}, attempt {log.attempt or 'newest'}", "bold")]
    text = log.data.decode("utf-8", "replace")
    rows = text.split("\n")
    if rows and not rows[-1]:
        rows.pop()
    for row in rows[-screen.height :]:
        shown = clean(row)
        lines.append(Text(f"  {shown}", _log_style(shown)))
    return lines


def _log_style(line: str) -> str:
    lowered = line.lower()
    if any(
        word in lowered for word in ("error", "traceback", "exception", "fatal", "out of memory", "killed")
    ):
        return "red"
    return "yellow" if "warning" in lowered else ""


def _foot(screen: Screen) -> Text:
    if screen.question:
        return Text(f"{screen.question} [y/N]", "bold yellow")
    if screen.message:
        return Text.assemble((one_line(screen.message), "bold"), ("   " + KEYS, "bright_black"))
    return Text(KEYS, "bright_black")


def _fit(lines: list[Text], room: int) -> list[Text]:
    """Exactly ``room`` lines at most: what does not fit is counted, not lost silently."""
    if len(lines) <= room:
        return lines
    return [
        *lines[: room - 1],
        Text(f"  ... {len(lines) - room + 1} more lines (a taller terminal, or orch status)"),
    ]


def _crop(line: Text, width: int) -> Text:
    line = line.copy()
    line.truncate(width, overflow="ellipsis")
    return line


def details(job: Mapping[str, Any]) -> str:
    """The step whose log a key press shows: running, failed, or the last started."""
    step = interesting_step(list(job.get("steps") or []))
    return str(step["name"]) if step else ""
