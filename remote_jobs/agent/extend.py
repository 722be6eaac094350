"""More time for steps that have a time limit: what may be asked, and what the limits are by the events.

A supervisor holds the added time in its memory, for the attempts that it runs: after a restart each attempt has its whole
limit anew.  Standard library only.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence

from remote_jobs import protocol
from remote_jobs.agent import control, recovery
from remote_jobs.agent.allowed import WRONG_STATE
from remote_jobs.agent.launching import AgentError

MOST_S = 366 * 86400.0


def limits_s(spec: protocol.JobSpec, events: Sequence[Mapping[str, Any]], step: Any = None) -> Dict[str, float]:
    """Step -> seconds that an attempt of it may take now: ``timeout_s``, for a service that until it is ready.

    Args:
        spec: as launched; ``orch retry --set`` is among the events.
        events: of the job, oldest first.
        step: only this one, or the ranges of this split one; None for all.
    """
    changes: Dict[str, Any] = {}
    more: Dict[str, float] = {}
    for event in events:
        kind, data = event.get("kind"), event.get("data") or {}
        if kind in ("reopened", "retry_requested"):
            changes.update(data.get("set") or {})
        elif kind == "recovered":
            more = {}
        elif kind == "extended" and _is_number(data.get("timeout_s")):
            for name in _meant(spec, event.get("step")):
                more[name] = more.get(name, 0.0) + float(data["timeout_s"])
    found = {}
    for one in spec.step_specs():
        own = recovery.with_overrides(one, changes)
        limit = own.timeout_s or (own.service or {}).get("timeout_s")
        if limit and one.name in _meant(spec, step):
            found[one.name] = float(limit) + more.get(one.name, 0.0)
    return found


def check(spec: protocol.JobSpec, state: Mapping[str, Any], events: Sequence[Mapping[str, Any]], args: Mapping[str, Any]) -> None:
    """Refuse what would change nothing.

    Raises:
        AgentError: bad_request: no time. wrong_state, no_limit: no step that is meant can still run, or has a limit.
    """
    if not _is_number(args.get("timeout_s")) or not 0 < float(args["timeout_s"]) <= MOST_S:
        raise AgentError("bad_request", "{!r} is no time to add".format(args.get("timeout_s")), "write 90s, 30m, 2h")
    step = args.get("step")
    ended = protocol.STEP_TERMINAL - {"lost"}  # of a lost job the next supervisor finds out what is over
    over = [item["name"] for item in state.get("steps") or [] if item["state"] in ended]
    if not [name for name in limits_s(spec, events, step) if name not in over]:
        what = "step {} of job {}".format(step, spec.id) if step else "job {}".format(spec.id)
        hint = "see: orch status {}".format(spec.id)
        if step in over:
            raise AgentError(WRONG_STATE, "{} is over".format(what), hint)
        raise AgentError("no_limit", "{} has no time limit (`timeout_s`) that could be moved".format(what), hint)


def _meant(spec: protocol.JobSpec, step: Any) -> List[str]:
    return [one.name for one in spec.step_specs() if control.means(step, one)]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
