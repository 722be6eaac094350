"""Block until a job has ended, by long polls: the end is known within a round trip, and a lost link is no end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import (
    AuthRefused,
    HostError,
    HostKeyChanged,
    HostKeyUnknown,
    HostRefused,
    JobLost,
    OrchError,
    WaitTimeout,
    WrongState,
)
from orchestrator.core.numbers import check_seconds
from orchestrator.core.schedule import wake_pause_s
from orchestrator.core.schema import MAX_DURATION_S
from orchestrator.core.states import OVER
from orchestrator.services.look import look, remember
from orchestrator.services.pace import Pace
from orchestrator.services.resolve import FoundJob
from orchestrator.services.sleep import SleepClock
from remote_jobs.protocol import STEP_TERMINAL

if TYPE_CHECKING:
    from orchestrator.services.session import Session

NOT_LAUNCHED = "the launch of {} is not finished; if it was cut short, start it anew with: orch launch PLAN"


def wait(
    session: Session,
    job: FoundJob,
    *,
    step: str | None = None,
    timeout_s: float | None = None,
    saw: Callable[[Mapping[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """The job's view once it has ended or is lost. A link that breaks on the way is waited for, without an end.

    Args:
        step: wait for the end of this step only, or of all ranges of this split one.
        saw: is told of every view on the way.

    Raises:
        WaitTimeout: not ended in time; the job goes on. UsageError: ``timeout_s`` is no time.
        HostError: the host cannot be asked at all (first contact failed, or it refuses us).
        JobLost: the host answers and has no such job.
    """
    if timeout_s is not None:
        check_seconds("time to wait", timeout_s, MAX_DURATION_S, zero=True)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    pace, seq, wait_s, away = Pace(session, job.host), -1, 0.0, False
    met, clock, told, hint = False, SleepClock(), False, "the job goes on"
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        held = wait_s if left is None else min(wait_s, left)
        clock.woke_mono()  # a sleep before this look breaks no look
        sent = time.monotonic()
        result = look(session, job.host, jobs=[job.id], seen={job.id: seq} if seq >= 0 else {}, wait_s=held)
        if result.error is not None:
            if met and sent < clock.woke_mono():
                time.sleep(wake_pause_s())
                continue  # this laptop slept in between: the error is its own, look again before saying anything
            if not met or not worth_waiting(result.error, met=met):
                raise result.error
            if not away:
                session.say(f"orch: the link to {job.host} broke ({first_line(result.error)}); trying again")
            away = True
            pause = pace.after_error()
            time.sleep(pause if left is None else min(pause, left))
        else:
            view = the_job(result.jobs, job, (result.answer or {}).get("unreadable") or {})
            if away:
                session.say(f"orch: {job.host} answers again; the job is {view['state']}")
            met, away = True, False
            changed, seq = view["seq"] != seq, view["seq"]
            hint = NOT_LAUNCHED.format(job.id) if view.get("unfinished") else "the job goes on"
            if changed:
                remember(session, [view])
                if saw is not None:
                    saw(view)
            if view["state"] in OVER or (step is not None and ended(steps_meant(view, step))):
                return view
            if view.get("unfinished") and not changed and not told:
                told = True
                session.say(f"orch: {NOT_LAUNCHED.format(job.id)}; waiting for it")
            wait_s = pace.after([view], changed=changed)
            owed_s = pace.owed_s(sent)
            time.sleep(owed_s if left is None else min(owed_s, max(0.0, left)))
        if left is not None and left <= 0:
            what = f"job {job.id} on {job.host}" if step is None else f"step {step} of job {job.id} on {job.host}"
            raise WaitTimeout(f"{what} has not ended within {timeout_s:g} s", hint)


def never_launched(job: FoundJob) -> WrongState:
    """What is said to who wants more of a job than its launch has brought to the host."""
    what, hint = NOT_LAUNCHED.format(job.id).split("; ")
    return WrongState(what, hint)


def steps_meant(view: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """The steps of a job that a name means: the one so called, and the ranges of it where it is split."""
    return [
        step for step in view.get("steps") or [] if name in (step["name"], (step.get("part") or {}).get("of"))
    ]


def ended(steps: Sequence[Mapping[str, Any]]) -> bool:
    """True when there are some and none of them will go on by itself."""
    return bool(steps) and all(step["state"] in STEP_TERMINAL for step in steps)


def the_job(views: list[dict[str, Any]], job: FoundJob, unreadable: dict[str, str]) -> dict[str, Any]:
    """This job's view out of an answer.

    Raises:
        JobLost: the host has no such job, or cannot read its records.
    """
    for view in views:
        if view["id"] == job.id:
            return view
    reason = unreadable.get(job.id) or "its folder is not there"
    raise JobLost(
        f"job {job.id} on {job.host} is unknown: {reason}",
        f"see what is there: orch status --host {job.host}",
    )


def worth_waiting(error: OrchError, *, met: bool) -> bool:
    """True when a host may answer (again) by itself; ``met``: it has answered this process before.

    Once met, more than ``transient`` counts: a link cut in the middle of a reconnect can look like an agent that did not start, and a
    full disk over there does not stop a job. Refused keys and logins need a person.
    """
    final = (AuthRefused, HostKeyUnknown, HostKeyChanged, HostRefused)
    if not isinstance(error, HostError) or isinstance(error, final):
        return False
    return met or error.transient


def first_line(error: OrchError) -> str:
    """The first line of an error's message."""
    return error.message.split("\n", 1)[0]
