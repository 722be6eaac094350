"""Runs nvidia-smi so that a stuck driver cannot take us along.

Every call is a process of its own in a session of its own, with a time limit; a child in uninterruptible sleep is
killed, given a moment and then left behind rather than waited for.  Also here, because it is the same kind of
question to the kernel: NVIDIA's Xid lines of the kernel log, where they may be read.  Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import IO, Dict, Iterable, List, Optional, Sequence

TIMEOUT_S = 15.0
"""A healthy 8-GPU box without persistence mode answers in 2 to 6 s."""
SMI_ENV = "ORCH_NVIDIA_SMI"
_PLACES = ("/usr/bin/nvidia-smi", "/usr/local/nvidia/bin/nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi")
_MAX_BYTES = 8 * 1024 * 1024
_XID = re.compile(r"NVRM: Xid \(PCI:(?P<bus>[0-9A-Fa-f:.]+)\): (?P<xid>\d+),?\s*(?P<text>.*)")

FATAL_XIDS: Dict[int, str] = {
    48: "double-bit ECC error",
    64: "row remapping failed",
    74: "NVLink error",
    79: "GPU fell off the bus",
    95: "uncontained memory error",
    119: "GSP firmware does not answer",
    120: "GSP firmware error",
    140: "unrecovered ECC error",
    143: "GPU initialisation failed",
}
"""Xids after which a GPU should not be used before a reset (NVIDIA's Xid catalogue). Others are faults of programs."""
XID_RECENT_S = 1800.0


def find_smi() -> Optional[str]:
    """Path of nvidia-smi: $ORCH_NVIDIA_SMI, the PATH, then the places where drivers put it."""
    named = os.environ.get(SMI_ENV)
    if named:
        return named
    return shutil.which("nvidia-smi") or next((p for p in _PLACES if os.access(p, os.X_OK)), None)


def run_smi(arguments: Sequence[str] = ("-q", "-x"), timeout_s: float = TIMEOUT_S) -> str:
    """What nvidia-smi prints, its errors included; never raises and never hangs.

    A missing program and a missed deadline come back as the text that `gpus.parse` knows.
    """
    path = find_smi()
    if path is None:
        return "nvidia-smi: command not found"
    import tempfile  # here: side tasks need it, and every start of a supervisor would pay for it

    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            child = subprocess.Popen(
                [path, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                env={**os.environ, "LC_ALL": "C"},
            )
        except OSError as exc:
            return "{}: nvidia-smi cannot be run: {}".format(path, exc.strerror)
        try:
            status = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _abandon(child)
            return "nvidia-smi timed out after {:g} s".format(timeout_s)
        text, errors = _content(out), _content(err)
    if status != 0 and not (text + errors).strip():
        return "nvidia-smi ended with status {} and printed nothing".format(status)
    return text if status == 0 and text.strip() else text + "\n" + errors


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MAX_BYTES).decode("utf-8", "replace")


def _abandon(child: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(1.0)
    if child.returncode is None:
        child.returncode = -signal.SIGKILL  # in the kernel's hands: nobody waits for it any more


@dataclass
class Xid:
    """One Xid line of the kernel log."""

    bus_id: str
    number: int
    age_s: float
    text: str

    @property
    def fatal(self) -> bool:
        """Recent, and of a kind after which the GPU needs a reset."""
        return self.number in FATAL_XIDS and self.age_s <= XID_RECENT_S


def parse_xids(records: Iterable[str], now_s: float) -> List[Xid]:
    """Xids of /dev/kmsg records (`prio,seq,microseconds,flags;text`); `now_s` is CLOCK_BOOTTIME-like uptime."""
    found = []
    for record in records:
        head, _, text = record.partition(";")
        hit = _XID.search(text)
        fields = head.split(",")
        if hit and len(fields) >= 3 and fields[2].isdigit():
            age_s = max(0.0, now_s - int(fields[2]) / 1e6)
            found.append(Xid(hit.group("bus"), int(hit.group("xid")), age_s, text.strip()[:200]))
    return found


def read_xids(path: str = "/dev/kmsg", limit_s: float = 1.0) -> Optional[List[Xid]]:
    """Xids in the kernel log, or None where this user may not read it (kernel.dmesg_restrict)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    records: List[str] = []
    deadline = time.monotonic() + limit_s
    try:
        while time.monotonic() < deadline:
            try:
                chunk = os.read(fd, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # records were overwritten while we read: go on with the oldest there is
            except OSError:
                return None
            if not chunk:
                break
            text = chunk.decode("utf-8", "replace")
            records += [line for line in text.splitlines() if "Xid" in line]
    finally:
        os.close(fd)
    return parse_xids(records, time.clock_gettime(time.CLOCK_MONOTONIC))


def same_gpu(bus_a: Optional[str], bus_b: Optional[str]) -> bool:
    """Whether two spellings of a PCI address (domain of 4 or 8 digits, with or without function) are one GPU."""

    def short(bus: Optional[str]) -> str:
        parts = (bus or "").lower().split(".")[0].split(":")
        if len(parts) < 3:
            return ""
        return "{:x}:{}:{}".format(int(parts[-3] or "0", 16), parts[-2], parts[-1])

    return short(bus_a) != "" and short(bus_a) == short(bus_b)
