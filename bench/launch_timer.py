"""Child of bench.launching: launches plans from one loaded process and prints when each was asked for.

Usage: launch_timer.py open|cold INVENTORY PLAN...; prints a JSON list of epoch seconds.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from orchestrator.services.launch import launch
from orchestrator.services.session import Session


class Unseen:
    """Progress that nobody looks at."""

    def start(self, name: str, total_bytes: int, done_bytes: int) -> None: ...

    def advance(self, num_bytes: int) -> None: ...

    def finish(self) -> None: ...


def main() -> None:
    kind, inventory, *plans = sys.argv[1:]
    asked = []
    if kind == "open":
        with Session(Path(inventory)) as session:
            session.agent("box").request("hello")
            for plan in plans:
                asked.append(time.time())
                launch(session, Path(plan), preflight=False, progress=Unseen())
    else:
        with Session(Path(inventory)) as session:  # load every module once
            session.agent("box").request("hello")
        for plan in plans:
            asked.append(time.time())
            with Session(Path(inventory)) as session:
                launch(session, Path(plan), preflight=False, progress=Unseen())
    print(json.dumps(asked))


if __name__ == "__main__":
    main()
