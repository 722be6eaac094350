"""The retry policy, seen from the processes that it starts: what each attempt was called with, and when it is the last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.retries.box import LOGS, Box, bundle, events
from tests.support.jobdir import kill
from tests.support.waiting import wait_until

OOM = LOGS / "own" / "gpu_oom_training_rank3.log"
KV = LOGS / "cases" / "021_kv_cache_too_small_after_clean_load.log"
PORT = LOGS / "real" / "vllm032_cpu_port_in_use.log"
LENGTH_LINE = (
    "ValueError: To serve at least one request with the models's max seq len (32768), (4.00 GiB KV cache is needed, which "
    "is larger than the available KV cache memory (2.5 GiB). Based on the available memory, the estimated maximum model "
    "length is 20480. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
)


def builtin(box: Box, uses: str, body: str, params: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A built-in step whose Python is a script of the test."""
    return {"name": "work", "uses": uses, "python": box.interpreter(body), "params": params, **more}


def fails_until(attempts: int, log: Path | str) -> str:
    """A body that fails with this log until its n-th call, which succeeds."""
    show = f"cat {log}" if isinstance(log, Path) else f"cat <<'END'\n{log}\nEND\n"
    return f"if [ $ORCH_ATTEMPT -ge {attempts} ]; then exit 0; fi\n{show}\nexit 1"


def flag(call: str, name: str) -> str | None:
    """Value of a flag in a recorded command line."""
    words = call.split()
    return words[words.index(name) + 1] if name in words else None


