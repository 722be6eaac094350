"""Run sections and print one table: `python -m bench`, or `python -m bench launch watch`.

Exit status 1 when a stated limit is missed. Results also go to bench/results/latest.json.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from bench.report import Report

SECTIONS: dict[str, str] = {
    "launch": "bench.launching",
    "know": "bench.knowing",
    "watch": "bench.watching",
    "preflight": "bench.preflight",
    "logs": "bench.logs",
    "eta": "bench.eta",
    "fuzz": "bench.fuzz_logs",
    "overnight": "bench.overnight",
    "wan": "bench.wan",
    "scale": "bench.scale",
    "peers": "bench.peers.contest",
}
"""Section -> module with ``run(report)``, in the order in which they run."""


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        print(f"no section {', '.join(unknown)}; there are: {', '.join(SECTIONS)}", file=sys.stderr)
        return 2
    report = Report()
    for name in names or SECTIONS:
        run: Callable[[Report], None] = import_module(SECTIONS[name]).run
        report.say(f"== {name}")
        started = time.monotonic()
        run(report)
        report.say(f"   took {time.monotonic() - started:.0f} s")
    machine = ", ".join(f"{key} {value}" for key, value in report.machine().items())
    print(f"\n{report.table()}\n\n{machine}")
    report.save(Path(__file__).parent / "results" / "latest.json")
    return 1 if any(row.holds is False for row in report.rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
