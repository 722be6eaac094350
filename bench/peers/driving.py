"""What the drivers share: their configuration, and the four lines that they print. Standard library only.

A driver is one life of one controller: a program in the peer's own environment that prints ``ready`` once everything that
a user would have set up beforehand is there, reads one line, prints ``submitting``, and later ``ended OUTCOME``.
Outcomes: ``ok``, ``failed WHY`` (it knows that the job failed), ``gone`` (it knows that it ended, not how),
``gave-up WHY`` (it stopped looking without knowing).  With the verb ``attach`` it takes up a job that an earlier life left.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Config:
    """What a driver is told."""

    folder: Path  # the controller's own; kept between lives
    work: Path  # where the payload says that it runs
    host_python: str
    payload: str
    address: str
    port: int
    user: str
    key: str
    known_hosts: str
    ssh_config: str
    alias: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def argv(self) -> list[str]:
        """The job."""
        return [self.host_python, "-I", "-S", self.payload, str(self.work)]

    @property
    def command(self) -> str:
        """The job as a shell command line."""
        return shlex.join(self.argv)

    def ssh(self, command: str) -> list[str]:
        """argv of plain OpenSSH."""
        return ["ssh", "-F", self.ssh_config, "-o", "BatchMode=yes", "-o", "LogLevel=ERROR", self.alias, command]


def start() -> tuple[str, Config]:
    """The verb and the configuration."""
    record = json.loads(Path(sys.argv[2]).read_text())
    for name in ("folder", "work"):
        record[name] = Path(record[name])
    return sys.argv[1], Config(**record)


def say(text: str) -> None:
    """One line to the harness."""
    print(f"@ {text}", flush=True)


def ready() -> None:
    """Wait for the starting gun, then say that it was heard."""
    say("ready")
    sys.stdin.readline()
    say("submitting")
