"""Fragments of one job's view: states, attempts, phases, bars, verdicts, times. Used by status, watch and why.

Pure: a view is the JSON of `orch status`; the present moment and the reader's time zone are arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from typing import Any

from orchestrator.ui.text import (
    clock_time,
    duration,
    number,
    one_line,
    parse_time,
    plural,
    seconds_between,
    size,
)

Json = Mapping[str, Any]

STATE_STYLE: Mapping[str, str] = {
    "queued": "bright_black",
    "gated": "yellow",
    "running": "cyan",
    "ready": "green",
    "retry_wait": "yellow",
    "stopping": "yellow",
    "succeeded": "green",
    "failed": "bold red",
    "stopped": "magenta",
    "lost": "bold red",
    "skipped": "bright_black",
}


@dataclass(frozen=True)
class Moment:
    """When and where the reader looks: needed to turn times into words."""

    now: datetime
    zone: tzinfo | None = None


def state_style(state: str) -> str:
    """Colour of a state; never the only carrier of meaning."""
    return STATE_STYLE.get(state, "")


def exit_words(exit_status: int | None) -> str:
    """``exit 1``, ``killed by signal 9 (SIGKILL)``, or nothing."""
    if exit_status is None:
        return ""
    if exit_status < 0:
        import signal

        try:
            name = signal.Signals(-exit_status).name
        except ValueError:
            name = ""
        return f"ended by signal {-exit_status}" + (f" ({name})" if name else "")
    return f"exit {exit_status}"


def verdict_words(verdict: Json | None) -> str:
    """``gpu_oom: CUDA out of memory while ...``, or nothing."""
    if not verdict:
        return ""
    summary = one_line(str(verdict.get("summary") or ""))
    kind = one_line(str(verdict.get("class") or "unknown"))
    return f"{kind}: {summary}" if summary else kind


def changes_words(changes: Any) -> str:
    """What an attempt changes against the one before it: ``gpu_memory_utilization 0.9 -> 0.85``."""
    if not changes:
        return ""
    if isinstance(changes, Mapping):
        words = []
        for key, value in changes.items():
            if isinstance(value, Mapping) and {"from", "to"} & set(value):
                words.append(f"{key} {value.get('from')} -> {value.get('to')}")
            else:
                words.append(f"{key}={value}")
        return one_line(", ".join(words))
    if isinstance(changes, (list, tuple)):
        return ", ".join(filter(None, (changes_words(item) for item in changes)))
    return one_line(str(changes))


def current_attempt(step: Json) -> Json | None:
    """The newest attempt of a step."""
    attempts = step.get("attempts") or []
    return attempts[-1] if attempts else None


def current_bar(attempt: Json | None) -> Json | None:
    """The bar that moves: the last unfinished one with a total, else the last one."""
    bars: list[Json] = list((attempt or {}).get("bars") or [])
    moving = [bar for bar in bars if bar.get("total") and (bar.get("done") or 0) < bar["total"]]
    chosen = moving or bars
    return chosen[-1] if chosen else None


def current_phase(attempt: Json | None) -> Json | None:
    """The phase that runs, else the last one."""
    phases: list[Json] = list((attempt or {}).get("phases") or [])
    running = [phase for phase in phases if phase.get("state") == "running"]
    chosen = running or phases
    return chosen[-1] if chosen else None


def bar_percent(bar: Json) -> float | None:
    """Percent done, from the counts where they exist (what the log prints is rounded)."""
    done, total = bar.get("done"), bar.get("total")
    if done is not None and total:
        return max(0.0, min(100.0, 100.0 * float(done) / float(total)))
    percent = bar.get("percent")
    return None if percent is None else max(0.0, min(100.0, float(percent)))


def bar_counts(bar: Json) -> str:
    """``28/64``, ``28`` without a total."""
    done, total = bar.get("done"), bar.get("total")
    if total is None:
        return number(done)
    return f"{number(done)}/{number(total)}"


def bar_label(bar: Json) -> str:
    """The bar's label with its worker, where several print the same bar."""
    label = one_line(str(bar.get("label") or "progress")).rstrip(":") or "progress"
    worker = bar.get("worker")
    return f"{label} [{one_line(str(worker))}]" if worker else label


def rate_words(bar: Json) -> str:
    """``22.4 s each`` or ``3.1 /s``."""
    per_item = bar.get("s_per_item")
    if not per_item:
        return ""
    return f"{per_item:.3g} s each" if per_item >= 1 else f"{1 / per_item:.3g} /s"


def eta_seconds(bar: Json) -> float | None:
    """Our estimate of the seconds left, else what the log says."""
    found = bar.get("eta_s")
    return found if found is not None else bar.get("remaining_s")


