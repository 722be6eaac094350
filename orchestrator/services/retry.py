"""Take a job up again that failed, was stopped or is lost."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import MissingSecret
from orchestrator.core.split import for_each_range, with_whole_steps
from orchestrator.services import notify
from orchestrator.services.look import look
from orchestrator.services.resolve import FoundJob
from orchestrator.services.stop import control
from orchestrator.services.wait import never_launched, the_job

if TYPE_CHECKING:
    from orchestrator.services.session import Session


def retry(
    session: Session, job: FoundJob, *, step: str | None = None, sets: Sequence[str] = ()
) -> dict[str, Any]:
    """Ask the host to reopen the job; ``sets`` are ``step.key=value`` as for launch.

    Raises:
        ConfigError: a ``--set`` that is none, or that a launch would refuse as well; the host drops what it does not
            know, so a slip is caught here.
        WrongState: the job runs, or what is meant succeeded. UsageError: there is no such step.
        MissingSecret: the host forgot the job's secrets when it ended, and not all of them are set here.
    """
    from orchestrator.core.changes import retry_changes

    changes: dict[str, Any] = {}
    if sets:
        host, steps = session.host(job.host), _steps(session, job)
        most = host.gpus if host.scheduler == "direct" else None  # of a cluster, they are those of one node
        changes = for_each_range(retry_changes(sets, with_whole_steps(steps), most_gpus=most), steps)
    told = notify.again(job.id)
    try:
        return control(session, job, "retry", secrets=told, step=step, set=changes)
    except MissingSecret:
        secrets = _secrets_at_hand(session, job)
        if not secrets:
            raise
    return control(session, job, "retry", secrets={**secrets, **told}, step=step, set=changes)


def _secrets_at_hand(session: Session, job: FoundJob) -> dict[str, dict[str, str]]:
    """The job's secrets by the names they have in its environment; the plan that said where they are is not at hand.

    Empty unless all of them are set here.
    """
    answer = session.agent(job.host).request("look", jobs=[job.id])
    wanted = ((answer["jobs"].get(job.id) or {}).get("spec") or {}).get("secrets") or {}
    found = {step: {name: os.environ.get(name, "") for name in names} for step, names in wanted.items()}
    return found if all(value for values in found.values() for value in values.values()) else {}


def _steps(session: Session, job: FoundJob) -> list[dict[str, Any]]:
    """The job's steps as they stand, each with its `done` and `service` where it has them."""
    result = look(session, job.host, jobs=[job.id])
    if result.error is not None:
        raise result.error
    answer = result.answer or {}
    view = the_job(result.jobs, job, answer.get("unreadable") or {})
    if view["unfinished"] and not view["steps"]:
        raise never_launched(job)
    blocks = (answer["jobs"][job.id].get("spec") or {}).get("blocks") or {}
    return [{**step, **blocks.get(step["name"], {})} for step in view["steps"]]
