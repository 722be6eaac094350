"""Who takes part, in which version, with which settings."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.peers.environments import command, interpreter

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Contestant:
    """One line of the table.

    Attributes:
        driver: the program that plays its controller.
        requirements: Python packages of its own environment; none = the bench's own interpreter.
        system: (program, Debian package) that the host needs.
        pause_s: its polling interval in s; where in it a death falls is spread over the rounds.
        slow: its rounds are mostly waiting, and run beside the others'.
        slower: they take minutes, and run beside everything.
        note: settings, said below the table.
    """

    name: str
    driver: str
    requirements: tuple[str, ...] = ()
    system: tuple[str, str] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    pause_s: float = 0.0
    slow: bool = False
    slower: bool = False
    note: str = ""

    @property
    def slug(self) -> str:
        """Name for folders."""
        return "".join(letter if letter.isalnum() else "-" for letter in self.name.lower()).strip("-")

    def python(self) -> str:
        """Interpreter of the driver; makes its environment on the first call.

        Raises:
            NotInstallable: it cannot be had here.
        """
        if self.system:
            command(*self.system)
        if not self.requirements:
            return sys.executable
        return str(interpreter(self.driver.removeprefix("drive_").removesuffix(".py"), self.requirements))


ORCH = str(Path(sys.executable).with_name("orch"))
AIIDA = ("aiida-core==2.9.4",)

FIELD = (
    Contestant("orch", "drive_orch.py", options={"orch": ORCH}, note="`orch launch`, then `orch watch`; start-up of Python included"),
    Contestant("ssh + nohup, every 2 s", "drive_ssh.py", options={"every_s": 2}, pause_s=2),
    Contestant("ssh + nohup, every 10 s", "drive_ssh.py", options={"every_s": 10}, pause_s=10, slow=True),
    Contestant(
        "ssh + nohup, every 300 s", "drive_ssh.py", options={"every_s": 300}, pause_s=300, slower=True,
        note="its three rounds run side by side",
    ),
    Contestant(
        "task-spooler over ssh", "drive_tsp.py", system=("tsp", "task-spooler"),
        note="`tsp -w` keeps one ssh open; prints no progress meanwhile",
    ),
    Contestant(
        "AiiDA, defaults", "drive_aiida.py", AIIDA, pause_s=10, slower=True,
        note="core.ssh + core.direct, safe_interval 15 s (30 s before 2.7), job poll 10 s; daemon and profile are up before the clock starts; no parser of one's own",
    ),
    Contestant(
        "AiiDA, fastest", "drive_aiida.py", AIIDA, options={"safe_interval": 0.01, "poll_s": 0.0}, pause_s=1,
        note="the same, safe_interval 0.01 s, job poll 0 s",
    ),
    Contestant(
        "remotemanager", "drive_remotemanager.py", ("remotemanager==0.14.3",), pause_s=10, slow=True,
        note="`Dataset.run()`, `Dataset.wait()` with its default of 10 s",
    ),
    Contestant(
        "dask SSHCluster", "drive_dask.py", ("distributed==2026.8.0", "asyncssh==2.24.1"),
        note="cluster start included; needs dask on the host; the job is a subprocess of a task",
    ),
)  # fmt: skip
