"""One Slurm for the whole group; a host side and an agent on its "login node" for each test."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import PATH, Cluster
from tests.support.host_side import Agent, HostSide, look
from tests.support.jobdir import JobDir
from tests.support.waiting import wait_until

JOB = f"slurm-{os.getpid()}"
"""Of this run alone: whatever carries a job's id is ended as the job's, and other tests run beside these."""


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A running Slurm without accounting."""
    folder = Path(tempfile.mkdtemp(prefix="orch-slurm-", dir="/var/tmp"))  # sockets need short paths
    try:
        with Cluster(folder / "s") as running:
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Login(HostSide):
    """The login node: a host side whose jobs go to Slurm."""

    def __init__(self, folder: Path, cluster: Cluster, python: str = sys.executable) -> None:
        super().__init__(folder, python)
        self.cluster = cluster

    def agent(self, **environment: str) -> Agent:
        """An agent that finds Slurm."""
        return super().agent(**{"PATH": PATH, **self.cluster.environment, **environment})

    def agent_behind(self, folder: Path, **programs: str) -> Agent:
        """An agent that finds these shell scripts in ``folder`` (made here) where it looks for Slurm's programs."""
        folder.mkdir(exist_ok=True)
        for program, body in programs.items():
            (folder / program).write_text(f"#!/bin/sh\n{body}\n")
            (folder / program).chmod(0o755)
        return self.agent(PATH=f"{folder}:{PATH}")

    def agent_that_misses_an_answer(self, folder: Path) -> Agent:
        """An agent whose first `sbatch` arrives, and whose answer does not."""
        timeout = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
        first = f'test -e {folder}/ok || {{ touch {folder}/ok; echo "{timeout}" >&2; exit 1; }}'
        return self.agent_behind(
            folder, sbatch=f'/usr/bin/sbatch "$@" || exit 1\ncase "$*" in *--parsable*) {first};; esac'
        )

    def launch(self, agent: Agent, steps: Any, job: str = JOB, **more: Any) -> JobDir:
        """Launch a job."""
        return super().launch(agent, steps, job, **more)

    def spec(self, steps: Any, job: str = JOB, **more: Any) -> dict[str, Any]:
        """A JobSpec object that asks Slurm for nodes; the queue is read each second."""
        slurm = {"queue_interval_s": 0.5, "partition": "main", **more.pop("slurm", {})}
        return super().spec(steps, job, slurm=slurm, allow_tmpfs=True, **more)


@pytest.fixture
def login(cluster: Cluster, tmp_path: Path) -> Iterator[Login]:
    """A login node with an empty root."""
    with Login(tmp_path / "login", cluster) as host:
        yield host
        for job in host.jobs():
            for row in cluster.run("squeue", "-h", "-o", "%i %j").splitlines():
                number, name = row.split()
                if name.startswith(f"orch-{job.id}."):
                    cluster.run("scancel", "--full", number)


@pytest.fixture
def agent(login: Login) -> Agent:
    """An agent on it."""
    return login.agent()


def events_of(job: JobDir, kind: str) -> list[dict[str, Any]]:
    """Events of one kind."""
    return [event for event in job.events() if event["kind"] == kind]


def view(agent: Agent, job: str = JOB) -> dict[str, Any]:
    """The state object of a job, with what Slurm says of it."""
    return dict(look(agent, job)["state"])


def until(agent: Agent, state: str, job: str = JOB, within_s: float = 25.0) -> dict[str, Any]:
    """Look until the job is in a state; that state object."""
    seen: dict[str, Any] = {}

    def there() -> bool:
        seen.update(view(agent, job))
        return bool(seen["state"] == state)

    wait_until(there, f"{job} is {state}", within_s=within_s, every_s=0.2, seen=lambda: seen)
    return seen


def submissions(job: JobDir) -> list[str]:
    """Slurm's ids of all submissions, oldest first."""
    numbers = [path for path in (job.path / "slurm").iterdir() if path.name.isdigit()]
    folders = sorted(numbers, key=lambda path: int(path.name))
    answers = [folder / "answer.json" for folder in folders]
    return [json.loads(answer.read_text())["id"] for answer in answers if answer.exists()]
