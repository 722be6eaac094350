"""What the next attempt runs with, by itself and as the plan states it: one row per rule of the change."""

from __future__ import annotations

from typing import Any

import pytest

from remote_jobs.agent import policy
from remote_jobs.protocol import StepSpec
from tests.supervisor.test_policy import RUN, as_read, decide, verdict, with_retry


def changes(uses: str, klass: str, rules: dict[str, Any], **params: Any) -> dict[str, Any]:
    """What the plan's block for a class makes of these parameters."""
    step = StepSpec(name="s", uses=uses, params=params, retry={klass: rules} if rules else {})
    return policy.change_parameters(step, klass, params, verdict(klass))


@pytest.mark.parametrize(
    ("uses", "klass", "params", "wanted"),
    [
        ("serve", "gpu_oom", {}, {"gpu_memory_utilization": 0.85}),
        ("serve", "gpu_oom", {"gpu_memory_utilization": 1}, {"gpu_memory_utilization": 0.95}),
        ("serve", "gpu_oom", {"gpu_memory_utilization": 0.7}, {}),
        ("extract", "gpu_oom", {"gpu_memory_utilization": 0.7, "max_num_batched_tokens": 5000}, {"max_num_batched_tokens": 2304}),
        ("extract", "gpu_oom", {"gpu_memory_utilization": 0.7, "max_num_batched_tokens": 2048, "batch_size": 5}, {"batch_size": 2}),
        ("extract", "gpu_oom", {"gpu_memory_utilization": 0.7, "max_num_batched_tokens": 2048}, {}),
        ("extract", "host_oom", {}, {}),  # not every backend knows batch_size
        ("train", "gpu_oom", {}, {"total_seq_len": 4096}),
        ("train", "gpu_oom", {"total_seq_len": 2500}, {"total_seq_len": 1152}),
        ("train", "gpu_oom", {"total_seq_len": 1500}, {"total_seq_len": 1024}),
        ("train", "host_oom", {"num_workers": 1}, {"num_workers": 0}),
        ("train", "shm", {}, {"num_workers": 0}),
        ("generate", "host_oom", {"concurrency": 5}, {"concurrency": 2}),
        ("generate", "nccl", {}, {}),
        # A bound never turns a change around: what is below its least is left alone, and the next parameter is tried.
        ("train", "gpu_oom", {"total_seq_len": 512}, {}),
        ("serve", "gpu_oom", {"gpu_memory_utilization": 0.6}, {}),
        ("extract", "gpu_oom", {"gpu_memory_utilization": 0.6}, {"max_num_batched_tokens": 4096}),
        ("extract", "gpu_oom", {"gpu_memory_utilization": 0.6, "max_num_batched_tokens": 1024, "batch_size": 4}, {"batch_size": 2}),
    ],
)
def test_changes_without_a_word_from_the_plan(uses: str, klass: str, params: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = changes(uses, klass, {}, **params)
    assert found == wanted
    assert [type(value) for value in found.values()] == [type(value) for value in wanted.values()]


@pytest.mark.parametrize(
    ("rules", "params", "wanted"),
    [
        ({"p": {"mul": 2}}, {"p": 8}, {"p": 16}),
        ({"p": {"mul": 2, "max": 12}}, {"p": 8}, {"p": 12}),
        ({"p": {"mul": 0.5}}, {"p": 1.0}, {"p": 0.5}),  # as written: a fraction may become one
        ({"p": {"add": -0.1}}, {"p": 1}, {"p": 0.9}),
        ({"p": {"mul": 0.9, "min": 0.5}}, {"p": 1}, {"p": 0.9}),
        ({"p": {"mul": 0.9, "max": 1.5}}, {"p": 1}, {"p": 0.9}),
        ({"p": {"mul": 0.9, "min": 1}}, {"p": 7}, {"p": 6}),
        ({"p": {"mul": 0.9, "min": 1}}, {"p": 1}, {}),
        ({"p": {"add": 1, "default": 3}}, {}, {"p": 4}),
        ({"p": {"add": 1}, "q": {"add": 1}}, {"q": 1}, {"q": 2}),  # p is neither set nor known
        ({"p": {"add": 1}, "q": {"add": 1}}, {"p": "text", "q": 1}, {"q": 2}),
        ({"p": {"add": 1}, "q": {"add": 1}}, {"p": True, "q": 1}, {"q": 2}),
        ({"batch_size": {"mul": 0.5, "default": 8}}, {}, {"batch_size": 4}),  # the plan knows its backend
        ({"p": {"set": "small"}, "q": {"set": 4}}, {}, {"p": "small"}),
        ({"p": {"set": "small"}, "q": {"set": 4}}, {"p": "large"}, {"p": "small"}),
        ({"p": {"set": "small"}, "q": {"set": 4}}, {"p": "small", "q": 9}, {"q": 4}),
        ({"p": {"set": 1000}}, {"p": 2000}, {"p": 1000}),
        ({"p": {"set": 1000}}, {"p": 500}, {"p": 1000}),
        ({"p": {"set": 1000}, "q": {"set": 4}}, {"p": 1000, "q": 4}, {}),
        ({"attempts": 2, "p": {"set": 1}}, {}, {"p": 1}),
        ({"lr": {"mul": 0.5}}, {"lr": 3.0e-5}, {"lr": 1.5e-05}),
        ({"lr": {"mul": 0.1}}, {"lr": 1e-10}, {"lr": 1e-11}),
        ({"p": {"mul": 2, "max": 4}, "q": {"add": 1}}, {"p": 8, "q": 1}, {"q": 2}),  # above its most: it stays
        ({"p": {"mul": 0.5, "min": 4}, "q": {"add": 1}}, {"p": 0, "q": 1}, {"q": 2}),
        ({"concurrency": {"mul": 1.5}}, {"concurrency": 1}, {"concurrency": 2}),  # up means up
        ({"p": {"mul": 1.5, "max": 1}, "q": {"add": 1}}, {"p": 1, "q": 1}, {"q": 2}),
        ({"p": {"mul": 1.1}}, {"p": 10}, {"p": 11}),
        ({"p": {"mul": 0.57}}, {"p": 100}, {"p": 57}),
        ({"p": {"mul": 0.5}, "q": {"add": 1}}, {"p": 1, "q": 1}, {"q": 2}),  # half of one is not none
        ({"p": {"add": -0.5}}, {"p": 0.25}, {}),
        ({"p": {"add": -1}}, {"p": 0}, {}),  # -1 often means no limit at all
        ({"p": {"add": -1, "min": -1}}, {"p": 0}, {"p": -1}),
        ({"p": {"add": -1}}, {"p": -5}, {"p": -6}),
        ({"p": {"mul": 0}}, {"p": 8}, {"p": 0}),
        ({"total_seq_len": {"mul": 0.5}}, {"total_seq_len": 200}, {"total_seq_len": 100}),
        ({"max_num_batched_tokens": {"add": 100}}, {"max_num_batched_tokens": 1024}, {"max_num_batched_tokens": 1280}),
    ],
)
def test_changes_that_the_plan_states(rules: dict[str, Any], params: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = changes("serve", "gpu_oom", as_read(rules), **as_read(params))
    assert found == wanted
    assert [type(value) for value in found.values()] == [type(value) for value in wanted.values()]


@pytest.mark.parametrize("klass", ["nccl", "config", "gpu_oom"])
def test_a_stated_change_is_made_whatever_the_class(klass: str) -> None:
    step = with_retry({klass: {"max_num_seqs": {"set": 4}}}, uses="serve")
    assert decide(step, [verdict(klass)]).changes == {"max_num_seqs": 4}


def test_a_block_that_only_counts_changes_what_its_class_changes() -> None:
    step = with_retry({"gpu_oom": {"attempts": 9}, "config": {"attempts": 2}}, uses="extract", params={"gpu_memory_utilization": 0.9})
    assert decide(step, [verdict("gpu_oom")]).changes == {"gpu_memory_utilization": 0.85}
    assert decide(step, [verdict("config")]).changes == {}
    assert decide(step, [verdict("config")]).retry, "the plan says that the cause may heal"
    assert not decide(with_retry({"config": {}}), [verdict("config")]).retry


def test_a_stated_change_for_a_hopeless_class_is_tried_three_times() -> None:
    step = with_retry({"config": {"max_num_seqs": {"mul": 0.5}}}, uses="serve")
    for tries, goes_on in ((1, True), (2, True), (3, False)):
        assert decide(step, [verdict("config", f"{'x' * tries}")] * tries, max_num_seqs=64).retry is goes_on


SAYS = "the estimated maximum model length is {}. Try increasing `gpu_memory_utilization`"


@pytest.mark.parametrize(
    ("texts", "current", "wanted"),
    [
        (["20480"], {}, {"max_model_len": 20480}),
        (["20480"], {"max_model_len": 1024}, {"max_model_len": 20480}),
        (["20480"], {"max_model_len": 20480}, {}),
        (["9000", "20480", "10000"], {}, {"max_model_len": 10000}),  # the last word
        (["9000", "10000", "9000"], {"max_model_len": 9000}, {}),
        (["9000", "10000"], {"max_model_len": 9000}, {"max_model_len": 10000}),
        (["0"], {}, {}),
        ([], {}, {}),
    ],
)
def test_the_length_that_vllm_names_is_taken_from_the_last_line_that_says_it(
    texts: list[str], current: dict[str, Any], wanted: dict[str, Any]
) -> None:
    found = {**verdict("kv_cache_too_small"), "evidence": [SAYS.format(text) for text in texts]}
    step = StepSpec(name="s", uses="serve", params=current)
    assert policy.change_parameters(step, "kv_cache_too_small", as_read(current), found) == wanted
    assert policy.change_parameters(RUN, "kv_cache_too_small", current, found) == {}, "nobody knows its flags"


@pytest.mark.parametrize(
    ("rules", "current", "wanted"),
    [
        ({"max_model_len": {"set": 8192}}, {"max_model_len": 32768}, {"max_model_len": 8192}),
        ({"max_model_len": {"mul": 0.5, "min": 32768}}, {"max_model_len": 32768}, {}),  # the plan's least is its word
        ({"gpu_memory_utilization": {"add": 0.03, "max": 0.95}}, {"gpu_memory_utilization": 0.9}, {"gpu_memory_utilization": 0.93}),
        ({"gpu_memory_utilization": {"add": 0.03, "max": 0.95}}, {"gpu_memory_utilization": 0.95}, {"max_model_len": 20480}),
        ({"attempts": 2}, {}, {"max_model_len": 20480}),
    ],
)
def test_what_the_plan_states_comes_before_the_length_that_vllm_names(
    rules: dict[str, Any], current: dict[str, Any], wanted: dict[str, Any]
) -> None:
    step = StepSpec(name="s", uses="serve", params=current, retry={"kv_cache_too_small": rules})
    failure = verdict("kv_cache_too_small", SAYS.format(20480))
    assert policy.change_parameters(step, "kv_cache_too_small", as_read(current), failure) == wanted


@pytest.mark.parametrize("klass", ["host_oom", "unknown"])
def test_no_other_class_takes_the_length(klass: str) -> None:
    assert policy.change_parameters(StepSpec(name="s", uses="serve"), klass, {}, verdict(klass, SAYS.format(20480))) == {}


def test_what_orch_keeps_itself_is_no_parameter_of_the_program() -> None:
    kept = {"gpus": 4, "without_gpus": ["GPU-1"], "ready_within_s": 60, "VLLM_ENGINE_READY_TIMEOUT_S": 1800}
    assert policy.parameters({**kept, "max_num_seqs": 4}) == {"max_num_seqs": 4}
