"""Check 7: ports, limits, locale, write permission and clock, each a row of its own."""

from __future__ import annotations

import contextlib
import errno
import locale
import os
import resource
import socket
import tempfile
from typing import Any, Dict, Optional, Tuple

from remote_jobs.agent import procs
from remote_jobs.agent.checks.context import FAIL, GIB, OK, WARN, Job, Row, Step, gib, row, worst

NOFILE_GOOD, NOFILE_MIN = 65535, 1024
"""vLLM asks for 65535; below 1024 a server with a few hundred requests fails."""
MEMLOCK_GOOD = 64 * 1024 * 1024
SKEW_SHOWN_S, SKEW_BAD_S = 2.0, 300.0
CACHE_MIN_BYTES = 2 * GIB


# ------------------------------------------------------------------------------------------------------------- port


def check_port(step: Step) -> Optional[Row]:
    """Whether the step's port is free now; None for steps that listen nowhere fixed."""
    port, where = wanted_port(step)
    if port is None:
        return None
    address = str(step.params.get("host") or "")
    problem = try_bind(address, port)
    holder = port_holder(port) if problem else ""
    return judge_port(port, where, problem, holder)


def wanted_port(step: Step) -> Tuple[Optional[int], str]:
    """(port, which setting names it) of a step."""
    ready = (step.spec.service or {}).get("ready") or {}
    if isinstance(ready.get("port"), int):
        return ready["port"], "service.ready.port"
    if isinstance(step.params.get("port"), int):
        return int(step.params["port"]), "port"
    return None, ""


def judge_port(port: int, where: str, problem: str, holder: str) -> Row:
    """The verdict from what binding said."""
    if not problem:
        return row(OK, "port {} is free".format(port))
    if problem == "denied":
        return row(
            FAIL,
            "port {} needs root: ports below 1024 are privileged".format(port),
            "set `{}: 8000`".format(where),
        )
    if problem == "in use":
        text = "port {} is in use{}".format(port, " by " + holder if holder else "")
        return row(
            FAIL, text, "set `{}` to a free one such as {}, or end that process".format(where, free_port())
        )
    return row(FAIL, "cannot listen on port {}: {}".format(port, problem), "correct `host` or `port`")


def try_bind(address: str, port: int) -> str:
    """Empty when the port can be bound, else `in use`, `denied` or the system's words."""
    try:
        infos = socket.getaddrinfo(address or None, port, 0, socket.SOCK_STREAM, 0, socket.AI_PASSIVE)
    except (OSError, OverflowError) as exc:
        return str(exc)
    for family, kind, proto, _, target in infos[:4]:
        try:
            with socket.socket(family, kind, proto) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(target)
                probe.listen(1)
        except OSError as exc:
            if exc.errno == errno.EADDRINUSE:
                return "in use"
            if exc.errno == errno.EACCES:
                return "denied"
            if family == socket.AF_INET6 or exc.errno in (errno.EAFNOSUPPORT,):
                continue  # no IPv6 here
            return exc.strerror or str(exc)
    return ""


