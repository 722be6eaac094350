"""Whose is this process? Owners of the pids that nvidia-smi lists, and which of them are our own orphans.

Four traces, because each of them can be missing: the ORCH_JOB marker (setproctitle may wipe it), the recorded
identity (boot id, pid, start ticks), the session a job's main process leads, and descent from one of those.
Inside a container nvidia-smi's pids are the host's and mean nothing here; with hidepid others' processes are
invisible: both are detected and said.  Standard library only.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, List, Optional, Set, Tuple

from remote_jobs import protocol
from remote_jobs.agent import jobdir, procs

INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the kernel's first pid namespace (PROC_PID_INIT_INO, include/linux/proc_ns.h)."""
_NEWEST_JOBS = 300
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class View:
    """How far this process can see: `pids_are_ours` False means that no listed pid may be looked up."""

    pids_are_ours: bool = True
    others_hidden: bool = False

    def notes(self) -> List[str]:
        """What people must know of it."""
        if not self.pids_are_ours:
            return [
                "inside a container: nvidia-smi's pids are the host's, so memory and utilisation are judged instead"
            ]
        if self.others_hidden:
            return ["other users' processes are hidden here (hidepid): their names and owners are unknown"]
        return []


def view() -> View:
    """Whether /proc here shows the processes that the driver talks of."""
    namespace = procs.pid_namespace()
    return View(
        pids_are_ours=namespace in (0, INITIAL_PID_NAMESPACE),
        others_hidden=os.getuid() != 0 and _hidepid(),
    )


def _hidepid(path: str = "/proc/self/mounts") -> bool:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                fields = line.split()
                if len(fields) > 3 and fields[1] == "/proc":
                    options = fields[3].split(",")
                    return any(
                        o.startswith("hidepid=") and o not in ("hidepid=0", "hidepid=off") for o in options
                    )
    except OSError:
        pass
    return False