def eta_words(eta: Json | None, moment: Moment) -> str:
    """``ready 14:32 - 14:38``: our range on the reader's clock."""
    if not eta:
        return ""
    low, high = eta.get("low_s"), eta.get("high_s")
    if low is not None and high is not None:
        first = clock_time(moment.now + timedelta(seconds=float(low)), moment.now, moment.zone)
        last = clock_time(moment.now + timedelta(seconds=float(high)), moment.now, moment.zone)
        return f"ready {first}" if first == last else f"ready {first} - {last}"
    at = parse_time(eta.get("at"))
    return f"ready {clock_time(at, moment.now, moment.zone)}" if at else ""


def bar_eta_words(bar: Json, moment: Moment) -> str:
    """``14:12 - 14:16, 13m35s left``: our range for the end of one bar, or one clock time where there is no range."""
    left = eta_seconds(bar)
    if left is None or bar_percent(bar) == 100.0:
        return ""
    ends = [bar.get("eta_low_s"), bar.get("eta_high_s")]
    if None in ends or bar.get("eta_s") is None:
        ends = [left, left]
    first, last = (
        clock_time(moment.now + timedelta(seconds=float(end)), moment.now, moment.zone)
        for end in ends
        if end is not None
    )
    return f"{first if first == last else f'{first} - {last}'}, {duration(left)} left"


def job_duration(job: Json, moment: Moment) -> str:
    """From the first start to the end or now; ``-`` before the start."""
    return duration(seconds_between(job.get("started_at"), job.get("ended_at"), moment.now))


def age_words(job: Json) -> str:
    """How fresh the knowledge is, and why it is not."""
    age = job.get("age_s")
    if job.get("reachable", True):
        return "" if age is None or age < 2 else f"seen {duration(age)} ago"
    since = "never seen" if age is None else f"last seen {duration(age)} ago"
    return f"host unreachable, {since}"


def step_words(step: Json, moment: Moment) -> str:
    """The one line that tells where a step stands."""
    attempt, parts = current_attempt(step), []
    state = str(step.get("state"))
    if attempt is not None:
        number_of_tries = int(attempt.get("n") or 1)
        parts.append(f"attempt {number_of_tries}" if number_of_tries > 1 else "")
        if state in {"running", "stopping", "ready", "retry_wait"} and attempt.get("ended_at") is None:
            parts.append(running_words(attempt, moment))
        else:
            took = seconds_between(attempt.get("started_at"), attempt.get("ended_at"), moment.now)
            if state not in {"queued", "gated"}:
                parts.append("" if took is None else f"took {duration(took)}")
            if attempt.get("state") not in {"succeeded", None}:
                parts.extend([exit_words(attempt.get("exit_status")), verdict_words(attempt.get("verdict"))])
    if step.get("retry_at") and state == "retry_wait":
        parts.append(
            f"next attempt {clock_time(parse_time(step['retry_at']), moment.now, moment.zone, seconds=True)}"
        )
    if step.get("waiting"):
        parts.append(one_line(str(step["waiting"])))
    elif state == "queued" and step.get("needs"):
        parts.append("needs " + ", ".join(map(str, step["needs"])))
    return ", ".join(part for part in parts if part)


def running_words(attempt: Json, moment: Moment) -> str:
    """Phase, bar and time left of an attempt under way."""
    parts = []
    phase, bar = current_phase(attempt), current_bar(attempt)
    name = one_line(str(phase.get("name"))) if phase is not None else ""
    if bar is None or bar_label(bar) != name:  # a phase's own bar names it
        parts.append(name)
    if bar is not None:
        percent = bar_percent(bar)
        text = f"{bar_label(bar)} {bar_counts(bar)}" + ("" if percent is None else f" {percent:.0f}%")
        parts.append(text)
        parts.append(bar_eta_words(bar, moment))
    took = seconds_between(attempt.get("started_at"), None, moment.now)
    parts.append(f"for {duration(took)}" if took is not None else "")
    return ", ".join(part for part in parts if part)


def launch_words(job: Json) -> str:
    """``launch not finished`` where no supervisor has taken the job up, or nothing."""
    return "launch not finished" if job.get("unfinished") else ""


def lost_words(job: Json) -> str:
    """What is known about a lost job: reason, and what still runs."""
    lost = job.get("lost")
    if not isinstance(lost, Mapping):
        return ""
    words = one_line(str(lost.get("reason") or "the supervisor is gone"))
    left = lost.get("processes") or []
    if left:
        words += f"; still running: {plural(len(left), 'process', 'processes')}"
        words += (
            " ("
            + ", ".join(str(item.get("pid") if isinstance(item, Mapping) else item) for item in left)
            + ")"
        )
    return words


def process_line(process: Json) -> str:
    """One process row: pid, user, state, CPU, memory, command."""
    rss, cpu = process.get("rss_mib"), process.get("cpu_pct")
    busy = "-" if cpu is None else f"{float(cpu):.0f}%"
    return (
        f"{process.get('pid'):>7} {one_line(str(process.get('user') or '?')):<8} {process.get('state') or '?'} "
        f"{busy:>6} {size(None if rss is None else float(rss) * 2**20):>9}  "
        f"{one_line(str(process.get('command') or ''))}"
    )
