"""The retry policy as an engineer would state it: one row per situation."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from remote_jobs.agent import policy
from remote_jobs.protocol import StepSpec


def as_read(record: Any) -> Any:
    """A record as it comes out of its file: no object of it is one that the program holds."""
    return json.loads(json.dumps(record))


def verdict(klass: str, text: str = "boom", retry: str = "yes") -> dict[str, Any]:
    """A failure object of explain's shape."""
    failure = {"class": klass, "retry": retry, "signature": "s", "root_cause": {"line": 1, "text": text}, "evidence": []}
    return as_read(failure)


def decide(step: StepSpec, verdicts: list[dict[str, Any]], progress: list[int] | None = None, **params: Any) -> policy.Decision:
    """Decide after the last of these verdicts."""
    progress = progress or [0] * len(verdicts)
    history = as_read([{"verdict": item, "progress": kept} for item, kept in zip(verdicts, progress, strict=True)])
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


class Lowest(random.Random):
    """Every draw comes out lowest."""

    def uniform(self, a: float, b: float) -> float:
        return a

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        return 0 if stop is None else start


class Highest(random.Random):
    """Every draw comes out highest."""

    def uniform(self, a: float, b: float) -> float:
        return b

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        return (start if stop is None else stop) - 1


def test_a_taken_port_moves_by_one_to_two_hundred() -> None:
    """A built-in step that was given a port gets another one, not the same for every job of the host."""
    step, taken = StepSpec(name="s", uses="serve"), verdict("port_in_use")
    for rng, moved in ((Lowest(), 8002), (Highest(), 8201)):
        decision = policy.decide(step, taken, [{"verdict": taken}], {"port": "8001"}, rng)
        assert decision.changes == {"port": moved}
        assert decision.reason == f"port_in_use: trying again with port={moved}"
    assert decide(step, [taken]).changes == {}, "it has none to move"
    for other in ("network", "segfault"):
        assert decide(step, [verdict(other)], port=8001).changes == {}
    planned = with_retry({"port_in_use": {"port": {"set": 9000}}}, uses="serve")
    assert decide(planned, [taken], port=8001).changes == {"port": 9000}


@pytest.mark.parametrize(("failures", "base"), [(0, 5), (1, 5), (2, 10), (3, 20), (7, 320), (8, 600), (30, 600)])
def test_backoff_doubles_to_ten_minutes_give_or_take_a_fifth(failures: int, base: float) -> None:
    assert policy.backoff_s(failures, Lowest()) == pytest.approx(0.8 * base)
    assert policy.backoff_s(failures, Highest()) == pytest.approx(1.2 * base)


@pytest.mark.parametrize("klass", sorted(klass for klass, (action, _) in policy.POLICY.items() if action == policy.AGAIN))
def test_only_a_busy_gpu_needs_no_pause(klass: str) -> None:
    """Its gate waits for the GPU anyway."""
    assert (decide(RUN, [verdict(klass)]).delay_s == 0) == (klass == "gpu_busy")


def test_every_failure_class_has_a_policy() -> None:
    """No class falls through to a default by accident."""
    from remote_jobs.logs import FAILURE_CLASSES

    assert set(policy.POLICY) == set(FAILURE_CLASSES)


AGAIN = sorted(klass for klass, (action, _) in policy.POLICY.items() if action == policy.AGAIN)


@pytest.mark.parametrize("klass", [*AGAIN, "a_class_of_tomorrow", "zz_class_of_tomorrow"])
def test_a_verdict_that_says_no_is_obeyed_but_for_outside_causes(klass: str) -> None:
    goes_on = klass in policy.OUTSIDE_CAUSES or klass == "unknown"
    decision = decide(RUN, [verdict(klass, retry="no")])
    assert decision.retry == goes_on
    assert goes_on or decision.reason == f"{klass}: trying again cannot help"
    assert decide(RUN, [verdict(klass, retry="after_change")]).retry


def test_the_reason_is_for_people() -> None:
    extract = StepSpec(name="e", uses="extract", params={"gpu_memory_utilization": 0.9})
    assert decide(RUN, [verdict("network")]).reason == "network: trying the same command again"
    assert decide(extract, [verdict("gpu_oom")]).reason == "gpu_oom: trying again with gpu_memory_utilization=0.85"
    assert decide(RUN, [verdict("gpu_oom")]).reason == "gpu_oom: needs a change and there is nothing left to change"
    assert decide(RUN, [verdict("config")]).reason == "config: trying again cannot help"
    assert decide(RUN, [verdict("network")] * 3).reason == "3 tries without new progress, the limit for network is 3"
    assert decide(RUN, [verdict("nccl")] * 2).reason == "2 tries without new progress, the limit for nccl is 2"
    step = with_retry({"attempts": 9, "gpu_oom": {"zeta": {"set": 1}, "alpha": {"set": 1}}}, uses="serve")
    assert decide(step, [verdict("nccl")] * 2).reason == "the same failure twice with no new progress"
    assert decide(step, [verdict("gpu_oom")]).reason == "gpu_oom: trying again with zeta=1"
    assert decide(step, [verdict("gpu_oom")], zeta=1).reason == "gpu_oom: trying again with alpha=1"


