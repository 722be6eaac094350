"""A command on every node of a step, with a stop that lets it save.

    python spread.py head SRUN... python spread.py node COMMAND...

srun takes a SIGTERM as "kill the step now", and other signals it gives to every process of the step, most of which die
of them.  So a stop goes over the shared file system: the head makes the file $ORCH_STOP_FILE, each node's part sees it
and sends TERM to its command's process group.  Run as a script, by the Python of the supervisor.  Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import Any, Sequence

LOOK_EVERY_S = 0.5


def tell(path: str) -> None:
    """Tell every node's part to stop its command."""
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))


def told(path: str) -> bool:
    """True once the file is there. A listing: over NFS a name that was missing stays missing for a while."""
    with contextlib.suppress(OSError):
        return os.path.basename(path) in os.listdir(os.path.dirname(path))
    return False


def head(command: Sequence[str], path: str) -> int:
    """Run srun; a TERM makes the stop file. Its exit status, as a shell would say it."""
    child = subprocess.Popen(list(command), start_new_session=True)

    def stop(_number: int, _frame: Any) -> None:
        tell(path)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    status = child.wait()
    return status if status >= 0 else 128 - status


def node(command: Sequence[str], path: str) -> int:
    """Run the command; 0 after a stop, since any other status makes srun kill the nodes that still save."""
    child = subprocess.Popen(list(command), start_new_session=True)
    stopping = False
    while child.poll() is None:
        if not stopping and told(path):
            stopping = True
            with contextlib.suppress(OSError):
                os.killpg(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(LOOK_EVERY_S)
    status = int(child.returncode)
    return 0 if stopping else status if status >= 0 else 128 - status


def main(argv: Sequence[str]) -> int:
    """Entry; see the module's text."""
    path = os.environ["ORCH_STOP_FILE"]
    return (head if argv[0] == "head" else node)(argv[1:], path)


if __name__ == "__main__":
    # Its own folder must not shadow the standard library (queue).
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != os.path.dirname(os.path.abspath(__file__))]
    sys.exit(main(sys.argv[1:]))
