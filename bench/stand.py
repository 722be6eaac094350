"""The test stand: a private sshd, a cable with a chosen round trip, a laptop in a folder. As in the tests."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tests.faults.stage import Stage

SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "LogLevel=ERROR")


@contextlib.contextmanager
def stand(rtt_s: float = 0.0) -> Iterator[Stage]:
    """A stage whose cable adds ``rtt_s`` of round trip; ``ssh -F stage.sshd.ssh_config box`` takes the same cable."""
    with tempfile.TemporaryDirectory(prefix="orch-bench-") as folder, Stage(Path(folder) / "stage") as stage:
        stage.cable.delay_s = rtt_s / 2
        config = stage.sshd.ssh_config
        config.write_text(config.read_text().replace(f"Port {stage.sshd.port}", f"Port {stage.cable.port}"))
        yield stage


def ssh(stage: Stage, *command: str) -> list[str]:
    """argv of a plain OpenSSH command through the same cable."""
    return ["ssh", "-F", str(stage.sshd.ssh_config), *SSH_OPTIONS, stage.sshd.alias, *command]


def timed(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def plain_ssh_s(stage: Stage, repetitions: int) -> list[float]:
    """Wall time of `ssh host true`."""
    argv = ssh(stage, "true")
    return [timed(lambda: subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)) for _ in range(repetitions)]


def cpu_s(pids: list[int]) -> float:
    """CPU seconds used so far by processes and the children they have reaped; gone ones count nothing."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def rss_mib(pid: int) -> float:
    """Largest resident set of a process so far, in MiB (VmHWM)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise LookupError(pid)


def environment(stage: Stage) -> dict[str, str]:
    """Environment of a controller process; PYTHONUNBUFFERED of this shell is not in it."""
    return {**stage.laptop.environment, "PYTHONPATH": str(Path(__file__).parents[1]), "PATH": os.environ["PATH"]}


PYTHON = sys.executable
