"""The retry policy as an engineer would state it: one row per situation."""

from __future__ import annotations

import random
from typing import Any

import pytest

from remote_jobs.agent import policy
from remote_jobs.protocol import StepSpec


def verdict(klass: str, text: str = "boom", retry: str = "yes") -> dict[str, Any]:
    """A failure object of explain's shape."""
    return {"class": klass, "retry": retry, "signature": "s", "root_cause": {"line": 1, "text": text}, "evidence": []}


def decide(step: StepSpec, verdicts: list[dict[str, Any]], progress: list[int] | None = None, **params: Any) -> policy.Decision:
    """Decide after the last of these verdicts."""
    progress = progress or [0] * len(verdicts)
    history = [{"verdict": item, "progress": kept} for item, kept in zip(verdicts, progress, strict=True)]
    return policy.decide(step, verdicts[-1], history, {**step.params, **params}, random.Random(1))


RUN = StepSpec(name="a", run="x")


def with_retry(retry: dict[str, Any], **fields: Any) -> StepSpec:
    """A step with a `retry:` block."""
    return StepSpec(name="a", retry=retry, **(fields or {"run": "x"}))


@pytest.mark.parametrize(
    "klass",
    ["code_incompatibility", "import_error", "config", "data_corrupt", "auth", "missing_file", "gpu_hardware", "driver"],
)
def test_what_cannot_heal_is_not_tried_again(klass: str) -> None:
    """Deterministic failures stop at once, also when the plan allows more attempts."""
    assert not decide(RUN, [verdict(klass)]).retry
    assert not decide(with_retry({"attempts": 5}), [verdict(klass)]).retry


@pytest.mark.parametrize("klass", ["network", "killed", "port_in_use", "gpu_busy"])
def test_outside_causes_are_tried_three_times_even_with_the_same_text(klass: str) -> None:
    """The same fingerprint says nothing about a command that something outside ended."""
    same = verdict(klass)
    assert decide(RUN, [same]).retry
    assert decide(RUN, [same, same]).retry
    assert not decide(RUN, [same, same, same]).retry


def test_unknown_gets_one_more_try() -> None:
    """Two attempts in all, as `attempts: 2` for unknown means one retry."""
    assert decide(RUN, [verdict("unknown")]).retry
    assert not decide(RUN, [verdict("unknown"), verdict("unknown", "other text")]).retry


def test_attempts_caps_every_class() -> None:
    """`--attempts 1` is obeyed whatever it died of."""
    for klass in policy.POLICY:
        assert not decide(with_retry({"attempts": 1}), [verdict(klass)]).retry


def test_the_same_failure_twice_without_progress_stops() -> None:
    """More budget does not help when nothing changed; numbers in the text do not make it another failure."""
    step = with_retry({"attempts": 9})
    first, second = verdict("nccl", "rank 3 failed at 0x7f10"), verdict("nccl", "rank 5 failed at 0x8a")
    assert not decide(step, [first, second]).retry
    assert decide(step, [first, second], progress=[10, 20]).retry


def test_progress_refills_the_budget() -> None:
    """Attempts that kept more samples than before do not use up the tries."""
    kills = [verdict("killed")] * 6
    assert not decide(RUN, kills).retry
    assert decide(RUN, kills, progress=[1, 2, 3, 4, 5, 6]).retry


def test_gpu_oom_lowers_utilization_inside_its_bounds() -> None:
    """0.9 -> 0.85 ... 0.7, then the next parameter, then the end."""
    step = StepSpec(name="e", uses="extract", params={"gpu_memory_utilization": 0.9})
    assert decide(step, [verdict("gpu_oom", retry="after_change")]).changes == {"gpu_memory_utilization": 0.85}
    at_bound = decide(step, [verdict("gpu_oom", retry="after_change")], gpu_memory_utilization=0.7)
    assert at_bound.changes == {"max_num_batched_tokens": 4096}
    spent = decide(step, [verdict("gpu_oom")], gpu_memory_utilization=0.7, max_num_batched_tokens=2048)
    assert not spent.retry