# what failed, step, parameters, retry block -> flag, its value in each attempt
CHANGED: dict[str, tuple[Path | str, str, dict[str, Any], dict[str, Any], str, list[str | None]]] = {
    "out of memory lowers the share of memory": (
        OOM, "extract", {"gpu_memory_utilization": 0.9}, {}, "--gpu-memory-utilization", ["0.9", "0.85", "0.8"]),
    "also where the plan left it to the program": (
        OOM, "extract", {}, {}, "--gpu-memory-utilization", [None, "0.85", "0.8"]),
    "by the plan's own block, inside its bounds": (
        OOM, "extract", {"gpu_memory_utilization": 0.9},
        {"attempts": 4, "gpu_oom": {"gpu_memory_utilization": {"add": -0.15, "min": 0.7}}},
        "--gpu-memory-utilization", ["0.9", "0.75", "0.7"]),
    "a parameter that the plan names": (
        OOM, "extract", {"max_num_seqs": 64}, {"gpu_oom": {"max_num_seqs": {"mul": 0.5, "min": 8}}},
        "--max-num-seqs", ["64", "32", "16"]),
    "training halves its sequence budget": (
        OOM, "train", {"total_seq_len": 8192}, {}, "--total-seq-len", ["8192", "4096", "2048"]),
    "the length that vLLM names": (
        LENGTH_LINE, "extract", {"max_model_len": 32768}, {}, "--max-model-len", ["32768", "20480"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_the_next_attempt_is_called_with_the_change(name: str, box: Box) -> None:
    log, uses, params, retry, option, values = CHANGED[name]
    job = box.launch(builtin(box, uses, fails_until(len(values), log), params, retry=retry))
    box.hurry(job, "succeeded")
    assert [flag(call, option) for call in box.calls()] == values
    changed = option.strip("-").replace("-", "_")
    assert [str(data["changes"][changed]) for data in events(job, "retry_scheduled")] == values[1:]
    assert [str(box.why(job, attempt=n)["changed_next"][changed]) for n in range(1, len(values))] == values[1:]


READY = (
    "TimeoutError: Timed out waiting for engine core processes to start. This is often caused by slow weight loading for "
    "large models. Waited 600s (configured by VLLM_ENGINE_READY_TIMEOUT_S)."
)
STUCK = "[rank0]: ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives."


@pytest.mark.parametrize(
    ("line", "name", "values"),
    [(READY, "VLLM_ENGINE_READY_TIMEOUT_S", ["700", "2100", "6300"]), (STUCK, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", ["", "1440"])],
)
def test_a_limit_that_ended_a_slow_load_is_raised(line: str, name: str, values: list[str], box: Box) -> None:
    """Also of a command of a person's own: 20 minutes are lost each time it dies of the same limit."""
    env = {name: values[0]} if values[0] else {}
    run = f"""echo "at $ORCH_ATTEMPT ${name}" >> seen; [ $ORCH_ATTEMPT = {len(values)} ] || {{ echo "{line}" >&2; exit 1; }}"""
    job = box.launch({"name": "work", "run": run, "env": env})
    box.hurry(job, "succeeded")
    wanted = [f"at {n} {value}".strip() for n, value in enumerate(values, start=1)]
    assert [text.strip() for text in (box.work / "seen").read_text().splitlines()] == wanted
    assert str(box.why(job, attempt=1)["changed_next"][name]) == values[1]


def test_a_service_that_needs_longer_gets_it(box: Box) -> None:
    service = {"ready": {"log": "up at last"}, "timeout_s": 1.0}
    run = "[ $ORCH_ATTEMPT = 2 ] && echo up at last; sleep 600"
    job = box.launch(
        {"name": "server", "run": run, "service": service}, {"name": "work", "run": "true", "needs": ["server"]}
    )
    box.hurry(job, "succeeded")
    assert [data["changes"] for data in events(job, "retry_scheduled")] == [{"ready_within_s": 3}]


def test_a_step_at_its_bound_fails_instead_of_trying_the_same_again(box: Box) -> None:
    block = {"attempts": 9, "gpu_oom": {"gpu_memory_utilization": {"add": -0.1, "min": 0.8}}}
    job = box.launch(builtin(box, "extract", fails_until(99, OOM), {"gpu_memory_utilization": 0.9}, retry=block))
    box.hurry(job, "failed")
    assert [flag(call, "--gpu-memory-utilization") for call in box.calls()] == ["0.9", "0.8"]
    assert "nothing left to change" in box.why(job)["reason"]
    assert box.why(job)["changed_next"] is None


def test_a_taken_port_becomes_another_one(box: Box) -> None:
    job = box.launch(builtin(box, "extract", fails_until(2, PORT), {"port": 8011}))
    box.hurry(job, "succeeded")
    first, second = (int(flag(call, "--port") or 0) for call in box.calls())
    assert first == 8011
    assert 8011 < second < 8311


def test_the_budget_counts_only_attempts_without_new_progress(box: Box) -> None:
    """Six kills, each after new files: none of them uses up the three tries; then three in vain do."""
    run = (
        "n=$(ls out 2>/dev/null | wc -l); mkdir -p out; "
        "if [ $n -lt 6 ]; then touch out/$n.safetensors; fi; kill -9 $$"
    )
    job = box.launch({"name": "work", "run": run, "done": {"count": "out/*.safetensors", "equals": 10}})
    box.hurry(job, "failed", within_s=120)
    assert [data["progress"] for data in events(job, "attempt_judged")] == [1, 2, 3, 4, 5, 6, 6, 6]


def test_shards_are_no_progress_and_markers_of_samples_are(box: Box) -> None:
    run = (
        "echo '::orch {\"phase\": \"load_weights\", \"state\": \"progress\", \"done\": '$((ORCH_ATTEMPT * 9))', \"total\": 64}'; "
        "echo '::orch {\"phase\": \"extract\", \"state\": \"progress\", \"done\": '$1', \"total\": 100}'; kill -9 $$"
    )
    in_vain = box.launch({"name": "work", "run": run.replace("$1", "5")}, job="in-vain")
    gaining = box.launch(
        {"name": "work", "run": run.replace("$1", "$ORCH_ATTEMPT"), "retry": {"attempts": 5}}, job="gaining"
    )
    for job, attempts in ((in_vain, 3), (gaining, 5)):
        box.hurry(job, "failed", within_s=120)
        assert box.verdicts(job) == ["killed"] * attempts


def test_the_same_failure_twice_stops_whatever_the_budget(box: Box) -> None:
    """Numbers (pids, addresses) make no other failure; another text does."""
    run = "echo \"RuntimeError: rank $$ lost its way at 0x$$\"; exit 1"
    same = box.launch({"name": "work", "run": run, "retry": {"attempts": 6}}, job="same")
    other = box.launch(
        {"name": "work", "run": "echo \"RuntimeError: $(printf 'a%.0s' $(seq $ORCH_ATTEMPT))\"; exit 1", "retry": {"attempts": 3}},
        job="other",
    )
    box.hurry(same, "failed")
    assert len(box.verdicts(same)) == 2
    assert "the same failure twice" in box.why(same)["reason"]
    box.hurry(other, "failed")
    assert len(box.verdicts(other)) == 3


def test_attempts_of_the_launch_caps_every_class(box: Box) -> None:
    job = box.launch({"name": "work", "run": "kill -9 $$", "retry": {"attempts": 1}})
    box.hurry(job, "failed")
    assert box.verdicts(job) == ["killed"]


def test_backoff_is_waited_for_and_shown(box: Box) -> None:
    job = box.launch({"name": "work", "run": "[ $ORCH_ATTEMPT = 2 ] || kill -9 $$"})
    job.wait_for_kind("retry_scheduled")
    [scheduled] = events(job, "retry_scheduled")
    assert 4.0 <= scheduled["delay_s"] <= 6.0
    wait_until(lambda: box.step(job)["retry_at"] == scheduled["at"], "status says when")
    box.hurry(job, "succeeded")


def test_changes_and_budget_survive_the_supervisor(box: Box) -> None:
    """The supervisor is killed while the job waits: the change that was decided is not forgotten."""
    body = fails_until(2, OOM)
    job = box.launch(builtin(box, "extract", body, {"gpu_memory_utilization": 0.9}))
    job.wait_for_kind("retry_scheduled")
    kill(job.supervisor)
    wait_until(lambda: not job.supervisors(), "it is gone")
    box.control(job, "retry")
    box.hurry(job, "succeeded")
    assert [flag(call, "--gpu-memory-utilization") for call in box.calls()] == ["0.9", "0.85"]


def test_what_a_person_sets_beats_what_the_policy_had_changed(box: Box) -> None:
    job = box.launch(
        builtin(box, "extract", fails_until(3, OOM), {"gpu_memory_utilization": 0.9}, retry={"attempts": 2})
    )
    box.hurry(job, "failed")
    box.control(job, "retry", args={"set": {"work.with.gpu_memory_utilization": 0.6, "work.with.max_num_seqs": 4}})
    box.hurry(job, "succeeded")
    assert [flag(call, "--gpu-memory-utilization") for call in box.calls()] == ["0.9", "0.85", "0.6"]
    assert flag(box.calls()[-1], "--max-num-seqs") == "4"
    assert bundle(job, 2)["params"]["gpu_memory_utilization"] == 0.85
