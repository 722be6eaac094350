"""Processes on this host: identity, table, the tree of a job, and ending it.

Why: a pid alone names nothing (it is reused, 32768 is a common limit), a process group misses escapees and the
environment marker misses programs that wipe it.  So a job's processes are found by four independent traces:
descent from the supervisor (a subreaper), the ORCH_JOB marker, the recorded session ids, recorded identities.
Nobody is ever killed by name.  Standard library only; Linux /proc.  Sources: proc(5), prctl(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import signal
import time
from dataclasses import dataclass
from typing import Dict, Iterable, List, Mapping, Optional, Set

from remote_jobs.protocol import MARKER_ENV, STEP_ENV, ProcessId

PR_SET_CHILD_SUBREAPER = 36
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Proc:
    """One row of the process table (sizes in bytes, times in clock ticks)."""

    pid: int
    ppid: int
    pgid: int
    session: int
    uid: int
    state: str
    comm: str
    start_ticks: int
    cpu_ticks: int
    rss_bytes: int


def boot_id() -> str:
    """Id of the running kernel's boot; differs after a reboot."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return "unknown"


def pid_namespace() -> int:
    """Inode of our pid namespace: pids of another namespace mean nothing here."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def read_proc(pid: int) -> Optional[Proc]:
    """Row of one process, or None when it is gone (or not ours to read)."""
    try:
        with open("/proc/{}/stat".format(pid), "rb") as file:
            raw = file.read()
            uid = os.fstat(file.fileno()).st_uid
    except OSError:
        return None
    # comm may hold spaces and brackets: fields are counted after the LAST closing bracket (proc(5)).
    head, _, tail = raw.rpartition(b")")
    fields = tail.split()
    if len(fields) < 22:
        return None
    return Proc(
        pid=pid,
        ppid=int(fields[1]),
        pgid=int(fields[2]),
        session=int(fields[3]),
        uid=uid,
        state=fields[0].decode("ascii", "replace"),
        comm=head.partition(b"(")[2].decode("utf-8", "replace"),
        start_ticks=int(fields[19]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        rss_bytes=int(fields[21]) * _PAGE_BYTES,
    )


def identity(pid: int) -> Optional[ProcessId]:
    """(boot id, pid, start ticks) of a live process, or None."""
    proc = read_proc(pid)
    return None if proc is None else ProcessId(pid, proc.start_ticks, boot_id())


def is_alive(process: ProcessId) -> bool:
    """True while this very process runs: same boot, same start; a zombie counts as dead."""
    if process.boot_id != boot_id():
        return False
    proc = read_proc(process.pid)
    return proc is not None and proc.start_ticks == process.start_ticks and proc.state not in "ZX"


def still_runs(proc: Proc) -> bool:
    """True while the process of this row runs: read again, same start, no zombie."""
    now = read_proc(proc.pid)
    return now is not None and now.start_ticks == proc.start_ticks and now.state not in "ZX"


def table() -> Dict[int, Proc]:
    """All visible processes by pid."""
    found: Dict[int, Proc] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            proc = read_proc(int(name))
            if proc is not None:
                found[proc.pid] = proc
    return found


def marker(pid: int, name: str = MARKER_ENV) -> Optional[str]:
    """Value of ORCH_JOB (or ``name``) in a process's initial environment; None when absent, wiped or unreadable."""
    try:
        with open("/proc/{}/environ".format(pid), "rb") as file:
            for item in file.read(1 << 20).split(b"\0"):
                if item.startswith(name.encode() + b"="):
                    return item.partition(b"=")[2].decode("utf-8", "replace")
    except OSError:
        pass
    return None


def command_line(pid: int, limit: int = 512) -> str:
    """Command line with NULs as spaces, or the bracketed name when there is none."""
    try:
        with open("/proc/{}/cmdline".format(pid), "rb") as file:
            raw = file.read(limit + 1)
    except OSError:
        return ""
    text = raw.rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")
    if not text:
        proc = read_proc(pid)
        return "[{}]".format(proc.comm) if proc else ""
    return text[:limit]


