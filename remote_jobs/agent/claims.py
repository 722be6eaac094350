"""Who may use which GPU: one flock per GPU, a queue in order of arrival, kept by the kernel.

Why flock: it is let go when its holder dies, however it dies, so there is nothing to clean up and no clock to
trust.  The locks lie in a node-local, sticky, world-writable folder so that they hold between users of one box;
they are advice to orch only (the gate still looks at real processes).  The claim's descriptors are handed to the
job's main process, so a claim outlives a killed supervisor as long as the work does.

A ticket file per waiter or holder says who it is; it is flocked for its owner's life, so a dead one is told by
its free lock.  Everything is decided under one short mutex.  Standard library only, Python 3.8.

In the folder: `mutex`, `gpu<index>`, `ticket-<number>-<uid>`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

from remote_jobs.agent import procs
from remote_jobs.agent.claim_queue import Ticket, choose, dump, number_of, parse, waiting_for, wanted

DEFAULT_FOLDER = "/var/tmp/orch-claims"  # noqa: S108 - opened with O_NOFOLLOW and O_DIRECTORY, shared on purpose
FOLDER_ENV = "ORCH_CLAIMS_DIR"
"""Another folder, for tests and for hosts whose /var/tmp is shared between machines."""
MUTEX_WAIT_S = 5.0
_MAX_TICKET_BYTES = 65536


class ClaimsUnusable(OSError):
    """The claims folder cannot be used; the message says why and what to do."""


class Claim:
    """GPUs that are ours until `release` or the death of everybody who inherited `fds`."""

    def __init__(self, ticket: "_Place", indices: List[int], fds: List[int]) -> None:
        self.indices = indices
        self._ticket = ticket
        self._fds = fds

    @property
    def fds(self) -> Tuple[int, ...]:
        """Descriptors to pass to the job's main process (`pass_fds`)."""
        return (*self._fds, *self._ticket.fds)

    def release(self) -> None:
        """Let go of them here. Whoever inherited the descriptors keeps the claim while it lives."""
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._fds = []
        self._ticket.drop(keep_record=any(self._held_by_heirs(index) for index in self.indices))

    def _held_by_heirs(self, index: int) -> bool:
        fd = _lock_gpu(self._ticket.folder, index)
        if fd is not None:
            os.close(fd)
        return fd is None


class _Place:
    """Our own ticket: a place in the queue, then the holder's record."""

    def __init__(self, folder: str, folder_fd: int, ticket: Ticket, fd: int) -> None:
        self.folder, self.ticket = folder, ticket
        # The shared lock on the folder itself keeps systemd-tmpfiles from ageing what lies in it.
        self.fds: List[int] = [fd, folder_fd]

    def write(self, held: List[int]) -> None:
        """Say in the ticket which GPUs are held (advisory: a full disk must not stop a job)."""
        self.ticket.held = held
        with contextlib.suppress(OSError):
            data = dump(self.ticket)
            os.ftruncate(self.fds[0], 0)
            os.pwrite(self.fds[0], data, 0)

    def drop(self, *, keep_record: bool = False) -> None:
        """Leave the queue; a record that heirs of the claim keep alive stays."""
        if not self.fds:
            return
        if not keep_record:
            with contextlib.suppress(OSError):
                os.unlink(self.ticket.path)
        for fd in self.fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.fds = []


