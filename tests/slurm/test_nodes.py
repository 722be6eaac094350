"""`nodes: 2`: one step over two slurmd, with real srun and real torchrun; Ray's place is taken by a stand-in package."""

from __future__ import annotations

import json
import shlex
import sys

from remote_jobs.agent.slurm.script import srun_prefix
from tests.slurm.cluster import free_port
from tests.slurm.conftest import JOB, Login, until, view
from tests.support.host_side import Agent, ended
from tests.support.jobdir import JobDir
from tests.support.waiting import wait_until

TRAINER = '''
"""Stands in for speculators: joins the process group of both nodes, sums the ranks, saves when told."""
import datetime, os, signal, sys, time
import torch.distributed as dist
told = []
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
import torch
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print(f"world {dist.get_world_size()} sum {int(total)}", flush=True)
open(f"joined-{dist.get_rank()}", "w").close()
while not told:
    time.sleep(0.05)
time.sleep(0.5)
open(f"saved-{dist.get_rank()}", "w").write(str(len(told)))
'''
TRAIN = '''
"""What train.py does with its launcher."""
from remote_jobs.steps import trainer_process
from remote_jobs.steps.extraction.stop import StopSignal
stop = StopSignal()
command = [word.replace("remote_jobs.steps.train_worker", "my_train_worker") for word in trainer_process.launcher(1)]
with stop.installed():
    trainer_process.run(command, "metrics", {}, stop)
'''
RAY_NODE = """
import os, sys, time
open(f"ray-{os.environ['SLURM_PROCID']}", "w").write(" ".join(sys.argv[1:]))
time.sleep(600)
"""
RAY = """
import glob
def init(**_): pass
def nodes(): return [{"Alive": True} for _ in glob.glob("ray-[0-9]")]
"""


def test_a_command_runs_on_every_node_and_its_lines_say_which(login: Login, agent: Agent) -> None:
    """Both nodes run the line; prefixes are srun's, which the log reader takes for ranks."""
    run = "echo $SLURMD_NODENAME of $ORCH_NODES, meet at $MASTER_ADDR:$MASTER_PORT"
    job = login.launch(agent, [{"name": "work", "run": run, "nodes": 2}])
    assert ended(job, within_s=30) == "succeeded"
    lines = sorted(job.log(1, "work").read_text().splitlines())
    assert [line.split(",")[0] for line in lines] == ["0: n1 of 2", "1: n2 of 2"]
    assert lines[0].split("meet at ")[1] == lines[1].split("meet at ")[1]


def test_one_nodes_death_is_named(login: Login, agent: Agent) -> None:
    """A rank that is killed ends the step; the verdict's root cause names the node and the rank."""
    run = 'test $SLURM_PROCID = 1 && { echo $$ >pid; kill -9 $$; }; exec sleep 600'
    job = login.launch(agent, [{"name": "work", "run": run, "nodes": 2, "retry": {"attempts": 1}}])
    assert ended(job, within_s=40) == "failed"
    [attempt] = view(agent)["steps"][0]["attempts"]
    assert attempt["verdict"]["class"] == "killed"
    assert "n2: task 1" in attempt["verdict"]["root_cause"]["text"]


def on_the_first_node(login: Login, agent: Agent, arguments: str) -> JobDir:
    """A job of two nodes whose step runs on the first one, with what the supervisor gives a built-in step there."""
    given = {"ORCH_NODES": "2", "ORCH_SRUN": json.dumps(srun_prefix(2)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "ORCH_STOP_FILE": str(login.work / "stop")}
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in given.items())
    run = f"exec env {variables} PYTHONPATH={login.release}:{login.work} {sys.executable} {arguments}"
    step = {"name": "work", "run": run, "grace_s": 60, "retry": {"attempts": 1}}
    return login.launch(agent, [step], slurm={"sbatch": ["--nodes=2", "--ntasks-per-node=1"]})


def test_torchrun_over_two_nodes_and_a_stop_that_lets_both_save(login: Login, agent: Agent) -> None:
    """The train step's launcher: c10d rendezvous, one world of two nodes, and one TERM for each trainer at a stop."""
    login.work.joinpath("my_train_worker.py").write_text(TRAINER)
    login.work.joinpath("train.py").write_text(TRAIN)
    job = on_the_first_node(login, agent, str(login.work / "train.py"))
    both = [login.work / f"joined-{rank}" for rank in (0, 1)]
    wait_until(lambda: all(path.exists() for path in both), "both nodes have joined", within_s=30, seen=lambda: job.log(1, "work").read_text()[-2000:])
    # The lines go through srun, the files do not.
    wait_until(lambda: job.log(1, "work").read_text().count("world 2 sum 3") == 2, "both have said so")
    agent.request("control", job=JOB, action="stop", args={})
    until(agent, "stopped", within_s=60)
    assert [(login.work / f"saved-{rank}").read_text() for rank in (0, 1)] == ["1", "1"]


def test_serve_and_extract_get_a_ray_cluster_of_their_nodes(login: Login, agent: Agent) -> None:
    """Head on the first node, the other joins it, the command runs once with RAY_ADDRESS, and nothing stays behind."""
    package = login.work / "ray" / "scripts"
    package.mkdir(parents=True)
    (package / "scripts.py").write_text(RAY_NODE)
    (package / "__init__.py").touch()
    (login.work / "ray" / "__init__.py").write_text(RAY)
    check = "import os; assert os.environ['RAY_ADDRESS'] == os.environ['MASTER_ADDR'] + ':' + os.environ['MASTER_PORT']"
    job = on_the_first_node(login, agent, f'{login.release}/remote_jobs/steps/nodes.py {sys.executable} -c "{check}"')
    assert ended(job, within_s=60) == "succeeded", job.log(1, "work").read_text()
    assert "--head" in (login.work / "ray-0").read_text()
    assert "--address=" in (login.work / "ray-1").read_text()
    assert "2 nodes have joined" in job.log(1, "work").read_text()
    assert not job.marked()


def test_a_stop_lets_every_node_save(login: Login, agent: Agent) -> None:
    """TERM reaches the command on both nodes, and each has its time."""
    run = "trap 'sleep 1; touch saved-$SLURM_PROCID; exit 1' TERM; touch up-$SLURM_PROCID; while true; do sleep 0.1; done"
    job = login.launch(agent, [{"name": "work", "run": run, "nodes": 2}])
    wait_until(lambda: (login.work / "up-0").exists() and (login.work / "up-1").exists(), "both nodes run")
    agent.request("control", job=JOB, action="stop", args={})
    assert ended(job) == "stopped"
    assert (login.work / "saved-0").exists()
    assert (login.work / "saved-1").exists()
