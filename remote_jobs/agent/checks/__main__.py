"""`python -m remote_jobs.agent.checks < request.json`: one JSON line {"ok", "checks"} on stdout.

The request is {"spec": {...}, "facts": {...}}.  The process ends even when a check still hangs.
"""

from __future__ import annotations

import json
import os
import sys
from typing import List, Optional

from remote_jobs.agent import checks


def main(_argv: Optional[List[str]] = None) -> int:
    """Answer one request; the exit status is 0 whenever an answer was given, 2 for an unreadable request."""
    try:
        request = json.load(sys.stdin)
        spec, facts = request["spec"], request.get("facts") or {}
    except (ValueError, KeyError, TypeError) as exc:
        sys.stderr.write("the request is no JSON object with a spec: {}\n".format(exc))
        return 2
    rows = checks.run(spec, facts)
    ok = not any(row["verdict"] == "fail" for row in rows)
    sys.stdout.write(json.dumps({"ok": ok, "checks": rows}) + "\n")
    sys.stdout.flush()
    # A thread that hangs in the kernel would keep the interpreter from ending.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
