"""`orch gpus --from FILE|-`: what nvidia-smi printed, read without a host or an inventory.

Must not import hosts: this verb works where no host is known, and on Windows and macOS.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from orchestrator.core.errors import UsageError
from remote_jobs.agent import gpus

MAX_BYTES = 64 * 1024 * 1024


def gpus_from_file(source: str) -> dict[str, Any]:
    """The `orch gpus` document of a saved or pasted output; `-` reads stdin.

    Raises:
        UsageError: the file cannot be read, or is far too large to be nvidia-smi's.
    """
    return dict(gpus.parse(read_text(source)).to_json())


def read_text(source: str) -> str:
    """The text, whatever its encoding: UTF-8, or UTF-16 as PowerShell's `>` writes it.

    Raises:
        UsageError: not readable, or larger than 64 MiB.
    """
    try:
        if source == "-":
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with Path(source).open("rb") as file:
                data = file.read(MAX_BYTES + 1)
    except OSError as error:
        message = f"cannot read {source}: {error.strerror or error}"
        raise UsageError(
            message, "save one with: nvidia-smi -q -x > smi.xml, or pipe: nvidia-smi | orch gpus --from -"
        ) from None
    if len(data) > MAX_BYTES:
        raise UsageError(
            f"{source} is larger than {MAX_BYTES >> 20} MiB",
            "give one output of nvidia-smi, not a log of many days",
        )
    return decode(data)


def decode(data: bytes) -> str:
    """Bytes as text; what is no text becomes replacement characters."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", "replace")
    return data.decode("utf-8-sig", "replace")
