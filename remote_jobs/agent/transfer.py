"""Files in and out over the agent's channel: chunks with offsets, so a broken transfer goes on where it stopped.

Uploads land in a store named by content hash and are verified before they count.  Downloads never follow a link
out of what was asked for.  Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import hashlib
import os
import stat
from typing import Any, Dict, List, Optional, Sequence, Tuple

from remote_jobs.agent.command import Places
from remote_jobs.agent.jobdir import Layout, fsync_dir
from remote_jobs.agent.launching import AgentError, disk_error, never_started

MAX_CHUNK_BYTES = 1 << 20
_MAX_ENTRIES = 200_000
_KINDS = {stat.S_IFREG: "file", stat.S_IFLNK: "link", stat.S_IFIFO: "fifo", stat.S_IFSOCK: "socket"}
_HEX = frozenset("0123456789abcdef")


def _blob(layout: Layout, sha256: str) -> str:
    if len(sha256) != 64 or not set(sha256) <= _HEX:
        raise AgentError("bad_request", "{!r} is not a sha256".format(sha256[:80]))
    return os.path.join(layout.blobs, sha256)


def have(layout: Layout, wanted: Sequence[str]) -> List[Dict[str, Any]]:
    """Hashes that are not in the store: [{sha256, offset}], offset = bytes of a partial upload already here."""
    missing = []
    for sha256 in wanted:
        path = _blob(layout, sha256)
        with contextlib.suppress(OSError):
            os.utime(path)  # asked for: no `gc` takes it before the launch that is about to use it
        if not os.path.isfile(path):
            size = 0
            with contextlib.suppress(OSError):
                size = os.stat(path + ".part").st_size
            missing.append({"sha256": sha256, "offset": size})
    return missing


def put(layout: Layout, sha256: str, offset: int, data: bytes, *, last: bool) -> Dict[str, Any]:
    """Append a chunk at ``offset``; with ``last`` verify and store: {offset} or {stored: true}.

    Raises:
        AgentError: `io` when the hash differs, `disk_full`; the partial file is dropped in both cases.
    """
    path = _blob(layout, sha256)
    if os.path.isfile(path):
        return {"offset": offset + len(data), "stored": True}
    part = path + ".part"
    try:
        fd = os.open(part, os.O_RDWR | os.O_CREAT, 0o600)
        with open(fd, "r+b") as file:
            here = os.fstat(fd).st_size
            if offset > here:
                return {"offset": here, "stored": False}  # the sender goes on from what is really here
            file.seek(offset)
            file.truncate()
            file.write(data)
            if not last:
                return {"offset": offset + len(data), "stored": False}
            file.flush()
            os.fsync(fd)
            file.seek(0)
            found = _sha256(file)
        if found != sha256:
            os.unlink(part)
            raise AgentError("io", "the uploaded bytes have sha256 {}, not {}".format(found, sha256), "upload again")
        os.replace(part, path)
        fsync_dir(layout.blobs)
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):  # half a file is worth less than room for the jobs that run
            with contextlib.suppress(OSError):
                os.unlink(part)
        raise disk_error(exc, "storing an uploaded file") from exc
    return {"offset": offset + len(data), "stored": True}


def _sha256(file: Any) -> str:
    digest = hashlib.sha256()
    for chunk in iter(lambda: file.read(1 << 20), b""):
        digest.update(chunk)
    return digest.hexdigest()


def digest(path: str) -> Dict[str, Any]:
    """{sha256, size} of a regular file."""
    with _open_regular(path) as file:
        return {"sha256": _sha256(file), "size": os.fstat(file.fileno()).st_size}


def _open_regular(path: str) -> Any:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as exc:
        raise AgentError("io", "cannot read {}: {}".format(path, exc.strerror or exc)) from exc
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise AgentError("io", "{} is not a regular file".format(path))
    return open(fd, "rb")


def get(path: str, offset: int, length: int, mtime_ns: Optional[int]) -> Tuple[Dict[str, Any], bytes]:
    """A piece of a regular file: ({size, eof, changed, mtime_ns}, bytes)."""
    with _open_regular(path) as file:
        status = os.fstat(file.fileno())
        data = os.pread(file.fileno(), max(0, min(length, MAX_CHUNK_BYTES)), offset)
        changed = mtime_ns is not None and int(mtime_ns) != status.st_mtime_ns
        eof = offset + len(data) >= status.st_size
        return {"size": status.st_size, "eof": eof, "changed": changed, "mtime_ns": status.st_mtime_ns}, data


def list_files(layout: Layout, job_id: Optional[str], roots: Sequence[str], globs: Sequence[str]) -> Dict[str, Any]:
    """What lies below each root, folders apart: {entries: [{root, path, absolute, size, mtime_ns, kind}], truncated}.

    Roots: "job" (the job's directory), "outputs" (every step's output), or an absolute path.  Kinds: file; link, which is
    never followed; fifo, socket and device, which hold nothing to fetch.
    """
    entries: List[Dict[str, Any]] = []
    for root in roots:
        for label, top, pattern in _tops(layout, job_id, root):
            if not _walk(label, top, [*globs] if globs else ([pattern] if pattern else []), entries):
                return {"entries": entries, "truncated": True}
    return {"entries": entries, "truncated": False}


def _tops(layout: Layout, job_id: Optional[str], root: str) -> List[Tuple[str, str, Optional[str]]]:
    if root.startswith("/"):
        return [(root, root, None)]
    if job_id is None:
        raise AgentError("bad_request", "root {!r} needs a job".format(root))
    job = layout.job(job_id)
    if os.path.isdir(job.path) and not os.path.exists(job.spec_path):
        raise never_started(job_id)
    if root == "job":
        return [("job", job.path, None)]
    if root != "outputs":
        raise AgentError("bad_request", "unknown root {!r}".format(root), "use job, outputs or an absolute path")
    spec = job.spec()
    places = Places(spec, job)
    tops: List[Tuple[str, str, Optional[str]]] = []
    for step in spec.step_specs():
        pattern = (step.done or {}).get("count")
        if pattern:
            tops.append((step.name, places.workdir, places.fill(str(pattern), lambda text: text)))
        output = places.output(step.name)
        if os.path.lexists(output) and not any(top == output and glob is None for _, top, glob in tops):
            # The ranges of a split share one output, and those of several hosts one name on the laptop.
            tops.append((str((step.part or {}).get("of") or step.name), output, None))
    return tops


def _walk(label: str, top: str, globs: Sequence[str], entries: List[Dict[str, Any]]) -> bool:
    """Collect files; False when there are more than an answer may hold."""
    if not os.path.isdir(top):
        _add(label, top, os.path.basename(top), entries)
        return True
    for folder, names, files in os.walk(top, followlinks=False):
        names.sort()
        for name in sorted([*files, *(item for item in names if os.path.islink(os.path.join(folder, item)))]):
            absolute = os.path.join(folder, name)
            relative = os.path.relpath(absolute, top)
            if globs and not any(fnmatch.fnmatchcase(relative, glob) for glob in globs):
                continue
            _add(label, absolute, relative, entries)
            if len(entries) >= _MAX_ENTRIES:
                return False
    return True


def _add(label: str, absolute: str, relative: str, entries: List[Dict[str, Any]]) -> None:
    with contextlib.suppress(OSError):
        status = os.lstat(absolute)
        entries.append(
            {
                "root": label,
                "path": relative,
                "absolute": absolute,
                "size": status.st_size,
                "mtime_ns": status.st_mtime_ns,
                "kind": _KINDS.get(stat.S_IFMT(status.st_mode), "device"),
            }
        )
