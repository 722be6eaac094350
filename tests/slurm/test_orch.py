"""`orch` on a laptop, sshd on the login node, Slurm behind it: the same commands as for a direct host."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import PATH, Cluster
from tests.sshd.server import Sshd
from tests.support.jobdir import JobDir
from tests.support.laptop import Laptop
from tests.support.waiting import wait_until


@pytest.fixture
def laptop(cluster: Cluster, tmp_path: Path) -> Iterator[Laptop]:
    """A laptop whose host `box` is the login node of the cluster."""
    root = tmp_path / "root"
    home = tmp_path / "sshd" / "home"
    options = {"SetEnv": f'"HOME={home}" "SLURM_CONF={cluster.conf}" "PATH={PATH}"'}
    with Sshd(tmp_path / "sshd", options=options) as server:
        host = {
            **server.inventory_entry(root=str(root)), "scheduler": "slurm", "partition": "main", "gpus": 4,
            "queue_interval_s": 0.5, "allow_tmpfs": True, "time_limit": "30m", "gres": "gpu:4",
        }  # fmt: skip
        yield Laptop(tmp_path / "laptop", {"box": host})
    for folder in (root / "jobs").glob("*"):
        JobDir(root, folder.name).end_everything()


def test_every_command_works_as_on_a_direct_host(cluster: Cluster, laptop: Laptop, tmp_path: Path) -> None:
    """launch, status, logs, stop, why, retry --set, wait, fetch; a waiting job shows reason and expected start."""
    run = "echo hello from $SLURM_JOB_ID; mkdir -p $ORCH_OUTPUT; echo result >$ORCH_OUTPUT/r; exit 3"
    plan = laptop.plan([{"name": "work", "run": run}], workdir=str(tmp_path / "work"))
    checks = laptop.run("preflight", plan, "--json", expect=0).json["checks"]
    assert [check["verdict"] for check in checks if check["name"] == "slurm"] == ["ok"]
    assert not [check for check in checks if check["name"] in ("gpus", "memory")]
    with cluster.full():
        job = laptop.launch(plan)
        known = tmp_path / "root" / "jobs" / job / "slurm.json"  # written at a look
        with laptop.started("wait", job):
            wait_until(lambda: known.exists() and '"Resources"' in known.read_text() and '"start":null' not in known.read_text(), "reason and start are known", within_s=30)
        assert laptop.status(job)["slurm"]["state"] == "PENDING"
        shown = laptop.run("status", job, expect=0).out
        assert "queued" in shown
        assert "nodes or GPUs are not free yet" in shown
        assert "expected start" in shown
    assert laptop.run("wait", job).status == 1
    assert laptop.run("logs", job, expect=0).out.startswith("hello from ")
    assert "exit status 3" in laptop.run("why", job, expect=0).out
    laptop.run("retry", job, "--set", "work.run=echo again", expect=0)
    laptop.run("wait", job, expect=0)
    laptop.run("fetch", job, tmp_path / "here", expect=0)
    assert [path.read_text() for path in (tmp_path / "here").rglob("r")] == ["result\n"]


def test_hosts_check_and_what_slurm_refuses(laptop: Laptop) -> None:
    """A login node needs no GPUs; a partition that is not there is named with the line to correct, and exit status 3."""
    found = laptop.run("hosts", "check", "box", "--json").json["hosts"][0]
    assert {check["name"]: check["verdict"] for check in found["checks"]}["gpus"] == "ok"
    host = {**json.loads(laptop.inventory.read_text())["hosts"]["box"], "partition": "nowhere"}
    laptop.write_inventory({"box": host})
    answer = laptop.run("launch", laptop.plan([{"name": "w", "run": "true"}]), "--no-preflight")
    assert answer.status != 0
    assert "nvalid partition" in answer.err
    assert "inventory" in answer.err
    assert laptop.run("status", "--json", expect=0).json["jobs"] == []
