"""The host side without SSH: a release in a folder, an agent as a child process, requests over its pipes.

The interpreter is started as on a host, `python -I -S <release> agent --root ROOT`, in an empty environment.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from remote_jobs import protocol
from tests.support.jobdir import JobDir
from tests.support.waiting import PATIENCE, wait_until

PROJECT = Path(__file__).parents[2]
JOB = f"job-{os.getpid()}"
"""Processes are found by their job's id: two test runs on one machine must not share one."""
MAIN = "from remote_jobs.agent.main import main\n\nmain()\n"


def pythons() -> dict[str, str]:
    """Interpreters to test the host side with: the oldest promised (3.8), where there is one, and this one."""
    found = {}
    candidates = [shutil.which("python3.8"), *map(str, sorted(Path.home().glob(".pyenv/versions/3.8.*/bin/python3.8")))]
    for candidate in candidates:
        if candidate and "shims" not in candidate:
            found["3.8"] = candidate
    found[f"{sys.version_info[0]}.{sys.version_info[1]}"] = sys._base_executable  # type: ignore[attr-defined]
    return found


def build_release(folder: Path) -> Path:
    """A release folder by plain copying, good enough to run from."""
    release = folder / "0123456789abcdef"
    if not release.exists():
        ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
        shutil.copytree(PROJECT / "remote_jobs", release / "remote_jobs", ignore=ignore)
        (release / "__main__.py").write_text(MAIN)
        (release / ".complete").touch()
    return release


class Refused(Exception):
    """The agent answered with an error."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(f"{error.get('code')}: {error.get('message')}")
        self.code = error.get("code")
        self.error = dict(error)


@dataclass(eq=False)
class Agent:
    """One agent process; requests may be sent from several threads."""

    process: subprocess.Popen[bytes]
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    hello: dict[str, Any] = field(default_factory=dict)
    _last: int = 0

    def __post_init__(self) -> None:
        self._arrived = threading.Condition()
        self._sending = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()
        self.hello = self.answer(0)["hello"]

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            for line in self.process.stdout:
                message = json.loads(line)
                message["payload"] = self.process.stdout.read(message.get("payload_bytes") or 0)
                with self._arrived:
                    self.answers[message["id"]] = message
                    self._arrived.notify_all()
        with self._arrived:
            self.answers[-1] = {}
            self._arrived.notify_all()

    def send(self, op: str, payload: bytes = b"", **fields: Any) -> int:
        """Send a request and return its number."""
        assert self.process.stdin is not None
        with self._sending:
            self._last += 1
            message = {"id": self._last, "op": op, **fields}
            if payload:
                message["payload_bytes"] = len(payload)
            self.process.stdin.write(protocol.dumps(message) + payload)
            self.process.stdin.flush()
            return self._last

    def answer(self, number: int, within_s: float = 20.0) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            Refused: it is an error.
        """
        with self._arrived:
            self._arrived.wait_for(lambda: number in self.answers or -1 in self.answers, within_s * PATIENCE)
            assert number in self.answers, f"no answer to request {number} within {within_s:g} s"
            answer = self.answers.pop(number)
        if not answer.get("ok"):
            raise Refused(answer["error"])
        return answer

    def request(self, op: str, payload: bytes = b"", within_s: float = 20.0, **fields: Any) -> dict[str, Any]:
        """Ask and wait for the answer."""
        return self.answer(self.send(op, payload, **fields), within_s)

    def close(self) -> int:
        """End its stdin, as a closed channel does; its exit status."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        return self.process.wait(10 * PATIENCE)


class HostSide:
    """A root on this machine with agents; a context manager that ends what is left.

    Args:
        folder: created; holds releases, root and work folder.
        python: interpreter of the agent and the supervisors.
    """

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.folder = folder
        self.python = python
        self.root = folder / "root"
        self.work = folder / "work"
        self.work.mkdir(parents=True)
        self.release = build_release(folder / "release")
        self._agents: list[Agent] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self._agents:
            if agent.process.poll() is None:
                agent.process.kill()
                agent.process.wait()
            for stream in (agent.process.stdin, agent.process.stdout):
                if stream:
                    with contextlib.suppress(OSError):
                        stream.close()
        for job in self.jobs():
            job.end_everything()

    def agent(self, **environment: str) -> Agent:
        """Start another agent."""
        argv = [self.python, "-I", "-S", str(self.release), "agent", "--root", str(self.root)]
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        env = {"PATH": os.defpath, "HOME": str(home), **environment}
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd="/")
        agent = Agent(process)
        self._agents.append(agent)
        return agent

    def spec(self, steps: list[dict[str, Any]] | str, job: str = JOB, **more: Any) -> dict[str, Any]:
        """A JobSpec object; a string is the command line of one step that is tried once."""
        if isinstance(steps, str):
            steps = [{"name": "work", "run": steps, "retry": {"attempts": 1}}]
        spec = protocol.JobSpec(
            id=job, name="plan", host="box", workdir=str(self.work), plan_sha256="0" * 64,
            created_at="2026-11-29T16:00:00Z", release=self.release.name,
            steps=[protocol.to_dict(protocol.StepSpec(**step)) for step in steps],
        )  # fmt: skip
        return {**protocol.to_dict(spec), **more}

    def launch(self, agent: Agent, steps: list[dict[str, Any]] | str, job: str = JOB, **more: Any) -> JobDir:
        """Launch a job."""
        agent.request("launch", spec=self.spec(steps, job, **more), secrets={}, new=False)
        return JobDir(self.root, job)

    def jobs(self) -> list[JobDir]:
        """Every job folder."""
        folder = self.root / "jobs"
        return [JobDir(self.root, path.name) for path in sorted(folder.iterdir())] if folder.is_dir() else []


def look(agent: Agent, job: str, **fields: Any) -> dict[str, Any]:
    """One job's entry in a look."""
    found = agent.request("look", jobs=[job], **fields)["jobs"][job]
    assert isinstance(found, dict)
    return found


def ended(job: JobDir, within_s: float = 20.0) -> str:
    """Wait for the final event and for the supervisor's end; the final state."""
    job.wait_for_kind("finished", within_s=within_s)
    wait_until(lambda: not job.supervisors(), "the supervisor has left")
    return str([event for event in job.events() if event["kind"] == "finished"][-1]["data"]["state"])


def attempts(agent: Agent, job: str, step: int = 0) -> list[tuple[str, int | None]]:
    """(state, exit status) of every attempt of a step."""
    return [(item["state"], item["exit_status"]) for item in look(agent, job)["state"]["steps"][step]["attempts"]]


def log_text(answer: Mapping[str, Any]) -> bytes:
    """Bytes of the first log in a look's answer."""
    return base64.b64decode(answer["logs"][0]["data_b64"])
