"""`orch retry --set step.key=value`: checked against the steps of a job that exists already, as `launch --set` is.

The plan's file is not at hand then, only the names and kinds of the job's steps; so the options are applied to a plan
made of these, and judged by the same rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.core import checks
from orchestrator.core.errors import ConfigError, Problem
from orchestrator.core.overrides import Override, apply_overrides, parse_override
from orchestrator.core.plan import STEP_KEYS, Plan, in_order, name_of, normal_plan
from orchestrator.core.retry import normal_retry
from orchestrator.core.schema import check, duration_s, suggest, unusable_text
from orchestrator.core.yaml import Document

FIXED = ("name", "uses", "needs", "files", "nodes", "split")
"""Keys that cannot change once a job exists: its graph and its files are on the host already."""
DURATIONS = ("timeout_s", "grace_s", "hang_s")


def retry_changes(texts: Sequence[str], steps: Sequence[tuple[str, str | None]]) -> dict[str, Any]:
    """Check the options of a retry.

    Args:
        texts: arguments of ``--set``.
        steps: (name, uses) of the job's steps, in order; uses is None for `run` steps.

    Returns:
        {dotted path: value} in the form that the host reads.

    Raises:
        ConfigError: with all problems found.
    """
    stand_in = [{"name": name, **({"uses": uses} if uses else {"run": "true"})} for name, uses in steps]
    document = Document(None, {"name": "job", "steps": stand_in})
    problems = apply_overrides(document, texts, ())
    overrides = [] if problems else [parse_override(text) for text in texts]
    problems += [problem for override in overrides for problem in _forbidden(override)]
    if not problems:
        problems += _judge(document)
    if problems:
        raise ConfigError.of(in_order(problems), "--set")
    return {".".join(override.path): _host_value(override) for override in overrides}


def _forbidden(override: Override) -> list[Problem]:
    key, value = override.path[1], override.value.value
    if key in FIXED:
        allowed = [name for name in STEP_KEYS if name not in FIXED]
        return [
            Problem(f"{override.option}: {key} cannot change in a job that exists", suggest(key, allowed))
        ]
    if key == "env" and (isinstance(value, dict) or len(override.path) < 3):
        hint = f"write --set {override.path[0]}.env.NAME=value; secrets come with orch launch"
        return [Problem(f"{override.option}: only single plain variables can be set", hint)]
    if key == "with" and (len(override.path) < 3 or override.path[2] == "extra_args"):
        hint = f"write --set {override.path[0]}.with.NAME=value"
        return [Problem(f"{override.option}: set one parameter at a time", hint)]
    return []


def _judge(document: Document) -> list[Problem]:
    raw = normal_plan(document)
    problems = list(unusable_text(document, raw))
    _, found = check(Plan, document, raw, name_of=lambda where: name_of(raw, where))
    # References may name any step: what waits for what was judged at the launch.
    names = [step["name"] for step in raw["steps"]]
    for index, step in enumerate(raw["steps"]):
        step["needs"] = [name for name in names[:index] if name != step["name"]]
    return [*problems, *found, *checks.check_plan(checks.Context(document, raw, Path()))]


def _host_value(override: Override) -> Any:
    _, key, *rest = override.path
    value = override.value.value
    if key in DURATIONS and value is not None:
        return duration_s(value)
    if key == "env":
        return value if isinstance(value, str) else override.value.texts.get((), "")
    if key == "retry" and value is not None:
        return _retry_value(rest, value)
    return value


def _retry_value(rest: Sequence[str], value: Any) -> Any:
    """The part of a retry block at a path, in the host's form."""
    if not rest:
        return normal_retry(value)
    if rest == ["attempts"] or len(rest) > 2:
        return value
    block: Mapping[str, Any] = normal_retry({rest[0]: value if len(rest) == 1 else {rest[1]: value}})
    return block[rest[0]] if len(rest) == 1 else block[rest[0]][rest[1]]
