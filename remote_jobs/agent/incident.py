"""The incident bundle: what an engineer would have wanted to see when the attempt died.

<attempt>/incident/ holds bundle.json (verdict, exit status, process tree with stacks, GPUs, kernel log, disk,
memory, environment with secrets masked, what the next attempt changes) and log.tail.  Each part is collected on
its own: what cannot be read is said, and hides nothing else.  Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional, Sequence

from remote_jobs import protocol
from remote_jobs.agent import procs, smi_run
from remote_jobs.agent.jobdir import read_json, write_atomic, write_json

if TYPE_CHECKING:
    from remote_jobs.agent.attempt import Attempt
    from remote_jobs.agent.policy import Decision

BUNDLE_FILE = "bundle.json"
TAIL_FILE = "log.tail"
DECISION_FILE = "decision.json"
STACKS_FILE = "stacks.json"
_TAIL_BYTES = 256 * 1024
_STACKS_S = 20.0
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_KEY|PRIVATE|AUTH|COOKIE|SESSION_KEY", re.I)
_KERNEL_LINES = re.compile(r"NVRM: Xid|Out of memory|oom-kill|oom_reaper|segfault at|I/O error|EXT4-fs error|XFS .*(?:error|corrupt)", re.I)
_KERNEL_STAMP = re.compile(r"\[\s*(\d+\.\d+)\]")
MASK = "***"


def masked(env: Mapping[str, str], secrets: Sequence[str]) -> Dict[str, str]:
    """The environment with every secret's value masked: declared ones and those whose name says so."""
    hidden = set(secrets)
    return {key: MASK if key in hidden or _SECRET_NAME.search(key) else value for key, value in sorted(env.items())}


def scrubbed(value: Any, secrets: Sequence[str]) -> Any:
    """The same JSON value with every secret's value masked in every text: a shell puts `$TOKEN` into its child's argv.

    Values shorter than 4 characters are left alone, since masking them would spoil every text.
    """
    hidden = sorted((secret for secret in set(secrets) if len(secret) >= 4), key=len, reverse=True)
    if not hidden:
        return value
    if isinstance(value, str):
        for secret in hidden:
            value = value.replace(secret, MASK)
        return value
    if isinstance(value, dict):
        return {scrubbed(key, hidden): scrubbed(item, hidden) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrubbed(item, hidden) for item in value]
    return value


def context(
    attempt: "Attempt", step: protocol.StepSpec, spec: protocol.JobSpec, left: Sequence[procs.Proc]
) -> Dict[str, Any]:
    """Facts that are gone a moment later; collected before the side task starts."""
    return {
        "job": spec.id,
        "step": step.name,
        "attempt": attempt.n,
        "release": spec.release,
        "patches": attempt.patch_hash,
        "params": attempt.params,
        "gpus": attempt.gpus,
        "stop": {"kind": attempt.stop_kind, "reason": attempt.stop_reason},
        "environment": masked(attempt.env, step.secrets),
        "left_processes": [process_row(proc) for proc in left[:100]],
    }


def process_row(proc: procs.Proc) -> Dict[str, Any]:
    """One process with what the kernel tells of where it waits."""
    row: Dict[str, Any] = {
        "pid": proc.pid,
        "ppid": proc.ppid,
        "user": procs.user_name(proc.uid),
        "state": proc.state,
        "rss_mib": round(proc.rss_bytes / 1048576.0, 1),
        "command": procs.command_line(proc.pid),
    }
    for name in ("wchan", "stack"):
        with contextlib.suppress(OSError), open("/proc/{}/{}".format(proc.pid, name), encoding="utf-8") as file:
            row[name] = file.read(4096).strip()
    return row


def stacks(left: Sequence[procs.Proc]) -> List[Dict[str, Any]]:
    """Process rows with Python stacks where py-spy is on the host's PATH (it may need rights we lack).

    Blocks for up to half a minute: only for side tasks.
    """
    py_spy = shutil.which("py-spy")
    until = time.monotonic() + _STACKS_S
    rows = []
    for proc in list(left)[:32]:
        row = process_row(proc)
        if py_spy and time.monotonic() < until:
            row["py_spy"] = _output([py_spy, "dump", "--nonblocking", "--pid", str(proc.pid)], 10.0)
        rows.append(row)
    return rows


