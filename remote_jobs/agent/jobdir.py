"""The job directory on the host: every path, every atomic write, every read of it.

Why: the directory is the interface between supervisor, agent and people, so nobody else joins these paths.
It is 0700 and its files 0600, whatever the umask.  Each file has one writer (see protocol.py).
Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import socket
import threading
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from remote_jobs import protocol
from remote_jobs.agent import procs

MAX_RECORD_BYTES = 64 * 1024 * 1024
# Magic numbers of statfs(2) for file systems whose flock is not to be trusted, or whose content is gone at reboot.
_NETWORK_FS = {"nfs", "nfs4", "lustre", "cifs", "smb3", "smbfs", "gpfs", "beegfs", "ceph", "glusterfs", "9p", "afs"}
_MEMORY_FS = {"tmpfs", "ramfs"}


def fs_type(path: str) -> str:
    """File system type of an existing path, from the longest matching mount of /proc/self/mountinfo."""
    best, best_len = "unknown", -1
    real = os.path.realpath(path)
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                left, _, right = line.partition(" - ")
                fields = left.split()
                if len(fields) < 5 or not right:
                    continue
                mount = fields[4].encode("utf-8", "surrogateescape").decode("unicode_escape")
                inside = real == mount or real.startswith(mount.rstrip("/") + "/")
                if inside and len(mount) >= best_len:
                    best, best_len = right.split()[0], len(mount)
    except OSError:
        pass
    return best


def is_network_fs(path: str) -> bool:
    """True on file systems where flock proves nothing between machines (NFS, Lustre, ...)."""
    kind = fs_type(path)
    return kind in _NETWORK_FS or kind.startswith("fuse.sshfs")


def is_memory_fs(path: str) -> bool:
    """True when the path lies in memory and is gone after a reboot."""
    return fs_type(path) in _MEMORY_FS


def fsync_dir(path: str) -> None:
    """Make a rename in this folder durable."""
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(fd)
    except OSError:
        pass  # some network file systems refuse fsync on folders; the file itself was synced
    finally:
        os.close(fd)


def write_atomic(
    path: str, data: bytes, *, durable: bool = True, mode: int = 0o600, place: Callable[[str, str], None] = os.replace
) -> None:
    """Replace a file in one step: readers see the old bytes or the new ones, never a half.

    ``place`` gives the finished temporary file its name.

    Raises:
        OSError: the old file is untouched (disk full, no permission).
    """
    tmp = "{}.tmp.{}.{}".format(path, os.getpid(), threading.get_ident())
    fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        try:
            os.fchmod(fd, mode)
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        place(tmp, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(tmp)
        raise
    if durable:
        fsync_dir(os.path.dirname(path) or ".")


def write_json(path: str, record: Any, *, durable: bool = True) -> None:
    """Atomic JSON file (one line)."""
    write_atomic(path, protocol.dumps(record), durable=durable)


def create_json(path: str, record: Any) -> bool:
    """A JSON file that was not there, durable; False when somebody else made it first, whose file stays."""
    try:
        write_atomic(path, protocol.dumps(record), place=_place_new)
    except FileExistsError:
        return False
    return True


def _place_new(tmp: str, path: str) -> None:
    """Give a file its name unless the name is taken: a link cannot replace anything, a rename would."""
    try:
        os.link(tmp, path)
    except OSError as exc:
        if exc.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK) or os.path.exists(path):
            raise
        os.rename(tmp, path)  # a file system without hard links
    else:
        os.unlink(tmp)


def read_json(path: str) -> Any:
    """Parsed JSON file.

    Raises:
        OSError: not readable. ValueError: not JSON, or larger than 64 MiB.
    """
    with open(path, "rb") as file:
        raw = file.read(MAX_RECORD_BYTES + 1)
    if len(raw) > MAX_RECORD_BYTES:
        raise ValueError("{} is larger than {} bytes".format(path, MAX_RECORD_BYTES))
    return json.loads(raw.decode("utf-8"))


class Layout:
    """Paths under the root (default ~/.orchestrator) that are not one job's."""

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(os.path.expanduser(root))
        self.jobs = os.path.join(self.root, protocol.JOBS_DIR)
        self.releases = os.path.join(self.root, protocol.RELEASES_DIR)
        self.blobs = os.path.join(self.root, protocol.BLOBS_DIR)
        self.history = os.path.join(self.root, protocol.HISTORY_DIR)

    def prepare(self) -> None:
        """Create the folders, private to this user."""
        for path in (self.root, self.jobs, self.releases, self.blobs, self.history):
            os.makedirs(path, mode=0o700, exist_ok=True)

    def job(self, job_id: str) -> "JobDir":
        """The directory of one job.

        Raises:
            ValueError: the id could leave the jobs folder.
        """
        if not job_id or job_id.startswith(".") or os.sep in job_id or "\0" in job_id:
            raise ValueError("{!r} is not a job id".format(job_id))
        return JobDir(os.path.join(self.jobs, job_id), self.root)

    def job_ids(self) -> List[str]:
        """Ids of all job directories, oldest first by name."""
        with contextlib.suppress(OSError):
            return sorted(name for name in os.listdir(self.jobs) if not name.startswith("."))
        return []


