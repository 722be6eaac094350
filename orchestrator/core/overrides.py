"""`--set step.key=value`: read, placed into the plan's document, and remembered so that errors name the option.

The value is YAML, as in the file. The path starts with a step's name (`extract.with.layers`, `train.retry.attempts`);
a path that starts with no step may name a key of the plan itself (`workdir`, `gate.wait`). Missing parents are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.core.errors import ConfigError, Problem
from orchestrator.core.schema import suggest
from orchestrator.core.yaml import Document, Where, parse

FORM = "write --set step.key=value, such as --set extract.with.layers=[2,30]"


@dataclass(frozen=True)
class Override:
    """One option: where it writes, what, and how it was typed."""

    option: str
    path: tuple[str, ...]
    value: Document


def parse_override(text: str) -> Override:
    """Read one ``--set``.

    Raises:
        ConfigError: no ``=``, an empty path or part of it, or a value that is not YAML.
    """
    option = f"--set {text}" if len(text) <= 80 else f"--set {text[:77]}..."
    dotted, equals, value = text.partition("=")
    path = tuple(part.strip() for part in dotted.split("."))
    if not equals:
        raise ConfigError(f"{option}: there is no '='", FORM)
    if not all(path):
        raise ConfigError(f"{option}: a part of the path is empty", FORM)
    try:
        document = parse(value)
    except ConfigError as error:
        raise ConfigError(
            f"{option}: the value cannot be read: {error.message}", error.hint or FORM
        ) from None
    if document.problems:
        raise ConfigError(f"{option}: {document.problems[0].message}", document.problems[0].hint)
    return Override(option, path, document)


def parse_set(text: str) -> tuple[str, Any]:
    """(dotted path, value) of one ``--set``; raises as :func:`parse_override` does."""
    override = parse_override(text)
    return ".".join(override.path), override.value.value


def apply_overrides(document: Document, texts: Sequence[str], plan_keys: Sequence[str]) -> list[Problem]:
    """Write all ``--set`` options into a plan's document, in order; returns what was wrong with them.

    Args:
        document: the plan as read; its value must be a mapping.
        texts: the options' arguments.
        plan_keys: keys that a plan may have at its top level.
    """
    given: object = texts  # of a Python program, so anything
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(text, str) for text in given):
        return [Problem(f"the changes are {given!r}, and must be a list of texts", FORM)]
    problems: list[Problem] = []
    for text in texts:
        try:
            override = parse_override(text)
            where = _target(document.value, override, plan_keys)
            _write(document, where, override)
        except ConfigError as error:
            problems.extend(error.problems)
    return problems


def _target(plan: dict[str, Any], override: Override, plan_keys: Sequence[str]) -> Where:
    steps = plan.get("steps")
    names = (
        [step.get("name") if isinstance(step, dict) else None for step in steps]
        if isinstance(steps, list)
        else []
    )
    first, *rest = override.path
    if first in names:
        if not rest:
            raise ConfigError(f"{override.option}: the path ends at the step", FORM)
        return ("steps", names.index(first), *rest)
    if first in plan_keys and first != "steps":
        return override.path
    known = [str(name) for name in names if name is not None]
    raise ConfigError(f"{override.option}: no step is called {first!r}", suggest(first, known, "steps"))


def _write(document: Document, where: Where, override: Override) -> None:
    *parents, last = where
    parent = document.value
    for depth, part in enumerate(parents):
        key = _key(parent, part, override, where[:depth])
        if isinstance(parent, dict) and parent.get(str(key)) is None:
            parent[str(key)] = {}
        parent = parent[key]
        if not isinstance(parent, dict | list):
            there = ".".join(override.path[: len(override.path) - len(where) + depth + 1])
            raise ConfigError(f"{override.option}: {there} is {parent!r}, which has no keys", FORM)
    key = _key(parent, last, override, where[:-1])
    place = (*parents, key)
    document.forget(place)
    parent[key] = override.value.value
    document.sets[place] = override.option
    for inner, text in override.value.texts.items():
        document.texts[*place, *inner] = text


def _key(parent: Any, part: str | int, override: Override, where: Where) -> str | int:
    """The key as it is used: an index where the parent is a list."""
    if not isinstance(parent, list):
        return part
    if isinstance(part, int):
        return part
    if part.isdecimal() and int(part) < len(parent):
        return int(part)
    name = ".".join(str(item) for item in where[2:] or where)
    raise ConfigError(
        f"{override.option}: {name} is a list of {len(parent)}, so {part!r} must be an index from 0",
        f"or set the whole list: ...{name}=[a, b]",
    )
