"""Stand-in for a program whose log is known: prints the log at its own pace, scaled, and ends the same way.

    python replay.py LOG --exit-status N [--within 1.5]

The pace comes from the clock stamps in the lines. A negative status is a signal that it sends itself. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time

STAMP = re.compile(rb"\b(\d\d):(\d\d):(\d\d)\b")


def pauses_s(lines: list[bytes]) -> list[float]:
    """Seconds that passed before each line, by the stamps; a line without one comes at once."""
    found = []
    last = None
    for line in lines:
        match = STAMP.search(line)
        at = None if match is None else sum(int(part) * unit for part, unit in zip(match.groups(), (3600, 60, 1)))  # noqa: B905
        found.append(float(max(0, at - last)) if at is not None and last is not None else 0.0)
        last = at if at is not None else last
    return found


def main() -> None:
    """Play, then end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("log")
    parser.add_argument("--exit-status", type=int, required=True)
    parser.add_argument("--within", type=float, default=1.5, help="seconds for the whole log")
    args, _ = parser.parse_known_args()  # flags of the step that it stands in for
    with open(args.log, "rb") as file:
        lines = file.read().splitlines(keepends=True)
    pauses = pauses_s(lines)
    scale = args.within / sum(pauses) if sum(pauses) else 0.0
    for line, pause in zip(lines, pauses):  # noqa: B905 - runs on any Python of the host
        if pause * scale > 0.001:
            time.sleep(pause * scale)
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
    if args.exit_status < 0:
        os.kill(os.getpid(), -args.exit_status)
        signal.pause()
    sys.exit(args.exit_status)


if __name__ == "__main__":
    main()
