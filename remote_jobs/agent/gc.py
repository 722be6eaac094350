"""What may be deleted on this host: old ended jobs, releases that no job needs, uploads, overlays. Never what runs.

Why here: only the host knows what runs.  A job goes when its final event is there, its lock is free, no process of it
lives and it ended long enough ago; its work folder is the user's and stays.  Whatever cannot be judged is kept, with
the reason.  Deleting is a rename first, so that a broken-off run leaves no half of anything.  Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import subprocess
import time
from typing import Any, Dict, List, Optional, Set

from remote_jobs import protocol
from remote_jobs.agent import procs, reboot
from remote_jobs.agent.jobdir import JobDir, Layout, Lock, read_json
from remote_jobs.agent.look import Looker
from remote_jobs.agent.times import epoch

DAY_S = 86400.0
OVERLAYS = "overlays"
DOOMED = ".gc-"
"""Start of the name that something has between its end and its removal."""
_BLOB = re.compile(r"[0-9a-f]{64}(\.part)?")
_RELEASE = re.compile(r"[0-9a-f]{16}")


class Collector:
    """One run: looks at everything below the root, then deletes what was found if it is to.

    Args:
        older_than_s: how long ago a job must have ended, and other things must have been touched last.
        apply: delete; otherwise only say what would go.
        own_release: the release this agent runs from.
    """

    def __init__(self, layout: Layout, looker: Looker, *, older_than_s: float, apply: bool, own_release: str) -> None:
        self.layout, self.looker = layout, looker
        self.older_than_s, self.apply = max(0.0, older_than_s), apply
        self.items: List[Dict[str, Any]] = []
        self.kept: List[Dict[str, Any]] = []
        self._now = time.time()
        self._own_release = own_release
        self._running = False  # of any job: its overlay may be in use
        self._words = _words_in_use()

    def run(self) -> Dict[str, Any]:
        """``{apply, items: [{kind, name, bytes, age_s, why}], kept: [{kind, name, why}], bytes}``."""
        self._leftovers()
        needed = self._jobs()
        self._releases(needed)
        self._uploads()
        self._overlays()
        return {
            "apply": self.apply,
            "items": self.items,
            "kept": self.kept,
            "bytes": sum(item["bytes"] for item in self.items),
        }

    # ------------------------------------------------------------------------------------------------------------ jobs

    def _jobs(self) -> Optional[Set[str]]:
        """Judge every job; the releases that the remaining ones need, None when that cannot be known."""
        needed: Optional[Set[str]] = set()
        for job_id in self.layout.job_ids():
            job = self.layout.job(job_id)
            if os.path.islink(job.path) or not os.path.isdir(job.path):
                self._keep("job", job_id, "is no folder of ours")
                continue
            gone = self._job(job)
            if gone or needed is None or not os.path.exists(job.spec_path):
                continue
            try:
                needed.add(str(read_json(job.spec_path).get("release") or ""))
            except (OSError, ValueError, AttributeError):
                needed = None
        return needed

    def _job(self, job: JobDir) -> bool:
        """True when the job goes."""
        found, unreadable = self.looker.jobs([job.id])
        if job.id not in found:
            self._running = True  # nobody knows
            return self._keep("job", job.id, "cannot be read: {}".format(unreadable.get(job.id)))
        record = found[job.id]
        if record.get("unfinished") and not record.get("alive"):
            return self._unfinished(job)
        state = record.get("state") or {}
        name = str(state.get("state"))
        if name not in protocol.JOB_TERMINAL:
            self._running = True
            hint = "; take it up or end it first: orch retry, orch stop" if name == "lost" else ""
            return self._keep("job", job.id, "is {}{}".format(name, hint))
        ended = epoch(state.get("ended_at"))
        age_s = self._now - (ended if ended is not None else _newest(job.path))
        if age_s < self.older_than_s:
            return self._keep("job", job.id, "ended {} ago".format(_days(age_s)))
        if self._alive(job):
            self._running = True
            return self._keep("job", job.id, "processes of it still run; see: orch status --processes")
        if _holds_files(job.at("work")):
            return self._keep("job", job.id, "its outputs lie in its own folder; fetch or move them first")
        why = "{}, ended {} ago (asked for: {})".format(name, _days(age_s), _asked(self.older_than_s))
        return self._take("job", job.id, job.path, age_s, why, job=job)

    def _unfinished(self, job: JobDir) -> bool:
        age_s = self._now - _newest(job.path)
        if age_s < max(self.older_than_s, DAY_S) or self._alive(job):
            return self._keep("job", job.id, "a launch that was not finished")
        why = "a launch that was never finished, {} old".format(_days(age_s))
        return self._take("job", job.id, job.path, age_s, why, job=job)

    def _alive(self, job: JobDir) -> bool:
        return bool(procs.find_job(job.id)) or job.path in self._words

    # ------------------------------------------------------------------------------------------------------------ rest

    def _releases(self, needed: Optional[Set[str]]) -> None:
        for name in _names(self.layout.releases):
            path = os.path.join(self.layout.releases, name)
            age_s = self._now - _newest(path)
            if name.startswith(".tmp-"):
                if age_s > min(self.older_than_s, DAY_S):
                    self._take("upload", name, path, age_s, "a release whose upload broke off")
            elif not _RELEASE.fullmatch(name) or age_s < self.older_than_s or path == self._own_path():
                continue
            elif needed is None:
                self._keep("release", name, "a job cannot be read, and it may need this release")
            elif name not in needed and path not in self._words:
                why = "no job that stays was launched with it; unused for {}".format(_days(age_s))
                self._take("release", name, path, age_s, why)

    def _own_path(self) -> str:
        return os.path.join(self.layout.releases, self._own_release or "-")

    def _uploads(self) -> None:
        for name in _names(self.layout.blobs):
            path = os.path.join(self.layout.blobs, name)
            with contextlib.suppress(OSError):
                status = os.lstat(path)
                age_s = self._now - status.st_mtime
                if not _BLOB.fullmatch(name) or not stat.S_ISREG(status.st_mode):
                    continue
                part = name.endswith(".part")
                if age_s > (min(self.older_than_s, DAY_S) if part else self.older_than_s):
                    why = "an upload that broke off" if part else "an uploaded file; jobs have copies of their own"
                    self._take("upload", name, path, age_s, "{}; {} old".format(why, _days(age_s)))

    def _overlays(self) -> None:
        parent = os.path.join(self.layout.root, OVERLAYS)
        for name in _names(parent):
            path = os.path.join(parent, name)
            age_s = self._now - _newest(path)
            if os.path.islink(path) or not os.path.isdir(path) or age_s < self.older_than_s:
                continue
            if self._running or path in self._words:
                self._keep("overlay", name, "a job runs")
            else:
                why = "patched packages, built again when a job needs them; unused for {}".format(_days(age_s))
                self._take("overlay", name, path, age_s, why)

    def _leftovers(self) -> None:
        """What an earlier run had begun to delete."""
        for parent in (self.layout.jobs, self.layout.releases, self.layout.blobs, os.path.join(self.layout.root, OVERLAYS)):
            for name in _names(parent):
                if name.startswith(DOOMED):
                    path = os.path.join(parent, name)
                    self._take("leftover", name, path, self._now - _newest(path), "left by an earlier gc")

    # ------------------------------------------------------------------------------------------------------------ acts

    def _keep(self, kind: str, name: str, why: str) -> bool:
        self.kept.append({"kind": kind, "name": name, "why": why})
        return False

    def _take(self, kind: str, name: str, path: str, age_s: float, why: str, job: Optional[JobDir] = None) -> bool:
        size = _size(path)
        lock = Lock(job.lock_path()) if job is not None and self.apply else None
        try:
            if lock is not None and not lock.acquire():
                return self._keep(kind, name, "somebody took it up just now")
            if self.apply:
                _remove(path)
        except OSError as exc:
            return self._keep(kind, name, "cannot be deleted: {}".format(exc))
        finally:
            if lock is not None:
                lock.release()
                if not lock.path.startswith(path + os.sep):  # the node-local one
                    with contextlib.suppress(OSError):
                        os.unlink(lock.path)
        self.items.append({"kind": kind, "name": name, "bytes": size, "age_s": round(age_s, 1), "why": why})
        return True


def _remove(path: str) -> None:
    """Out of sight in one step, then away."""
    parent, name = os.path.split(path)
    doomed = path if name.startswith(DOOMED) else os.path.join(parent, "{}{}-{}".format(DOOMED, name, os.getpid()))
    if doomed != path:
        os.rename(path, doomed)
    if os.path.isdir(doomed) and not os.path.islink(doomed):
        shutil.rmtree(doomed)
    else:
        os.unlink(doomed)


def _words_in_use() -> str:
    """Command lines of all processes, and the lines that a boot would start."""
    lines = [procs.command_line(pid, 1 << 16) for pid in procs.table()]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        listed = subprocess.run(
            ["crontab", "-l"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=5,
            check=False,
        )  # fmt: skip
        lines.append(listed.stdout.decode("utf-8", "replace"))
    with contextlib.suppress(OSError, ValueError), open(
        os.path.expanduser("~/.config/systemd/user/" + reboot.UNIT), encoding="utf-8"
    ) as file:
        lines.append(file.read())
    return "\n".join(lines)


def _names(folder: str) -> List[str]:
    with contextlib.suppress(OSError):
        return sorted(os.listdir(folder))
    return []


def _newest(path: str) -> float:
    """Time of the last change of a thing or of what lies directly in it; now when it cannot be read."""
    try:
        times = [os.lstat(path).st_mtime]
    except OSError:
        return time.time()
    if os.path.isdir(path) and not os.path.islink(path):
        for name in _names(path):
            with contextlib.suppress(OSError):
                times.append(os.lstat(os.path.join(path, name)).st_mtime)
    return max(times)


def _holds_files(folder: str) -> bool:
    return not os.path.islink(folder) and any(files for _, _, files in os.walk(folder))


def _size(path: str) -> int:
    """Bytes on the disk."""
    total = 0
    with contextlib.suppress(OSError):
        total = os.lstat(path).st_blocks * 512
    if os.path.isdir(path) and not os.path.islink(path):
        for folder, names, files in os.walk(path):
            for name in [*names, *files]:
                with contextlib.suppress(OSError):
                    total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


def _asked(seconds: float) -> str:
    """What was asked for, exact: more than 30 days, more than 1h30m."""
    if seconds <= 0:
        return "any age"
    if seconds % DAY_S == 0:
        return "more than {}".format(_days(seconds))
    parts, left = [], int(seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        parts += ["{}{}".format(count, unit)] if count else []
    return "more than {}".format("".join(parts) or "{:g}s".format(seconds))


def _days(seconds: float) -> str:
    """3 hours, 1 day, 45 days: as a person reckons it."""
    if seconds < 60:
        return "less than a minute"
    count, unit = (seconds / DAY_S, "day") if seconds >= DAY_S else (seconds / 3600, "hour")
    if count >= 1:
        return "{:.0f} {}{}".format(count, unit, "" if round(count) == 1 else "s")
    return "{:.0f} min".format(seconds / 60)


