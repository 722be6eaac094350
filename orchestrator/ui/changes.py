"""What is new between two views of a job, as dated one-line facts: plain `watch`, and the live view's recent lines.

Pure. A fact carries the time the host recorded where there is one, so that what happened while nobody looked is told
with its own times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from orchestrator.ui.job import (
    Json,
    Moment,
    bar_counts,
    bar_eta_words,
    bar_label,
    bar_percent,
    changes_words,
    eta_words,
    exit_words,
    launch_words,
    lost_words,
    rate_words,
    verdict_words,
)
from orchestrator.ui.text import duration, iso, one_line, seconds_between

ENDED = frozenset({"succeeded", "failed", "stopped", "lost"})
MARK_PERCENT = 10
"""A bar gets a line when it passes a multiple of this; a line per update would drown the rest."""


@dataclass(frozen=True)
class Change:
    """One fact. ``at`` is ISO UTC; ``tone`` is good, bad, warn or plain."""

    at: str
    host: str
    job: str
    step: str
    text: str
    tone: str = "plain"

    def line(self) -> str:
        """The plain line: date, host, job, step, words."""
        where = f"{self.job} {self.step}" if self.step else self.job
        return (
            f"{self.at} {self.host} {where}: {self.text}" if where else f"{self.at} {self.host}: {self.text}"
        )


_TONE: Mapping[str, str] = {
    "succeeded": "good",
    "ready": "good",
    "failed": "bad",
    "lost": "bad",
    "stopped": "warn",
    "gated": "warn",
    "retry_wait": "warn",
    "stopping": "warn",
}


def job_changes(
    before: Json | None, after: Json, moment: Moment, *, seen_at: datetime | None = None
) -> list[Change]:
    """Facts that ``after`` has and ``before`` has not, oldest first. ``before`` None: the whole story so far.

    ``seen_at``: the host's clock when it said so, which all its own times are by. By this laptop's clock, and a moment
    later, "queued" would be younger than the start that the next answer tells of.
    """
    host, job = one_line(str(after.get("host"))), str(after.get("id"))
    found: list[Change] = []
    over = str(after.get("state")) in {"succeeded", "failed", "stopped"}
    # What has no time of its own was so by now, and not after the job's end.
    undated = _time(after.get("ended_at") if over else None, seen_at or moment.now)

    def add(text: str, *, at: Any = None, step: str = "", tone: str = "plain") -> None:
        found.append(Change(_time(at, moment.now) if at else undated, host, job, one_line(step), text, tone))

    old_steps = {step["name"]: step for step in (before or {}).get("steps") or []}
    for step in after.get("steps") or []:
        old = old_steps.get(step["name"])
        for fact in _step_facts(old, step, moment):
            add(fact.text, at=fact.at, step=str(step["name"]), tone=fact.tone)
    old_notes = list((before or {}).get("notes") or [])
    for note in after.get("notes") or []:
        if note not in old_notes:
            text, at = (note.get("text"), note.get("at")) if isinstance(note, Mapping) else (note, None)
            add(one_line(str(text)), at=at, tone="warn")
    state, old_state = str(after.get("state")), (before or {}).get("state")
    if state != old_state:
        words = [state]
        if state == "lost":
            words.append(lost_words(after))
        elif after.get("ended_at") and over:
            took = seconds_between(after.get("started_at"), after.get("ended_at"), moment.now)
            words.append("" if took is None else f"after {duration(took)}")
        else:
            words.append(eta_words(after.get("eta"), moment))
        add(", ".join(word for word in words if word), tone=_TONE.get(state, "plain"))
    if launch_words(after) and not launch_words(before or {}):
        add(f"{launch_words(after)}; if it was cut short, start it anew with: orch launch PLAN", tone="warn")
    return in_order(found)


def in_order(changes: Iterable[Change]) -> list[Change]:
    """Oldest first; of one second, as they were found."""
    return sorted(changes, key=lambda change: change.at)


@dataclass(frozen=True)
class _Fact:
    text: str
    at: str | None = None
    tone: str = "plain"


def _time(at: Any, now: datetime) -> str:
    text = str(at) if at else iso(now)
    # Whole seconds: the host may write fractions.
    return text[:19] + "Z" if len(text) > 20 and text.endswith("Z") else text


def _step_facts(old: Json | None, step: Json, moment: Moment) -> Iterator[_Fact]:
    old_attempts = {attempt.get("n"): attempt for attempt in (old or {}).get("attempts") or []}
    for attempt in step.get("attempts") or []:
        yield from _attempt_facts(old_attempts.get(attempt.get("n")), attempt, moment)
    state, old_state = str(step.get("state")), (old or {}).get("state")
    waiting, old_waiting = step.get("waiting"), (old or {}).get("waiting")
    if state != old_state and state in {
        "ready",
        "skipped",
        "gated",
        "retry_wait",
        "stopping",
        "stopped",
        "lost",
    }:
        words = [state.replace("retry_wait", "waits for the next attempt")]
        if state == "retry_wait" and step.get("retry_at"):
            words.append(f"at {_time(step['retry_at'], moment.now)}")
        if waiting:
            words.append(one_line(str(waiting)))
        yield _Fact(", ".join(words), tone=_TONE.get(state, "plain"))
    elif waiting and waiting != old_waiting:
        yield _Fact(f"{state}, {one_line(str(waiting))}", tone="warn" if state == "gated" else "plain")


def _attempt_facts(old: Json | None, attempt: Json, moment: Moment) -> Iterator[_Fact]:
    number = attempt.get("n")
    prefix = f"attempt {number}"
    if old is None:
        words = changes_words(attempt.get("changes"))
        yield _Fact(f"{prefix} started" + (f" with {words}" if words else ""), attempt.get("started_at"))
    yield from _phase_facts((old or {}).get("phases") or [], attempt.get("phases") or [], prefix)
    yield from _bar_facts((old or {}).get("bars") or [], attempt.get("bars") or [], prefix, moment)
    state = str(attempt.get("state"))
    if state in ENDED and (old or {}).get("state") not in ENDED:
        took = seconds_between(attempt.get("started_at"), attempt.get("ended_at"), moment.now)
        # The verdict comes a moment after the end: until then it has only ended.
        judged = state != "failed" or bool(attempt.get("verdict"))
        words = ", ".join(
            word
            for word in (
                f"{prefix} {state if judged else 'ended'}",
                exit_words(attempt.get("exit_status")) if state != "succeeded" else "",
                verdict_words(attempt.get("verdict")),
                "" if took is None else f"after {duration(took)}",
            )
            if word
        )
        yield _Fact(words, attempt.get("ended_at"), _TONE.get(state, "plain"))
    elif old is not None and attempt.get("verdict") and attempt["verdict"] != old.get("verdict"):
        yield _Fact(f"{prefix} {state}: {verdict_words(attempt['verdict'])}", None, _TONE.get(state, "plain"))


def _phase_facts(old: Sequence[Json], phases: Sequence[Json], prefix: str) -> Iterator[_Fact]:
    for index, phase in enumerate(phases):
        before = old[index] if index < len(old) else None
        state = phase.get("state")
        if before is not None and before.get("state") == state:
            continue
        name = one_line(str(phase.get("name")))
        if state == "running":
            yield _Fact(f"{prefix}: {name}", phase.get("started_at"))
        else:
            took = phase.get("took_s")
            words = f"{prefix}: {name} {state}" + ("" if took is None else f" in {duration(float(took))}")
            yield _Fact(words, phase.get("ended_at"), "bad" if state == "failed" else "plain")


def _bar_key(bar: Json) -> tuple[Any, ...]:
    return (bar.get("label"), bar.get("worker"), bar.get("pid"), bar.get("instance"))


def _bar_facts(old: Sequence[Json], bars: Sequence[Json], prefix: str, moment: Moment) -> Iterator[_Fact]:
    before = {_bar_key(bar): bar for bar in old}
    for bar in bars:
        previous, percent = before.get(_bar_key(bar)), bar_percent(bar)
        if percent is None:
            if previous is None:
                yield _Fact(f"{prefix}: {bar_label(bar)} {bar_counts(bar)}")
            continue
        mark = int(percent // MARK_PERCENT)
        if previous is not None and mark <= int((bar_percent(previous) or 0.0) // MARK_PERCENT):
            continue
        words = [f"{prefix}: {bar_label(bar)} {bar_counts(bar)} {percent:.0f}%", rate_words(bar)]
        eta = bar_eta_words(bar, moment)
        words.append(f"ready {eta}" if eta else "")
        yield _Fact(", ".join(word for word in words if word))


def host_change(name: str, text: str, moment: Moment, tone: str = "warn") -> Change:
    """A fact about a host: link lost, back, clocks apart."""
    return Change(iso(moment.now), one_line(name), "", "", one_line(text), tone)
