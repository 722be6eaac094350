"""What a job takes of its host: how busy its GPUs were, one line a minute in <job>/usage.jsonl, for the plots of `orch history`
and `orch report`; and whether the disk of its logs was full (`fulldisk`).

GPUs only while a running attempt of this job holds GPUs.  nvidia-smi is asked in a side task, for four figures of each GPU.
Standard library only.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, List, Optional

from remote_jobs import protocol
from remote_jobs.agent import smi_run
from remote_jobs.agent.attempt import utc_now
from remote_jobs.agent.fulldisk import FullDisk
from remote_jobs.agent.side import SideTask

if TYPE_CHECKING:
    from remote_jobs.agent.supervisor import Supervisor

FILE = "usage.jsonl"
EVERY_S = 60.0
FIRST_AFTER_S = 5.0
TIMEOUT_S = 40.0
MAX_FILE_BYTES = 8 << 20
"""A week of eight GPUs is half of it."""
_QUERY = ("--query-gpu=index,utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits")


def read() -> List[List[Optional[float]]]:
    """[index, utilisation in %, MiB used, MiB in all] of each GPU; what is not a number there is None."""
    rows = []
    for line in smi_run.run_smi(_QUERY).splitlines():
        cells = [_number(cell) for cell in line.split(",")]
        if len(cells) == 4 and cells[0] is not None:
            rows.append(cells)
    return rows


def _number(text: str) -> Optional[float]:
    try:
        return float(int(text))
    except ValueError:
        return None


class UsageKeeper:
    """The supervisor's part."""

    def __init__(self, boss: "Supervisor") -> None:
        self._boss = boss
        self._task: Optional[SideTask] = None
        self._due: Optional[float] = None
        self._path = boss.job.at(FILE)
        self.disk = FullDisk(boss)

    def _held(self) -> List[int]:
        held: List[int] = []
        for stepper in self._boss.steppers:
            if stepper.spec.gpus > 0 and stepper.attempt is not None:
                held.extend(stepper.gpus.indices or ())
        return sorted(set(held))

    def tick(self, now: float) -> None:
        """Take a reading when one is due. Never blocks; never raises for what a disk or a driver does."""
        self.disk.tick(now)
        if self._task is not None:
            if not self._task.ready():
                return
            rows, self._task = self._task.result, None
            if rows:
                self._append(rows)
        if self._due is not None and now < self._due:
            return
        if not self._held():
            self._due = None
            return
        if self._due is None:
            self._due = now + FIRST_AFTER_S
            return
        self._due = now + EVERY_S
        self._task = SideTask(read, timeout_s=TIMEOUT_S)

    def _append(self, rows: List[Any]) -> None:
        held = self._held()
        record = {"at": utc_now(), "gpus": [row for row in rows if not held or int(row[0]) in held]}
        with contextlib.suppress(OSError):
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                if os.fstat(fd).st_size < MAX_FILE_BYTES:
                    os.write(fd, protocol.dumps(record))
            finally:
                os.close(fd)
