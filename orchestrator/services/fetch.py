"""Files of a job onto the laptop: in chunks that resume, verified by SHA-256 before a file gets its name.

The host is not trusted with names (see local_paths) nor with sizes. A file that changes while it is fetched is
noticed, tried once more, and then reported instead of being kept half old and half new.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import HostRefused, LocalError, UsageError
from orchestrator.services.local_paths import Destination, UnsafeName, open_part
from orchestrator.services.look import look, remember
from orchestrator.services.resolve import FoundJob
from orchestrator.services.upload import Progress
from orchestrator.services.wait import the_job

if TYPE_CHECKING:
    from orchestrator.hosts.agent import AgentClient
    from orchestrator.services.session import Session

CHUNK_BYTES = 1 << 20
MAX_MTIME_NS = 1 << 63
IN_FLIGHT = 8
"""Chunks asked for at once: at 150 ms round trip one at a time would be 7 MiB/s."""
DIGEST_TIMEOUT_S = 3600.0
JOB_FOLDER = "orch-job"
"""Where a job's own records and logs go inside DEST; outputs keep their path below the work folder."""
RECORDS = ("spec.json", "events.jsonl", "state.json", "result.json", "supervisor.log")


class _Changed(Exception):
    """The file on the host is being written."""


@dataclass(frozen=True)
class _Remote:
    name: str
    absolute: str
    size: int
    mtime_ns: int


def folder_of(dest: str) -> Path:
    """DEST as a path.

    Raises:
        UsageError: it is empty: a path would take that for the current folder, and a variable that is not set is meant.
    """
    if not dest:
        raise UsageError("DEST is empty: is a variable not set?", "name a folder, such as results/; the current one is `.`")
    return Path(dest)


def fetch(
    session: Session,
    job: FoundJob,
    dest: Path,
    *,
    include: Sequence[str] = (),
    what: str = "outputs",
    progress: Progress,
) -> dict[str, Any]:
    """Bring files; ``{"job", "host", "dest", "fetched": [...], "unchanged": [...], "links": [...], "special": [...],
    "skipped": [...]}``, where ``special`` are FIFOs, sockets and devices.

    Args:
        include: globs that a file's path or name must fit.
        what: outputs, logs (with records and incident bundles), or all.
        progress: hears of each file.

    Raises:
        LocalError: DEST cannot be written. HostError: the host is away, or refuses.
    """
    result = look(session, job.host, jobs=[job.id])
    if result.error is not None:
        raise result.error
    view = the_job(result.jobs, job, (result.answer or {}).get("unreadable") or {})
    remember(session, [view])
    agent = session.agent(job.host)
    roots = {"outputs": ["outputs"], "logs": ["job"], "all": ["outputs", "job"]}[what]
    answer: dict[str, Any] = {
        "job": job.id,
        "host": job.host,
        "dest": str(dest),
        "fetched": [],
        "unchanged": [],
        "links": [],
        "special": [],
        "skipped": [],
    }
    try:
        place = Destination(dest)
    except OSError as error:
        raise LocalError(
            f"{dest} cannot be written: {error.strerror or error}", "choose another folder"
        ) from error
    listing = agent.request("list", job=job.id, roots=roots)
    if listing.get("truncated"):
        answer["skipped"].append({"path": "...", "reason": "the host has more files than one listing holds"})
    for remote in _wanted(listing.get("entries") or [], view.get("workdir"), include, what, answer):
        _one(agent, remote, place, progress, answer)
    return answer


def _wanted(
    entries: Sequence[dict[str, Any]],
    workdir: str | None,
    include: Sequence[str],
    what: str,
    answer: dict[str, Any],
) -> Iterator[_Remote]:
    """The regular files that were asked for; what else was is noted in ``answer``."""
    seen: set[str] = set()
    for entry in entries:
        absolute = str(entry.get("absolute"))
        if absolute in seen:
            continue
        seen.add(absolute)
        name = _local_name(entry, workdir)
        if include and not any(_fits(name, str(entry.get("path")), glob) for glob in include):
            continue
        if entry.get("root") == "job" and what == "logs" and not _is_log(str(entry.get("path"))):
            continue
        if entry.get("kind") == "file":
            yield _Remote(name, absolute, int(entry["size"]), int(entry["mtime_ns"]))
        elif entry.get("kind") == "link":
            answer["links"].append({"path": name})
        elif entry.get("root") != "job":  # a job's records hold a FIFO of ours, which nobody misses
            answer["special"].append({"path": name, "kind": str(entry.get("kind"))})


def _local_name(entry: dict[str, Any], workdir: str | None) -> str:
    root, path, absolute = str(entry.get("root")), str(entry.get("path")), str(entry.get("absolute"))
    if root == "job":
        return f"{JOB_FOLDER}/{path}"
    base = (workdir or "").rstrip("/")
    if base.startswith("/") and absolute.startswith(base + "/"):
        return absolute[len(base) + 1 :]
    return f"{root.strip('/') or 'output'}/{path}"


def _fits(name: str, path: str, glob: str) -> bool:
    return any(fnmatch.fnmatchcase(text, glob) for text in (name, path, name.rsplit("/", 1)[-1]))


