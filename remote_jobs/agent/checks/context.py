"""What every check knows: the plan as uploaded, with paths resolved on this host, and facts from the asker.

Reads nothing but the environment.  Standard library only, Python 3.8.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Dict, List, Mapping, Optional

from remote_jobs import protocol
from remote_jobs.agent import command, jobdir

Row = Dict[str, Any]
"""{"step", "name", "verdict": ok|warn|fail|skip, "took_s", "found", "fix"}, and `exports` from the timers."""

OK, WARN, FAIL, SKIP = "ok", "warn", "fail", "skip"
_WORST = {SKIP: 0, OK: 1, WARN: 2, FAIL: 3}
GIB = 1024**3
VLLM_STEPS = frozenset({"serve", "extract", "evaluate"})


def row(verdict: str, found: str, fix: str = "", **more: Any) -> Row:
    """One result; `found` names the file or number seen, `fix` what to type or change."""
    return {"verdict": verdict, "found": found, "fix": fix, **more}


def worst(rows: List[Row], when_empty: str) -> Row:
    """Several findings of one check as one row: the worst verdict, every finding of that weight, all fixes."""
    if not rows:
        return row(OK, when_empty)
    verdict = max((r["verdict"] for r in rows), key=lambda v: _WORST[v])
    shown = [r for r in rows if r["verdict"] == verdict]
    rest = [r for r in rows if r["verdict"] != verdict and r["verdict"] == WARN]
    merged = row(
        verdict,
        "; ".join(r["found"] for r in shown + rest),
        "; ".join(dict.fromkeys(r["fix"] for r in shown + rest if r["fix"])),
    )
    for each in rows:
        merged.update({k: v for k, v in each.items() if k not in merged})
    return merged


def gib(count: float) -> str:
    """Bytes for people, binary units."""
    if count >= 100 * GIB:
        return "{:.0f} GiB".format(count / GIB)
    if count >= GIB:
        return "{:.1f} GiB".format(count / GIB)
    if count >= 1024**2:
        return "{:.0f} MiB".format(count / 1024**2)
    return "{} bytes".format(int(count))


class Step:
    """One step with its parameters filled in and its paths made absolute."""

    def __init__(self, job: "Job", spec: protocol.StepSpec) -> None:
        self.job, self.spec = job, spec
        self.name, self.uses = spec.name, spec.uses
        self.params: Dict[str, Any] = job.places.filled(dict(spec.params))
        self.gpus = spec.gpus

    def env(self, name: str, default: Optional[str] = None) -> Optional[str]:
        """A variable as the step will see it: the plan's, the job's, then this host's."""
        for source in (self.spec.env, self.job.spec.env, os.environ):
            if name in source:
                return str(source[name])
        return default

    def own_env(self, name: str) -> Optional[str]:
        """A variable that the plan itself sets, None when it does not."""
        for source in (self.spec.env, self.job.spec.env):
            if name in source:
                return str(source[name])
        return None

    def number(self, name: str, default: float) -> float:
        """A numeric parameter; also `8192`, `32k` and `1M` as vLLM takes them."""
        value = self.params.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        text = str(value or "").strip()
        factor = {"k": 1000, "K": 1024, "m": 10**6, "M": 1024**2}.get(text[-1:], 1)
        try:
            return float(text[:-1] if factor != 1 else text) * factor
        except ValueError:
            return default

    def path(self, value: str) -> str:
        """Absolute path of a parameter: relative ones are under workdir."""
        return os.path.normpath(os.path.join(self.job.workdir, os.path.expanduser(value)))

    @property
    def output(self) -> str:
        """Where this step writes."""
        return os.path.normpath(self.job.places.output(self.name))

    @property
    def python(self) -> str:
        """Interpreter of this step."""
        return os.path.expanduser(self.spec.python or self.job.spec.python or "python3")

    def maker_of(self, path: str) -> Optional[str]:
        """Name of an earlier step whose output this path is or lies in; it need not exist yet."""
        for other in self.job.steps:
            if other is self:
                return None
            made = other.output
            if path == made or path.startswith(made.rstrip("/") + "/"):
                return other.name
        return None

    def shipped(self, value: str) -> bool:
        """True for a file of the plan's `files:`, which is uploaded at launch."""
        return os.path.basename(value) in {str(item.get("name")) for item in self.job.spec.files}

    @property
    def service(self) -> bool:
        """A step that stays up."""
        return self.spec.service is not None or self.uses == "serve"


class Job:
    """The plan under check."""

    def __init__(self, spec: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        defaults = {"id": "preflight", "name": "preflight", "host": "", "workdir": "", "plan_sha256": ""}
        record = {**defaults, "created_at": "", "release": "", "steps": [], **spec}
        record["steps"] = [_step_record(step) for step in record["steps"]]
        self.facts = facts
        self.spec = protocol.from_dict(protocol.JobSpec, record)
        self.layout = jobdir.Layout(str(facts.get("root") or protocol.DEFAULT_ROOT))
        self.places = command.Places(self.spec, self.layout.job(self.spec.id))
        self.workdir = self.places.workdir
        self.steps: List[Step] = []
        self.steps = [Step(self, step) for step in self.spec.step_specs()]

    @property
    def first_gpu_step(self) -> Optional[Step]:
        """The first step that needs GPUs: the only one whose GPUs are judged before a launch."""
        return next((step for step in self.steps if step.gpus > 0), None)


def _step_record(step: Mapping[str, Any]) -> Dict[str, Any]:
    """A plan's step or a spec's: `with` and `params` are the same."""
    record = dict(step)
    if "params" not in record:
        record["params"] = dict(record.pop("with", None) or {})
    known = {field.name for field in dataclasses.fields(protocol.StepSpec)}
    kept = {key: value for key, value in record.items() if key in known and value is not None}
    kept["gpus"] = int(kept.get("gpus") or 0)
    return kept
