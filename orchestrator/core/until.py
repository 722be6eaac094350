"""``orch watch --until``: a point in a job's life to wait for. Pure: views come in, words go out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.core.errors import UsageError
from orchestrator.core.schema import suggest
from orchestrator.core.states import OVER
from remote_jobs.protocol import STEP_TERMINAL, JobState

FORMS = "write done, phase=NAME, phase=NAME:done, step=NAME or state=NAME"


@dataclass
class Until:
    """A point, and which jobs have reached it. A point once reached stays reached, whatever a retry does after it.

    Attributes:
        text: as typed.
        reached: job id -> what was seen.
    """

    text: str
    kind: str
    name: str = ""
    detail: str = ""
    reached: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Until:
        """Read the option's value.

        Raises:
            UsageError: it is none of the forms.
        """
        kind, equals, rest = text.strip().partition("=")
        if kind == "done" and not equals:
            return cls(text, "done")
        name, colon, detail = rest.partition(":")
        if kind not in {"phase", "step", "state"} or not name or (colon and (kind, detail) != ("phase", "done")):
            raise UsageError(f"--until {text!r} is no point in a job's life", FORMS)
        if kind == "state" and name not in {state.value for state in JobState}:
            raise UsageError(f"--until: no job is ever {name!r}", suggest(name, [state.value for state in JobState]))
        return cls(text, kind, name, detail)

    def see(self, view: Mapping[str, Any]) -> str | None:
        """What this view reached, when the job had not reached it before.

        Raises:
            UsageError: the job has no such step.
        """
        job = str(view["id"])
        words = self._reached(view) if job not in self.reached else None
        if words is not None:
            self.reached[job] = words
        return words

    def over(self, view: Mapping[str, Any]) -> bool:
        """True when there is nothing more to wait for in this job."""
        return str(view["id"]) in self.reached or view.get("state") in OVER

    def _reached(self, view: Mapping[str, Any]) -> str | None:
        steps = view.get("steps") or []
        if self.kind == "done":
            return str(view["state"]) if view.get("state") in OVER else None
        if self.kind == "state":
            return self.name if view.get("state") == self.name else None
        if self.kind == "step":
            step = next((item for item in steps if item["name"] == self.name), None)
            if step is None and steps:
                names = [str(item["name"]) for item in steps]
                raise UsageError(f"job {view['id']} has no step {self.name!r}", suggest(self.name, names, "steps"))
            ended = step is not None and (step["state"] in STEP_TERMINAL or step["state"] == "ready")
            return f"step {self.name} {step['state']}" if step is not None and ended else None
        for step in steps:
            for attempt in (step.get("attempts") or [])[-1:]:
                for phase in attempt.get("phases") or []:
                    done = phase.get("state") == "done"
                    if phase.get("name") == self.name and (done or (not self.detail and phase.get("state") == "running")):
                        return f"step {step['name']}: phase {self.name} {'done' if done else 'began'}"
        return None
