"""The place: two network namespaces, a link that can be cut, a private sshd for each contestant, and the counting.

Host side and laptop side of one contestant are told apart by their environment: everything below its sshd has that sshd's
HOME, everything below its driver has its mark. So CPU is counted for daemons that a peer leaves behind as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from bench.peers.contestants import HERE, Contestant
from bench.stand import cpu_s
from tests.netem import Wan
from tests.sshd.server import Sshd
from tests.support.jobdir import alive, environment, kill, pids

MARK = "ORCH_BENCH_CONTESTANT"


@dataclass
class Usage:
    """Counters of one contestant at one moment."""

    at: float
    connections: int
    laptop_cpu_s: float
    host_cpu_s: float


FIRST_PORT = 2200
"""Below the ports that connections get by themselves: those of earlier contestants may still hold one."""


class Arena:
    """Context manager. Everything that was started is ended at its end, by pid."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._hosts: dict[str, Sshd] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="orch-peers-")))
        self._stack.callback(self._end_all)
        self.wan = self._stack.enter_context(Wan(self.folder / "wan"))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def host(self, contestant: Contestant) -> Sshd:
        """The contestant's own sshd at the far end of the link."""
        with self._lock:
            if contestant.slug not in self._hosts:
                folder = self.folder / contestant.slug / "sshd"
                folder.mkdir(parents=True)
                port = FIRST_PORT + len(self._hosts)
                server = Sshd(folder, address=self.wan.far_address, command_prefix=self.wan.far, port=port)
                self._hosts[contestant.slug] = self._stack.enter_context(server)
            return self._hosts[contestant.slug]

    def work(self, contestant: Contestant, number: str) -> Path:
        """Work folder of one job."""
        return self.folder / contestant.slug / f"job-{number}"

    def payload(self, contestant: Contestant, number: str) -> tuple[float, int] | None:
        """(when it started in epoch seconds, pid) of a job's payload; None when it has not started."""
        try:
            at, pid = (self.work(contestant, number) / "started").read_text().split()
        except OSError:
            return None
        return float(at), int(pid)

    # ------------------------------------------------------------------------------------------------------ counting

    def laptop_pids(self, contestant: Contestant) -> list[int]:
        """Everything that its drivers have started and that lives."""
        return [pid for pid in pids() if environment(pid).get(MARK) == f"{self.folder}:{contestant.slug}"]

    def host_pids(self, contestant: Contestant) -> list[int]:
        """Its sshd with everything below it, and everything that was started through it."""
        server = self.host(contestant)
        assert server.process is not None
        found = {server.process.pid}
        with contextlib.suppress(psutil.Error):
            found |= {child.pid for child in psutil.Process(server.process.pid).children(recursive=True)}
        found |= {pid for pid in pids() if environment(pid).get("HOME") == str(server.home)}
        return sorted(found)

    def usage(self, contestant: Contestant, payload: int) -> Usage:
        """The counters now; the payload's own CPU is nobody's."""
        host = [pid for pid in self.host_pids(contestant) if pid != payload]
        return Usage(
            time.monotonic(), self.host(contestant).connections(), cpu_s(self.laptop_pids(contestant)), cpu_s(host)
        )

    def end(self, contestant: Contestant, *, host_too: bool) -> None:
        """SIGKILL a contestant's controller (its daemons included), and with ``host_too`` what it runs on the host."""
        for _ in range(3):
            for pid in self.laptop_pids(contestant):
                kill(pid)
        if not host_too:
            return
        server = self.host(contestant)
        keep = {server.process.pid if server.process else 0}
        for _ in range(3):
            for pid in set(self.host_pids(contestant)) - keep:
                kill(pid)

    def _end_all(self) -> None:
        """Nothing of ours lives on: whatever carries this arena's folder in its environment."""
        mine = str(self.folder)
        for _ in range(5):
            left = [
                pid for pid in pids()
                if environment(pid).get(MARK, "").startswith(mine) or environment(pid).get("HOME", "").startswith(mine)
            ]  # fmt: skip
            for pid in left:
                kill(pid)
            if not left:
                return


class Drive:
    """One life of one controller: a driver process in the near namespace, whose lines are kept with their time.

    Args:
        number: names the job.
        verb: run, or attach.
    """

    def __init__(self, arena: Arena, contestant: Contestant, number: str, verb: str = "run") -> None:
        server = arena.host(contestant)
        folder = arena.folder / contestant.slug / "laptop"
        (folder / ".ssh").mkdir(parents=True, exist_ok=True)
        (folder / ".ssh" / "known_hosts").write_text(server.known_hosts.read_text())
        base = str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())
        record = {
            "folder": str(folder), "work": str(arena.work(contestant, number)), "host_python": base,
            "payload": str(HERE / "payload.py"), "address": server.address, "port": server.port, "user": server.user,
            "key": str(server.client_key), "known_hosts": str(server.known_hosts), "alias": server.alias,
            "ssh_config": str(server.ssh_config), "options": contestant.options,
        }  # fmt: skip
        config = folder / f"config-{number}.json"
        config.write_text(json.dumps(record))
        mark = f"{arena.folder}:{contestant.slug}"
        self.stderr = folder / f"stderr-{verb}-{number}"
        self.lines: list[tuple[float, str]] = []
        scratch = arena.folder / "t"  # a short name: some put sockets there
        scratch.mkdir(exist_ok=True)
        python = contestant.python()
        path = f"{Path(python).parent}:{os.environ['PATH']}"  # as in an activated environment
        with self.stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*arena.wan.near, python, str(HERE / contestant.driver), verb, str(config)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True, cwd=folder,
                env={"PATH": path, "HOME": str(folder), "LANG": "C.UTF-8", "TMPDIR": str(scratch), MARK: mark},
            )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            text = line.decode(errors="replace")
            if text.startswith("@ "):
                self.lines.append((time.time(), text[2:].strip()))

    def said(self, word: str) -> tuple[float, str] | None:
        """(epoch seconds, text) of the first line that starts with a word."""
        return next((line for line in list(self.lines) if line[1].startswith(word)), None)

    def wait(self, word: str, within_s: float) -> tuple[float, str] | None:
        """The same, once it is there; None when the driver ended or the time is over."""
        until(lambda: self.said(word) or self.process.poll() is not None, within_s)
        self._reader.join(0.2)
        return self.said(word)

    def go(self) -> None:
        """The starting gun."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()

    def why(self) -> str:
        """Last words on stderr."""
        lines = self.stderr.read_text(errors="replace").strip().splitlines()
        return f"exit status {self.process.poll()}: {lines[-1] if lines else 'no words'}"[:160]

    def close(self) -> None:
        """End it, if it still runs."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(2)
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                with contextlib.suppress(OSError):
                    stream.close()


def until(condition: Callable[[], object], within_s: float) -> bool:
    """Whether a condition becomes true in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


__all__ = ["Arena", "Drive", "Usage", "alive", "until"]
