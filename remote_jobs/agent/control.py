"""Requests from the controller to a supervisor: one file each under control/, acknowledged by an event.

The agent writes, the supervisor reads; a FIFO wakes it at once where the file system has FIFOs, else it looks
once a second.  Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from typing import Any, Dict, List, Mapping, Optional

from remote_jobs import protocol
from remote_jobs.agent.jobdir import JobDir, read_json, write_json


def _folder(job: JobDir) -> str:
    return job.at(protocol.CONTROL_DIR)


def post(job: JobDir, action: str, args: Mapping[str, Any], key: str = "") -> str:
    """Write a request durably and wake the supervisor; the request's id.

    Raises:
        OSError: not written (disk full ...); the supervisor never sees half of it.
    """
    request_id = "{:.6f}-{}-{}".format(time.time(), action, key if key.isalnum() else os.urandom(6).hex())
    os.makedirs(_folder(job), mode=0o700, exist_ok=True)
    record = {"v": protocol.VERSION, "id": request_id, "action": action, "args": dict(args)}
    write_json(os.path.join(_folder(job), request_id + ".json"), record)
    wake(job)
    return request_id


def means(name: Optional[str], step: protocol.StepSpec) -> bool:
    """Does a request that names this step mean that one: itself, a range of the split step so called, or any (None)?"""
    return name in (None, step.name, (step.part or {}).get("of"))


def wake(job: JobDir) -> None:
    """Make a supervisor look now; without a reader (none alive) this does nothing."""
    with contextlib.suppress(OSError):
        fd = os.open(job.at(*protocol.WAKE_FIFO.split("/")), os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(fd, b"!")
        finally:
            os.close(fd)


def open_fifo(job: JobDir) -> int:
    """The supervisor's end of the FIFO, non-blocking; -1 where FIFOs cannot be made."""
    os.makedirs(_folder(job), mode=0o700, exist_ok=True)
    path = job.at(*protocol.WAKE_FIFO.split("/"))
    try:
        if not os.path.exists(path):
            os.mkfifo(path, 0o600)
        if not stat.S_ISFIFO(os.stat(path).st_mode):
            return -1
        # Read-write, so that the end of the last writer is no endless end-of-file.
        return os.open(path, os.O_RDWR | os.O_NONBLOCK)
    except OSError:
        return -1


def pending(job: JobDir) -> List[Dict[str, Any]]:
    """Requests not yet done, oldest first; unreadable ones are left alone."""
    found: List[Dict[str, Any]] = []
    try:
        names = sorted(os.listdir(_folder(job)))
    except OSError:
        return found
    for name in names:
        if name.endswith(".json"):
            with contextlib.suppress(OSError, ValueError):
                record = read_json(os.path.join(_folder(job), name))
                if isinstance(record, dict) and record.get("id") == name[: -len(".json")]:
                    found.append(record)
    return found


def done(job: JobDir, request_id: str) -> None:
    """Remove a request whose event is written."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(_folder(job), request_id + ".json"))
