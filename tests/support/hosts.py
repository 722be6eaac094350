"""Several hosts on this machine: one sshd each, with a root, a work folder, GPUs and GPU claims of its own.

A host's GPUs are what its `nvidia-smi` prints: the stand-in of tests.gate.smi, named in the environment of its logins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tests.gate.smi import FakeSmi
from tests.sshd.server import Sshd
from tests.support.jobdir import JobDir, agents, kill
from tests.support.laptop import Laptop


class Hosts:
    """Context manager: hosts, and one laptop that knows them all.

    Args:
        folder: created.
        entries: name -> more keys of the inventory entry (``gpus: 2`` gives it two).
    """

    def __init__(self, folder: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
        self.folder = folder
        self.entries = entries
        self.sshd = {name: self._sshd(name) for name in entries}
        self.smi = {name: FakeSmi(folder / name / "bin") for name in entries}
        self._stack = contextlib.ExitStack()

    def _sshd(self, name: str) -> Sshd:
        folder = self.folder / name / "sshd"
        login = {
            "HOME": folder / "home",
            "ORCH_NVIDIA_SMI": self.folder / name / "bin" / "nvidia-smi",
            "ORCH_CLAIMS_DIR": self.folder / name / "claims",
        }
        return Sshd(folder, options={"SetEnv": " ".join(f'"{key}={value}"' for key, value in login.items())})

    def __enter__(self) -> Self:
        inventory = {}
        for name, server in self.sshd.items():
            self.work(name).mkdir(parents=True)
            self._stack.enter_context(server)
            self.smi[name].save(gpus=self.entries[name].get("gpus", 0))
            inventory[name] = server.inventory_entry(root=str(self.root(name)), **self.entries[name])
        self.laptop = Laptop(self.folder / "laptop", inventory)
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.entries:
            for job in self.jobs(name):
                job.end_everything()
        self._stack.close()
        for name in self.entries:
            for pid in agents(self.root(name)):
                kill(pid)

    def root(self, name: str) -> Path:
        """The host's root."""
        return self.folder / name / "root"

    def work(self, name: str) -> Path:
        """A folder on the host for outputs."""
        return self.folder / name / "work"

    def jobs(self, name: str) -> list[JobDir]:
        """Every job folder of a host."""
        folder = self.root(name) / "jobs"
        return [JobDir(self.root(name), path.name) for path in sorted(folder.iterdir())] if folder.is_dir() else []
