"""The agent's watch over jobs in Slurm: one `squeue` for all of them, seldom, and what follows from its answer.

A job whose allocation ended without our final event is settled here: what it died of is recorded, and where the retry
policy says so it is submitted again.  Nothing is ever concluded from silence: a queue that could not be read changes
nothing.  Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from remote_jobs import protocol
from remote_jobs.agent import control, procs
from remote_jobs.agent.fold import fold
from remote_jobs.agent.jobdir import JobDir, Layout, Lock, lock_holder, read_json, write_json
from remote_jobs.agent.slurm import arrays, client, queue, submissions, verdicts
from remote_jobs.agent.slurm.reading import Reading, ask_accounting, find_row, read_queue
from remote_jobs.agent.slurm.submissions import Submission
from remote_jobs.agent.times import epoch

EVERY_S = 30.0
"""Seconds between two readings of the queue, unless the inventory says otherwise."""
HOLD_S = 5.0
"""How long a look may be held for the first reading."""
PASS_EVERY_S = 1.0
STALE_BEAT_S = 60.0
"""Without a heartbeat for this long a job that Slurm calls dead (or does not know) is dead; they come each 20 s."""
SETTLE_TIMEOUT_S = 60.0
_DOUBTED = frozenset({"NODE_FAIL", "BOOT_FAIL", queue.GONE})
"""Ends that Slurm tells of nodes it cannot reach: their processes may live on for a while."""


def settle(
    layout: Layout, job: JobDir, verdict: Optional[Dict[str, Any]] = None, *, cancelled: bool = False
) -> str:
    """Record what has happened to a job that no supervisor watches, and obey its requests, without starting anything.

    Args:
        verdict: what attempts died of that were cut short.
        cancelled: they were, because somebody cancelled the job.

    Returns:
        ``ok``, or ``held`` when a supervisor lives after all.

    Raises:
        OSError: it could not be done; the text says why.
    """
    from remote_jobs.agent.command import release_dir

    entry = release_dir()
    if not os.path.exists(os.path.join(entry, "__main__.py")):
        entry = os.path.join(entry, "remote_jobs", "agent", "__main__.py")
    argv = [sys.executable, "-I", "-S", entry, "supervise", "--root", layout.root, "--job", job.id, "--settle"]
    given = json.dumps({"verdict": verdict, "cancelled": cancelled}).encode("utf-8") + b"\n"
    try:
        done = subprocess.run(
            argv, input=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=SETTLE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise OSError("settling {} took more than {:.0f} s".format(job.id, SETTLE_TIMEOUT_S)) from None
    if done.returncode:
        raise OSError("settling {} failed: {}".format(job.id, done.stderr.decode("utf-8", "replace")[-500:].strip()))
    return done.stdout.decode("utf-8", "replace").strip()


def over(job: JobDir, spec: protocol.JobSpec) -> bool:
    """True once the job has its final event."""
    return fold(spec, job.read_events()).state["state"] in protocol.JOB_TERMINAL


class Keeper:
    """Watches this root's Slurm jobs from a thread of the agent, for as long as somebody looks."""

    def __init__(self, layout: Layout, on_pass: Callable[[], Any] = lambda: None) -> None:
        self.layout = layout
        self._on_pass = on_pass
        self._next_check = 0.0
        self._direct: Set[str] = set()
        self._specs: Dict[str, protocol.JobSpec] = {}
        self._thread: Optional[threading.Thread] = None
        self._passes = 0
        self._accounted: Tuple[float, List[queue.Row]] = (-1.0, [])
        self._began = 0.0
        self._wanted = threading.Event()

    def ready(self, now: float) -> bool:
        """Tell the keeper that somebody looks; False while a look should wait for the first reading of the queue.

        ``now`` is the monotonic clock, in s.
        """
        if self._thread is None:
            if now < self._next_check:
                return True
            self._next_check = now + PASS_EVERY_S
            if not self.open_jobs():
                return True
            self._began = now
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._wanted.set()
        return self._passes > 0 or now - self._began > HOLD_S

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            try:
                self.keep()
            except Exception as exc:  # a job that cannot be kept must not end the watch over the others
                sys.stderr.write("slurm: {}: {}\n".format(type(exc).__name__, exc))
            self._passes += 1
            if self._passes == 1:
                self._on_pass()
            time.sleep(PASS_EVERY_S)

    def open_jobs(self) -> List[Tuple[JobDir, protocol.JobSpec]]:
        """Slurm jobs without a result."""
        found = []
        for job_id in self.layout.job_ids():
            if job_id in self._direct:
                continue
            job = JobDir(os.path.join(self.layout.jobs, job_id), self.layout.root)
            if not os.path.isdir(job.at(submissions.FOLDER)):
                if os.path.exists(job.spec_path):  # the folder is made before the spec is written
                    self._direct.add(job_id)
                continue
            if os.path.exists(job.result_path):
                continue
            with contextlib.suppress(OSError, ValueError):
                if job_id not in self._specs:
                    self._specs[job_id] = job.spec()
                found.append((job, self._specs[job_id]))
        return found

    def keep(self) -> None:
        """One pass: read the queue when that is due, and do for every job what its row asks for."""
        jobs = self.open_jobs()
        if not jobs:
            return
        every_s = min(float((spec.slurm or {}).get("queue_interval_s") or EVERY_S) for _, spec in jobs)
        reading = read_queue(self.layout, every_s)
        if reading.at != self._accounted[0]:
            newest = [submissions.newest(job) for job, _ in jobs]
            self._accounted = (reading.at, ask_accounting(reading, [one for one in newest if one is not None]))
        reading.accounted = self._accounted[1]
        for job, spec in jobs:
            try:
                self._keep(job, spec, reading)
            except (OSError, ValueError, client.Unanswered) as exc:
                sys.stderr.write("slurm: {}: {}\n".format(job.id, exc))

    def _keep(self, job: JobDir, spec: protocol.JobSpec, reading: Reading) -> None:
        submission = submissions.newest(job)
        if submission is None:
            return  # its launch, sent again, goes on with it
        if reading.error is not None:
            submissions.note_seen(job, submission, None, reading.error)
            return
        row = find_row(reading, submission)
        if submission.id is None:
            if row is not None:
                submissions.note_id(job, submission.n, row.id)
                submission.id = row.id
            elif reading.at - submission.at > submissions.LOST_ANSWER_S:
                arrays.again(self.layout, job, job.spec(), submission)
                return
        error = None
        if row is not None and row.waiting and _stop_asked(job):
            client.cancel(row.id, waiting_only=True)
        if row is not None and row.ended:
            try:
                go_on(self.layout, job, spec, submission, row)
            except client.Refused as exc:
                error = "Slurm refuses the job: {}".format(exc)
            if submissions.newest(job).n != submission.n:  # type: ignore[union-attr]
                return
        submissions.note_seen(job, submission, row, error)


