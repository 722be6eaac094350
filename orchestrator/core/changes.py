"""`orch retry --set step.key=value`: checked against the steps of a job that exists already, as `launch --set` is.

The plan's file is not at hand then, only the names and kinds of the job's steps; so the options are applied to a plan
made of these, and judged by the same rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from orchestrator.core import checks
from orchestrator.core.errors import ConfigError, Problem
from orchestrator.core.overrides import Override, apply_overrides, parse_override
from orchestrator.core.plan import STEP_KEYS, Done, Plan, Service, Step, in_order, name_of, normal_plan
from orchestrator.core.retry import normal_retry
from orchestrator.core.schema import check, suggest, unusable_text
from orchestrator.core.spec import patches_of, service_of
from orchestrator.core.steps import BUILTIN, unknown_parameter
from orchestrator.core.yaml import Document

FIXED = ("name", "uses", "needs", "files", "nodes", "split")
"""Keys that cannot change once a job exists: its graph and its files are on the host already."""
BLOCKS: dict[str, type[Done | Service]] = {"done": Done, "service": Service}
"""Keys with keys of their own: one of these is judged together with those that the job has."""
READ = ("run", "timeout_s", "grace_s", "hang_s")
"""Keys whose value is what the plan made of it: text, or seconds."""


def retry_changes(
    texts: Sequence[str], steps: Sequence[Mapping[str, Any]], *, most_gpus: int | None = None
) -> dict[str, Any]:
    """Check the options of a retry.

    Args:
        texts: arguments of ``--set``.
        steps: the job's steps, in order: name, uses (None for `run` steps), and done and service as they are.
        most_gpus: what the host has; None where that is not known, or is no limit.

    Returns:
        {dotted path: value} in the form that the host reads.

    Raises:
        ConfigError: with all problems found.
    """
    document = Document(None, {"name": "job", "steps": [_stand_in(step) for step in steps]})
    problems = apply_overrides(document, texts, ())
    overrides = [] if problems else [parse_override(text) for text in texts]
    uses = {str(step["name"]): step.get("uses") for step in steps}
    for override in overrides:
        problems += [*_forbidden(override, most_gpus), *_null_slip(override, uses[override.path[0]])]
    plan = None
    if not problems:
        plan, problems = _judge(document)
    if problems or plan is None:
        raise ConfigError.of(in_order(problems), "--set")
    read = {step.name: step for step in plan.steps}
    return {".".join(override.path): _host_value(override, read[override.path[0]]) for override in overrides}


def _stand_in(step: Mapping[str, Any]) -> dict[str, Any]:
    blocks = {key: deepcopy(step[key]) for key in BLOCKS if step.get(key)}
    return {"name": step["name"], **({"uses": step["uses"]} if step.get("uses") else {"run": "(a command)"}), **blocks}


def _forbidden(override: Override, most_gpus: int | None) -> list[Problem]:
    key, value = override.path[1], override.value.value
    if key in FIXED:
        allowed = [name for name in STEP_KEYS if name not in FIXED]
        return [
            Problem(f"{override.option}: {key} cannot change in a job that exists", suggest(key, allowed))
        ]
    if key == "gpus" and value is None:
        return [Problem(f"{override.option}: how many GPUs it takes was settled by the launch", "write a number")]
    if key == "gpus" and most_gpus is not None and isinstance(value, int) and value > most_gpus:
        return [Problem(f"{override.option}: GPUs of the host: {most_gpus}", "write a number up to that")]
    if key == "env" and (isinstance(value, dict) or len(override.path) < 3):
        hint = f"write --set {override.path[0]}.env.NAME=value; secrets come with orch launch"
        return [Problem(f"{override.option}: only single plain variables can be set", hint)]
    if key == "with" and (len(override.path) < 3 or override.path[2] == "extra_args"):
        hint = f"write --set {override.path[0]}.with.NAME=value"
        return [Problem(f"{override.option}: set one parameter at a time", hint)]
    return []


def _null_slip(override: Override, uses: str | None) -> list[Problem]:
    """A null with a wrong name; with any other value the plan's own checks find it, but nulls are taken out of a plan."""
    if override.value.value is not None:
        return []
    _, key, *rest = override.path
    found: tuple[str, str] | None = None
    if key not in STEP_KEYS:
        found = f"there is no key {key!r}", suggest(key, STEP_KEYS)
    elif key in BLOCKS and rest and rest[0] not in BLOCKS[key].model_fields:
        found = f"there is no {key}.{rest[0]}", suggest(rest[0], BLOCKS[key].model_fields)
    elif key == "with" and rest and uses is not None and uses in BUILTIN:
        if rest[0] in BUILTIN[uses].required:
            found = f"{uses} cannot start without {rest[0]}", f"write --set {override.path[0]}.with.{rest[0]}=value"
        elif rest[0] not in BUILTIN[uses].names():
            found = unknown_parameter(uses, rest[0])
    return [Problem(f"{override.option}: {found[0]}", found[1])] if found else []


def _judge(document: Document) -> tuple[Plan | None, list[Problem]]:
    raw = normal_plan(document)
    problems = list(unusable_text(document, raw))
    plan, found = check(Plan, document, raw, name_of=lambda where: name_of(raw, where))
    # References may name any step: what waits for what was judged at the launch.
    names = [step["name"] for step in raw["steps"]]
    for index, step in enumerate(raw["steps"]):
        step["needs"] = [name for name in names[:index] if name != step["name"]]
    return plan, [*problems, *found, *checks.check_plan(checks.Context(document, raw, Path()))]


def _host_value(override: Override, step: Step) -> Any:
    _, key, *rest = override.path
    if key in READ:
        return getattr(step, key)
    if key == "patches":
        return patches_of(step)
    if key == "service":
        return _at(service_of(step), rest)
    if key == "done":
        return _at(step.done.model_dump(exclude_none=True) if step.done is not None else None, rest)
    value = override.value.value
    if key == "env":
        return value if isinstance(value, str) else override.value.texts.get((), "")
    if key == "retry":
        return _retry_value(rest, value)
    return value


def _at(value: Any, path: Sequence[str]) -> Any:
    """What stands at a path; None where nothing does."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _retry_value(rest: Sequence[str], value: Any) -> Any:
    """The part of a retry block at a path, in the host's form."""
    if not rest:
        return normal_retry(value or {})
    if rest == ["attempts"] or len(rest) > 2:
        return value
    block: Mapping[str, Any] = normal_retry({rest[0]: value if len(rest) == 1 else {rest[1]: value}})
    return block[rest[0]] if len(rest) == 1 else block[rest[0]][rest[1]]
