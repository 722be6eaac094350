"""One host for a test of this group: a root, an agent, a stand-in nvidia-smi on its PATH, claims of its own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Self

from tests.gate.smi import FakeSmi
from tests.support.host_side import JOB, Agent, HostSide, Refused, ended, look
from tests.support.jobdir import JobDir
from tests.support.waiting import wait_until

REPLAY = Path(__file__).with_name("replay.py")
LOGS = Path(__file__).parents[1] / "data" / "logs"

# The "interpreter" of a built-in step: writes down how it was called, then does what the test's script says.
INTERPRETER = """#!/bin/bash
printf '%s\\n' "$*" >> {work}/argv
{body}
"""


class Box:
    """A context manager; ``agent`` is connected.

    Args:
        folder: created.
        python: interpreter of agent and supervisors.
        environment: more variables of the agent, which the supervisors inherit.
    """

    def __init__(self, folder: Path, python: str = sys.executable, **environment: str) -> None:
        self.side = HostSide(folder, python)
        self.smi = FakeSmi(folder / "bin")
        self.bin = folder / "bin"
        self.environment = {
            "PATH": f"{self.bin}:{os.defpath}",
            "ORCH_CLAIMS_DIR": str(folder / "claims"),
            **environment,
        }
        self.work = self.side.work
        self.root = self.side.root

    def __enter__(self) -> Self:
        self.side.__enter__()
        self.agent: Agent = self.side.agent(**self.environment)
        return self

    def __exit__(self, *exc: object) -> None:
        self.side.__exit__(*exc)

    def launch(self, *steps: dict[str, Any], job: str = JOB, secrets: Any = None, **top: Any) -> JobDir:
        """Launch a job of these steps; ``top`` are keys of its spec."""
        spec = self.side.spec(list(steps), job, **top)
        self.agent.request("launch", spec=spec, secrets=secrets or {}, new=False)
        return JobDir(self.root, job)

    def interpreter(self, body: str, name: str = "python-of-the-step") -> str:
        """A program that stands in for the Python of a built-in step; each call's argv is a line of ``work/argv``."""
        path = self.bin / name
        path.write_text(INTERPRETER.format(work=self.work, body=body))
        path.chmod(0o755)
        return str(path)

    def calls(self) -> list[str]:
        """How the interpreter was called, oldest first."""
        path = self.work / "argv"
        return path.read_text().splitlines() if path.exists() else []

    def control(self, job: JobDir, action: str, **fields: Any) -> dict[str, Any]:
        """One request to the job's supervisor."""
        args = fields.pop("args", {})
        return self.agent.request("control", job=job.id, action=action, args=args, wait_s=10, **fields)

    def hurry(self, job: JobDir, state: str | None = None, within_s: float = 60.0) -> str:
        """Wait for the job's end, ending every backoff at once; the final state."""

        def over() -> bool:
            if "finished" in job.kinds():
                return True
            if job.state == "retry_wait":
                self.skip_backoff(job)
            return False

        wait_until(over, f"{job.id} has ended", within_s=within_s, every_s=0.1, seen=job.kinds)
        found = ended(job)
        assert state in (None, found), (found, job.kinds(), self.verdicts(job))
        return found

    def skip_backoff(self, job: JobDir) -> None:
        """What `orch retry` does to a job that waits."""
        try:
            self.control(job, "retry")
        except Refused as refusal:  # the wait was over just now
            if refusal.code != "wrong_state":
                raise

    def step(self, job: JobDir, index: int = 0) -> dict[str, Any]:
        """A step's state object."""
        found: dict[str, Any] = look(self.agent, job.id)["state"]["steps"][index]
        return found

    def verdicts(self, job: JobDir, index: int = 0) -> list[str | None]:
        """Class of each attempt's verdict."""
        return [(item["verdict"] or {}).get("class") for item in self.step(job, index)["attempts"]]

    def why(self, job: JobDir, **fields: Any) -> dict[str, Any]:
        """The agent's answer to `orch why`."""
        found: dict[str, Any] = self.agent.request("why", job=job.id, **fields)["why"]
        return found

    def release_go(self, name: str = "go") -> None:
        """Touch a file that a job waits for."""
        (self.work / name).touch()


def replayed(path: str, exit_status: int, within_s: float = 1.0) -> str:
    """Command line that replays a log of tests/data/logs."""
    return f"{sys.executable} -S {REPLAY} {LOGS / path} --exit-status {exit_status} --within {within_s}"


def events(job: JobDir, kind: str) -> list[dict[str, Any]]:
    """Data of all events of a kind."""
    return [event["data"] for event in job.events() if event["kind"] == kind]


def bundle(job: JobDir, attempt: int = 1, step: str = "work", index: int = 1) -> dict[str, Any]:
    """The incident bundle of one attempt."""
    path = job.log(index, step, attempt).parent / "incident" / "bundle.json"
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found
