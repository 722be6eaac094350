"""A bad line: 50 and 150 ms round trip, with and without 1 % of packets lost each way; orch beside plain OpenSSH.

Real TCP between two network namespaces (tests/netem.py), so loss costs what retransmission costs. Needs root.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

from bench.report import Report, Row
from bench.stand import timed
from tests.netem import Wan
from tests.sshd.server import Sshd
from tests.support.jobdir import JobDir, agents, kill
from tests.support.laptop import Laptop
from tests.support.waiting import wait_until

LINES = ((50.0, 0.0), (50.0, 0.01), (150.0, 0.0), (150.0, 0.01))
"""(round trip in ms, share of packets lost each way)."""
REPETITIONS = int(os.environ.get("ORCH_BENCH_ROUNDS", "3"))
STARTED = "date +%s.%N > started.tmp; mv started.tmp started"
RUN = f"{STARTED}; until [ -e go ]; do sleep 0.01; done; date +%s.%N > ended"
POLL_S = 2.0


class Line:
    """A laptop and a host with the line between them."""

    def __init__(self, folder: Path, wan: Wan, sshd: Sshd) -> None:
        self.folder, self.wan, self.sshd = folder, wan, sshd
        self.root = folder / "root"
        entry = sshd.inventory_entry(root=str(self.root))
        self.laptop = Laptop(folder / "laptop", {"box": entry}, command_prefix=wan.near)

    def ssh(self, command: str) -> list[str]:
        """argv of plain OpenSSH over the same line."""
        options = ("-o", "BatchMode=yes", "-o", "LogLevel=ERROR")
        return [*self.wan.near, "ssh", "-F", str(self.sshd.ssh_config), *options, self.sshd.alias, command]

    def orch_round(self, name: str) -> tuple[float, float]:
        """(launch -> running, exit -> `orch wait` says so) in s."""
        work = self.folder / name
        asked = time.time()
        job = self.laptop.launch(self.laptop.plan([{"name": "work", "run": RUN}], name=name, workdir=str(work)))
        launched = _epoch(work / "started") - asked
        before = self.sshd.executions()
        with self.laptop.started("wait", job) as process:
            wait_until(lambda: self.sshd.executions() > before, "the waiter is connected")
            time.sleep(1.5)  # not a synchronisation: its question has to be on the host, as it is all night
            (work / "go").touch()
            assert process.stdout is not None
            line = process.stdout.readline()
            known = time.time()
            assert b"succeeded" in line, line
        return launched, known - _epoch(work / "ended")

    def ssh_round(self, name: str, share: float) -> tuple[float, float]:
        """The same with setsid, and a loop that looks every 2 s; the end falls at ``share`` of the pause."""
        work = self.folder / name
        work.mkdir()
        asked = time.time()
        subprocess.run(
            self.ssh(f"cd {work} && setsid -f sh -c '{RUN}' >/dev/null 2>&1 </dev/null"), check=True, stdin=subprocess.DEVNULL
        )
        launched = _epoch(work / "started") - asked
        while subprocess.run(self.ssh(f"test -e {work}/ended"), check=False, stdin=subprocess.DEVNULL).returncode:
            if not (work / "go").exists():
                time.sleep(POLL_S * share)
                (work / "go").touch()
                time.sleep(POLL_S * (1 - share))
            else:
                time.sleep(POLL_S)
        return launched, time.time() - _epoch(work / "ended")

    def end(self) -> None:
        """Nothing is left on the host."""
        folder = self.root / "jobs"
        for path in folder.iterdir() if folder.is_dir() else []:
            JobDir(self.root, path.name).end_everything()
        for pid in agents(self.root):
            kill(pid)


def _epoch(path: Path) -> float:
    wait_until(path.exists, f"{path.name} is there", within_s=60, every_s=0.002)
    wait_until(lambda: path.read_text().endswith("\n"), f"{path.name} is whole", every_s=0.001)
    return float(path.read_text())


def run(report: Report) -> None:
    """The section of `python -m bench`."""
    for rtt_ms, loss in LINES:
        measure(report, rtt_ms, loss)


def measure(report: Report, rtt_ms: float, loss: float) -> None:
    """One line's rows."""
    where = f"RTT {rtt_ms:.0f} ms" + (f", {loss:.0%} lost" if loss else "")
    with (
        tempfile.TemporaryDirectory(prefix="orch-wan-") as folder,
        Wan(Path(folder) / "wan", delay_ms=rtt_ms / 2, loss=loss) as wan,
        Sshd(Path(folder) / "sshd", address=wan.far_address, command_prefix=wan.far) as sshd,
    ):
        line = Line(Path(folder), wan, sshd)
        try:
            line.orch_round("first")  # uploads the release
            ours = [line.orch_round(f"orch-{number}") for number in range(REPETITIONS)]
            theirs = [line.ssh_round(f"ssh-{n}", (n + 0.5) / REPETITIONS) for n in range(REPETITIONS)]
            status = [timed(lambda: line.laptop.run("status", expect=0)) for _ in range(REPETITIONS)]
            true = [timed(lambda: subprocess.run(line.ssh("true"), check=True)) for _ in range(REPETITIONS)]
        finally:
            line.end()
    report.add(Row("wan", f"`orch launch` from the shell -> running, {where}", "s", [one for one, _ in ours],
                   peer=[one for one, _ in theirs], peer_name="ssh setsid -f"))  # fmt: skip
    report.add(Row("wan", f"exit -> `orch wait` says so, {where}", "s", [one for _, one in ours],
                   peer=[one for _, one in theirs], peer_name="ssh every 2 s"))  # fmt: skip
    report.add(Row("wan", f"`orch status` from the shell, {where}", "s", status, peer=true, peer_name="ssh host true"))
