"""Ask a job's supervisor to stop it; with ``wait`` until every process has ended."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from orchestrator.core.answers import check_record
from orchestrator.core.errors import ProtocolError
from orchestrator.core.numbers import check_seconds
from orchestrator.core.schema import MAX_DURATION_S
from orchestrator.services.look import job_view, look, remember
from orchestrator.services.resolve import FoundJob
from orchestrator.services.wait import steps_meant
from orchestrator.services.wait import wait as wait_for

if TYPE_CHECKING:
    from orchestrator.services.session import Session

SETTLE_LOOKS = 5
ACKNOWLEDGE_S = 10.0
"""How long the host waits for the supervisor's word before it answers."""


def control(
    session: Session, job: FoundJob, action: str, *, secrets: Mapping[str, Any] | None = None, **args: Any
) -> dict[str, Any]:
    """One request to a supervisor, repeated safely after a broken link (the host folds equal requests into one).

    ``secrets`` travel beside the request: what is in it becomes a record on the host.
    """
    return _asked(session, job, action, secrets=secrets, **args)[0]


def _asked(
    session: Session, job: FoundJob, action: str, *, secrets: Mapping[str, Any] | None = None, **args: Any
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """The answer of `control`, and the job's state or view that it was made of."""
    given = {key: value for key, value in args.items() if value not in (None, "", {})}
    more: dict[str, Any] = {"secrets": secrets} if secrets else {}
    answer = session.agent(job.host).request(
        "control", job=job.id, action=action, args=given, wait_s=ACKNOWLEDGE_S, **more
    )
    state, seq = answer.get("state") or {}, answer.get("seq")
    if state:
        _remember(session, job, state)
    if seq is not None and int(state.get("seq") or 0) < int(seq):
        # The word was given, and the state that shows it is being written: who asks next must not see the old one.
        state = _state_since(session, job, int(seq)) or state
    document = {
        "job": job.id,
        "host": job.host,
        "acknowledged": bool(answer.get("acknowledged")),
        "seq": seq,
        "state": state.get("state"),
        **({"limits_s": answer["limits_s"]} if answer.get("limits_s") is not None else {}),
        **({"steps": answer["steps"]} if answer.get("steps") else {}),
    }
    return document, state


def _state_since(session: Session, job: FoundJob, seq: int) -> dict[str, Any] | None:
    """The job's view once it shows event ``seq``; None when it does not within a few seconds."""
    for _ in range(SETTLE_LOOKS):
        result = look(session, job.host, jobs=[job.id], seen={job.id: seq - 1}, wait_s=1.0)
        for view in result.jobs:
            if view["seq"] >= seq:
                remember(session, [view])
                return view
    return None


def _remember(session: Session, job: FoundJob, state: Mapping[str, Any]) -> None:
    """Keep the answered state in the ledger: the next launch of this plan must not take the job for what it was."""
    row = session.ledger.job(job.id)
    if row is None or row.view is None:
        return  # the next look brings more than this answer
    record = {"state": state, "spec": {key: row.view.get(key) for key in ("workdir", "plan_sha256")}}
    with contextlib.suppress(ProtocolError):  # the job is obeyed all the same
        check_record(job.id, record)
        remember(session, [job_view(job.host, job.id, record, age=0.0)])


def stop(
    session: Session,
    job: FoundJob,
    *,
    step: str | None = None,
    wait: bool = False,
    timeout_s: float | None = None,
    reason: str = "",
) -> dict[str, Any]:
    """Stop a job or one step of it; a job that has ended already is left as it is.

    ``state`` of the answer is the job's; with ``step``, ``stopping`` is {step: its state} of it, or of its ranges.

    Raises:
        WaitTimeout: with ``wait``, the job or the step has not ended in time.
        NoSuchJob, UsageError: no such job or step, or ``timeout_s`` is no time. WrongState: its launch was cut short.
    """
    if timeout_s is not None:
        check_seconds("time to wait", timeout_s, MAX_DURATION_S, zero=True)
    answer, view = _asked(session, job, "stop", step=step, reason=reason)
    if wait:
        view = wait_for(session, job, step=step, timeout_s=timeout_s)
        answer.update(state=view["state"], acknowledged=True)
    if step is not None:
        answer["stopping"] = {str(one["name"]): str(one["state"]) for one in steps_meant(view, step)}
    return answer
