"""A step split on a Slurm host: an array of which each task is a job of its own, or the ranges in one allocation."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.extract.conftest import Result, read_sample
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import cluster
from tests.slurm.test_orch import laptop
from tests.support.laptop import Laptop
from tests.support.waiting import wait_until

__all__ = ["cluster", "laptop"]


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "work"
    folder.mkdir()
    yield folder
    (folder / "go").touch()


def launched(laptop: Laptop, plan: Path) -> list[str]:
    """Ids of the jobs of one launch, in the order of their ranges."""
    host = json.loads(laptop.inventory.read_text())["hosts"]["box"]
    laptop.write_inventory({"box": {**host, "gres": "gpu:1"}})  # all of them at once
    answer = laptop.run("launch", plan, "--no-preflight", "--json", within_s=60, expect=0)
    assert "the tasks of one Slurm array" in answer.err
    return [row["job"] for row in answer.json["jobs"]]


def test_the_ranges_are_an_array_of_jobs(cluster: Cluster, laptop: Laptop, work: Path) -> None:
    run = "echo $SLURM_JOB_ID >ran-$ORCH_SPLIT_INDEX; until [ -e go ]; do sleep 0.1; done"
    plan = laptop.plan([{"name": "part", "run": run, "split": 3}], workdir=str(work))
    jobs = launched(laptop, plan)
    assert len(set(jobs)) == 3
    names = [[found["name"] for found in laptop.status(job)["steps"]] for job in jobs]
    assert names == [["part-1of3"], ["part-2of3"], ["part-3of3"]]
    rows = cluster.run("squeue", "-h", "-r", f"--name=orch-{jobs[0]}.array", "-o", "%F %K %T").splitlines()
    assert len({row.split()[0] for row in rows}) == 1, "one array"
    assert sorted(row.split()[1] for row in rows) == ["1", "2", "3"]
    wait_until(lambda: any(work.glob("ran-*")), "a range runs", within_s=40)
    (work / "go").touch()
    for job in jobs:
        laptop.run("wait", job, within_s=60, expect=0)
    allocations = {(work / f"ran-{index}").read_text() for index in (1, 2, 3)}
    assert len(allocations) == 3


def test_ranges_of_an_array_give_what_one_run_gives(
    laptop: Laptop, work: Path, models: dict[str, Path], dataset: Path, run_extract: Callable[..., Result]
) -> None:
    """The last range to end writes the one manifest; a range that comes again leaves it as it is."""
    given = {"model": str(models["qwen3"]), "dataset": str(dataset), "layers": [0, 2, 5, 6], "backend": "transformers"}
    step = {"name": "states", "uses": "extract", "gpus": 0, "split": 2, "python": sys.executable, "with": {**given, "device": "cpu"}}
    jobs = launched(laptop, laptop.plan([step], workdir=str(work)))
    assert len(jobs) == 2
    for job in jobs:
        laptop.run("wait", job, within_s=240, expect=0)
    one, folder = run_extract(models["qwen3"], dataset), work / "states"
    times = dict.fromkeys(("created_at", "updated_at"))
    merged = json.loads((folder / "manifest.json").read_text())
    assert {**merged, **times} == {**one.manifest(), **times}
    assert {path.name for path in folder.glob("[!.]*")} == {path.name for path in one.folder.glob("[!.]*")}
    for row, path in one.files().items():
        mine, theirs = read_sample(folder / f"hs_{row}.safetensors"), read_sample(path)
        assert mine["hidden_states"].sub(theirs["hidden_states"]).abs().max() < 1e-4
        assert mine["token_ids"].equal(theirs["token_ids"])
    again = run_extract(models["qwen3"], dataset, "--range", "1/2", "--join", output=folder)
    assert "joined already" in again.log
    assert json.loads((folder / "manifest.json").read_text()) == merged


def test_the_ranges_share_one_allocation_where_the_plan_says_so(laptop: Laptop, work: Path) -> None:
    run = "echo $SLURM_JOB_ID >>ran; until [ $(wc -l <ran) = 3 ]; do sleep 0.1; done"
    plan = laptop.plan([{"name": "part", "run": run, "split": {"ranges": 3, "array": False}}], workdir=str(work))
    job = laptop.launch(plan)
    laptop.run("wait", job, within_s=60, expect=0)
    assert [step["state"] for step in laptop.status(job)["steps"]] == ["succeeded"] * 4
    assert len((work / "ran").read_text().split()) == 3
    assert len(set((work / "ran").read_text().split())) == 1
