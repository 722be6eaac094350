"""Print a log of a real run again, at the pace of its own clock, SPEED times faster; end as the run did.

    replay.py LOG SPEED EXIT_STATUS

Stamps of vLLM (`11-29 13:22:43`) and rich (`[13:16:10]`) give the pace, tqdm's elapsed time inside a bar (`[01:02<`) too;
what lies between two of them is spread evenly. Writes piece by piece, so carriage returns arrive one at a time.
"""

import os
import re
import sys
import time

STAMP = re.compile(rb"\d\d-\d\d (\d\d):(\d\d):(\d\d) |^\[(\d\d):(\d\d):(\d\d)\]")
ELAPSED = re.compile(rb"\[(\d\d):(\d\d)<")


def moments(pieces):
    """(piece, s since the start of the run) of each piece."""
    found, now, first, bar_from = [], 0.0, None, 0.0
    for piece in pieces:
        stamp, elapsed = STAMP.search(piece), ELAPSED.search(piece)
        if stamp:
            hours, minutes, seconds = (int(part) for part in stamp.groups() if part is not None)
            clock = 3600 * hours + 60 * minutes + seconds
            first = clock if first is None else first
            now = max(now, float(clock - first))
        elif elapsed:
            spent = 60 * int(elapsed.group(1)) + int(elapsed.group(2))
            bar_from = now if spent == 0 else bar_from
            now = max(now, bar_from + spent)
        else:
            now += 0.05
        found.append((piece, now))
    return found


def main():
    path, speed, status = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    with open(path, "rb") as file:
        pieces = re.findall(rb"[^\r\n]*[\r\n]|[^\r\n]+$", file.read())
    began = time.monotonic()
    for piece, at in moments(pieces):
        pause = began + at / speed - time.monotonic()
        if pause > 0:
            time.sleep(pause)
        os.write(1, piece)
    if status < 0:
        os.kill(os.getpid(), -status)
        time.sleep(60)
    sys.exit(status)


if __name__ == "__main__":
    main()
