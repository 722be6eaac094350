"""`orch history` for people: one line a job. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.core.schema import nearest, suggest
from orchestrator.ui.job import Json, Moment
from orchestrator.ui.text import clock_time, columns, duration, one_line, parse_time, seconds_between


def score_line(score: Json | None) -> str | None:
    """One line on how good the ETAs were, beside what the bars themselves said."""
    if not score:
        return None
    line = f"Forecasts: {score['count']}, off by {score['median_error']:.0%} of the time left (median)"
    if score.get("printed_median_error") is not None:
        line += f"; the bars themselves by {score['printed_median_error']:.0%}"
    return line + "."


def hours(spent: Json | None) -> tuple[str, str]:
    """GPU hours spent and lost as two cells."""
    if not spent or not spent["spent"]:
        return "-", "-"
    return f"{spent['spent']:.1f}", f"{spent['lost']:.1f}" if spent["lost"] else "-"


def hours_line(spent: Json | None) -> str | None:
    """One line on the GPU hours of all jobs listed."""
    if not spent or not spent["spent"]:
        return None
    lost = f", {spent['lost']:.1f} of them lost to failed attempts" if spent["lost"] else ""
    return f"GPU hours: {spent['spent']:.1f}{lost}."


PLANS_SHOWN = 20


def no_such_plan(plan: str, names: Sequence[str]) -> str:
    """One line for a list that is empty because no job is of this plan: the nearest name, and the newest ones."""
    alike = nearest(plan, names)
    shown = list(dict.fromkeys([*([alike] if alike else []), *names]))[:PLANS_SHOWN]
    more = f", and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return one_line(f"No job is of plan {plan!r}; {suggest(plan, shown, 'plans')}{more}.")


def history_lines(jobs: Sequence[Json], moment: Moment) -> list[str]:
    """A table, newest first."""
    if not jobs:
        return ["No jobs yet."]
    rows = [["JOB", "HOST", "STATE", "STARTED", "TOOK", "GPU-H", "LOST", "ATTEMPTS", "VERDICTS"]]
    for job in jobs:
        verdicts = [str(name) for step in job.get("steps") or [] for name in step.get("verdicts") or []]
        took = seconds_between(job.get("started_at"), job.get("ended_at"), moment.now)
        rows.append(
            [
                str(job["id"]),
                one_line(str(job.get("host"))),
                str(job.get("state")),
                clock_time(
                    parse_time(job.get("started_at") or job.get("created_at")), moment.now, moment.zone
                ),
                duration(took),
                *hours(job.get("gpu_hours")),
                str(job.get("attempts", 0)),
                one_line(", ".join(verdicts)) or "-",
            ]
        )
    return columns(rows)
