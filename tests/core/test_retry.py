"""What a `retry:` block may say, one row per mistake: the place, the message and what to write instead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator.core.retry import FAILURE_CLASSES, check_retry, normal_retry
from orchestrator.core.yaml import Document, Where

SERVE: dict[str, Any] = {"uses": "serve", "gpus": 8}
TRAIN: dict[str, Any] = {"uses": "train", "gpus": 8}
RUN: dict[str, Any] = {"run": "x", "gpus": 8}


def places(value: Any, at: Where) -> Iterator[Where]:
    yield at
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*at, key))


def problems(retry: Any, step: dict[str, Any]) -> list[tuple[str, str, str | None]]:
    """(place, message, hint) of each problem."""
    retry = json.loads(json.dumps(retry))  # as read from a file: no object of it is one that the program holds
    paths = list(places(retry, ("retry",)))
    document = Document("plan", None, lines={path: number for number, path in enumerate(paths)})
    found = check_retry(document, ("retry",), {**step, "retry": retry}, lambda where: ".".join(map(str, where)))
    return [(".".join(map(str, paths[item.line or 0])), item.message, item.hint) for item in found]


@pytest.mark.parametrize(
    ("step", "retry"),
    [
        (RUN, {}),
        (RUN, None),
        (RUN, 3),  # no mapping: the model of the plan says so, once
        (RUN, {"attempts": 1}),
        (RUN, {"attempts": 1000, "nccl": {"attempts": 2}, "unknown": {}}),
        (RUN, {"gpu_hardware": {"fewer_gpus": {"min": 1}}}),
        (RUN, {"gpu_hardware": {"fewer_gpus": {"min": 8}, "attempts": 2}}),
        (RUN, {"gpu_hardware": {"fewer_gpus": {}}}),
        (RUN, {"gpu_hardware": {"fewer_gpus": 4}}),
        ({"run": "x", "gpus": "all"}, {"gpu_hardware": {"fewer_gpus": 4}}),  # what is wrong with gpus is said elsewhere
        (SERVE, {"gpu_oom": {"gpu_memory_utilization": {"add": -0.05, "min": 0.7}}}),
        (SERVE, {"gpu_oom": {"gpu_memory_utilization": {"add": -0.05, "min": 0.7, "max": 0.7, "default": 0.9}}}),
        (SERVE, {"gpu_oom": {"max_num_seqs": {"mul": 0.5, "min": 1}}}),
        (SERVE, {"gpu_oom": {"max_num_seqs": {"mul": 0.5, "min": 1, "max": 9}}}),
        (TRAIN, {"shm": {"num_workers": {"mul": 0}}}),  # a flag that is handed on
        (TRAIN, {"shm": {"num_workers": {"set": [1]}}}),
        (TRAIN, {"numerical": {"lr": {"mul": 0.5, "min": 1e-6}}}),
        (TRAIN, {"numerical": {"lr": 1}}),
        (SERVE, {"kv_cache_too_small": {"max_model_len": "32k"}}),
        (SERVE, {"kv_cache_too_small": {"max_model_len": {"mul": 0.5, "min": 1024}}}),
        (SERVE, {"gpu_oom": {"dtype": {"set": "half"}, "gpu_memory_utilization": {"mul": 0, "min": 0.5}}}),
        (SERVE, {"gpu_oom": {"max_num_seqs": {"add": 1}}}),
        (SERVE, {"gpu_oom": {"max_num_seqs": {"set": 7}}}),
        (SERVE, {"gpu_oom": {"max_num_seqs": 4, "model": "smaller"}}),
        ({"uses": "no such step"}, {"gpu_oom": {"whatever": {"set": 1}, "a": {"set": "x"}, "b": {"set": 1}}}),  # said elsewhere
        ({"uses": ["serve"]}, {"gpu_oom": {"whatever": {"set": 1}}}),
    ],
)
def test_sound_blocks(step: dict[str, Any], retry: Any) -> None:
    assert problems(retry, step) == []


FEWER = "write retry: {gpu_hardware: {fewer_gpus: {min: 4}}}: go on without a GPU that failed, with at least 4"
CHANGE = "write {add: -0.05, min: 0.7}, {mul: 0.5, min: 1} or {set: VALUE}"
TRIES = "a whole number from 1 to 1000; 1 means no second try"
OOM = "retry.gpu_oom.max_num_seqs"
LR = "retry.numerical.lr"
NUMBER = "only a number can be added to or multiplied: write {set: VALUE}"


def oom(change: Any) -> dict[str, Any]:
    return {"gpu_oom": {"max_num_seqs": change}}


def fewer(value: Any) -> dict[str, Any]:
    return {"gpu_hardware": {"fewer_gpus": value}}


LEAVES = "retry.gpu_hardware.fewer_gpus"
ONE_MISTAKE = [
    *[
        (RUN, {"attempts": tries}, "retry.attempts", f"retry.attempts must count tries, not {tries!r}", TRIES)
        for tries in (0, -1, 1001, 2.0, True, "3", None)
    ],
    (RUN, {"nccl": {"attempts": 0}}, "retry.nccl.attempts", "retry.nccl.attempts must count tries, not 0", TRIES),
    (RUN, {"nccl": 3}, "retry.nccl", "retry.nccl must be a mapping", "write {attempts: N} or {PARAM: ...}"),
    (
        RUN, {"cuda_oom": {}}, "retry.cuda_oom", "retry: there is no failure class 'cuda_oom'",
        f"did you mean 'gpu_oom'? allowed: attempts, {', '.join(FAILURE_CLASSES)}",
    ),
    (
        RUN, {"a": {}}, "retry.a", "retry: there is no failure class 'a'",
        f"allowed: attempts, {', '.join(FAILURE_CLASSES)}",
    ),
    (
        RUN, oom({"mul": 0.5}), OOM, f"{OOM} cannot be changed",
        "a run step has no parameters to change; {attempts: N} is all it can have",
    ),
    (SERVE, oom({}), OOM, f"{OOM} must have exactly one of add, mul, set", CHANGE),
    (SERVE, oom({"add": 1, "set": 4}), OOM, f"{OOM} must have exactly one of add, mul, set", CHANGE),
    (SERVE, oom({"set": 4, "least": 1}), f"{OOM}.least", f"{OOM}: unknown key 'least'", "allowed: add, mul, set, min, max, default"),
    (SERVE, oom({"mul": 0.5, "min": 8, "max": 4}), OOM, f"{OOM}: min 8 is above max 4", CHANGE),
    (SERVE, oom({"add": 0}), OOM, f"{OOM} changes nothing", CHANGE),
    (SERVE, oom({"mul": 1}), OOM, f"{OOM} changes nothing", CHANGE),
    *[
        (SERVE, oom({"set": 1, key: value} if key not in {"add", "mul"} else {key: value}), f"{OOM}.{key}",
         f"{OOM}.{key} must be a number, not {value!r}", CHANGE)
        for key in ("add", "mul", "min", "max", "default")
        for value in ("half", True, None, float("inf"))
    ],
    (SERVE, oom({"set": 1, "min": "a", "max": "b"}), f"{OOM}.min", f"{OOM}.min must be a number, not 'a'", CHANGE),
    *[
        (TRAIN, {"numerical": {"lr": value}}, LR, f"{LR}: {words}", None)
        for value, words in (
            ("banana", "must be a number, not the text 'banana'"),
            ([1], "must be a number, not a list of 1"),
            (0, "must be more than 0.0, not 0"),
        )
    ],
    *[
        (TRAIN, {"numerical": {"lr": change}}, f"{LR}.{key}", f"{LR}.{key}{words}", hint)
        for change, key, words, hint in (
            ({"set": [1]}, "set", ": must be a number, not a list of 1", None),
            ({"set": 101}, "set", ": must be at most 100.0, not 101", None),
            ({"set": {"a": 1}}, "set", ": must be a number, not a mapping (a: ...)", None),
            ({"set": None}, "set", " has no value", CHANGE),
            ({"mul": 0.5, "min": 0}, "min", ": must be more than 0.0, not 0", None),
            ({"mul": 0.5, "default": 200}, "default", ": must be at most 100.0, not 200", None),
            ({"mul": -1}, "mul", " must be at least 0, not -1", CHANGE),
        )
    ],
    (TRAIN, {"numerical": {"lr": None}}, LR, f"{LR} has no value", f"{CHANGE}, or remove it"),
    (TRAIN, {"shm": {"num_workers": None}}, "retry.shm.num_workers", "retry.shm.num_workers has no value", f"{CHANGE}, or remove it"),
    (TRAIN, {"shm": {"num_workers": {"mul": -1}}}, "retry.shm.num_workers.mul", "retry.shm.num_workers.mul must be at least 0, not -1", CHANGE),
    *[
        (SERVE, {"gpu_oom": {name: change}}, f"retry.gpu_oom.{name}", f"retry.gpu_oom.{name}: {name} is not a number", NUMBER)
        for name in ("model", "enforce_eager", "dtype", "extra_args")
        for change in ({"add": 1}, {"mul": 0.5})
    ],
    (SERVE, {"gpu_oom": {"dtype": "int3"}}, "retry.gpu_oom.dtype", "retry.gpu_oom.dtype: the text 'int3' is not allowed",
     "allowed: auto, half, float16, bfloat16, float, float32"),
    (SERVE, oom({"set": "text"}), f"{OOM}.set", f"{OOM}.set: must be a whole number, not the text 'text'", None),
    (SERVE, oom({"mul": 0.5, "min": 0}), f"{OOM}.min", f"{OOM}.min: must be at least 1, not 0", None),
    (SERVE, oom({"add": 0.5}), f"{OOM}.add", f"{OOM}.add must be a whole number, not 0.5", CHANGE),
    (SERVE, oom({"mul": 0}), f"{OOM}.mul", f"{OOM}.mul would make it 0", CHANGE),
    (RUN, {"gpu_oom": {"fewer_gpus": {"min": 4}}}, "retry.gpu_oom.fewer_gpus", "retry.gpu_oom.fewer_gpus: only a GPU that failed can be left out", FEWER),
    (RUN, {"nccl": {"fewer_gpus": "x"}}, "retry.nccl.fewer_gpus", "retry.nccl.fewer_gpus: only a GPU that failed can be left out", FEWER),
    (RUN, fewer({"min": 4, "least": 2}), f"{LEAVES}.least", f"{LEAVES}: unknown key 'least'", FEWER),
    (RUN, fewer({"min": 4, "pods": 2}), f"{LEAVES}.pods", f"{LEAVES}: unknown key 'pods'", FEWER),
    (RUN, {"driver": {"fewer_gpus": 4}}, "retry.driver.fewer_gpus", "retry.driver.fewer_gpus: only a GPU that failed can be left out", FEWER),
    *[
        (RUN, fewer(least), LEAVES, f"{LEAVES}: {least!r} is no number of GPUs", FEWER)
        for least in ("half", True, 0, -1, 2.0)
    ],
    (RUN, fewer({"min": "half"}), LEAVES, f"{LEAVES}: 'half' is no number of GPUs", FEWER),
    (RUN, fewer({"min": 9}), LEAVES, f"{LEAVES}: min 9 is above the step's gpus: 8", "at most gpus: 8"),
    ({"run": "x", "gpus": 0}, fewer(4), LEAVES, f"{LEAVES}: min 4 is above the step's gpus: 0", "the step claims no GPUs: leave this out"),
]  # fmt: skip


@pytest.mark.parametrize(("step", "retry", "place", "message", "hint"), ONE_MISTAKE)
def test_one_mistake_is_one_problem(step: dict[str, Any], retry: Any, place: str, message: str, hint: str) -> None:
    assert problems(retry, step) == [(place, message, hint)]


def test_a_misspelt_parameter_is_named_with_the_right_one() -> None:
    [(place, message, hint)] = problems({"gpu_oom": {"gpu_memory_utilisation": {"subtract": 0.1}}}, SERVE)
    assert place == "retry.gpu_oom.gpu_memory_utilisation"
    assert message.startswith("retry.gpu_oom: ")
    assert hint is not None
    assert "did you mean 'gpu_memory_utilization'" in hint


def test_every_mistake_of_a_block_is_told_at_once() -> None:
    retry = {"attempts": 0, "oom": {}, "nccl": 1, "gpu_oom": {"attempts": 0, "max_num_seqs": {"sub": 1}}, "shm": {"attempts": -1}}
    assert [place for place, *_ in problems(retry, SERVE)] == [
        "retry.attempts", "retry.oom", "retry.nccl", "retry.gpu_oom.attempts", f"{OOM}.sub", OOM, "retry.shm.attempts",
    ]  # fmt: skip


def test_the_host_reads_one_form() -> None:
    written = {
        "attempts": 3,
        "gpu_oom": {"attempts": 2, "max_num_seqs": 4, "model": None, "batch_size": {"mul": 0.5}, "a": 1},
        "gpu_hardware": {"fewer_gpus": 4, "dtype": "half"},
        "nccl": {},
    }
    assert normal_retry(json.loads(json.dumps(written))) == {
        "attempts": 3,
        "gpu_oom": {"attempts": 2, "max_num_seqs": {"set": 4}, "batch_size": {"mul": 0.5}, "a": {"set": 1}},
        "gpu_hardware": {"fewer_gpus": {"min": 4}, "dtype": {"set": "half"}},
        "nccl": {},
    }
