"""Ten failures of real runs, replayed under a real supervisor: class, decision and number of attempts of each."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from tests.retries.box import LOGS, Box, events, replayed
from tests.support.host_side import ended, pythons
from tests.support.jobdir import JobDir

CASES = {
    case["id"]: case
    for case in map(json.loads, (LOGS / "real" / "logs.jsonl").read_text().splitlines())
    if case["expected"]["failure_class"]
}
# id -> class of every attempt, attempts in all (None of them changes: these are commands of a person's own)
TABLE: dict[str, tuple[str, int]] = {
    "vllm026_h200_gpu_busy": ("gpu_busy", 3),
    "vllm026_h200_truncated_shard": ("data_corrupt", 1),
    "vllm026_h200_main_sigkilled": ("killed", 3),
    "vllm032_cpu_shard_truncated": ("data_corrupt", 1),
    "vllm032_cpu_port_in_use": ("port_in_use", 3),
    "vllm032_cpu_max_model_len": ("config", 1),
    "vllm032_cpu_worker_sigkilled_midload": ("killed", 3),
    "vllm032_cpu_api_sigkilled_midload": ("killed", 3),
    "speculators09_train_sigterm": ("killed", 3),
    "torchrun_worker_sigkilled": ("killed", 3),
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Box, dict[str, JobDir]]]:
    """All ten side by side, with the backoffs cut short, to their ends."""
    with Box(tmp_path_factory.mktemp("replayed"), next(iter(pythons().values()))) as box:
        jobs = {
            name: box.launch(
                {"name": "work", "run": replayed(f"real/{CASES[name]['file']}", CASES[name]["exit_status"])}, job=name
            )
            for name in TABLE
        }
        deadline = time.monotonic() + 240
        open_jobs = dict(jobs)
        while open_jobs and time.monotonic() < deadline:
            for name, job in list(open_jobs.items()):
                if "finished" in job.kinds():
                    ended(job)
                    del open_jobs[name]
                elif job.state == "retry_wait":
                    box.skip_backoff(job)
            time.sleep(0.1)
        assert not open_jobs, {name: job.kinds() for name, job in open_jobs.items()}
        yield box, jobs


def test_the_table_names_every_failure_of_the_real_logs() -> None:
    """A new log of a failure must get its row."""
    assert set(TABLE) == set(CASES)


@pytest.mark.parametrize("name", TABLE)
def test_real_failure(name: str, played: tuple[Box, dict[str, JobDir]]) -> None:
    box, jobs = played
    job, (klass, attempts) = jobs[name], TABLE[name]
    assert box.verdicts(job) == [klass] * attempts
    assert [item["exit_status"] for item in box.step(job)["attempts"]] == [CASES[name]["exit_status"]] * attempts
    assert (job.kinds().count("retry_scheduled"), job.state) == (attempts - 1, "failed")
    found = box.why(job)
    assert (found["attempt"], found["verdict"]["class"]) == (attempts, klass)
    match = CASES[name]["expected"]["root_cause_match"]
    if match:
        assert match in found["verdict"]["root_cause"]["text"]
    assert found["reason"] == events(job, "step_failed")[0]["reason"]