def _is_log(path: str) -> bool:
    return path.startswith("steps/") or path in RECORDS


def _one(
    agent: AgentClient, remote: _Remote, place: Destination, progress: Progress, answer: dict[str, Any]
) -> None:
    """One file: placed, skipped as identical, or reported with the reason why not."""
    try:
        path = place.place(remote.name)
        if _identical(agent, remote, path):
            _keep_time(path, remote.mtime_ns)
            answer["unchanged"].append({"path": remote.name, "size": remote.size})
            return
        try:
            size, sha256 = _bring(agent, remote, path, progress)
        except _Changed:
            # Once more from the start, with the size and time that it has now.
            path.with_name(path.name + ".part").unlink(missing_ok=True)
            fresh = _stat(agent, remote)
            size, sha256 = _bring(agent, fresh, path, progress)
            remote = fresh
        _keep_time(path, remote.mtime_ns)
        answer["fetched"].append({"path": remote.name, "size": size, "sha256": sha256})
    except _Changed:
        answer["skipped"].append(
            {"path": remote.name, "reason": "it changes while it is fetched; fetch again later"}
        )
    except UnsafeName as error:
        answer["skipped"].append({"path": remote.name, "reason": f"its name is not safe here: {error}"})
    except HostRefused as error:
        answer["skipped"].append({"path": remote.name, "reason": error.message})
    except OSError as error:
        if error.errno in {28, 122}:  # ENOSPC, EDQUOT: no other file will fit either
            raise LocalError(
                f"this laptop's disk is full: {remote.name}", "free space, then fetch again"
            ) from error
        answer["skipped"].append(
            {"path": remote.name, "reason": f"cannot be written here: {error.strerror or error}"}
        )


def _identical(agent: AgentClient, remote: _Remote, path: Path) -> bool:
    """True when the file is here already: same size, and same time or same hash."""
    try:
        status = path.stat()
    except OSError:
        return False
    if status.st_size != remote.size:
        return False
    # File systems keep times more coarsely than we send them (FAT: 2 s); the hash decides then.
    if abs(status.st_mtime_ns - remote.mtime_ns) < 1000:
        return True
    return bool(
        agent.request("digest", path=remote.absolute, timeout_s=DIGEST_TIMEOUT_S)["sha256"] == _sha256(path)
    )


def _stat(agent: AgentClient, remote: _Remote) -> _Remote:
    answer = agent.request("get", path=remote.absolute, offset=0, length=0)
    return _Remote(remote.name, remote.absolute, int(answer["size"]), int(answer["mtime_ns"]))


def _bring(agent: AgentClient, remote: _Remote, path: Path, progress: Progress) -> tuple[int, str]:
    """Copy into ``<path>.part``, going on from what is there, verify, rename; (size, sha256).

    Raises:
        _Changed: the host's file is not what was listed any more, or not what its hash says.
    """
    part = path.with_name(path.name + ".part")
    have = part.stat().st_size if part.is_file() and not part.is_symlink() else 0
    if have > remote.size:
        have = 0
    progress.start(remote.name, remote.size, have)
    descriptor = open_part(part, append=have > 0)
    with os.fdopen(descriptor, "r+b") as file:
        file.seek(have)
        file.truncate()
        for chunk in _chunks(agent, remote, have):
            file.write(chunk)
            progress.advance(len(chunk))
        file.flush()
        os.fsync(file.fileno())
    told = agent.request("digest", path=remote.absolute, timeout_s=DIGEST_TIMEOUT_S)
    found = _sha256(part)
    if told["sha256"] != found or int(told["size"]) != part.stat().st_size:
        raise _Changed
    progress.finish()
    os.replace(part, path)
    return remote.size, found


def _chunks(agent: AgentClient, remote: _Remote, start: int) -> Iterator[bytes]:
    """Pieces of a file in order, several asked for at once.

    Raises:
        _Changed: the file's time or size is another one now.
    """
    offsets = iter(range(start, remote.size, CHUNK_BYTES))
    pool = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="fetch")
    pending: deque[Future[dict[str, Any]]] = deque()

    def ask(offset: int) -> Future[dict[str, Any]]:
        length = min(CHUNK_BYTES, remote.size - offset)
        return pool.submit(
            agent.request, "get", path=remote.absolute, offset=offset, length=length, mtime_ns=remote.mtime_ns
        )

    try:
        for offset in offsets:
            pending.append(ask(offset))
            if len(pending) < IN_FLIGHT:
                continue
            yield _piece(pending.popleft(), remote)
        while pending:
            yield _piece(pending.popleft(), remote)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _piece(answer: Future[dict[str, Any]], remote: _Remote) -> bytes:
    """The bytes of one answer; a host that sends more than was asked for is not believed."""
    found = answer.result()
    if found.get("changed") or int(found["size"]) != remote.size:
        raise _Changed
    data: bytes = found.get("payload") or b""
    if not 0 < len(data) <= CHUNK_BYTES:
        raise _Changed
    return data


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _keep_time(path: Path, mtime_ns: int) -> None:
    if 0 < mtime_ns < MAX_MTIME_NS:
        os.utime(path, ns=(mtime_ns, mtime_ns))