@pytest.mark.parametrize("attempts", [2, 300])
def test_attempts_counts_all_tries_progress_or_not(attempts: int) -> None:
    step, kept = with_retry({"attempts": attempts}), list(range(1, attempts + 2))
    assert decide(step, [verdict("killed")] * (attempts - 1), progress=kept[:-2]).retry
    last = decide(step, [verdict("killed")] * attempts, progress=kept[:-1])
    assert (last.retry, last.reason) == (False, f"attempt {attempts} of {attempts} failed (killed)")
    assert not decide(step, [verdict("killed")] * (attempts + 1), progress=kept).retry, "the limit was lowered meanwhile"


def test_attempts_may_raise_what_a_class_gets_by_itself() -> None:
    step = with_retry({"attempts": 6})
    assert decide(step, [verdict("network")] * 5).retry
    assert not decide(step, [verdict("network")] * 6).retry
    assert decide(with_retry({"network": {"attempts": 5}}), [verdict("network")] * 4).retry
    assert not decide(with_retry({"attempts": 9, "network": {"attempts": 2}}), [verdict("network")] * 2).retry
    assert not decide(with_retry({"attempts": 2, "network": {"attempts": 9}}), [verdict("network")] * 2, [1, 2]).retry


def test_only_more_than_ever_before_is_progress() -> None:
    kills = [verdict("killed")] * 3
    assert not decide(RUN, kills, progress=[10, 4, 5]).retry, "it fell back, and gained less than it had"
    assert not decide(RUN, kills, progress=[1000, 1000, 1000]).retry
    assert decide(RUN, kills, progress=[10, 4, 11]).retry


def test_twice_the_same_means_the_last_two() -> None:
    step, one, other = with_retry({"attempts": 9}), verdict("nccl", "a"), verdict("nccl", "b")
    for first, last in ((one, other), (other, one)):
        assert decide(step, [first, last]).retry
        assert not decide(step, [first, last, last]).retry
        assert decide(step, [last, first, last]).retry
        assert decide(step, [last, last, first]).retry
    for progress in ([10, 10], [10, 5], [1000, 1000]):
        assert not decide(step, [one, one], progress=progress).retry
    assert decide(step, [one, one], progress=[5, 10]).retry


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


FEWER = StepSpec(name="s", uses="serve", params={"tensor_parallel_size": 8}, gpus=8, retry={"gpu_hardware": {"fewer_gpus": {"min": 1}}})


def after(failure: dict[str, Any], *faulty: int, step: StepSpec = FEWER) -> policy.Decision:
    return policy.decide(step, failure, [{"verdict": failure}], step.params, random.Random(1), survey=healthy(8, *faulty))


def test_the_reason_names_the_gpu_that_is_left_out() -> None:
    decision = after(as_read(HARDWARE), 2)
    assert decision.reason == (
        "gpu_hardware: trying again with gpus=4, tensor_parallel_size=4 (without gpu 2 (GPU-2): Xid 79)"
    )
    unknown = after(HARDWARE)
    assert (unknown.retry, unknown.reason) == (False, "gpu_hardware: which GPU failed is not known, so none can be left out")


@pytest.mark.parametrize("klass", ["gpu_oom", "shm", "disk_full", "kv_cache_too_small"])
def test_no_gpu_is_left_out_for_another_failure(klass: str) -> None:
    assert "without_gpus" not in after(verdict(klass), 2).changes


def test_a_contained_memory_error_leaves_no_gpu_out() -> None:
    decision = after({**HARDWARE, "signature": "xid-contained", "retry": "yes"}, 2)
    assert (decision.retry, decision.changes) == (True, {})


def test_what_else_the_plan_changes_goes_with_fewer_gpus() -> None:
    for name in ("a_flag", "zz_flag"):
        rules = {"gpu_hardware": {"fewer_gpus": {"min": 1}, name: {"set": 1}}}
        found = after(HARDWARE, 2, step=StepSpec(name="s", uses="serve", params={"tensor_parallel_size": 8}, gpus=8, retry=as_read(rules)))
        assert found.changes == {name: 1, "without_gpus": ["GPU-2"], "gpus": 4, "tensor_parallel_size": 4}
        assert f"{name}=1" in found.reason
        assert "without_gpus=" not in found.reason
