"""Starting a supervisor: the lock that makes it the only one, its secrets, its way out of the channel that started it.

`supervise` (detached, for the life of the job), `supervise --slurm` (as the batch script of an allocation) and
`supervise --settle` (on a login node: write records, start nothing).  What it does then is in supervisor.py.  Standard
library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from typing import Any, Dict, Iterator, Mapping

from remote_jobs import protocol
from remote_jobs.agent import control, procs, recovery
from remote_jobs.agent.jobdir import JobDir, Layout, Lock, write_json
from remote_jobs.agent.supervisor import Supervisor


def _load_secrets(job: JobDir, given: Mapping[str, Any]) -> Dict[str, Any]:
    """Secrets of this start, kept in a 0600 file because a later attempt needs them; deleted at the end."""
    path = job.at(protocol.SECRETS_FILE)
    kept: Dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
        loaded = json.loads(file.read().decode("utf-8"))
        kept = loaded if isinstance(loaded, dict) else {}
    if given:
        kept = {**kept, **given}
        write_json(path, kept)
    return kept


class _SupervisorLog:
    """stdout and stderr of a supervisor: what cannot be written (a full disk) is dropped, and never raises."""

    def write(self, text: str) -> int:
        """Write through, without a buffer that would be tried again for ever."""
        with contextlib.suppress(OSError):
            os.write(2, text.encode("utf-8", "replace"))
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""


def _detach(job: JobDir) -> None:
    """Double fork into a session of our own; stdio to the supervisor's log, so that no channel is held open."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    os.chdir("/")
    os.umask(0o077)
    nothing = os.open(os.devnull, os.O_RDWR)
    log = os.open(job.at(protocol.SUPERVISOR_LOG), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for fd in (nothing, log):
        if fd > 2:
            os.close(fd)
    sys.stdout = sys.stderr = _SupervisorLog()


def _log_to(job: JobDir) -> None:
    """Stdio to the supervisor's log, without leaving the process tree: an allocation ends with its batch script."""
    os.chdir("/")
    log = os.open(job.at(protocol.SUPERVISOR_LOG), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = sys.stderr = _SupervisorLog()


@contextlib.contextmanager
def _telling_of_crashes() -> Iterator[None]:
    """End the process at a defect of ours, so that the log's last word is that. Where it was, not its text: that may quote a secret."""
    sys.stderr.write("{}{}\n".format(recovery.BEGAN, os.getpid()))
    try:
        yield
    except Exception as exc:
        traceback.print_exc()
        at = traceback.extract_tb(exc.__traceback__)[-1]
        sys.stderr.write("{}{} at {}:{}\n".format(recovery.CRASHED, type(exc).__name__, os.path.basename(at.filename), at.lineno))
        sys.exit(1)


def main_in_slurm(root: str, job_id: str) -> int:
    """Entry of `supervise --slurm`: the batch script of an allocation. Runs until the job or the allocation ends."""
    from remote_jobs.agent.slurm.allocation import Allocation, local_spec

    layout = Layout(root)
    job = layout.job(job_id)
    lock = Lock(job.lock_path())
    if not lock.acquire(patience_s=30.0):
        sys.stderr.write("another supervisor of this job runs on this node\n")
        return 1
    _log_to(job)
    os.register_at_fork(after_in_child=lock.release)
    procs.become_subreaper()
    crashed_before = recovery.crash(job)
    with _telling_of_crashes():
        supervisor = Supervisor(layout, job, local_spec(job.spec()), _load_secrets(job, {}), lock)
        supervisor.crashed_before = crashed_before
        if supervisor.fold.state["state"] in protocol.JOB_TERMINAL and not control.pending(job):
            return 0
        supervisor.allocation = Allocation(supervisor, os.environ)
        supervisor.epitaph = supervisor.allocation.epitaph()
        supervisor.run()
    lock.release()
    return 0


def main_settle(root: str, job_id: str) -> int:
    """Entry of `supervise --settle`: reads {verdict} from stdin, writes records, starts nothing, prints `ok` or `held`."""
    layout = Layout(root)
    job = layout.job(job_id)
    given = json.loads(sys.stdin.buffer.readline() or b"{}")
    lock = Lock(job.lock_path())
    if not lock.acquire(patience_s=2.0):
        print("held")
        return 0
    supervisor = Supervisor(layout, job, job.spec(), _load_secrets(job, {}), lock)
    supervisor.crashed_before = recovery.crash(job)
    supervisor.epitaph = given.get("verdict")
    supervisor.cancelled = bool(given.get("cancelled"))
    supervisor.settle()
    lock.release()
    print("ok")
    return 0


def main(root: str, job_id: str) -> int:
    """Entry of `supervise`: reads {secrets} from stdin, detaches, says `ok` on the pipe in ORCH_ACK_FD, runs.

    The acknowledgement comes after the lock is held and the first state is on disk, so "launched" is true.
    """
    layout = Layout(root)
    job = layout.job(job_id)
    given = json.loads(sys.stdin.buffer.readline() or b"{}")
    ack_fd = int(os.environ.pop("ORCH_ACK_FD", "-1"))

    def acknowledge(text: str) -> None:
        if ack_fd >= 0:
            with contextlib.suppress(OSError):
                os.write(ack_fd, (text + "\n").encode("utf-8", "replace"))
                os.close(ack_fd)

    _detach(job)
    lock = Lock(job.lock_path())
    if not lock.acquire():
        acknowledge("held")
        return 0
    # A side task that hangs in a driver must not look like a living supervisor when we are killed.
    os.register_at_fork(after_in_child=lock.release)
    crashed_before = recovery.crash(job)
    with _telling_of_crashes():
        try:
            procs.become_subreaper()
            supervisor = Supervisor(layout, job, job.spec(), _load_secrets(job, given.get("secrets") or {}), lock)
            supervisor.crashed_before = crashed_before
            if supervisor.fold.state["state"] in protocol.JOB_TERMINAL and not control.pending(job):
                acknowledge("ok")  # over, and nobody asks for a retry: a start at boot must not touch it
                return 0
            supervisor.write_state(durable=True)
        except Exception as exc:
            acknowledge("error {}: {}".format(type(exc).__name__, exc))
            raise
        acknowledge("ok")
        supervisor.run()
    lock.release()
    return 0
