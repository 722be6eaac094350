"""The trainer as a child of train.py: how it is started, told to stop, and never left behind.

It runs in a session of its own, so that a signal to train.py's group does not reach torchrun: that one kills its workers
30 s after a signal, in the middle of a save. The workers are told, and torchrun just ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from remote_jobs.agent import procs
from remote_jobs.steps import nodes
from remote_jobs.steps.extraction.errors import StepError
from remote_jobs.steps.extraction.stop import StopSignal
from remote_jobs.steps.train_worker import METRICS_ENV

SAVE_LIMIT_S = 110.0
"""A stopped trainer that has not saved after this long is told again, which makes it leave its step at once."""
PR_SET_PDEATHSIG = 1


def launcher(processes: int) -> list[str]:
    """Command that runs the training process, by torchrun when there are several."""
    module = "remote_jobs.steps.train_worker"
    if nodes.count() > 1:
        return [*nodes.srun(), sys.executable, "-m", "remote_jobs.steps.trainer_process", str(processes), "--module", module]
    if processes == 1:
        return [sys.executable, "-m", module]
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [sys.executable, *run, "--module", module]


def run(command: Sequence[str], metrics: str, extra_env: Mapping[str, str], stop: StopSignal) -> None:
    """Run the trainer to its end; its records go to the file `metrics`.

    Raises:
        Interrupted: stopped; the checkpoint is saved.
        StepError: the trainer failed.
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    env = {**os.environ, METRICS_ENV: metrics, "TOKENIZERS_PARALLELISM": "false", **extra_env}
    if not sys.stderr.isatty():
        env.setdefault("COLUMNS", "400")  # rich wraps its lines at 80 otherwise, in the middle of words
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), root]))
    procs.become_subreaper()
    status = _followed(command, env, stop)
    stop.check()
    if status != 0:
        raise StepError(f"training ended with exit status {status}; the reason is further up")


def _followed(command: Sequence[str], env: Mapping[str, str], stop: StopSignal) -> int:
    """Run a trainer and pass a stop on to the processes that train; its exit status."""
    child = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_parent  # noqa: PLW1509
    )  # fmt: skip
    told_at: float | None = None
    while child.poll() is None:
        now = time.monotonic()
        if stop.number is not None and (told_at is None or now - told_at > SAVE_LIMIT_S):
            told_at = now
            if command[0] == "srun":
                nodes.stop_all()  # to srun itself a TERM would mean: kill
            else:
                for proc in _trainers(child.pid):
                    procs.send_signal(proc, signal.SIGTERM)
        time.sleep(0.1)
    return child.returncode


def main(argv: Sequence[str]) -> int:
    """One node's part of a training on several: `PROCESSES --module MODULE FLAGS...`, started by srun.

    After a stop the exit status is 0: another one would make srun kill the nodes that still save.
    """
    stop = StopSignal()
    with stop.installed():
        procs.become_subreaper()
        status = _followed(nodes.torchrun(int(argv[0]), argv[1:]), os.environ, stop)
    return 0 if stop.number is not None else status if status >= 0 else 128 - status


def _trainers(pid: int) -> list[procs.Proc]:
    """The processes that train: the child itself, or torchrun's children; not their loaders and helpers."""
    rows = procs.table()
    workers = [
        proc
        for proc in rows.values()
        if proc.ppid == pid and "train_worker" in procs.command_line(proc.pid, 4096)
    ]
    torchrun = "torch.distributed.run" in procs.command_line(pid, 4096)
    return workers if torchrun else [rows[pid]] if pid in rows else []


def _end_with_parent() -> None:
    """In the child: SIGTERM when train.py dies, so that nobody trains on unseen (Linux, prctl(2))."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
