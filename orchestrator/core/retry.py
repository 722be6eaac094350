"""The `retry:` block of a step: how many tries, and what to change after which failure.

    retry: {attempts: 3, gpu_oom: {gpu_memory_utilization: {add: -0.05, min: 0.7}}, nccl: {attempts: 2}}

    retry: {gpu_hardware: {fewer_gpus: {min: 4}}}     # go on without a GPU that failed, with at least four

What the host does with it is remote_jobs/agent/policy.py; here it is only checked and put into one form.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import create_model

from orchestrator.core.errors import Problem
from orchestrator.core.schema import Strict, check, suggest
from orchestrator.core.steps import BUILTIN, unknown_parameter
from orchestrator.core.yaml import Document, Where

FAILURE_CLASSES = tuple(
    """
    gpu_oom host_oom gpu_busy kv_cache_too_small nccl gpu_hardware driver code_incompatibility import_error config
    data_corrupt missing_file auth network disk_full filesystem port_in_use shm killed segfault device_assert numerical
    waiting_for_input unknown
    """.split()  # noqa: SIM905 - as the contract lists them
)
"""What a failed attempt can have died of; a `retry:` block may hold an entry for each."""

OPERATIONS = ("add", "mul", "set")
BOUNDS = ("min", "max", "default")
MAX_ATTEMPTS = 1000
FEWER_GPUS = "fewer_gpus"
_FEWER_HINT = "write retry: {gpu_hardware: {fewer_gpus: {min: 4}}}: go on without a GPU that failed, with at least 4"
_CHANGE_HINT = "write {add: -0.05, min: 0.7}, {mul: 0.5, min: 1} or {set: VALUE}"


def normal_retry(retry: Mapping[str, Any]) -> dict[str, Any]:
    """The block as the host reads it: a plain value of a parameter becomes ``{set: value}``."""
    result: dict[str, Any] = {}
    for key, block in retry.items():
        if isinstance(block, dict):
            result[key] = {name: _normal(name, value) for name, value in block.items() if value is not None}
        else:
            result[key] = block
    return result


def _normal(name: str, value: Any) -> Any:
    if name == "attempts" or isinstance(value, dict):
        return value
    return {"min": value} if name == FEWER_GPUS else {"set": value}


def check_retry(
    document: Document, at: Where, step: Mapping[str, Any], name_of: Callable[[Where], str]
) -> Iterator[Problem]:
    """Everything wrong with a step's retry block."""
    retry, uses = step.get("retry"), step.get("uses")
    if not isinstance(retry, dict):
        return  # the model says so
    for key, block in retry.items():
        where = (*at, key)
        if key == "attempts":
            yield from _attempts(document, where, block, name_of)
        elif key not in FAILURE_CLASSES:
            hint = suggest(key, ["attempts", *FAILURE_CLASSES])
            yield document.problem(where, f"{name_of(at)}: there is no failure class {key!r}", hint)
        elif not isinstance(block, dict):
            yield document.problem(
                where, f"{name_of(where)} must be a mapping", "write {attempts: N} or {PARAM: ...}"
            )
        else:
            for name, change in block.items():
                if name == "attempts":
                    yield from _attempts(document, (*where, name), change, name_of)
                elif name == FEWER_GPUS:
                    yield from _fewer_gpus(document, (*where, name), step, change, name_of)
                else:
                    yield from _change(document, (*where, name), uses, change, name_of)


def _attempts(
    document: Document, where: Where, value: Any, name_of: Callable[[Where], str]
) -> Iterator[Problem]:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_ATTEMPTS:
        hint = f"a whole number from 1 to {MAX_ATTEMPTS}; 1 means no second try"
        yield document.problem(where, f"{name_of(where)} must count tries, not {value!r}", hint)


def _fewer_gpus(
    document: Document, where: Where, step: Mapping[str, Any], value: Any, name_of: Callable[[Where], str]
) -> Iterator[Problem]:
    if where[-2] != "gpu_hardware":
        yield document.problem(where, f"{name_of(where)}: only a GPU that failed can be left out", _FEWER_HINT)
        return
    if isinstance(value, dict) and set(value) - {"min"}:
        key = next(key for key in value if key != "min")
        yield document.problem((*where, key), f"{name_of(where)}: unknown key {key!r}", _FEWER_HINT)
        return
    least = value.get("min", 1) if isinstance(value, dict) else value
    if isinstance(least, bool) or not isinstance(least, int) or least < 1:
        yield document.problem(where, f"{name_of(where)}: {least!r} is no number of GPUs", _FEWER_HINT)
        return
    gpus = step.get("gpus")
    if isinstance(gpus, int) and least > gpus:
        hint = f"at most gpus: {gpus}" if gpus else "the step claims no GPUs: leave this out"
        yield document.problem(where, f"{name_of(where)}: min {least} is above the step's gpus: {gpus}", hint)
        return


