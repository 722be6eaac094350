"""How a job's end becomes an exit status: 0 succeeded, 1 failed or stopped, 5 lost or unknown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.core import states
from orchestrator.core.errors import JobFailed, JobLost
from remote_jobs.agent.causes import failed_steps, last_attempt


def exit_status(view: Mapping[str, Any]) -> int:
    """Exit status for a job that has ended (or is lost); 0 while it goes on."""
    state = str(view.get("state"))
    return states.exit_status(state) if states.is_over(state) else 0


def worst(statuses: list[int]) -> int:
    """The exit status for several jobs: lost before failed before fine."""
    return max(statuses, default=0)


def raise_for(view: Mapping[str, Any]) -> None:
    """Raise unless the job succeeded.

    Raises:
        JobFailed: it failed or was stopped. JobLost: its supervisor is gone.
    """
    job, host, state = view["id"], view["host"], view["state"]
    if state == "succeeded":
        return
    if state == "lost":
        lost = view.get("lost") or {}
        reason = lost.get("reason") or "its supervisor is gone without a final word"
        pids = [str(item.get("pid")) for item in lost.get("processes") or [] if isinstance(item, Mapping)]
        left = f"; still running: pid {', '.join(pids)}" if pids else ""
        raise JobLost(
            f"job {job} on {host} is lost: {reason}{left}", f"clean up and go on with: orch retry {job}"
        )
    if state == "stopped":
        raise JobFailed(f"job {job} on {host} was stopped", f"take it up again with: orch retry {job}")
    raise JobFailed(f"job {job} on {host} failed: {failure_words(view)}", f"see: orch why {job}")


def failure_words(view: Mapping[str, Any]) -> str:
    """The step that failed first, what its last attempt died of, and the names of those that failed after it."""
    failed = failed_steps(view.get("steps") or [])
    if not failed:
        return "see its steps"
    others = ", ".join(str(step["name"]) for step in failed[1:])
    after = f"; after it failed: {others}" if others else ""
    last = last_attempt(failed[0])
    unstarted = failed[0].get("waiting")  # of a failed step: why it was not started, or not again
    if last is None:
        return f"step {failed[0]['name']}" + (f", not started: {unstarted}" if unstarted else "") + after
    status, verdict = last.get("exit_status"), last.get("verdict") or {}
    ended = "" if status is None else f" (signal {-status})" if status < 0 else f" (exit {status})"
    kind = f", {verdict['class']}: {verdict.get('summary') or ''}".rstrip(": ") if verdict.get("class") else ""
    if unstarted:
        after = f"; not started again: {unstarted}{after}"
    return f"step {failed[0]['name']}, attempt {last.get('n')}{ended}{kind}{after}"
