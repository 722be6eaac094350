"""End every process below this one: engines and workers that outlive whoever started them. Must not import torch."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from remote_jobs.agent import procs

STOP_RUNGS = ((signal.SIGTERM, 4.0), (signal.SIGTERM, 4.0), (signal.SIGKILL, 4.0))
"""Signal and patience in s. All of it fits into the supervisor's own ladder for serve and extract (5 + 10 s)."""


def end_everything(first: int | None = None) -> list[int]:
    """End every process below this one, politely first; returns the pids that are left (none, as a rule).

    `first`: a ready server, which ends its engine itself when it alone is asked. One that still loads would lose that
    signal, so there everybody is told at once.
    """
    for rung, (signum, patience_s) in enumerate(STOP_RUNGS):
        if not living():
            break
        for proc in living():
            if rung > 0 or first is None or proc.pid == first:
                procs.send_signal(proc, signum)
        deadline = time.monotonic() + patience_s
        while living() and time.monotonic() < deadline:
            time.sleep(0.05)
    return [proc.pid for proc in living()]


def living() -> list[procs.Proc]:
    """Our descendants that still run; zombies that fell to us as subreaper are collected on the way."""
    rows = procs.table()
    found = [rows[pid] for pid in procs.descendants(os.getpid(), rows)]
    for proc in found:
        if proc.state == "Z" and proc.ppid == os.getpid():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(proc.pid, os.WNOHANG)
    return [proc for proc in found if proc.state not in "ZX"]