class JobDir:
    """One job's directory. Opening it reads nothing."""

    def __init__(self, path: str, root: str) -> None:
        self.path = path
        self.root = root
        self.id = os.path.basename(path)

    def at(self, *parts: str) -> str:
        """Absolute path of something inside."""
        return os.path.join(self.path, *parts)

    @property
    def spec_path(self) -> str:
        """spec.json"""
        return self.at(protocol.SPEC_FILE)

    @property
    def events_path(self) -> str:
        """events.jsonl"""
        return self.at(protocol.EVENTS_FILE)

    @property
    def state_path(self) -> str:
        """state.json"""
        return self.at(protocol.STATE_FILE)

    @property
    def result_path(self) -> str:
        """result.json"""
        return self.at(protocol.RESULT_FILE)

    def attempt_path(self, index: int, name: str, attempt: int, *parts: str) -> str:
        """Something inside one attempt's folder (index of the step from 1)."""
        return self.at(*protocol.attempt_dir(index, name, attempt).split("/"), *parts)

    def spec(self) -> protocol.JobSpec:
        """The job's spec.

        Raises:
            OSError: missing or unreadable. ValueError: broken. ProtocolVersionError: another version's.
        """
        try:
            record = read_json(self.spec_path)
        except ValueError as exc:
            raise ValueError("{} is broken: {}".format(self.spec_path, exc)) from exc
        if not isinstance(record, dict):
            raise ValueError("{} is not a JSON object".format(self.spec_path))  # noqa: TRY004 - of the data, not a type
        protocol.check_version(record, self.spec_path)
        return protocol.from_dict(protocol.JobSpec, record)

    def lock_path(self) -> str:
        """The liveness lock: in the directory, or node-local where flock of the root's file system proves nothing."""
        if not is_network_fs(self.root):
            return self.at(protocol.LOCK_FILE)
        folder = "/var/tmp/orch-{}".format(os.getuid())  # noqa: S108 - node-local on purpose, 0700
        os.makedirs(folder, mode=0o700, exist_ok=True)
        key = hashlib.sha256(self.path.encode("utf-8", "surrogateescape")).hexdigest()[:24]
        return os.path.join(folder, key + ".lock")

    def read_events(self) -> List[Dict[str, Any]]:
        """All whole events in order; a torn last line and a torn line in front of a newer one are left out."""
        return [event for event, _ in self.iter_events()]

    def iter_events(self) -> Iterator[Tuple[Dict[str, Any], int]]:
        """(event, end offset) of every whole line of events.jsonl."""
        try:
            file = open(self.events_path, "rb")  # noqa: SIM115 - closed below; only opening may fail here
        except FileNotFoundError:
            return
        offset = 0
        with file:
            for line in file:
                offset += len(line)
                if not line.endswith(b"\n"):
                    return
                try:
                    event = json.loads(line.decode("utf-8"))
                except ValueError:
                    continue  # torn by a full disk or a kill; the writer went on on a new line
                if isinstance(event, dict) and isinstance(event.get("seq"), int) and protocol.is_count(event["seq"]):
                    yield event, offset


class EventLog:
    """Append side of events.jsonl: rising seq, one write per line, fsynced. The supervisor alone uses it."""

    def __init__(self, job: JobDir) -> None:
        self._fd = os.open(job.events_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        size = os.fstat(self._fd).st_size
        self.seq = 0
        end = 0
        for event, offset in job.iter_events():
            self.seq = max(self.seq, event["seq"])
            end = offset
        if size > end and not self._ends_with_newline(job.events_path):
            os.write(self._fd, b"\n")  # a torn last line must not swallow the next event

    @staticmethod
    def _ends_with_newline(path: str) -> bool:
        with open(path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def append(self, event: protocol.Event) -> None:
        """Write one event durably.

        Raises:
            OSError: nothing (or a torn line that readers skip) was written; the caller may try again.
        """
        data = protocol.dumps(protocol.to_dict(event))
        written = os.write(self._fd, data)
        if written != len(data):
            os.write(self._fd, b"\n")
            raise OSError(28, "No space left on device (short write)")
        os.fsync(self._fd)
        self.seq = event.seq

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class Lock:
    """flock held for the supervisor's life: held = alive, free without a final event = lost."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd: Optional[int] = None

    def acquire(self, patience_s: float = 0.5) -> bool:
        """Take the lock; False when another process holds it.

        A look holds a shared lock for microseconds, hence the short patience.
        """
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= deadline:
                    os.close(fd)
                    return False
                time.sleep(0.01)
        me = procs.identity(os.getpid())
        owner = {
            "hostname": socket.gethostname(),
            "boot_id": procs.boot_id(),
            "pid_ns": procs.pid_namespace(),
            "pid": os.getpid(),
            "start_ticks": me.start_ticks if me else 0,
        }
        with contextlib.suppress(OSError):  # a full disk must not stop the lock: the flock is what counts
            os.ftruncate(fd, 0)
            os.pwrite(fd, protocol.dumps(owner), 0)
        self._fd = fd
        return True

    def release(self) -> None:
        """Let go (the kernel does so at death as well)."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def touch(self) -> None:
        """Keep tmp cleaners away from a node-local lock file."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.utime(self._fd)


def lock_holder(path: str) -> Tuple[bool, Dict[str, Any]]:
    """(held?, what the owner wrote). A missing file is a free lock."""
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return False, {}
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            held = False
        except OSError:
            held = True
        owner: Dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            parsed = json.loads(os.pread(fd, 4096, 0).decode("utf-8"))
            owner = parsed if isinstance(parsed, dict) else {}
        return held, owner
    finally:
        os.close(fd)