def free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_holder(port: int) -> str:
    """`pid N (command)` of the listener, empty when it is not ours to see."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table, encoding="ascii") as file:
            for line in file.readlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add("socket:[{}]".format(fields[9]))
    if not inodes:
        return ""
    for pid in procs.table():
        with contextlib.suppress(OSError):
            folder = "/proc/{}/fd".format(pid)
            for fd in os.listdir(folder):
                with contextlib.suppress(OSError):
                    if os.readlink(os.path.join(folder, fd)) in inodes:
                        return "pid {} ({})".format(pid, procs.command_line(pid, 100))
    return ""


# ----------------------------------------------------------------------------------------------------------- limits


def check_limits(job: Job) -> Row:
    """Open files and locked memory."""
    loads = any(step.uses for step in job.steps)
    many = any(step.gpus > 1 for step in job.steps)
    nofile = resource.getrlimit(resource.RLIMIT_NOFILE)
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return judge_limits(nofile, memlock, loads=loads, many_gpus=many)


def judge_limits(nofile: Tuple[int, int], memlock: Tuple[int, int], *, loads: bool, many_gpus: bool) -> Row:
    """The verdict from (soft, hard) limits; -1 is unlimited."""
    found = []
    soft, hard = (_size(v) for v in nofile)
    fix = "raise it in /etc/security/limits.conf (`* soft nofile 65535`) or the container's --ulimit nofile=65535"
    if loads and soft < NOFILE_MIN:
        found.append(
            row(FAIL, "only {:.0f} open files are allowed (hard limit {:.0f})".format(soft, hard), fix)
        )
    elif loads and soft < NOFILE_GOOD and hard < NOFILE_GOOD:
        found.append(row(WARN, "{:.0f} open files are allowed, vLLM wants {}".format(soft, NOFILE_GOOD), fix))
    locked = _size(memlock[0])
    if many_gpus and locked < MEMLOCK_GOOD:
        text = "only {} of memory may be locked (memlock): InfiniBand and pinned buffers may fail"
        found.append(
            row(WARN, text.format(gib(locked)), "set `* - memlock unlimited`, or --ulimit memlock=-1")
        )
    return worst(
        found,
        "open files {:.0f}, locked memory {}".format(
            soft, "unlimited" if locked == float("inf") else gib(locked)
        ),
    )


def _size(value: int) -> float:
    return float("inf") if value in (-1, resource.RLIM_INFINITY) else float(value)


# ----------------------------------------------------------------------------------------------------------- locale


def check_locale(job: Job) -> Row:
    """Whether Python there will write UTF-8."""
    names = ("LC_ALL", "LC_CTYPE", "LANG", "PYTHONUTF8", "PYTHONIOENCODING")
    env = {name: str(job.spec.env.get(name, os.environ.get(name, ""))) for name in names}
    return judge_locale(env, _usable)


def judge_locale(env: Dict[str, str], usable: Any) -> Row:
    """The verdict from the variables; `usable(name)` says whether the system has a locale."""
    chosen = env.get("LC_ALL") or env.get("LC_CTYPE") or env.get("LANG") or "C"
    if env.get("PYTHONUTF8") == "1":
        return row(OK, "PYTHONUTF8=1")
    if chosen in ("C", "POSIX") or chosen.upper().replace("-", "").endswith("UTF8"):
        if chosen not in ("C", "POSIX") and not usable(chosen):
            text = "locale {} is not installed here: programs fall back to ASCII"
            return row(WARN, text.format(chosen), "set `env: {LC_ALL: C.UTF-8}`")
        return row(OK, "locale {}".format(chosen))
    return row(
        WARN,
        "locale {} is not UTF-8: prompts and file names may break".format(chosen),
        "set `env: {LC_ALL: C.UTF-8}`",
    )


def _usable(name: str) -> bool:
    before = locale.setlocale(locale.LC_CTYPE)
    try:
        locale.setlocale(locale.LC_CTYPE, name)
    except locale.Error:
        return False
    else:
        return True
    finally:
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, before)


# ------------------------------------------------------------------------------------------------------------ write


def check_write(job: Job) -> Row:
    """Whether workdir, outputs and orch's root can be written, tried for real; and the caches' disk."""
    found = []
    places = {job.workdir: "workdir", job.layout.root: "root"}
    for step in job.steps:
        if step.uses or step.spec.output:
            places.setdefault(step.output, "output of {}".format(step.name))
    for path, what in places.items():
        problem = try_write(path)
        if problem:
            found.append(
                row(FAIL, "{} {}: {}".format(what, path, problem), "correct the path, or its owner and mode")
            )
    return worst(found, "{} folders can be written".format(len(places)))


def try_write(path: str) -> str:
    """Empty when a file can be made in the folder, or in the nearest one that exists; else why not."""
    existing = path
    while not os.path.lexists(existing) and existing not in ("/", ""):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        return "{} is not a folder".format(existing)
    try:
        with tempfile.NamedTemporaryFile(prefix=".orch-preflight-", dir=existing):
            pass
    except OSError as exc:
        return "{} cannot be written: {}".format(existing, exc.strerror)
    return ""


def check_cache(job: Job) -> Optional[Row]:
    """Room for compiled kernels and temporary files; None when no step loads a model."""
    if not any(step.uses in ("serve", "extract", "evaluate", "train") for step in job.steps):
        return None
    found = []
    home = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    places = {home: "the cache of compiled kernels", tempfile.gettempdir(): "temporary files (TMPDIR)"}
    for path, what in places.items():
        existing = path
        while not os.path.exists(existing) and existing != "/":
            existing = os.path.dirname(existing)
        stat = os.statvfs(existing)
        free = stat.f_bavail * stat.f_frsize
        if free < CACHE_MIN_BYTES:
            found.append(row(WARN if free > CACHE_MIN_BYTES / 8 else FAIL,
                             "{} free in {} for {}".format(gib(free), existing, what),
                             "free some space, or set TMPDIR / XDG_CACHE_HOME in `env:`"))  # fmt: skip
    return worst(found, "room for caches and temporary files")


# ------------------------------------------------------------------------------------------------------------ clock


def judge_clock(laptop_wall: Optional[float], host_wall: float, latency_s: float = 0.0) -> Optional[Row]:
    """The two clocks compared; None when the laptop did not say its time.

    Args:
        laptop_wall: epoch seconds when the laptop asked.
        host_wall: epoch seconds when the host received it.
        latency_s: the part of the difference that the way may explain.
    """
    if laptop_wall is None:
        return None
    skew = host_wall - laptop_wall
    beyond = max(0.0, abs(skew) - max(0.0, latency_s))
    text = "the host's clock is {:.1f} s {} the laptop's".format(
        abs(skew), "ahead of" if skew > 0 else "behind"
    )
    fix = "set it right on whichever is wrong: `timedatectl set-ntp true`"
    if beyond > SKEW_BAD_S:
        return row(FAIL, text + ": tokens and certificates may be refused", fix)
    if beyond > SKEW_SHOWN_S:
        return row(WARN, text, fix)
    return row(OK, "clocks differ by {:.1f} s".format(abs(skew)))
