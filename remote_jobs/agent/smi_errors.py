"""nvidia-smi's own complaints and what they mean to somebody who wants to start a job.

Kept as a table so that a new driver's wording is one more row. Pure, stdlib, Python 3.8.
"""

from __future__ import annotations

import re
from typing import List, Optional, Tuple

# (pattern, what it means and what to do). The first match of a line wins.
MEANINGS: Tuple[Tuple[str, str], ...] = (
    (
        r"couldn't communicate with the NVIDIA driver",
        "the NVIDIA kernel driver is not loaded: `sudo modprobe nvidia`, or reinstall it for the running kernel",
    ),
    (
        r"Driver/library version mismatch",
        "the driver was upgraded while the old kernel module is still loaded: reboot the host or reload the module",
    ),
    (
        r"Failed to initialize NVML: Unknown Error",
        "this container lost access to the GPU devices (often after `systemctl daemon-reload`): restart the container",
    ),
    (
        r"Failed to initialize NVML: Insufficient Permissions",
        "no permission on /dev/nvidia*: join the group that owns them (often `video`) or start the container with GPUs",
    ),
    (
        r"GPU access blocked by the operating system",
        "the host system blocks the GPU (WSL, or a disabled device): check it on the host",
    ),
    (
        r"Failed to initialize NVML",
        "the NVIDIA management library cannot start: check `dmesg` for NVRM lines",
    ),
    (
        r"couldn't find libnvidia-ml\.so|libnvidia-ml\.so[^ ]*: cannot open shared object",
        "the driver's user libraries are missing or not on the library path",
    ),
    (
        r"GPU is lost|fallen off the bus",
        "a GPU fell off the bus: reboot the host and look for `Xid 79` in `dmesg`",
    ),
    (
        r"Unable to (?:determine|detect) the device handle",
        "a GPU does not answer: reboot the host and look for `Xid` lines in `dmesg`",
    ),
    (
        r"No devices (?:were )?found",
        "the driver sees no GPU: check `lspci | grep -i nvidia` and the container's GPU options",
    ),
    (
        (
            r"nvidia-smi['\"]?:? (?:command )?not found|nvidia-smi: No such file"
            r"|No such file or directory:? '?(?:\S*/)?nvidia-smi|unable to find nvidia-smi"
            r"|'?nvidia-smi'? is not recognized|executable file not found"
        ),
        "nvidia-smi is not on the PATH: no NVIDIA driver on this host, or its folder is missing from PATH",
    ),
    (
        r"Failed to properly shut ?down NVML",
        "the driver failed while answering: check `dmesg` for NVRM lines",
    ),
    (r"Segmentation fault|Bus error|core dumped", "nvidia-smi itself crashed: driver and library do not fit"),
    (
        r"timed out after|TimeoutExpired",
        "nvidia-smi hangs: the driver is stuck; reboot the host, look for `Xid` in `dmesg`",
    ),
    (
        r"Unable to retrieve information|Unknown Error$",
        "the driver cannot read a GPU: check `dmesg` for Xid lines",
    ),
)
_COMPILED = tuple((re.compile(pattern, re.IGNORECASE), meaning) for pattern, meaning in MEANINGS)
LOST = re.compile(r"GPU is lost|fallen off the bus", re.IGNORECASE)
_PERMISSION = re.compile(r"nvidia-smi.*permission denied", re.IGNORECASE)
_INFOROM = re.compile(r"infoROM is corrupted at gpu (\S+)", re.IGNORECASE)
_BUS_ID = re.compile(r"([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])")


def meaning(line: str) -> Optional[str]:
    """What an error line of nvidia-smi means, or None when it is none."""
    if _PERMISSION.search(line):
        return "nvidia-smi may not be executed by this user"
    for pattern, text in _COMPILED:
        if pattern.search(line):
            return text
    return None


def find(text: str) -> List[str]:
    """Error lines of the text, in order and once each, as `line: what it means`.

    Lines of the plain table are skipped: there a process may be called anything.
    """
    found: List[str] = []
    for raw in text.splitlines():
        line = raw.strip()
        if not line or line[0] in "|+<" or len(line) > 500:
            continue
        said = meaning(line)
        if said is not None:
            entry = "%s: %s" % (line.rstrip(".:"), said)
            if entry not in found:
                found.append(entry)
    return found


def warnings(text: str) -> List[str]:
    """Warnings that do not forbid the use of a GPU, such as a corrupted infoROM."""
    return [
        "infoROM of GPU %s is corrupted (warranty and serial data; it can compute)" % m
        for m in _INFOROM.findall(text)
    ]


def bus_id(line: str) -> Optional[str]:
    """The PCI bus id an error line names, if any."""
    found = _BUS_ID.search(line)
    return found.group(1) if found else None


def says_nothing(value: str) -> bool:
    """True for the many ways in which nvidia-smi says that it has no value."""
    return value.strip().strip("[]").lower() in (
        "",
        "n/a",
        "not found",
        "not supported",
        "not available",
        "unknown",
        "none",
        "-",
        "insufficient permissions",
        "requested functionality has been deprecated",
        "not available in wddm driver model",
    )
