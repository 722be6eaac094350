"""A step split over a Slurm host: one allocation for each range, started when Slurm has room for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

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


def test_each_range_is_an_allocation_of_its_own(cluster: Cluster, laptop: Laptop, work: Path) -> None:
    run = "echo $SLURM_JOB_ID >ran-$ORCH_SPLIT_INDEX; until [ -e go ]; do sleep 0.1; done"
    step = {"name": "part", "run": run, "split": {"ranges": 3, "hosts": ["box"]}}
    plan = laptop.plan([step], workdir=str(work))
    plan.write_text(plan.read_text().replace('"host": "box",', ""))
    jobs = [row["job"] for row in laptop.run("launch", plan, "--no-preflight", "--json", expect=0).json["jobs"]]
    assert len(set(jobs)) == 3
    names = [[found["name"] for found in laptop.status(job)["steps"]] for job in jobs]
    assert names == [["part-1of3"], ["part-2of3"], ["part-3of3"]]
    wait_until(lambda: any(work.glob("ran-*")), "a range runs", within_s=40)
    queued = cluster.run("squeue", "-h", "-o", "%j")
    assert all(f"orch-{job}." in queued for job in jobs), "the others run or wait at Slurm"
    (work / "go").touch()
    for job in jobs:
        laptop.run("wait", job, within_s=60, expect=0)
    allocations = {(work / f"ran-{index}").read_text() for index in (1, 2, 3)}
    assert len(allocations) == 3


def test_without_hosts_the_ranges_share_one_allocation(laptop: Laptop, work: Path) -> None:
    run = "echo $SLURM_JOB_ID >>ran; until [ $(wc -l <ran) = 3 ]; do sleep 0.1; done"
    plan = laptop.plan([{"name": "part", "run": run, "split": 3}], workdir=str(work))
    job = laptop.launch(plan)
    laptop.run("wait", job, within_s=60, expect=0)
    assert [step["state"] for step in laptop.status(job)["steps"]] == ["succeeded"] * 4
    assert len((work / "ran").read_text().split()) == 3
    assert len(set((work / "ran").read_text().split())) == 1
