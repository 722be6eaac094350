"""Facts about this host: for the hello of every agent, for `orch hosts check` and `orch init`.

Each fact is read on its own; what cannot be read is None, never an exception.  Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import time
from datetime import datetime, timezone
from typing import Any, Dict, List, Optional

from remote_jobs import protocol
from remote_jobs.agent import logind, procs
from remote_jobs.agent.jobdir import Layout, fs_type, is_memory_fs

SHM = "/dev/shm"  # noqa: S108 - only measured
_USUAL_PLACES = ("/data", "/scratch", "/mnt", "/tmp")  # noqa: S108 - only measured
_PYTHON_NAMES = ("python3", "python", "python3.8", "python3.9", "python3.10", "python3.11", "python3.12", "python3.13")


def clocks() -> Dict[str, Any]:
    """Wall clock (ISO and epoch seconds) and monotonic clock of this host."""
    wall = time.time()
    now = datetime.fromtimestamp(wall, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
    return {"now": now, "wall": wall, "mono": time.monotonic()}


def in_container() -> bool:
    """True when our pids are not the host's: nvidia-smi's pids mean nothing here."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("NSpid:") and len(line.split()) > 2:
                return True
    return os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv")


def hello(layout: Layout, release: str) -> Dict[str, Any]:
    """First line of every agent."""
    return {
        "v": protocol.VERSION,
        "release": release,
        "python": platform.python_version(),
        "python_path": sys.executable,
        "hostname": socket.gethostname(),
        "boot_id": procs.boot_id(),
        "uid": os.getuid(),
        "user": procs.user_name(os.getuid()),
        "home": os.path.expanduser("~"),
        "root": layout.root,
        "root_fs": fs_type(layout.root),
        "tmpfs": is_memory_fs(layout.root),
        "container": in_container(),
        "pid": os.getpid(),
        **clocks(),
    }


def probe(layout: Layout) -> Dict[str, Any]:
    """Everything that `orch init` and `orch hosts check` show."""
    facts: Dict[str, Any] = hello(layout, "")
    facts.update(
        {
            "os": _os_name(),
            "kernel": platform.release(),
            "machine": platform.machine(),
            "pythons": _pythons(),
            "gpus": _gpus(),
            "nvidia_smi": shutil.which("nvidia-smi") is not None,
            "disks": [disk for disk in (_disk(path) for path in _interesting_paths(layout)) if disk],
            "shm_bytes": (_disk(SHM) or {}).get("total_bytes"),
            "cpu_count": os.cpu_count(),
            "mem_bytes": _memory_bytes(),
            "slurm": _slurm(),
            "tools": {name: shutil.which(name) for name in ("py-spy", "systemd-run", "rsync", "tmux")},
            "logind": {"kill_user_processes": logind.kills_user_processes(), "linger": logind.lingers()},
            "limits": {"nofile": list(resource.getrlimit(resource.RLIMIT_NOFILE))},
            "warnings": logind.warnings(),
        }
    )
    return facts


def _os_name() -> str:
    with contextlib.suppress(OSError), open("/etc/os-release", encoding="utf-8") as file:
        for line in file:
            if line.startswith("PRETTY_NAME="):
                return line.split("=", 1)[1].strip().strip('"')
    return platform.system()


def _pythons() -> List[Dict[str, str]]:
    found: Dict[str, Dict[str, str]] = {}
    for name in _PYTHON_NAMES:
        path = shutil.which(name)
        real = os.path.realpath(path) if path else None
        if path is None or real in found or real is None:
            continue
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(
                [path, "-c", "import platform; print(platform.python_version())"],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=10, check=False,
            )  # fmt: skip
            if done.returncode == 0:
                found[real] = {"path": path, "version": done.stdout.decode("ascii", "replace").strip()}
    return list(found.values())


def _gpus() -> Optional[List[str]]:
    """Names of the GPUs; None when there is no nvidia-smi or it does not answer."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20, check=False,
        )  # fmt: skip
        if done.returncode == 0:
            return [line.strip() for line in done.stdout.decode("utf-8", "replace").splitlines() if line.strip()]
    return None


def _slurm() -> bool:
    """True when sbatch is there and belongs to a cluster; Debian installs it with packages that only may use one.

    `scontrol version` asks nobody, but needs the cluster's configuration. No answer in time is not a no.
    """
    if shutil.which("sbatch") is None:
        return False
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            ["scontrol", "version"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=10, check=False,
        )  # fmt: skip
        return done.returncode == 0 or b"configuration source" not in done.stderr
    return True


def _interesting_paths(layout: Layout) -> List[str]:
    paths = [layout.root, os.path.expanduser("~"), "/", *_USUAL_PLACES]
    return [path for path in dict.fromkeys(paths) if os.path.isdir(path)]


def _disk(path: str) -> Optional[Dict[str, Any]]:
    try:
        stat = os.statvfs(path)
    except OSError:
        return None
    return {
        "path": path,
        "fs": fs_type(path),
        "free_bytes": stat.f_bavail * stat.f_frsize,
        "total_bytes": stat.f_blocks * stat.f_frsize,
        "free_inodes": stat.f_favail,
        "writable": os.access(path, os.W_OK),
    }


def disk_free(path: str) -> Optional[Dict[str, Any]]:
    """Free space where ``path`` is, or will be."""
    while path and not os.path.isdir(path) and path != "/":
        path = os.path.dirname(path)
    return _disk(path or "/")


def _memory_bytes() -> Optional[int]:
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    return None
