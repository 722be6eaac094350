"""A plan: what to run, read from YAML with every mistake found at once, before anything reaches a host.

The models here say what a plan may hold; orchestrator.core.checks says what must fit together. The format is the
contract of the README's "Plan" section.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from orchestrator.core import yaml
from orchestrator.core.errors import ConfigError, Problem
from orchestrator.core.files import LocalFile
from orchestrator.core.notify import Notify
from orchestrator.core.overrides import apply_overrides, parse_set
from orchestrator.core.retry import FAILURE_CLASSES
from orchestrator.core.schema import (
    Duration,
    Env,
    Secret,
    Size,
    Strict,
    Texts,
    check,
    dotted,
    unusable_text,
    wrong,
)
from orchestrator.core.schema import without_nulls as compact
from orchestrator.core.yaml import Document, Where

if TYPE_CHECKING:
    from orchestrator.core.inventory import Host

__all__ = ["FAILURE_CLASSES", "LoadedPlan", "LocalFile", "Plan", "Step", "load_plan", "parse_set"]

EMPTY_PLAN_HINT = "a plan has at least: name: hello / steps: [{name: hi, run: echo hi}]"


def _step_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", value):
        raise wrong(
            f"{value!r} cannot be a step's name",
            "letters, digits, - and _, at most 64, starting with a letter or digit: it names a folder",
        )
    return value


def _plan_name(value: str) -> str:
    if not value.strip() or len(value) > 200 or not value.isprintable():
        raise wrong(f"{value[:40]!r} cannot be a plan's name", "one line of text, at most 200 characters")
    return value


def _workdir(value: str) -> str:
    if not re.match(r"/|~", value):
        raise wrong(f"{value!r} must be an absolute path on the host", "start it with / or ~/")
    if "{" in value:
        raise wrong(f"{value!r} cannot hold references", "write the path itself")
    return value


def _patches(value: Any) -> Any:
    if value in ("auto", "none") or (
        isinstance(value, list) and all(isinstance(item, str) and item for item in value)
    ):
        return value
    raise wrong(
        f"must be auto, none or a list of patch sets, not {value!r}", "orch patch list shows the sets"
    )


def _retry(value: Any) -> Any:
    if isinstance(value, int):
        raise wrong("must be a mapping", f"write retry: {{attempts: {value}}}")
    return value


def _split(value: Any) -> Any:
    return {"ranges": value} if isinstance(value, int) and not isinstance(value, bool) else value


Text = Annotated[str, Field(min_length=1)]


class Split(Strict):
    """A step in ranges that run side by side: on one host, or some of them on each of several hosts.

    ``array``: on a Slurm host every range is a job of its own, and they are submitted as one array.
    """

    ranges: Annotated[int, Field(ge=1, le=256)] = 1
    hosts: Texts = Field(default_factory=list)
    array: bool = True


_COUNT = {"type": "integer", "minimum": 1, "maximum": 256}
_SPLIT = {
    "description": "Ranges that run side by side: 4, or {ranges: 4, hosts: [a, b]}.",
    "anyOf": [
        _COUNT,
        {
            "type": "object",
            "properties": {
                "ranges": _COUNT,
                "hosts": {"type": "array", "items": {"type": "string"}},
                "array": {"type": "boolean"},
            },
            "required": ["ranges"],
            "additionalProperties": False,
        },
    ],
}


class Ready(Strict):
    """How a service shows that it is up; exactly one of these."""

    http: Text | None = None
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    log: Text | None = None


class Service(Strict):
    """A step that stays up until the steps that need it are done."""

    ready: Ready | None = None
    timeout_s: Duration | None = None


class Done(Strict):
    """Success as checked work: the number of files that a pattern under workdir matches."""

    count: Text
    equals: Annotated[int, Field(ge=0)] | None = None
    at_least: Annotated[int, Field(ge=0)] | None = None


class Gate(Strict):
    """The check of the GPUs before each attempt."""

    wait: Duration | None = None
    memory_mib: Annotated[int, Field(ge=0)] | None = None
    reap: Literal["own", "none"] | None = None


class Step(Strict):
    """One step of a plan, as written."""

    name: Annotated[str, AfterValidator(_step_name)]
    uses: str | None = None
    run: str | None = None
    params: dict[str, Any] = Field(default_factory=dict, alias="with")
    needs: Texts = Field(default_factory=list)
    gpus: Annotated[int, Field(ge=0, le=4096)] | None = None
    env: Env = Field(default_factory=dict)
    files: Texts = Field(default_factory=list)
    retry: Annotated[dict[str, Any], BeforeValidator(_retry)] = Field(default_factory=dict)
    done: Done | None = None
    service: Service | None = None
    grace_s: Duration | None = None
    timeout_s: Duration | None = None
    hang_s: Duration | None = None
    output: Text | None = None
    python: Text | None = None
    patches: Annotated[Any, BeforeValidator(_patches)] = None
    nodes: Annotated[int, Field(ge=1, le=4096)] = 1
    split: Annotated[Split, BeforeValidator(_split), WithJsonSchema(_SPLIT)] = Split()

    @property
    def is_service(self) -> bool:
        """It stays up for others."""
        return self.service is not None or self.uses == "serve"


class Plan(Strict):
    """A plan, as written."""

    name: Annotated[str, AfterValidator(_plan_name)]
    host: Text | None = None
    workdir: Annotated[str, AfterValidator(_workdir)] | None = None
    python: Text | None = None
    env: Env = Field(default_factory=dict)
    gate: Gate = Gate()
    log_limit: Size | None = None
    restart_after_reboot: bool = False
    notify: Notify = Field(default_factory=list)
    steps: Annotated[list[Step], Field(min_length=1, max_length=500)]

    def step(self, name: str) -> Step:
        """The step of that name.

        Raises:
            KeyError: there is none.
        """
        for step in self.steps:
            if step.name == name:
                return step
        raise KeyError(name)

    @property
    def needs(self) -> dict[str, list[str]]:
        """Step -> the steps it waits for, in plan order."""
        return {step.name: step.needs for step in self.steps}


PLAN_KEYS = tuple(Plan.model_fields)
STEP_KEYS = tuple(field.alias or name for name, field in Step.model_fields.items())


@dataclass(frozen=True)
class LoadedPlan:
    """A plan that was read and found sound.

    Attributes:
        plan: the model.
        path: the file.
        base_dir: folder of the file; local paths in the plan are relative to it.
        plan_sha256: hash of the resolved plan (after ``--set``); the contents of ``files`` are hashed when read.
        document: positions of all values, for errors that come later.
        files: local files that go to the host.
        warnings: what is allowed but looks wrong, one line each.
    """

    plan: Plan
    path: Path
    base_dir: Path
    plan_sha256: str
    document: Document
    files: tuple[LocalFile, ...] = ()
    warnings: tuple[str, ...] = ()

    def error(self, where: Where, message: str, hint: str | None = None) -> ConfigError:
        """An error about a value of this plan, with its line; ``where`` is such as ``("steps", 0, "gpus")``."""
        return ConfigError.of([self.document.problem(where, message, hint)], f"the plan {self.path}")

    def secrets(self, host: Host | None = None) -> dict[str, dict[str, Secret]]:
        """{step: {NAME: where its value is}}: the step's own secrets win over the plan's, those over the host's.

        A plain value nearer to the step hides a secret of the same name.
        """
        wanted: dict[str, dict[str, Secret]] = {}
        for step in self.plan.steps:
            merged: dict[str, str | Secret] = {**(host.env if host else {}), **self.plan.env, **step.env}
            wanted[step.name] = {name: value for name, value in merged.items() if isinstance(value, Secret)}
        return {step: names for step, names in wanted.items() if names}


def load_plan(path: Path | str, sets: Sequence[str] = ()) -> LoadedPlan:
    """Read a plan, apply ``--set`` options, and check everything that can be checked without the host.

    Args:
        path: the YAML file.
        sets: arguments of ``--set``.

    Raises:
        ConfigError: with all problems found.
    """
    from orchestrator.core import checks

    path = Path(path)
    what = f"the plan {path}"
    document = yaml.load(path, "plan")
    if document.value is None:
        raise ConfigError("the plan is empty", EMPTY_PLAN_HINT, file=str(path))
    if not isinstance(document.value, dict):
        kind = "a list" if isinstance(document.value, list) else "one value"
        raise ConfigError(
            f"a plan is a mapping (key: value), not {kind}", EMPTY_PLAN_HINT, file=str(path), line=1
        )
    problems = list(document.problems)
    problems += apply_overrides(document, sets, PLAN_KEYS)
    raw = normal_plan(document)
    problems += unusable_text(document, raw)
    misplaced, cleaned = checks.misplaced_keys(document, raw, PLAN_KEYS, STEP_KEYS)
    problems += misplaced
    plan, found = check(Plan, document, cleaned, name_of=lambda where: name_of(raw, where))
    problems += found
    base_dir = path.resolve().parent
    context = checks.Context(document, raw, base_dir)
    problems += checks.check_plan(context)
    if plan is not None and not problems:
        problems += checks.check_inputs(context, plan)
    if problems or plan is None:
        raise ConfigError.of(in_order(problems), what)
    return LoadedPlan(
        plan=plan,
        path=path,
        base_dir=base_dir,
        plan_sha256=_sha256(raw),
        document=document,
        files=tuple({file.name: file for file in context.files}.values()),
        warnings=tuple(context.warnings),
    )


def in_order(problems: Sequence[Problem]) -> list[Problem]:
    """By line, the command line's first; each once."""
    return sorted(dict.fromkeys(problems), key=lambda problem: problem.line or 0)


