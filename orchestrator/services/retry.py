"""Take a job up again that failed, was stopped or is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import ConfigError
from orchestrator.services.look import look
from orchestrator.services.resolve import FoundJob
from orchestrator.services.stop import control
from orchestrator.services.wait import the_job

if TYPE_CHECKING:
    from orchestrator.services.session import Session


def retry(
    session: Session, job: FoundJob, *, step: str | None = None, sets: Sequence[str] = ()
) -> dict[str, Any]:
    """Ask the host to reopen the job; ``sets`` are ``step.key=value`` as for launch.

    Raises:
        ConfigError: a ``--set`` that is none, or names no step or no key that a step has.
        HostRefused: the job runs, or there is no such step.
    """
    changes = read_sets(sets, _step_names(session, job)) if sets else {}
    return control(session, job, "retry", step=step, set=changes)


def _step_names(session: Session, job: FoundJob) -> list[str]:
    result = look(session, job.host, jobs=[job.id])
    if result.error is not None:
        raise result.error
    view = the_job(result.jobs, job, (result.answer or {}).get("unreadable") or {})
    return [str(step["name"]) for step in view["steps"]]


def read_sets(sets: Sequence[str], steps: Sequence[str]) -> dict[str, Any]:
    """``{"step.key": value}``; the host drops what it does not know, so a slip is caught here. Pure.

    Raises:
        ConfigError: as `retry`.
    """
    from orchestrator.core.plan import STEP_KEYS, parse_set
    from orchestrator.core.schema import suggest

    changes: dict[str, Any] = {}
    for text in sets:
        path, value = parse_set(text)
        step, _, key = path.partition(".")
        if step not in steps:
            raise ConfigError(
                f"--set {text}: the job has no step {step!r}", suggest(step, steps, "its steps")
            )
        if not key:
            raise ConfigError(f"--set {text}: no key", f"write --set {step}.with.KEY=VALUE")
        top = key.split(".", 1)[0]
        if top not in STEP_KEYS or top in {"name", "files", "needs"}:
            allowed = [name for name in STEP_KEYS if name not in {"name", "files", "needs"}]
            raise ConfigError(f"--set {text}: a step has no {top!r} to change", suggest(top, allowed))
        changes[path] = value
    return changes