def _change(
    document: Document, where: Where, uses: Any, change: Any, name_of: Callable[[Where], str]
) -> Iterator[Problem]:
    name = str(where[-1])
    if uses is None:
        hint = "a run step has no parameters to change; {attempts: N} is all it can have"
        yield document.problem(where, f"{name_of(where)} cannot be changed", hint)
        return
    if isinstance(uses, str) and uses in BUILTIN and name not in BUILTIN[uses].names():
        unknown = unknown_parameter(uses, name)
        if unknown:
            yield document.problem(where, f"{name_of(where[:-1])}: {unknown[0]}", unknown[1])
            return
    kind = _kind(uses, name)
    if change is None:
        yield document.problem(where, f"{name_of(where)} has no value", f"{_CHANGE_HINT}, or remove it")
        return
    if not isinstance(change, dict):  # a plain value: set to it
        yield from _values(document, where[:-1], kind, {name: change}, name_of)
        return
    for key in change:
        if key not in (*OPERATIONS, *BOUNDS):
            hint = suggest(key, (*OPERATIONS, *BOUNDS))
            yield document.problem((*where, key), f"{name_of(where)}: unknown key {key!r}", hint)
    operations = [key for key in OPERATIONS if key in change]
    if len(operations) != 1:
        yield document.problem(
            where, f"{name_of(where)} must have exactly one of add, mul, set", _CHANGE_HINT
        )
    for key in (*OPERATIONS[:2], *BOUNDS):
        value = change.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            yield document.problem(
                (*where, key), f"{name_of(where)}.{key} must be a number, not {value!r}", _CHANGE_HINT
            )
            return
    if "min" in change and "max" in change and change["min"] > change["max"]:
        yield document.problem(
            where, f"{name_of(where)}: min {change['min']} is above max {change['max']}", _CHANGE_HINT
        )
    if change.get("add", 1) == 0 or change.get("mul", 2) == 1:
        yield document.problem(where, f"{name_of(where)} changes nothing", _CHANGE_HINT)
    if change.get("mul", 1) < 0:
        yield document.problem(
            (*where, "mul"), f"{name_of(where)}.mul must be at least 0, not {change['mul']!r}", _CHANGE_HINT
        )
    if "set" in change and change["set"] is None:
        yield document.problem((*where, "set"), f"{name_of(where)}.set has no value", _CHANGE_HINT)
    yield from _fits(document, where, kind, change, name_of)


def _fits(
    document: Document, where: Where, kind: Any, change: Mapping[str, Any], name_of: Callable[[Where], str]
) -> Iterator[Problem]:
    """What the change and its bounds lead to must be what the step's `with:` takes for this parameter."""
    if kind is None:
        return
    moves, numbers = {"add", "mul"} & set(change), _plain_types(kind) & {int, float}
    if moves and not numbers:
        hint = "only a number can be added to or multiplied: write {set: VALUE}"
        yield document.problem(where, f"{name_of(where)}: {where[-1]} is not a number", hint)
        return
    if float not in numbers and moves and not float(change.get("add", 0)).is_integer():
        seen = change["add"]
        yield document.problem(
            (*where, "add"), f"{name_of(where)}.add must be a whole number, not {seen!r}", _CHANGE_HINT
        )
    to_zero = change.get("mul") == 0 and "min" not in change
    if to_zero and any(_values(document, where, kind, {"mul": 0}, name_of)):
        yield document.problem((*where, "mul"), f"{name_of(where)}.mul would make it 0", _CHANGE_HINT)
    stated = {key: change[key] for key in ("set", *BOUNDS) if key in change}
    yield from _values(document, where, kind, stated, name_of)


def _kind(uses: Any, name: str) -> Any:
    """Type of a parameter of a built-in step; None for a flag that is handed on, of which nothing is known."""
    fields = BUILTIN[uses].params.model_fields if isinstance(uses, str) and uses in BUILTIN else {}
    return fields[name].annotation if name in fields else None


def _values(
    document: Document, at: Where, kind: Any, values: Mapping[str, Any], name_of: Callable[[Where], str]
) -> Iterator[Problem]:
    """What is wrong with these values, by their keys below ``at``, as values of one parameter."""
    if kind is not None:
        fields: dict[str, Any] = dict.fromkeys(values, (kind, None))
        yield from check(create_model("Change", __base__=Strict, **fields), document, values, at, name_of)[1]


def _plain_types(kind: Any) -> set[Any]:
    """The types of a union without what is annotated: ``Annotated[int | str, ...] | None`` is int, str, None."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _plain_types(parts[0])
    if origin in {Union, types.UnionType}:
        return {found for part in parts for found in _plain_types(part)}
    return {kind}