def name_of(raw: Mapping[str, Any], where: Where) -> str:
    """How a value is called in messages: ``workdir``, ``step extract``, ``extract.with.layers`` (as for ``--set``)."""
    if where[:1] != ("steps",) or len(where) < 2:
        return dotted(where)
    index, *rest = where[1:]
    step = raw["steps"][index] if isinstance(raw.get("steps"), list) and isinstance(index, int) else None
    name = step.get("name") if isinstance(step, dict) else None
    shown = name if isinstance(name, str) and name else f"number {int(index) + 1}"
    if not rest:
        return f"step {shown}"
    return f"{shown}.{dotted(tuple(rest))}" if shown == name else f"{dotted(tuple(rest))} of step {shown}"


def normal_plan(document: Document) -> dict[str, Any]:
    """The document's value without nulls, and with text where text is meant though YAML reads a number or truth."""
    raw: dict[str, Any] = compact(document.value)
    text_of_env(document, raw, ())
    if isinstance(raw.get("gate"), dict):
        raw["gate"] = compact(raw["gate"])
    if isinstance(raw.get("steps"), list):
        raw["steps"] = [_normal_step(document, step, ("steps", i)) for i, step in enumerate(raw["steps"])]
    return raw


def _normal_step(document: Document, step: Any, where: Where) -> Any:
    if not isinstance(step, dict):
        return step
    step = compact(step)
    for key in ("with", "retry", "done", "service"):
        if isinstance(step.get(key), dict):
            step[key] = compact(step[key])
    if "run" in step and not isinstance(step["run"], str):  # run: true
        step["run"] = document.texts.get((*where, "run"), step["run"])
    text_of_env(document, step, where)
    return step


def text_of_env(document: Document, owner: dict[str, Any], where: Where) -> None:
    """Environment values as written: ``OMP_NUM_THREADS: 8`` is "8", ``V: 1.10`` is "1.10"."""
    env = owner.get("env")
    if isinstance(env, dict):
        owner["env"] = {
            key: value
            if isinstance(value, str) or value is None
            else document.texts.get((*where, "env", key), value)
            for key, value in env.items()
        }


def _sha256(value: Mapping[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()
