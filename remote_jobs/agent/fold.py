"""The job's state as a fold over its events: nobody assigns a state.

Pure: no I/O and no clock.  The result is the object of state.json, which `orch status` shows (see design:
{id, name, state, seq, steps: [{name, state, attempts: [...]}]}).  Standard library only.
"""

from __future__ import annotations

import re
from typing import Any, Dict, Iterable, List, Mapping, Optional

from remote_jobs import protocol

_MAX_NOTES = 50


class Fold:
    """Folds events one by one; ``state`` is the current state object (live, do not change it)."""

    def __init__(self, spec: protocol.JobSpec) -> None:
        self.spec = spec
        self.state: Dict[str, Any] = {
            "v": protocol.VERSION,
            "id": spec.id,
            "name": spec.name,
            "host": spec.host,
            "state": "queued",
            "seq": 0,
            "created_at": spec.created_at,
            "started_at": None,
            "ended_at": None,
            "eta": None,
            "stop_requested": False,
            "notes": [],
            "steps": [
                {
                    "name": step.name,
                    "uses": step.uses,
                    **({"part": step.part} if step.part else {}),
                    "needs": list(step.needs),
                    "service": step.service is not None or step.uses == "serve",
                    "state": "queued",
                    "waiting": None,
                    "retry_at": None,
                    "attempts": [],
                }
                for step in spec.step_specs()
            ],
        }
        self._finished: Optional[str] = None
        self._steps = {step["name"]: step for step in self.state["steps"]}

    def step(self, name: str) -> Dict[str, Any]:
        """State object of one step."""
        found: Dict[str, Any] = self._steps[name]
        return found

    def attempts(self, name: str) -> List[Dict[str, Any]]:
        """Attempts of one step, oldest first."""
        found: List[Dict[str, Any]] = self._steps[name]["attempts"]
        return found

    def apply(self, event: Mapping[str, Any]) -> None:
        """Take one event (JSON object of protocol.Event). Unknown kinds only move ``seq``.

        Raises:
            IllegalTransition: the event does not fit the state of its step; nothing has changed then.
        """
        kind, data = str(event["kind"]), event.get("data") or {}
        step = self._steps.get(event.get("step") or "")
        if step is not None:
            step["state"] = protocol.advance(step["state"], kind, step["name"])
            self._apply_to_step(step, kind, data, event)
        self.state["seq"] = event["seq"]
        if kind == "reopened":
            for item in self.state["steps"]:
                chosen = data.get("steps")
                if item["name"] in chosen if chosen is not None else data.get("step_filter") in (None, item["name"]):
                    item["state"] = protocol.advance(item["state"], kind, item["name"])
                    item["waiting"] = item["retry_at"] = None
        self._apply_to_job(kind, data, event)
        self.state["state"] = protocol.job_state(
            [item["state"] for item in self.state["steps"]],
            finished=self._finished,
            stopping=self.state["stop_requested"],
        )

    def _apply_to_job(self, kind: str, data: Mapping[str, Any], event: Mapping[str, Any]) -> None:
        at = event.get("at")
        if kind == "attempt_started" and self.state["started_at"] is None:
            self.state["started_at"] = at
        elif kind == "stop_requested" and not event.get("step"):
            self.state["stop_requested"] = True
        elif kind == "finished":
            self._finished = str(data.get("state", "failed"))
            self.state["ended_at"] = at
            self.state["stop_requested"] = False
        elif kind == "reopened":
            self._finished = None
            self.state["ended_at"] = None
            self.state["stop_requested"] = False
        if kind in ("note", "recovered", "reaped", "stragglers", "hang_suspected") and data.get("text"):
            self.state["notes"] = [*self.state["notes"], {"at": at, "text": data["text"]}][-_MAX_NOTES:]

    @staticmethod
    def _apply_to_step(step: Dict[str, Any], kind: str, data: Mapping[str, Any], event: Mapping[str, Any]) -> None:
        at = event.get("at")
        if kind in ("step_queued", "step_gated"):
            step["waiting"] = data.get("reason") or "; ".join(data.get("reasons", [])) or None
        elif kind in protocol.STATE_EVENTS and kind != "retry_scheduled":
            # Why there was no (further) attempt: its last one died of something else.
            step["waiting"] = data.get("reason") if kind == "step_failed" and data.get("unstarted") else None
        step["retry_at"] = data.get("at") if kind == "retry_scheduled" else (
            step["retry_at"] if kind not in protocol.STATE_EVENTS else None
        )
        if kind == "attempt_started":
            step["attempts"].append(
                {
                    "n": event.get("attempt"),
                    "state": "running",
                    "started_at": at,
                    "ended_at": None,
                    "exit_status": None,
                    "verdict": None,
                    "phases": [],
                    "bars": [],
                    "pid": (data.get("process") or {}).get("pid"),
                    "changes": data.get("changes") or None,
                    "gpus": data.get("gpus"),
                }
            )
            return
        attempt = next((item for item in step["attempts"] if item["n"] == event.get("attempt")), None)
        if attempt is None:
            return
        if kind == "stop_sent":
            attempt["state"] = "stopping"
        elif kind == "attempt_ended":
            attempt["state"] = data.get("state", "failed")
            attempt["exit_status"] = data.get("exit_status")
            attempt["ended_at"] = at
        elif kind == "attempt_judged":
            attempt["state"] = data.get("state", attempt["state"])
            attempt["verdict"] = data.get("verdict")
            if data.get("progress"):
                attempt["kept"] = data["progress"]  # samples or checkpoints that the next attempt goes on from
        if kind in ("attempt_ended", "attempt_judged") and data.get("phases") is not None:
            attempt["phases"] = data["phases"]
            attempt["bars"] = data.get("bars", [])


def fold(spec: protocol.JobSpec, events: Iterable[Mapping[str, Any]]) -> Fold:
    """Fold a whole event list (as read from events.jsonl)."""
    result = Fold(spec)
    for event in events:
        result.apply(event)
    return result


_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")


def fingerprint(verdict: Optional[Mapping[str, Any]]) -> str:
    """What makes two failures the same: class, rule and root cause without its numbers (pids, addresses, sizes)."""
    if not verdict:
        return "none"
    root = verdict.get("root_cause") or {}
    text = _NUMBERS.sub("#", str(root.get("text") or ""))[:200]
    return "{}|{}|{}".format(verdict.get("class"), verdict.get("signature"), text)
