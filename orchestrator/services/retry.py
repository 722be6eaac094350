"""Take a job up again that failed, was stopped or is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.services.resolve import FoundJob
from orchestrator.services.stop import control

if TYPE_CHECKING:
    from orchestrator.services.session import Session


def retry(session: Session, job: FoundJob, *, step: str | None = None, sets: Sequence[str] = ()) -> dict[str, Any]:
    """Ask the host to reopen the job; ``sets`` are ``step.key=value`` as for launch.

    Raises:
        ConfigError: a ``--set`` that is none.
        HostRefused: the job runs, or there is no such step.
    """
    from orchestrator.core.plan import parse_set

    changes: dict[str, Any] = {}
    for text in sets:
        path, value = parse_set(text)
        changes[path] = value
    return control(session, job, "retry", step=step, set=changes)