class Claimer:
    """Claims GPUs for the steps of one supervisor and keeps their places in the queue between tries."""

    def __init__(self, folder: Optional[str] = None) -> None:
        self.folder = folder or os.environ.get(FOLDER_ENV) or DEFAULT_FOLDER
        self._places: Dict[Tuple[str, str], _Place] = {}

    def claim(
        self,
        job: str,
        step: str,
        gpus: Union[int, Sequence[int]],
        host_gpus: Optional[int] = None,
        among: Optional[Sequence[int]] = None,
    ) -> Tuple[Optional[Claim], str]:
        """Take the GPUs now, or keep a place in the queue and say what is waited for.

        Args:
            job: job id, written into the ticket for others to read.
            step: the step's name.
            gpus: how many of the host's, or exactly which (indices).
            host_gpus: how many the host has; needed when `gpus` is a number (default: that number).
            among: the only ones to choose from, as seen just now (others are held by foreign work).

        Returns:
            (claim, "") or (None, reason such as "gpu 3 held by job X").

        Raises:
            ClaimsUnusable: the folder cannot be made or is not what it must be.
            ValueError: more GPUs asked for than the host has.
        """
        wants, count = wanted(gpus, host_gpus)
        if among is not None:
            wants = [index for index in wants if index in set(among)]
            if len(wants) < count:
                return None, "{} GPUs wanted, {} may be used: the others are held by foreign work".format(count, len(wants))
        folder_fd = open_folder(self.folder)
        try:
            with _mutex(self.folder) as locked:
                if not locked:
                    return None, "the claims folder {} is busy".format(self.folder)
                key = (job, step)
                place = self._places.get(key)
                if place is None:
                    place = self._enter(job, step, wants, count)
                    self._places[key] = place
                place.ticket.wants = wants
                return self._take(key, place)
        finally:
            os.close(folder_fd)

    def forget(self, job: str, step: str) -> None:
        """Leave the queue without having claimed (the job was stopped)."""
        place = self._places.pop((job, step), None)
        if place is not None:
            place.drop()

    def _enter(self, job: str, step: str, wants: List[int], count: int) -> _Place:
        number = 1 + max((number_of(name) for name in _ticket_names(self.folder)), default=0)
        path = os.path.join(self.folder, "ticket-{:09d}-{}".format(number, os.getuid()))
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        os.fchmod(fd, 0o644)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder_fd = open_folder(self.folder)
        with contextlib.suppress(OSError):
            fcntl.flock(folder_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        ticket = Ticket(number, job, step, _user(), count, wants, [], time.time(), os.getpid(), path)
        place = _Place(self.folder, folder_fd, ticket, fd)
        place.write([])
        return place

    def _take(self, key: Tuple[str, str], place: _Place) -> Tuple[Optional[Claim], str]:
        ticket = place.ticket
        free: Dict[int, int] = {}
        try:
            for index in ticket.wants:
                fd = _lock_gpu(self.folder, index)
                if fd is not None:
                    free[index] = fd
            tickets = live_tickets(self.folder)
            usable = choose(ticket, tickets, set(free))
            if usable is None:
                return None, waiting_for(ticket, tickets, set(free))
            place.write(usable)
            claim = Claim(place, usable, [free.pop(index) for index in usable])
            del self._places[key]
            return claim, ""
        finally:
            for fd in free.values():
                os.close(fd)


# ---------------------------------------------------------------------------------------------------------- the edge


def open_folder(path: str) -> int:
    """Descriptor of the claims folder, made when missing: sticky and writable for everybody.

    Raises:
        ClaimsUnusable: it is a link, not a folder, or not writable.
    """
    try:
        os.mkdir(path, 0o1777)
        os.chmod(path, 0o1777)  # noqa: S103 - for every user of the box, like /tmp; mkdir obeys the umask
    except FileExistsError:
        pass
    except OSError as exc:
        raise ClaimsUnusable(
            exc.errno, "cannot make {} for GPU claims: {}".format(path, exc.strerror)
        ) from None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as exc:
        raise ClaimsUnusable(
            exc.errno, "{} must be a folder for GPU claims (not a link): {}".format(path, exc.strerror)
        ) from None
    mode = os.fstat(fd).st_mode
    if not os.access(path, os.W_OK) or not stat.S_ISDIR(mode):
        os.close(fd)
        raise ClaimsUnusable(13, "{} is not writable: `chmod 1777 {}` as its owner".format(path, path))
    return fd


def _open_lock(path: str) -> int:
    """A lock file of anybody's: opened without O_CREAT, which fs.protected_regular refuses on others' files."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, flags)
        with contextlib.suppress(FileExistsError):
            fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
            os.fchmod(fd, 0o644)
            return fd
    raise ClaimsUnusable(2, "{} appears and vanishes: somebody else cleans this folder".format(path))


def _lock_gpu(folder: str, index: int) -> Optional[int]:
    """Locked descriptor of one GPU, or None when somebody holds it."""
    path = os.path.join(folder, "gpu{}".format(index))
    for _ in range(10):
        fd = _open_lock(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A cleaner may have removed the file between open and lock: then this lock excludes nobody.
            if os.fstat(fd).st_ino == os.stat(path).st_ino:
                return fd
        except BlockingIOError:
            os.close(fd)
            return None
        except FileNotFoundError:
            pass
        os.close(fd)
    return None


@contextlib.contextmanager
def _mutex(folder: str) -> Any:
    fd = _open_lock(os.path.join(folder, "mutex"))
    deadline = time.monotonic() + MUTEX_WAIT_S
    locked = False
    try:
        while not locked and time.monotonic() < deadline:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked = True
            except BlockingIOError:
                time.sleep(0.005)
        yield locked
    finally:
        os.close(fd)


def live_tickets(folder: str) -> List[Ticket]:
    """Tickets whose owner (or an heir of its descriptors) lives, in order of arrival. Dead ones of ours are removed."""
    found = []
    for name in _ticket_names(folder):
        path = os.path.join(folder, name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                ticket = parse(os.pread(fd, _MAX_TICKET_BYTES, 0), name, path)
                if ticket is not None:
                    found.append(ticket)
                continue
            with contextlib.suppress(OSError):
                os.unlink(path)  # refused by the sticky bit when it is somebody else's
        finally:
            os.close(fd)
    return sorted(found, key=lambda t: t.number)


def status(folder: Optional[str] = None) -> Dict[str, List[Dict[str, object]]]:
    """Holders and queue of this host, for `orch status`: {"held": [...], "queue": [...]}; never raises."""
    path = folder or os.environ.get(FOLDER_ENV) or DEFAULT_FOLDER
    try:
        with _mutex(path):
            tickets = live_tickets(path)
    except OSError:
        return {"held": [], "queue": []}
    queue = [t for t in tickets if not t.held]
    return {
        "held": [{**t.row(), "gpus": t.held} for t in tickets if t.held],
        "queue": [{**t.row(), "gpus": t.count, "position": place} for place, t in enumerate(queue, start=1)],
    }


def _ticket_names(folder: str) -> List[str]:
    try:
        return sorted(name for name in os.listdir(folder) if name.startswith("ticket-"))
    except FileNotFoundError:
        return []


def _user() -> str:
    return procs.user_name(os.getuid())
