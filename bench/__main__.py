"""Run sections and print one table: `python -m bench`, or `python -m bench launch watch`.

Exit status 1 when a stated limit is missed. Results also go to bench/results/latest.json; with `--keep` each section's go to
bench/results/SECTION.json, with date, commit and machine: these are committed, and `python docs/generate.py` puts them into
README and docs/figures.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from bench.report import Report

SECTIONS: dict[str, str] = {
    "start": "bench.starting",
    "launch": "bench.launching",
    "know": "bench.knowing",
    "watch": "bench.watching",
    "watchers": "bench.watchers",
    "preflight": "bench.preflight",
    "logs": "bench.logs",
    "eta": "bench.eta",
    "fuzz": "bench.fuzz_logs",
    "overnight": "bench.overnight",
    "blackhole": "bench.blackhole",
    "wan": "bench.wan",
    "scale": "bench.scale",
    "peers": "bench.peers.contest",
}
"""Section -> module with ``run(report)``, in the order in which they run."""


RESULTS = Path(__file__).parent / "results"


def main(arguments: list[str]) -> int:
    keep = "--keep" in arguments
    names = [name for name in arguments if name != "--keep"]
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
        report.took_s[name] = round(time.monotonic() - started)
        report.say(f"   took {report.took_s[name]} s")
    machine = ", ".join(f"{key} {value}" for key, value in report.machine().items())
    print(f"\n{report.table()}\n\n{machine}")
    report.save(RESULTS / "latest.json")
    for name in (names or SECTIONS) if keep else ():
        report.save(RESULTS / f"{name}.json", section=name)
    return 1 if any(row.holds is False for row in report.rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
