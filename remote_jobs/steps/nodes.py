"""A step on several nodes of a Slurm allocation: who starts what where.

    python nodes.py COMMAND...     a Ray cluster over the step's nodes around COMMAND (serve and extract: vLLM's Ray executor)

The supervisor sets ORCH_NODES, ORCH_SRUN (JSON: the command that starts one process a node), MASTER_ADDR and
MASTER_PORT; without them a step has this one node. Must not import torch, vllm or ray.
"""

from __future__ import annotations

import os
import sys

if __package__ in {None, ""}:  # started as a script: its own folder must not shadow libraries
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import json
import subprocess
import time
from collections.abc import Sequence

from remote_jobs.agent.slurm import spread
from remote_jobs.steps.extraction.errors import StepError
from remote_jobs.steps.extraction.stop import StopSignal

JOIN_LIMIT_S = 300.0
END_LIMIT_S = 20.0
_COUNT = "import ray; ray.init(address='auto', log_to_driver=False); print(sum(n['Alive'] for n in ray.nodes()))"
_WORKER = "--ray-node"


def count() -> int:
    """Nodes of this step."""
    return int(os.environ.get("ORCH_NODES") or 1)


def rank() -> int:
    """Number of this node among the step's, from 0: srun's."""
    return int(os.environ.get("SLURM_PROCID") or 0)


def srun() -> list[str]:
    """Words before a command that is to run once on each node."""
    return [str(word) for word in json.loads(os.environ.get("ORCH_SRUN") or "[]")]


def stop_all() -> None:
    """Tell the processes of all nodes to save and end."""
    spread.tell(os.environ["ORCH_STOP_FILE"])


def rendezvous() -> str:
    """HOST:PORT at which the processes of all nodes meet; the first node listens there."""
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def torchrun(processes: int, module: Sequence[str]) -> list[str]:
    """Torchrun on this node, one of several, with c10d rendezvous at the first (torch.distributed.run's own flags)."""
    where = ["--nnodes", str(count()), "--nproc-per-node", str(processes)]
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", rendezvous(), "--rdzv-id", os.environ.get("ORCH_JOB", "orch")]
    # Said, not guessed by host name: names of nodes and of interfaces differ on many clusters.
    first = ["--rdzv-conf", f"is_host={1 if rank() == 0 else 0}"]
    return [sys.executable, "-m", "torch.distributed.run", *where, *meet, *first, *module]


def with_ray(command: Sequence[str]) -> int:
    """Run a command on the first node with a Ray cluster over all of them; its exit status.

    Raises:
        StepError: a node did not join, or left.
    """
    stop = StopSignal()
    with stop.installed():
        here = [sys.executable, os.path.abspath(__file__), _WORKER]
        cluster = subprocess.Popen([*srun(), *here], stdin=subprocess.DEVNULL, start_new_session=True)
        child: subprocess.Popen[bytes] | None = None
        try:
            _wait_for_nodes(cluster, stop)
            print(f"Ray: {count()} nodes have joined at {rendezvous()}", flush=True)
            env = {**os.environ, "RAY_ADDRESS": rendezvous()}
            child = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL)
            while child.poll() is None:
                if cluster.poll() is not None and stop.number is None:
                    child.terminate()
                    raise StepError("a node of the Ray cluster ended; srun names it above")
                time.sleep(0.2)
            return child.returncode if child.returncode >= 0 else 128 - child.returncode
        finally:
            if child is not None and child.poll() is None:
                child.wait()  # it has been told: by the group's signal, or above
            _end(cluster)


def _wait_for_nodes(cluster: subprocess.Popen[bytes], stop: StopSignal) -> None:
    deadline = time.monotonic() + JOIN_LIMIT_S
    env = {**os.environ, "RAY_ADDRESS": rendezvous()}
    while time.monotonic() < deadline:
        stop.check()
        if cluster.poll() is not None:
            raise StepError(f"Ray did not start on every node (srun ended with {cluster.returncode}); is ray installed there?")
        asked = subprocess.run([sys.executable, "-c", _COUNT], env=env, capture_output=True, text=True, check=False)
        if asked.returncode == 0 and int(asked.stdout.split()[-1]) >= count():
            return
        time.sleep(1.0)
    raise StepError(f"not every node joined the Ray cluster within {JOIN_LIMIT_S:.0f} s")


def _end(cluster: subprocess.Popen[bytes]) -> None:
    """Each node's part takes the stop file as a TERM."""
    if cluster.poll() is None:
        stop_all()
        try:
            cluster.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            cluster.kill()
            cluster.wait()


def ray_node() -> None:
    """Become the Ray process of this node."""
    host, _, port = rendezvous().rpartition(":")
    where = ["--head", f"--port={port}", f"--node-ip-address={host}", "--include-dashboard=false"]
    where = where if rank() == 0 else [f"--address={rendezvous()}"]
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", *where, "--block"]
    os.execv(sys.executable, words)  # noqa: S606 - no shell is wanted


def main(argv: Sequence[str]) -> int:
    """Entry; see the module's text."""
    if list(argv) == [_WORKER]:
        ray_node()
    from remote_jobs.steps import entry

    return entry.run("nodes", lambda _progress: with_ray(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