def _stop_asked(job: JobDir) -> bool:
    return any(item.get("action") == "stop" and not (item.get("args") or {}).get("step") for item in control.pending(job))


def go_on(layout: Layout, job: JobDir, spec: protocol.JobSpec, submission: Submission, row: queue.Row) -> None:
    """The allocation has ended: nothing where the job is over, else its end is recorded and perhaps it is submitted anew.

    Raises:
        client.Refused, client.Unanswered: the next submission. OSError: the job's directory.
    """
    if over(job, spec) or (row.state in _DOUBTED and not _silent(job)):
        return
    marker = os.path.join(submission.path, "settled")
    if not os.path.exists(marker):
        lock = Lock(os.path.join(submission.path, "settling"))
        if not lock.acquire(patience_s=0.0):
            return  # another agent is at it
        try:
            if not os.path.exists(marker) and not _settle_end(layout, job, row):
                return
            write_json(marker, {"row": queue.to_record(row)}, durable=False)
        finally:
            lock.release()
    if not over(job, spec):
        submissions.submit(layout, job, job.spec(), n=submission.n + 1)


def _settle_end(layout: Layout, job: JobDir, row: queue.Row) -> bool:
    """Record how the allocation ended; False when a supervisor lives after all."""
    if row.state == "CANCELLED" and not _stop_asked(job):
        control.post(job, "stop", {"reason": "cancelled in Slurm (scancel {})".format(row.id)})
    verdict = None if left_by_itself(job) else verdicts.of_end(named(row))
    return settle(layout, job, verdict, cancelled=row.state == "CANCELLED") == "ok"


def named(row: queue.Row) -> queue.Row:
    """The row with, after a node failure, only the nodes that are down, where Slurm tells them."""
    if row.state not in ("NODE_FAIL", "BOOT_FAIL") or not row.nodes:
        return row
    with contextlib.suppress(client.Unanswered, client.Refused):
        said = client.call(["sinfo", "--noheader", "--Node", "--nodes=" + row.nodes, "--format=%N|%T|%E"])
        down = sorted({line.replace("|", " ", 1).replace("|", ": ", 1) for line in said.splitlines() if "|down" in line})
        if down:
            row.nodes = "; ".join(down)
    return row


def left_by_itself(job: JobDir) -> bool:
    """True when the last supervisor went because its time limit was near: the job goes on, nothing has failed."""
    for event in reversed(job.read_events()):
        data = event.get("data") or {}
        if data.get("left"):
            return bool(data["left"] == "time_limit")
        if data.get("supervisor"):
            return False
    return False


def _silent(job: JobDir) -> bool:
    """True when nothing speaks for a living supervisor: a lock of this machine that is free, or no heartbeat for long."""
    held, owner = lock_holder(job.lock_path())
    if owner.get("boot_id") == procs.boot_id() and owner.get("pid_ns") == procs.pid_namespace():
        return not held
    with contextlib.suppress(OSError, ValueError, TypeError):
        beat = epoch(read_json(job.state_path).get("beat_at"))
        return beat is None or time.time() - beat > STALE_BEAT_S
    return True
