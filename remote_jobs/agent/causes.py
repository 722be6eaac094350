"""Which of several failed steps is the cause, and which failed after it.  Pure, used on both sides: the host's `why` and
notifications, the laptop's `wait`, `status` and `logs` must name the same step.  Standard library only.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence

from remote_jobs.agent.times import seconds_between

FAILED = ("failed", "lost")
SERVICE_FELT_S = 60.0
"""A step that failed this short before a service it needs was seen to die most likely failed of that."""


def failed_steps(steps: Sequence[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """The failed steps of a job, the one to look at first: the one that failed first, or the service it failed of.

    Args:
        steps: the step objects of a job's state.
    """
    found = sorted((step for step in steps if step.get("state") in FAILED), key=_ended)
    for first in found[:1]:
        for other in found[1:]:
            if other.get("service") and other.get("name") in (first.get("needs") or []) and _felt(first, other):
                found.remove(other)
                return [other, *found]
    return found


def last_attempt(step: Mapping[str, Any]) -> Optional[Dict[str, Any]]:
    """The attempt that a step failed of; None when it failed before its first one."""
    attempts = step.get("attempts") or []
    return attempts[-1] if attempts else None


def _ended(step: Mapping[str, Any]) -> str:
    """When it failed; what has no time (lost, or never started) comes last."""
    return str((last_attempt(step) or {}).get("ended_at") or "~")


def _felt(step: Mapping[str, Any], service: Mapping[str, Any]) -> bool:
    apart_s = seconds_between(_ended(step), _ended(service))
    return apart_s is not None and apart_s <= SERVICE_FELT_S
