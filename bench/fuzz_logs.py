"""Fuzz the log reader for minutes: no exception, no super-linear time, one answer for every cutting of the stream.

    python bench/fuzz_logs.py [--seconds 600] [--seed 1]

Starts from the committed logs and the hostile pieces of the test suite, mutates them, and keeps every input that breaks
a promise in bench/results/fuzz-*.log. Exit status 1 when there is one.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from bench.report import Report, Row
from remote_jobs.logs import LogReader, explain_bytes
from tests.logs.test_reader import LOGS, PIECES, mutate

RESULTS = Path(__file__).resolve().parent / "results"
DEFAULT_S = 600.0
SLOWEST_MB_PER_S = 0.1


def broken(data: bytes, status: int | None, rng: random.Random) -> str | None:
    """What promise an input breaks, or None."""
    before = time.process_time()
    try:
        whole = explain_bytes(data, status)
    except Exception:
        return traceback.format_exc()
    took_s = time.process_time() - before
    if took_s > 1.0 + len(data) / (SLOWEST_MB_PER_S * 1e6):
        return f"{took_s:.1f} s for {len(data)} bytes"
    reader = LogReader()
    at = 0
    while at < len(data):
        step = rng.choice([1, 7, 100, 5000, 70_000])
        reader.feed(data[at : at + step])
        at += step
    if reader.finish(status) != whole:
        return "another answer when cut otherwise"
    return None


def fuzz(seconds: float, seed: int, say: Callable[[str], None]) -> tuple[int, int]:
    """(inputs tried, promises broken)."""
    rng = random.Random(seed)
    logs = [path.read_bytes() for path in LOGS if path.stat().st_size < 40_000]
    end = time.monotonic() + seconds
    tried = found = 0
    while time.monotonic() < end:
        data = rng.choice(logs) if rng.random() < 0.8 else b"".join(rng.choices(PIECES, k=rng.randrange(1, 400)))
        for _ in range(rng.randrange(1, 4)):
            data = mutate(rng, data)[:2_000_000]
        tried += 1
        what = broken(data, rng.choice([None, None, 0, 1, -9, 137]), rng)
        if what is not None:
            found += 1
            RESULTS.mkdir(exist_ok=True)
            path = RESULTS / f"fuzz-{seed}-{tried}.log"
            path.write_bytes(data)
            say(f"{path}: {what}")
    return tried, found


def run(report: Report) -> None:
    """The section of `make bench`: ten minutes."""
    tried, found = fuzz(DEFAULT_S, int(time.time()), report.say)
    report.add(Row("fuzz", f"broken promises in {tried} damaged logs", "", [found], limit=0))


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=DEFAULT_S)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    tried, found = fuzz(args.seconds, args.seed, print)
    print(f"{tried} inputs, {found} broken promises")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
