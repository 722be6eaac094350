"""Which requests the state of a job leaves room for, and what a retry of one step takes up again.

A refusal from here is no trouble of the host: asked again, it is refused again.  Of states and specs alone, no I/O.
Standard library only.
"""

from __future__ import annotations

from typing import Any, List, Mapping, Optional, Sequence

from remote_jobs import protocol
from remote_jobs.agent import ready
from remote_jobs.agent.launching import AgentError

WRONG_STATE = "wrong_state"
ANEW = "start it anew with: orch launch PLAN"


def check(action: str, state: Mapping[str, Any], steps: Sequence[str], *, alive: bool) -> None:
    """Refuse what would change nothing, or what would come too early or too late.

    Args:
        action: stop, retry or extend.
        state: of the job, as it is looked at.
        steps: names of the steps that are meant; empty for the whole job.
        alive: does a supervisor of it live?

    Raises:
        AgentError: wrong_state.
    """
    job, name = state.get("id"), state.get("state")
    if action == "stop" and steps and name == "lost":
        raise AgentError(
            WRONG_STATE,
            "job {} is lost: no supervisor is left that could stop one of its steps".format(job),
            "end all of it: orch stop {0}; or clean up and go on: orch retry {0}".format(job),
        )
    if action == "retry" and name == "succeeded":
        raise AgentError(WRONG_STATE, "job {} succeeded: nothing to retry".format(job), ANEW)
    if action == "retry" and name in ("running", "stopping", "gated", "queued") and alive:
        raise AgentError(
            WRONG_STATE,
            "job {} is {}: a retry needs an ended, lost or waiting job".format(job, name),
            ("wait until it has stopped: orch wait {}" if name == "stopping" else "stop it first: orch stop {}").format(job),
        )
    if action == "retry" and steps and all(_state_of(state, one) == "succeeded" for one in steps):
        raise AgentError(WRONG_STATE, "step {} of job {} succeeded: nothing to retry".format(", ".join(steps), job), ANEW)
    if action == "extend" and name in protocol.JOB_TERMINAL:
        raise AgentError(WRONG_STATE, "job {} is over ({})".format(job, name), ANEW if name == "succeeded" else "take it up again with: orch retry {}".format(job))


def runs_again(spec: protocol.JobSpec, before: Mapping[str, Any], reopened: Sequence[str]) -> List[str]:
    """Of the steps that a retry reopened, those that run again: what succeeded stays, but for a service with work to do.

    Args:
        before: the job's state before it was reopened.
        reopened: as the event says.
    """

    def open_again(step: protocol.StepSpec) -> bool:
        return _state_of(before, step.name) != "succeeded"

    steps = [step for step in spec.step_specs() if step.name in reopened]
    return [
        step.name
        for step in steps
        if open_again(step) or (ready.is_service(step) and any(step.name in user.needs and open_again(user) for user in steps))
    ]


def _state_of(state: Mapping[str, Any], step: str) -> Optional[str]:
    return next((str(item["state"]) for item in state.get("steps") or [] if item["name"] == step), None)