def user_name(uid: int) -> str:
    """Login name of a uid, or the number as text."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def descendants(root: int, rows: Dict[int, Proc]) -> Set[int]:
    """Pids below ``root`` (not itself) in this table."""
    return _below([root], rows)


def _below(roots: Iterable[int], rows: Dict[int, Proc]) -> Set[int]:
    """Pids below any of ``roots`` in this table, which is gone through once."""
    children: Dict[int, List[int]] = {}
    for proc in rows.values():
        children.setdefault(proc.ppid, []).append(proc.pid)
    found: Set[int] = set()
    stack = [pid for root in roots for pid in children.get(root, ())]
    while stack:
        pid = stack.pop()
        if pid not in found:
            found.add(pid)
            stack.extend(children.get(pid, ()))
    return found


def tree(root: int) -> Dict[int, Proc]:
    """Live rows below ``root`` (not itself): by the kernel's lists of children, since a busy host has thousands of rows.

    A child that starts or ends meanwhile may be missed (proc(5)): for regular scans, not for a kill.
    """
    found: Dict[int, Proc] = {}
    stack = [root]
    while stack:
        pid = stack.pop()
        try:
            for thread in os.listdir("/proc/{}/task".format(pid)):
                with open("/proc/{}/task/{}/children".format(pid, thread), "rb") as file:
                    stack += [int(child) for child in file.read().split()]
        except OSError:
            if not os.path.exists("/proc/self/task/{}/children".format(os.getpid())):  # a kernel without these lists
                rows = table()
                return {below: rows[below] for below in descendants(root, rows)}
        row = read_proc(pid) if pid != root else None
        if row is not None:
            found[pid] = row
    return found


class Snapshot:
    """The process table of one moment, read when it is first asked for, and each marker read once: for many questions."""

    def __init__(self) -> None:
        self._rows: Optional[Dict[int, Proc]] = None
        self._markers: Dict[int, Optional[str]] = {}

    @property
    def rows(self) -> Dict[int, Proc]:
        """All visible processes by pid."""
        if self._rows is None:
            self._rows = table()
        return self._rows

    def marker(self, pid: int) -> Optional[str]:
        """See `marker`."""
        if pid not in self._markers:
            self._markers[pid] = marker(pid)
        return self._markers[pid]


def find_job(
    job: str,
    *,
    at: Optional[Snapshot] = None,
    supervisor: Optional[int] = None,
    sessions: Iterable[int] = (),
    recorded: Iterable[ProcessId] = (),
    exclude: Iterable[int] = (),
) -> List[Proc]:
    """Live processes of a job, by all four traces, without zombies, the supervisor and ``exclude``.

    Args:
        job: job id to look for in the marker.
        at: the moment to judge by; the present one when left out.
        supervisor: pid of the job's subreaper when it is alive: everything below it is the job's.
        sessions: session ids that the job's main processes led; only counted for our own uid.
        recorded: identities written down earlier; they match by start time, never by pid alone.
        exclude: pids to leave out (children of the supervisor that are not the job's).
    """
    at = at or Snapshot()
    rows = at.rows
    me = os.getuid()
    skip = set(exclude)
    if skip:
        skip |= _below(tuple(skip), rows)
    skip.add(os.getpid())
    wanted = descendants(supervisor, rows) if supervisor else set()
    wanted_sessions = set(sessions)
    boot = boot_id()
    known = {(item.pid, item.start_ticks) for item in recorded if item.boot_id == boot}
    for proc in rows.values():
        ours = me in (proc.uid, 0)
        marked = ours and proc.pid not in wanted and proc.pid != supervisor and at.marker(proc.pid) == job
        if marked or (proc.pid, proc.start_ticks) in known or (ours and proc.session in wanted_sessions):
            wanted.add(proc.pid)
    wanted |= _below(tuple(wanted), rows)
    if supervisor:
        skip.add(supervisor)
    return [rows[pid] for pid in sorted(wanted) if pid in rows and pid not in skip and rows[pid].state not in "ZX"]


def owners(rows: Iterable[Proc], mains: Mapping[str, int]) -> Dict[int, str]:
    """Pid -> the step whose running attempt a process of one job belongs to. ``mains``: step -> pid of its main process.

    By descent and session; what left both (setsid, a daemon) by the step in its environment, or is the only step's.
    """
    found: Dict[int, str] = {}
    table = {row.pid: row for row in rows}
    for name, main in mains.items():
        members = {main} | descendants(main, table) | {row.pid for row in table.values() if row.session == main}
        found.update(dict.fromkeys(members, name))
    only = next(iter(mains)) if len(mains) == 1 else None
    for pid in table:
        if pid not in found:
            step = marker(pid, STEP_ENV)
            owner = step if step in mains else only
            if owner is not None:
                found.update(dict.fromkeys(({pid} | descendants(pid, table)) - set(found), owner))
    return found


def send_signal(proc: Proc, signum: int) -> bool:
    """Signal this very process: its start time is read again first. False when it is gone or not ours."""
    now = read_proc(proc.pid)
    if now is None or now.start_ticks != proc.start_ticks:
        return False
    try:
        os.kill(proc.pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def signal_group(pgid: int, signum: int) -> bool:
    """Signal a process group; False when nobody is left in it."""
    if pgid <= 1:
        return False
    try:
        os.killpg(pgid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def become_subreaper() -> bool:
    """Make orphans below us our children, so that escapees (setsid, double fork) stay in our tree."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return bool(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


class CpuMeter:
    """CPU per cent of processes between two readings of the table (100 = one core); at the first one since their start."""

    def __init__(self) -> None:
        self._last: Dict[int, int] = {}
        self._at = 0.0

    def rows(self, procs: List[Proc], now: float) -> List[Dict[str, object]]:
        """JSON rows {pid, ppid, user, state, cpu_pct, rss_mib, command}; ``now`` is monotonic, in s."""
        elapsed_s = now - self._at if self._at else 0.0
        uptime_s = time.clock_gettime(time.CLOCK_BOOTTIME)  # what field 22 of /proc/PID/stat counts in
        result: List[Dict[str, object]] = []
        for proc in procs:
            before = self._last.get(proc.pid)
            if before is not None and elapsed_s > 0:
                cpu_pct = 100.0 * max(0, proc.cpu_ticks - before) / _CLOCK_TICKS / elapsed_s
            else:
                age_s = max(1.0 / _CLOCK_TICKS, uptime_s - proc.start_ticks / _CLOCK_TICKS)
                cpu_pct = 100.0 * proc.cpu_ticks / _CLOCK_TICKS / age_s
            result.append(
                {
                    "pid": proc.pid,
                    "ppid": proc.ppid,
                    "user": user_name(proc.uid),
                    "state": proc.state,
                    "cpu_pct": round(cpu_pct, 1),
                    "rss_mib": round(proc.rss_bytes / 1048576.0, 1),
                    "command": command_line(proc.pid),
                }
            )
        self._last = {proc.pid: proc.cpu_ticks for proc in procs}
        self._at = now
        return result


def boot_time_s() -> float:
    """Wall-clock time of the boot in epoch seconds (btime of /proc/stat)."""
    with contextlib.suppress(OSError, ValueError), open("/proc/stat", encoding="ascii") as file:
        for line in file:
            if line.startswith("btime "):
                return float(line.split()[1])
    return 0.0


def io_bytes(pid: int) -> Optional[int]:
    """Bytes this process has read and written so far (rchar + wchar of /proc/PID/io), None if unreadable."""
    total = 0
    with contextlib.suppress(OSError, ValueError), open("/proc/{}/io".format(pid), encoding="ascii") as file:
        for line in file:
            if line.startswith(("rchar:", "wchar:")):
                total += int(line.split()[1])
        return total
    return None


def signal_name(signum: int) -> str:
    """TERM for 15 and so on; the number as text when unnamed."""
    try:
        return signal.Signals(signum).name[3:]
    except ValueError:
        return str(signum)