def write(
    attempt_dir: str,
    log_path: str,
    verdict: Mapping[str, Any],
    exit_status: Optional[int],
    facts: Mapping[str, Any],
    secrets: Sequence[str] = (),
) -> str:
    """Write the bundle; its folder. Parts that fail are named in the bundle; a full disk loses only the bundle."""
    folder = os.path.join(attempt_dir, protocol.INCIDENT_DIR)
    parts: Dict[str, Callable[[], Any]] = {
        "gpus": lambda: smi_run.run_smi(()) if smi_run.find_smi() else "no nvidia-smi on this host",
        "kernel": kernel_lines,
        "disk": lambda: _disk([attempt_dir, str((facts.get("environment") or {}).get("ORCH_WORKDIR") or "/")]),
        "memory": _memory,
    }
    bundle: Dict[str, Any] = {"v": protocol.VERSION, "verdict": dict(verdict), "exit_status": exit_status, **facts}
    for name, collect in parts.items():
        try:
            bundle[name] = collect()
        except Exception as exc:  # one unreadable part must not hide the others
            bundle[name] = "could not be read: {}".format(exc)
    with contextlib.suppress(OSError):
        os.makedirs(folder, mode=0o700, exist_ok=True)
        write_json(os.path.join(folder, BUNDLE_FILE), scrubbed(bundle, secrets), durable=False)
        with open(log_path, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
            tail = log.read(_TAIL_BYTES).decode("utf-8", "surrogateescape")
            data = scrubbed(tail, secrets).encode("utf-8", "surrogateescape")
            write_atomic(os.path.join(folder, TAIL_FILE), data, durable=False)
    return folder


def note_decision(attempt_dir: str, decision: "Decision") -> None:
    """Say in the bundle what happens next and what the next attempt changes."""
    folder = os.path.join(attempt_dir, protocol.INCIDENT_DIR)
    record = {
        "retry": decision.retry,
        "reason": decision.reason,
        "delay_s": round(decision.delay_s, 1),
        "changes": decision.changes,
    }
    with contextlib.suppress(OSError):
        os.makedirs(folder, mode=0o700, exist_ok=True)
        write_json(os.path.join(folder, DECISION_FILE), record, durable=False)


def read(attempt_dir: str) -> Dict[str, Any]:
    """The bundle as written, with `decision` and `stacks`; empty parts when there is none."""
    folder = os.path.join(attempt_dir, protocol.INCIDENT_DIR)
    found: Dict[str, Any] = {"folder": folder}
    for key, name in (("bundle", BUNDLE_FILE), ("decision", DECISION_FILE), ("stacks", STACKS_FILE)):
        found[key] = None
        with contextlib.suppress(OSError, ValueError):
            found[key] = read_json(os.path.join(folder, name))
    return found


def kernel_lines(limit: int = 40, since_s: float = 0.0) -> List[str]:
    """Newest kernel messages about GPUs (Xid), memory and storage; empty where the kernel log may not be read.

    ``since_s``: only messages after this time since boot (dmesg's own clock, close to the monotonic one).
    """
    lines = []
    for line in _output(["dmesg"], 5.0).splitlines():
        stamp = _KERNEL_STAMP.match(line)
        if stamp and float(stamp.group(1)) >= since_s - 1.0 and _KERNEL_LINES.search(line):
            lines.append(line)
    return lines[-limit:]


def _output(argv: Sequence[str], timeout_s: float) -> str:
    """Output of a small program, or what went wrong; never hangs, since the driver may."""
    try:
        done = subprocess.run(
            list(argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as exc:
        return "{}: {}".format(argv[0], exc)
    return done.stdout[-65536:].decode("utf-8", "replace")


def _disk(paths: Sequence[str]) -> List[Dict[str, Any]]:
    rows = []
    for path in dict.fromkeys(paths):
        with contextlib.suppress(OSError):
            stat = os.statvfs(path)
            rows.append({"path": path, "free_bytes": stat.f_bavail * stat.f_frsize, "free_inodes": stat.f_favail})
    return rows


def _memory() -> Dict[str, int]:
    """MemTotal, MemAvailable, Shmem and swap of /proc/meminfo, in KiB."""
    wanted = {"MemTotal", "MemAvailable", "Shmem", "SwapTotal", "SwapFree"}
    found: Dict[str, int] = {}
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name in wanted:
                found[name] = int(rest.split()[0])
    return found
