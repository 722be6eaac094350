"""A laptop in a folder: its own home, ledger, inventory and plans, driving the installed `orch` as a person would.

Nothing here imports the product: what a user can see is all that a test may see.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.waiting import PATIENCE

ORCH = str(Path(sys.executable).with_name("orch"))


@dataclass
class Answer:
    """What one command printed and how it ended."""

    argv: Sequence[str]
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON document on stdout."""
        try:
            return json.loads(self.out)
        except ValueError:
            raise AssertionError(f"stdout is not one JSON document: {self}") from None

    @property
    def one_screen(self) -> bool:
        """True when the message to people fits a screen and holds no traceback."""
        lines = self.err.splitlines()
        return 0 < len(lines) <= 24 and "Traceback" not in self.err + self.out

    def __str__(self) -> str:
        return f"{' '.join(map(str, self.argv))} -> {self.status}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


class Laptop:
    """One controller's surroundings.

    Args:
        folder: created; holds home, ledger, inventory and plans.
        hosts: name -> inventory entry.
        environment: more variables for every command.
        command_prefix: put before every command, e.g. ["ip", "netns", "exec", "near"].
    """

    def __init__(
        self,
        folder: Path,
        hosts: Mapping[str, Mapping[str, Any]],
        *,
        environment: Mapping[str, str] | None = None,
        command_prefix: Sequence[str] = (),
    ) -> None:
        self.command_prefix = tuple(command_prefix)
        self.folder = folder
        self.home = folder / "home"
        self.store = folder / "orch-home"
        self.inventory = folder / "inventory.yaml"
        self.home.mkdir(parents=True, exist_ok=True)
        self.write_inventory(hosts)
        self.environment = {
            "PATH": f"{Path(ORCH).parent}:{os.environ.get('PATH', '/usr/bin:/bin')}",
            "HOME": str(self.home),
            "ORCH_HOME": str(self.store),
            "ORCH_INVENTORY": str(self.inventory),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            # `make coverage` measures our child processes too.
            **{key: value for key, value in os.environ.items() if key.startswith("COVERAGE_")},
            **(environment or {}),
        }

    def write_inventory(self, hosts: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the inventory. JSON is YAML 1.2."""
        self.inventory.write_text(
            json.dumps({"hosts": {name: dict(entry) for name, entry in hosts.items()}}, indent=1, ensure_ascii=False)
        )

    def plan(self, steps: Sequence[Mapping[str, Any]], *, name: str = "plan", **top: Any) -> Path:
        """Write a plan for the host `box` and return its path."""
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps({"name": name, "host": "box", **top, "steps": list(steps)}, indent=1, ensure_ascii=False))
        return path

    def forget(self) -> None:
        """Lose the ledger, as with a new laptop."""
        for path in sorted(self.store.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()

    def run(self, *arguments: object, within_s: float = 60.0, expect: int | None = None, stdin: str = "") -> Answer:
        """Run `orch ARGUMENTS` to its end; ``expect`` asserts the exit status."""
        argv = [ORCH, *map(str, arguments)]
        with self.started(*arguments) as process:
            try:
                out, err = process.communicate(stdin.encode() if stdin else None, timeout=within_s * PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                answer = Answer(argv, process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))
                raise AssertionError(f"still running after {within_s:g} s: {answer}") from None
        answer = Answer(argv, process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))
        if expect is not None:
            assert answer.status == expect, f"expected exit status {expect}: {answer}"
        return answer

    @contextlib.contextmanager
    def started(self, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
        """`orch ARGUMENTS` running in its own process group; killed at the end of the block if it still runs."""
        process = subprocess.Popen(
            [*self.command_prefix, ORCH, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.folder,
            env=self.environment,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream:
                    with contextlib.suppress(OSError):
                        stream.close()

    def launch(self, plan: Path, *arguments: object, within_s: float = 60.0) -> str:
        """Launch without preflight and return the job's id."""
        answer = self.run("launch", plan, "--no-preflight", *arguments, within_s=within_s, expect=0)
        return answer.out.strip()

    def status(self, job: str) -> dict[str, Any]:
        """The job's object of `orch status JOB --json`."""
        answer = self.run("status", job, "--json", expect=0)
        assert answer.json["schema"] == 1
        [found] = answer.json["jobs"]
        assert isinstance(found, dict)
        return found
