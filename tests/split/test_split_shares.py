"""Which ranges become which jobs, and what their steps are told. Pure."""

from __future__ import annotations

from typing import Any

from orchestrator.core.split import arrays, expand, one_after_another, shares

STEP: dict[str, Any] = {"name": "x", "uses": "extract", "gpus": 8, "params": {"model": "/m"}, "split": 3}


def test_ranges_of_a_scheduler_are_jobs_and_those_of_one_host_are_an_array() -> None:
    """Blocks on direct hosts; a job that is alone on its cluster is submitted as always."""
    queued = {"box": False, "big": True, "small": True}
    todo = shares(6, queued)
    assert todo == [("box", [1, 2]), ("big", [3]), ("big", [4]), ("small", [5]), ("small", [6])]
    jobs = [(f"job-{number}", host) for number, (host, _) in enumerate(todo)]
    assert arrays(jobs, queued) == {
        "job-1": ["job-1", "job-2"], "job-2": ["job-1", "job-2"], "job-3": ["job-3", "job-4"], "job-4": ["job-3", "job-4"],
    }  # fmt: skip
    assert arrays([("a", "box"), ("b", "big")], queued) == {}
    assert shares(4, {"big": False}) == [("big", [1, 2, 3, 4])], "array: false"


def test_ranges_without_a_joining_step_join_themselves() -> None:
    """Only a built-in step knows how; a range of a job with a joining step leaves it to that."""
    [alone] = expand([STEP], [2], join=True)
    assert (alone["name"], alone["params"]) == ("x-2of3", {"model": "/m", "join": True})
    assert STEP["params"] == {"model": "/m"}
    assert all("join" not in step["params"] for step in expand([STEP]))
    [run] = expand([{"name": "x", "run": "true", "split": 3}], [1], join=True)
    assert not run["params"]


def test_only_ranges_of_one_job_run_one_after_another() -> None:
    """Each task of an array has an allocation of its own."""
    assert one_after_another({"steps": expand([STEP]), "host_gpus": 8})
    assert not one_after_another({"steps": expand([STEP], [2]), "host_gpus": 8})
