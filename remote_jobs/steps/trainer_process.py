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
from remote_jobs.steps.extraction.errors import StepError
from remote_jobs.steps.extraction.stop import StopSignal
from remote_jobs.steps.train_worker import METRICS_ENV

SAVE_LIMIT_S = 110.0
"""A stopped trainer that has not saved after this long is told again, which makes it leave its step at once."""
PR_SET_PDEATHSIG = 1


def launcher(processes: int) -> list[str]:
    """Command that runs the training process, by torchrun when there are several."""
    module = "remote_jobs.steps.train_worker"
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
    child = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_parent  # noqa: PLW1509
    )  # fmt: skip
    told_at: float | None = None
    while child.poll() is None:
        now = time.monotonic()
        if stop.number is not None and (told_at is None or now - told_at > SAVE_LIMIT_S):
            told_at = now
            for proc in _trainers(child.pid):
                procs.send_signal(proc, signal.SIGTERM)
        time.sleep(0.1)
    stop.check()
    if child.returncode != 0:
        raise StepError(f"training ended with exit status {child.returncode}; the reason is further up")


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
