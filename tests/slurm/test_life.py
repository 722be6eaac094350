"""The life of a job in Slurm, seen from the login node."""

from __future__ import annotations

from tests.slurm.cluster import Cluster
from tests.slurm.conftest import Login
from tests.support.host_side import Agent, ended, look


def test_runs_in_the_allocation(cluster: Cluster, login: Login, agent: Agent) -> None:
    """A job runs on a node, with its log, result and GPUs, as it would on a direct host."""
    job = login.launch(agent, [{"name": "work", "run": "echo on $SLURMD_NODENAME job $SLURM_JOB_ID; sleep 1; touch done"}])
    assert ended(job) == "succeeded"
    shown = look(agent, "job-1")
    print(shown)
    print(cluster.queue())
