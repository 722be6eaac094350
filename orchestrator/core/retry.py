"""The `retry:` block of a step: how many tries, and what to change after which failure.

    retry: {attempts: 3, gpu_oom: {gpu_memory_utilization: {add: -0.05, min: 0.7}}, nccl: {attempts: 2}}

    retry: {gpu_hardware: {fewer_gpus: {min: 4}}}     # go on without a GPU that failed, with at least four

What the host does with it is remote_jobs/agent/policy.py; here it is only checked and put into one form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from orchestrator.core.errors import Problem
from orchestrator.core.schema import suggest
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
    if not isinstance(change, dict):
        return  # a plain value: set to it
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
