"""A GPU breaks: it is named, and left out where the plan allows fewer. Four or eight GPUs of a stand-in nvidia-smi."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.retries.box import Box, bundle, events
from tests.retries.test_policy_on_the_host import builtin, flag
from tests.support.host_side import Refused, ended, look
from tests.support.jobdir import JobDir, kill
from tests.support.waiting import wait_until

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
FAILS_ONCE = f"""
echo $CUDA_VISIBLE_DEVICES >> visible
if [ $ORCH_ATTEMPT = 1 ]; then touch up; until [ -e go ]; do sleep 0.05; done; echo "{ECC}" >&2; exit 1; fi
"""


def broken_under_way(box: Box, retry: dict[str, Any]) -> JobDir:
    """Eight GPUs in one tensor-parallel group; the third is lost while the first attempt runs, and kills it."""
    box.smi.save(gpus=8)
    step = builtin(box, "extract", FAILS_ONCE, {"tensor_parallel_size": 8}, gpus=8, retry=retry)
    job = box.launch(step, host_gpus=8)
    wait_until((box.work / "up").exists, "the first attempt runs", seen=job.kinds)
    box.smi.save(lost=[2])
    box.release_go()
    return job


def visible(box: Box) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each attempt."""
    return Path(box.work / "visible").read_text().split()


def test_the_next_attempt_leaves_it_out_and_shrinks_to_a_divisor(box: Box) -> None:
    job = broken_under_way(box, {"gpu_hardware": {"fewer_gpus": {"min": 3}}})
    box.hurry(job, "succeeded")
    assert [flag(call, "--tensor-parallel-size") for call in box.calls()] == ["8", "4"]
    assert "gpus" not in box.calls()[1], "what orch keeps for itself is no flag of the program"
    assert visible(box) == ["0,1,2,3,4,5,6,7", "0,1,3,4"]
    told = box.why(job, attempt=1)
    uuid = "GPU-00000002-c207-a54c-7ef0-178ac953cafc"
    assert told["changed_next"] == {"gpus": 4, "tensor_parallel_size": 4, "without_gpus": [uuid]}
    assert f"gpu 2 ({uuid})" in told["verdict"]["summary"]
    assert any("gpu 2" in str(item) and "lost" in str(item) for item in told["evidence"])
    assert f"without gpu 2 ({uuid})" in told["reason"]
    assert bundle(job)["verdict"]["summary"] == told["verdict"]["summary"]
    assert box.step(job)["attempts"][1]["changes"]["gpus"] == 4


@pytest.mark.parametrize("retry", [{"attempts": 5}, {"gpu_hardware": {"fewer_gpus": {"min": 5}}}], ids=["never allowed", "too few"])
def test_else_the_job_stops_at_once_and_names_it(retry: dict[str, Any], box: Box) -> None:
    job = broken_under_way(box, retry)
    assert ended(job) == "failed"
    assert visible(box) == ["0,1,2,3,4,5,6,7"]
    told = box.why(job)
    assert told["verdict"]["class"] == "gpu_hardware"
    assert "gpu 2 (GPU-00000002-" in told["verdict"]["summary"]
    if "gpu_hardware" in retry:
        assert "no divisor of tensor_parallel_size 8 gives 5 to 7 GPUs" in told["reason"]


def test_it_stays_out_when_the_supervisor_dies_until_a_person_says_how_many(box: Box) -> None:
    """The GPU looks healthy again at once: it is the step that remembers it."""
    box.smi.save(gpus=4)
    run = FAILS_ONCE + "if [ $ORCH_ATTEMPT != 4 ]; then touch up$ORCH_ATTEMPT; sleep 600; fi"
    step = {"name": "work", "run": run, "gpus": 4, "retry": {"gpu_hardware": {"fewer_gpus": {"min": 2}}}}
    job = box.launch(step, host_gpus=4)
    wait_until((box.work / "up").exists, "the first attempt runs", seen=job.kinds)
    box.smi.save(lost=[1])
    box.release_go()
    wait_until(lambda: job.state == "retry_wait", "it failed", seen=job.kinds)
    box.smi.save(lost=[])
    box.skip_backoff(job)
    wait_until((box.work / "up2").exists, "the second attempt runs", seen=job.kinds)
    job.wait_for_kind("attempt_started", count=2)  # on record: the program may be faster
    kill(job.supervisor)
    wait_until(lambda: look(box.agent, job.id)["state"]["state"] == "lost", "it is known to be lost")
    box.control(job, "retry")
    wait_until((box.work / "up3").exists, "the third attempt runs", seen=job.kinds)
    box.control(job, "stop")
    assert ended(job) == "stopped"
    box.control(job, "retry", args={"set": {"work.gpus": 4}})
    box.hurry(job, "succeeded")
    assert visible(box) == ["0,1,2,3", "0,2,3", "0,2,3", "0,1,2,3"]


def test_a_gpu_that_is_broken_before_the_start(box: Box) -> None:
    """At launch and at the gate of a later step alike; a step that may not shrink is refused, with the GPU named."""
    box.smi.save(gpus=4, lost=[1])
    run = "echo $CUDA_VISIBLE_DEVICES $ORCH_GPUS > seen-$ORCH_STEP"
    fewer = {"gpus": 4, "retry": {"gpu_hardware": {"fewer_gpus": {"min": 2}}}}
    with pytest.raises(Refused, match="gpu 1: GPU is lost"):
        box.launch({"name": "work", "run": run, "gpus": 4}, job="refused", host_gpus=4)
    job = box.launch(
        {"name": "first", "run": run, **fewer}, {"name": "second", "run": run, "needs": ["first"], **fewer}, host_gpus=4
    )
    box.hurry(job, "succeeded")
    assert [(box.work / f"seen-{name}").read_text().split() for name in ("first", "second")] == [["0,2,3", "3"]] * 2
    reasons = [data["reason"] for data in events(job, "step_queued") if data.get("changes")]
    assert len(reasons) == 2
    assert all("without gpu 1 (GPU-00000001-" in text for text in reasons)


def test_where_nothing_else_tells_the_worker_that_died_first_does(box: Box) -> None:
    """And a host with GPUs to spare gives another one: nothing shrinks."""
    box.smi.save(gpus=4)
    line = f"(Worker_TP1 pid=77) {ECC}"
    run = f"echo $CUDA_VISIBLE_DEVICES >> visible; [ $ORCH_ATTEMPT = 2 ] || {{ echo '{line}' >&2; exit 1; }}"
    step = {"name": "work", "run": run, "gpus": 2, "retry": {"gpu_hardware": {"fewer_gpus": {"min": 2}}}}
    job = box.launch(step, host_gpus=4)
    box.hurry(job, "succeeded")
    assert visible(box) == ["0,1", "0,2"]
    assert "most likely" in str(box.why(job, attempt=1)["evidence"])
