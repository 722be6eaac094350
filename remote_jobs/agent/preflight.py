"""The agent's side of `orch preflight`: runs the checks in a child, which may hang or die without harm.

Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Dict, Mapping

from remote_jobs.agent import command

if TYPE_CHECKING:
    from remote_jobs.agent.jobdir import Layout

QUICK_TIMEOUT_S = 150.0
DEEP_TIMEOUT_S = 1790.0
_START = "import sys; sys.path.insert(0, sys.argv[1]); from remote_jobs.agent.checks.__main__ import main; sys.exit(main())"


def run(layout: "Layout", request: Mapping[str, Any]) -> Dict[str, Any]:
    """{"passed", "checks"} for a request {spec, deep?, laptop_files?, checks?, wall?, wait_gate?, no_queue?}.

    (`ok` is the envelope's word for an answered request.)  Every failure of the child is a row: an answer always comes.
    """
    facts = {
        "root": layout.root,
        "deep": bool(request.get("deep")),
        "laptop_files": list(request.get("laptop_files") or []),
        "laptop_wall": request.get("wall"),
        "received_wall": time.time(),
        "only": request.get("checks"),
        "wait_gate": bool(request.get("wait_gate")),
        "no_queue": bool(request.get("no_queue")),
    }
    timeout_s = DEEP_TIMEOUT_S if facts["deep"] else QUICK_TIMEOUT_S
    began = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _START, command.release_dir()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = child.communicate(
            json.dumps({"spec": request.get("spec"), "facts": facts}).encode("utf-8"), timeout_s
        )
        answer = json.loads(out.decode("utf-8"))
        return {"passed": bool(answer["ok"]), "checks": list(answer["checks"])}
    except subprocess.TimeoutExpired:
        what, fix = (
            "the checks gave no answer within {:g} s".format(timeout_s),
            "look at `df -h` and `dmesg` on the host",
        )
    except (ValueError, KeyError, TypeError):
        tail = (err.decode("utf-8", "replace").strip().splitlines() or ["no output"])[-1]
        what, fix = "the checks died: {}".format(tail[:300]), "report this; go on with --no-preflight"
    finally:
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)  # what a check may have left behind
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(1.0)
        for stream in (child.stdin, child.stdout, child.stderr):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
    took_s = round(time.monotonic() - began, 3)
    return {
        "passed": False,
        "checks": [
            {"step": None, "name": "checks", "verdict": "fail", "took_s": took_s, "found": what, "fix": fix}
        ],
    }
