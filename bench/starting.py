"""What typing `orch` costs before anything happens: cold processes, beside the import of the libraries it stands on.

CPU seconds (user + system) of each child, so that a busy machine measures the same thing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from bench.report import Report, Row

ROUNDS = 15
LIMIT = 0.35
BIN = Path(sys.executable).parent
COMMANDS = {
    "libraries": [sys.executable, "-c", "import fabric, typer, rich, pydantic"],
    "orch --help": [str(BIN / "orch"), "--help"],
    "orch status --help": [str(BIN / "orch"), "status", "--help"],
    "python -c pass": [sys.executable, "-c", "pass"],
}


def cpu_s(argv: list[str]) -> float:
    """CPU seconds of one cold process."""
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, argv
    return usage.ru_utime + usage.ru_stime


def run(report: Report) -> None:
    """Interleaved rounds, medians."""
    samples: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, argv in COMMANDS.items():
            samples[name].append(cpu_s(argv))
    peer = samples["libraries"]
    for name in ("orch --help", "orch status --help", "python -c pass"):
        limit = LIMIT * median(peer) if name == "orch --help" else None
        text = f"<= {LIMIT} x" if limit else ""
        report.add(Row("start", f"{name}, CPU", "s", samples[name], limit, text, peer, peer_name="import of its libraries"))
