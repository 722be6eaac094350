"""`python3 -m remote_jobs.logs LOG`: explain a log on the host, as JSON. The supervisor's verdict child runs this.

Exit status: 0 when the log could be read (whatever it says), 2 for wrong usage or an unreadable file.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import List, Optional

from remote_jobs.logs.source import explain_file, opened, updates_of


def main(argv: Optional[List[str]] = None) -> int:
    """Parse the command line, read, print."""
    parser = argparse.ArgumentParser(prog="remote_jobs.logs", description="Explain a log: bars, phases, failure.")
    parser.add_argument("log", help="log file, or - for standard input")
    parser.add_argument("--exit-status", type=int, help="exit status of the process, negative for a signal")
    parser.add_argument("--updates", action="store_true", help="print every bar update as one JSON object a line")
    parser.add_argument("--head-bytes", type=int, default=0, help="with --tail-bytes: read only the first N bytes ...")
    parser.add_argument("--tail-bytes", type=int, default=0, help="... and the last N bytes of a larger file")
    parser.add_argument("--host-line", action="append", default=[], help="line of dmesg or memory.events (repeatable)")
    args = parser.parse_args(argv)
    try:
        if args.updates:
            with opened(args.log) as stream:
                for record in updates_of(stream):
                    sys.stdout.write(json.dumps(record) + "\n")
            return 0
        answer = explain_file(args.log, args.exit_status, args.head_bytes, args.tail_bytes, args.host_line)
        sys.stdout.write(json.dumps(answer) + "\n")
    except BrokenPipeError:
        sys.stderr.close()
    except OSError as error:
        sys.stderr.write("cannot read the log {}: {}\n".format(args.log, error.strerror or error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
