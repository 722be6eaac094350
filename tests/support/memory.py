"""Peak memory of one program, whatever the test run itself has grown to.

A child is a copy of its parent until it has become another program, and the kernel counts that copy into ru_maxrss: so
a small Python stands in between.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

_MEASURE = (
    "import pathlib, resource, subprocess, sys; status = subprocess.run(sys.argv[2:]).returncode; "
    "peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss; "
    "pathlib.Path(sys.argv[1]).write_text(str(peak)); sys.exit(status)"
)


def measured(note: Path, argv: Sequence[object]) -> list[str]:
    """argv that runs a program with its own exit status and leaves its peak in ``note``; see `peak_mib`."""
    return [sys.executable, "-S", "-c", _MEASURE, str(note), *map(str, argv)]


def peak_mib(note: Path) -> float:
    """MiB at most that the program held."""
    return int(note.read_text()) / 1024
