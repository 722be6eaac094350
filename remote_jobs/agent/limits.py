"""Time limits that ended a healthy attempt, and what the next one gets instead.

A model that loads slower than the program's own limit dies of it at every try, 10 or 20 minutes in.  Known by what
the program says: vLLM's wait for its engine (default 600 s), torch's NCCL heartbeat (480 s), our serve step's and a
service's own limit for getting ready.

Pure: no I/O, no clock.  Standard library only.
"""

from __future__ import annotations

import re
from typing import Any, Dict, Mapping, Optional, Tuple

from remote_jobs.protocol import StepSpec

READY_WITHIN = "ready_within_s"
"""The change that replaces `service.timeout_s`."""
FACTOR = 3.0
CAP_S = 6 * 3600
_ENV = re.compile(r"[A-Z][A-Z0-9_]+")
# what the program says -> (variable, its default in s)
_VARIABLES: Tuple[Tuple["re.Pattern[str]", str, float], ...] = (
    (re.compile(r"Timed out waiting for engine core processes"), "VLLM_ENGINE_READY_TIMEOUT_S", 600.0),
    (re.compile(r"watchdog got stuck for \d+ seconds|TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"), "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", 480.0),
)  # fmt: skip
_SERVE = re.compile(r"the server was not ready within (\d+) s")


def is_variable(key: str) -> bool:
    """Whether a change is one of the environment, not a parameter of the step."""
    return _ENV.fullmatch(key) is not None


def environment(changes: Mapping[str, Any]) -> Dict[str, str]:
    """The variables among the changes."""
    return {key: str(value) for key, value in changes.items() if is_variable(key)}


def raised(
    step: StepSpec, verdict: Mapping[str, Any], changes: Mapping[str, Any], env: Mapping[str, str]
) -> Dict[str, Any]:
    """Limits to raise after this verdict: three times as long, at most six hours; {} when no limit ended the attempt.

    Args:
        step: the step.
        verdict: explain's failure object.
        changes: what the attempt ran with beyond the plan.
        env: the attempt's environment.
    """
    said = [str((verdict.get("root_cause") or {}).get("text") or ""), str(verdict.get("summary") or "")]
    said += [str(item) for item in verdict.get("evidence") or ()]
    text = "\n".join(said)
    found: Dict[str, Any] = {}
    for pattern, name, default_s in _VARIABLES:
        if pattern.search(text):
            _raise(found, name, _number(env.get(name)) or default_s)
    told = _SERVE.search(text)
    if told and step.uses == "serve":
        _raise(found, "ready_timeout_s", float(told.group(1)))
    limit_s = _number(changes.get(READY_WITHIN)) or _number((step.service or {}).get("timeout_s"))
    if verdict.get("signature") == "not_ready" and limit_s:
        _raise(found, READY_WITHIN, limit_s)
    return found


def _raise(found: Dict[str, Any], name: str, now_s: float) -> None:
    if now_s < CAP_S:
        found[name] = int(min(CAP_S, now_s * FACTOR))


def _number(value: Any) -> Optional[float]:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
