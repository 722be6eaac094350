"""`orch retry --set` is judged by the same rules as `launch --set`, without the plan's file."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.core.changes import retry_changes
from orchestrator.core.errors import ConfigError

STEPS = [
    {"name": "serve", "uses": "serve"},
    {"name": "extract", "uses": "extract"},
    {"name": "own", "uses": None, "done": {"count": "out/*", "equals": 1}},
    {"name": "up", "uses": None, "service": {"ready": {"log": "READY"}, "timeout_s": 3.0}},
]


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("serve.with.gpu_memory_utilization=0.8", "serve.with.gpu_memory_utilization", 0.8),
        ("serve.with.brand_new=1", "serve.with.brand_new", 1),
        ("serve.with.max_model_len=", "serve.with.max_model_len", None),
        ("extract.with.layers=[2,30]", "extract.with.layers", [2, 30]),
        (
            "extract.with.dataset={steps.serve.output}/x".replace("{", "'{") + "'",
            "extract.with.dataset",
            "{steps.serve.output}/x",
        ),
        ("own.timeout_s=1h", "own.timeout_s", 3600.0),
        ("own.env.A=1.10", "own.env.A", "1.10"),
        ("own.run=echo hi", "own.run", "echo hi"),
        ("own.run=true", "own.run", "true"),
        ("own.run=5", "own.run", "5"),
        ("own.done.equals=2", "own.done.equals", 2),
        ("own.done={count: a, at_least: 2}", "own.done", {"count": "a", "at_least": 2}),
        ("own.done=null", "own.done", None),
        ("up.service.timeout_s=20m", "up.service.timeout_s", 1200.0),
        ("up.service={ready: {port: 80}, timeout_s: 1h}", "up.service", {"ready": {"port": 80}, "timeout_s": 3600.0}),
        ("own.retry.attempts=5", "own.retry.attempts", 5),
        ("serve.retry.gpu_oom.max_num_seqs=4", "serve.retry.gpu_oom.max_num_seqs", {"set": 4}),
        ("serve.retry.gpu_oom.max_num_seqs.mul=0.5", "serve.retry.gpu_oom.max_num_seqs.mul", 0.5),
        ("serve.retry.gpu_oom={max_num_seqs: 4}", "serve.retry.gpu_oom", {"max_num_seqs": {"set": 4}}),
        ("serve.retry={attempts: 2}", "serve.retry", {"attempts": 2}),
        ("serve.retry=null", "serve.retry", {}),
        ("serve.patches=null", "serve.patches", "auto"),
        ("own.patches=null", "own.patches", None),
        ("up.service.timeout_s=null", "up.service.timeout_s", 1800.0),
        ("up.service={ready: {port: 80}}", "up.service", {"ready": {"port": 80}, "timeout_s": 1800.0}),
        ("serve.gpus=4", "serve.gpus", 4),
    ],
)
def test_good_changes(text: str, path: str, value: Any) -> None:
    assert retry_changes([text], STEPS) == {path: value}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("serv.gpus=1", ["no step is called 'serv'", "did you mean 'serve'"]),
        ("serve.with.tensor_paralel_size=8", ["did you mean 'tensor_parallel_size'", "--set serve.with."]),
        ("serve.with.tensor_parallel_size=eight", ["whole number"]),
        ("serve.needs=[own]", ["cannot change in a job that exists"]),
        ("own.env.T={from: env}", ["only single plain variables"]),
        ("own.with.a=1", ["with: is for built-in steps"]),
        ("own.retry.attempts=0", ["must count tries"]),
        ("own.timeout_s=soon", ["must be a time"]),
        ("own.gpu=1", ["did you mean 'gpus'"]),
        ("own", ["no '='"]),
        ("own.done.equals=many", ["whole number"]),
        ("up.service.ready.port=80", ["up.service"]),
        ("workdir=/x", ["no step is called 'workdir'"]),
        ("own.gpus=null", ["was settled by the launch", "write a number"]),
        ("own.gpus=9", ["GPUs of the host: 8"]),
        ("own.timout_s=null", ["there is no key 'timout_s'", "did you mean 'timeout_s'"]),
        ("serve.with.modle=null", ["unknown parameter 'modle'", "did you mean 'model'"]),
        ("serve.with.model=null", ["serve cannot start without model"]),
        ("own.done.eqals=null", ["there is no done.eqals", "did you mean 'equals'"]),
        ("own.run.x=3", ["own.run is '(a command)', which has no keys"]),
    ],
)
def test_bad_changes(text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        retry_changes([text], STEPS, most_gpus=8)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("texts", ["own.run=true", 5, [5], None])
def test_a_program_must_give_a_list_of_texts(texts: Any) -> None:
    with pytest.raises(ConfigError, match="must be a list of texts"):
        retry_changes(texts, STEPS)


def test_nothing_to_change() -> None:
    assert retry_changes([], STEPS) == {}