@dataclass
class Owner:
    """What is known of one process on a GPU."""

    pid: int
    owner: str = "unknown"
    """`job:<id>`, `user:<name>` or `unknown`, as in the JSON of `orch gpus`."""
    job: Optional[str] = None
    user: Optional[str] = None
    start_ticks: Optional[int] = None
    since_s: Optional[float] = None
    """Age in seconds."""
    command: str = ""
    standing: str = "foreign"
    """foreign, running (its job is alive), working (job lost, main process alive), orphan (may be reaped)."""
    why: str = ""

    def describe(self) -> str:
        """One line for people."""
        who = (
            "job {}".format(self.job)
            if self.job
            else "user {}".format(self.user)
            if self.user
            else "an unknown user"
        )
        age = ", for {}".format(_age(self.since_s)) if self.since_s is not None else ""
        what = " ({})".format(self.command) if self.command else ""
        return "pid {} of {}{}{}{}".format(self.pid, who, age, what, ": " + self.why if self.why else "")


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return "{:.0f} {}".format(seconds // size, unit)
    return "{:.0f} s".format(seconds)


@dataclass
class JobFacts:
    """What a job's directory says: enough to know whether a process of it is an orphan."""

    id: str
    alive: bool
    final: bool
    mains: List[protocol.ProcessId] = field(default_factory=list)
    """Recorded main processes, one per attempt."""

    def standing(self, boot: str, own_job: Optional[str] = None) -> Tuple[str, str]:
        """(standing, why) of a process of this job that holds a GPU.

        Orphan only when the job has a final event or every recorded main process is gone, by this boot's
        identities. What cannot be known (no record, another boot or machine) is never an orphan.
        """
        working = [main for main in self.mains if procs.is_alive(main)]
        if self.alive and self.id != own_job:
            return "running", "its job runs"
        if self.final and not self.alive:
            return "orphan", "left over from a finished job"
        if working and self.id == own_job:
            return "running", "another attempt of this job works there"
        if working:
            return "working", (
                "its supervisor is gone but its main process (pid {}) works: `orch retry {}` takes it up,"
                " `orch stop {}` ends it".format(working[0].pid, self.id, self.id)
            )
        if not any(main.boot_id == boot for main in self.mains):
            return "running", "nothing recorded tells whether its job is over"
        return "orphan", "its main process is gone"


def read_job(job: jobdir.JobDir) -> JobFacts:
    """Facts of one job; a directory that cannot be read gives facts that never make an orphan."""
    try:
        alive, _ = jobdir.lock_holder(job.lock_path())
        facts = JobFacts(job.id, alive, final=False)
        for event in job.read_events():
            kind, data = event.get("kind"), event.get("data") or {}
            if kind == protocol.EventKind.FINISHED.value:
                facts.final = True
            elif kind == protocol.EventKind.REOPENED.value:
                facts.final = False
            elif kind == protocol.EventKind.ATTEMPT_STARTED.value and data.get("process"):
                facts.mains.append(protocol.from_dict(protocol.ProcessId, data["process"]))
    except (OSError, ValueError, TypeError, AttributeError):
        return JobFacts(job.id, alive=True, final=False)
    return facts


def identify(
    pids: Iterable[int],
    jobs_root: Optional[str],
    *,
    own_job: Optional[str] = None,
    seen: Optional[View] = None,
) -> Dict[int, Owner]:
    """Owner of each pid that this process may look up.

    Args:
        pids: as nvidia-smi lists them.
        jobs_root: the folder of our jobs (`<root>/jobs`); None knows no jobs.
        own_job: the asking supervisor's job, whose earlier attempts' leftovers are orphans although it is alive.
        seen: what `view()` said; asked when left out.
    """
    seen = seen or view()
    wanted = sorted(set(pids))
    if not seen.pids_are_ours:
        return {pid: Owner(pid) for pid in wanted}
    rows = procs.table()
    traces = _Traces(jobs_root, rows)
    boot = procs.boot_id()
    found = {}
    for pid in wanted:
        proc = rows.get(pid)
        if proc is None:
            why = "hidden from this user" if seen.others_hidden else "no such process any more"
            found[pid] = Owner(pid, why=why)
            continue
        user = procs.user_name(proc.uid)
        owner = Owner(
            pid,
            owner="user:{}".format(user),
            user=user,
            start_ticks=proc.start_ticks,
            since_s=max(0.0, _uptime() - proc.start_ticks / _CLOCK_TICKS),
            command=procs.command_line(pid, 160),
        )
        job = traces.job_of(proc)
        if job is not None:
            owner.job, owner.owner = job, "job:{}".format(job)
            facts = traces.facts(job)
            if facts is None:
                owner.why = "a job of another user or of another root"
            else:
                owner.standing, owner.why = facts.standing(boot, own_job)
        found[pid] = owner
    return found


def _uptime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class _Traces:
    """From a process to the job it belongs to. Directories are read only when a marker does not settle it."""

    def __init__(self, jobs_root: Optional[str], rows: Dict[int, procs.Proc]) -> None:
        # The same rules for ids as everywhere: Layout joins paths, nobody else.
        self._layout = jobdir.Layout(os.path.dirname(os.path.abspath(jobs_root))) if jobs_root else None
        self._rows = rows
        self._facts: Dict[str, Optional[JobFacts]] = {}
        self._recorded: Optional[Dict[Tuple[int, int], str]] = None
        self._sessions: Dict[int, Tuple[str, int]] = {}

    def job_of(self, proc: procs.Proc) -> Optional[str]:
        marked = procs.marker(proc.pid)
        if marked:
            return marked
        for ancestor in self._line(proc):
            job = self._by_record(ancestor) or procs.marker(ancestor.pid)
            if job:
                return job
        return self._by_session(proc)

    def facts(self, job: str) -> Optional[JobFacts]:
        """Facts of a job of this root; None when it has no such job."""
        if job not in self._facts:
            self._facts[job] = None
            if self._layout is not None:
                try:
                    directory = self._layout.job(job)
                    if os.path.isdir(directory.path):
                        self._facts[job] = read_job(directory)
                except ValueError:
                    pass  # somebody's own ORCH_JOB that is no job id of ours
        return self._facts[job]

    def _line(self, proc: procs.Proc) -> Iterable[procs.Proc]:
        seen: Set[int] = set()
        current: Optional[procs.Proc] = proc
        while current is not None and current.pid not in seen and current.pid > 1:
            seen.add(current.pid)
            yield current
            current = self._rows.get(current.ppid)

    def _by_record(self, proc: procs.Proc) -> Optional[str]:
        return self._records().get((proc.pid, proc.start_ticks))

    def _by_session(self, proc: procs.Proc) -> Optional[str]:
        self._records()
        entry = self._sessions.get(proc.session)
        if entry is None:
            return None
        job, leader_ticks = entry
        leader = self._rows.get(proc.session)
        # A session id is its leader's pid: reused only after the session is empty, so a member that began before
        # the recorded leader, or a living leader that is somebody else, belongs to another session.
        if leader is not None and leader.start_ticks != leader_ticks:
            return None
        return job if proc.start_ticks >= leader_ticks else None

    def _records(self) -> Dict[Tuple[int, int], str]:
        if self._recorded is None:
            self._recorded = {}
            boot = procs.boot_id()
            ids = self._layout.job_ids() if self._layout is not None else []
            for job_id in self._newest(ids):
                facts = self.facts(job_id)
                for main in facts.mains if facts else []:
                    if main.boot_id == boot:
                        self._recorded[(main.pid, main.start_ticks)] = job_id
                        self._sessions[main.pid] = (job_id, main.start_ticks)
        return self._recorded

    def _newest(self, ids: List[str]) -> List[str]:
        jobs = self._layout.jobs if self._layout is not None else ""

        def changed(job_id: str) -> float:
            try:
                return os.stat(os.path.join(jobs, job_id)).st_mtime
            except OSError:
                return 0.0

        return sorted(ids, key=changed, reverse=True)[:_NEWEST_JOBS]


def as_row(owner: Owner) -> Dict[str, Any]:
    """JSON of one holder, for `orch gpus` and gate reasons."""
    return {
        "pid": owner.pid,
        "owner": owner.owner,
        "job": owner.job,
        "user": owner.user,
        "since_s": owner.since_s,
        "command": owner.command,
        "standing": owner.standing,
        "why": owner.why,
        "start_ticks": owner.start_ticks,
    }