def test_a_plan_states_its_own_change() -> None:
    """The design's example block."""
    step = with_retry(
        {"attempts": 3, "gpu_oom": {"gpu_memory_utilization": {"add": -0.1, "min": 0.75}}}, uses="extract",
        params={"gpu_memory_utilization": 0.8},
    )  # fmt: skip
    assert decide(step, [verdict("gpu_oom")]).changes == {"gpu_memory_utilization": 0.75}
    assert not decide(step, [verdict("gpu_oom")], gpu_memory_utilization=0.75).retry


def test_kv_cache_takes_the_length_that_vllm_names() -> None:
    """The message itself holds the number to use."""
    text = "the estimated maximum model length is 20480. Try increasing `gpu_memory_utilization`"
    step = StepSpec(name="s", uses="serve", params={"max_model_len": 32768})
    assert decide(step, [verdict("kv_cache_too_small", text)]).changes == {"max_model_len": 20480}


def test_a_run_step_has_nothing_to_change() -> None:
    """An after-change verdict on somebody's own command is not tried again."""
    for klass in ("gpu_oom", "kv_cache_too_small", "host_oom", "shm"):
        assert not decide(RUN, [verdict(klass, retry="after_change")]).retry


def test_a_taken_port_moves() -> None:
    """A built-in step that was given a port gets another one."""
    step = StepSpec(name="s", uses="serve", params={"port": 8000})
    changed = decide(step, [verdict("port_in_use")]).changes["port"]
    assert 8000 < changed < 8300


def test_backoff_doubles_to_ten_minutes_with_jitter() -> None:
    """5, 10, 20 ... 600 s, each within 20 %."""
    rng = random.Random(7)
    for failures, base in ((1, 5), (2, 10), (3, 20), (8, 600), (30, 600)):
        assert 0.8 * base <= policy.backoff_s(failures, rng) <= 1.2 * base


def test_every_failure_class_has_a_policy() -> None:
    """No class falls through to a default by accident."""
    from remote_jobs.logs import FAILURE_CLASSES

    assert set(policy.POLICY) == set(FAILURE_CLASSES)


HARDWARE = {**verdict("gpu_hardware", "uncorrectable ECC error", retry="no"), "evidence": []}


def healthy(count: int, *faulty: int) -> dict[str, Any]:
    """A survey of a host with so many GPUs."""
    rows = [{"index": i, "uuid": f"GPU-{i}", "bus_id": f"0000:{16 + i:x}:00.0"} for i in range(count)]
    return {
        "healthy": [row for row in rows if row["index"] not in faulty],
        "faulty": [{**row, "why": "Xid 79"} for row in rows if row["index"] in faulty],
    }


@pytest.mark.parametrize(
    ("params", "gpus", "faulty", "least", "wanted"),
    [
        ({"tensor_parallel_size": 8}, 8, [2], 4, {"gpus": 4, "tensor_parallel_size": 4}),
        ({"tensor_parallel_size": 8}, 8, [2], 5, None),  # 7 are left, and 8 has no divisor from 5 to 7
        ({"tensor_parallel_size": 6}, 6, [0], 1, {"gpus": 6}),  # of 8: another one takes its place
        ({"tensor_parallel_size": 4, "data_parallel_size": 2}, 8, [1], 1, {"gpus": 4, "data_parallel_size": 1}),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 4}, 8, [1], 1, {"gpus": 4, "tensor_parallel_size": 1}),
        ({"tensor_parallel_size": 8}, 8, [0, 1, 2, 3, 4], 4, None),
    ],
)  # fmt: skip
def test_a_broken_gpu_is_left_out_where_the_plan_allows_fewer(
    params: dict[str, Any], gpus: int, faulty: list[int], least: int, wanted: dict[str, Any] | None
) -> None:
    """tensor_parallel_size shrinks to a divisor of itself, replicas to any number; never below what the plan says."""
    step = StepSpec(name="s", uses="serve", params=params, gpus=gpus, retry={"gpu_hardware": {"fewer_gpus": {"min": least}}})
    history = [{"verdict": HARDWARE, "progress": 0}]
    found = policy.decide(step, HARDWARE, history, params, random.Random(1), survey=healthy(8, *faulty))
    assert found.retry is (wanted is not None), found
    if wanted is not None:
        assert found.changes["without_gpus"] == [f"GPU-{i}" for i in faulty]
        for name, value in wanted.items():
            assert found.changes.get(name, gpus if name == "gpus" else None) == value, found.changes
