"""What it costs a laptop to keep `orch watch` open over 50 hosts and 200 jobs, and how old what it shows is.

The hosts are SSH servers in one process with real agents behind them (bench.crowd); the watcher is the real program on
a pty of 120 x 50. An event counts as shown when its name has been written to the terminal.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from bench.report import Report, Row
from bench.stand import PYTHON, cpu_s, rss_mib
from tests.cli.terminal import Terminal
from tests.support.laptop import ORCH, Laptop
from tests.support.waiting import wait_until

HOSTS = int(os.environ.get("ORCH_BENCH_HOSTS", "50"))
EACH = 4
MEASURE_S = float(os.environ.get("ORCH_BENCH_WATCH_S", "60"))
SETTLE_S = 25.0
"""After the last host was met: the first looks come close together."""
LATE_S = 3.0
_EVENT = re.compile(rb"e(\d{5})")


@contextlib.contextmanager
def crowd(folder: Path) -> Iterator[Laptop]:
    """The hosts, and a laptop that knows them."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen(
        [PYTHON, "-m", "bench.crowd", str(folder), str(HOSTS), str(EACH)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        ports = json.loads(process.stdout.readline())["ports"]
        entry = {"identity_file": str(folder / "id"), "known_hosts": str(folder / "known_hosts"), "allow_tmpfs": True}
        yield Laptop(
            folder / "laptop",
            {
                f"host{number:02d}": {**entry, "ssh": f"root@127.0.0.1:{port}", "root": str(folder / f"root{number}")}
                for number, port in enumerate(ports)
            },
        )
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)


class Shown:
    """When each event's name was written to the terminal; read by a thread that does nothing else."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.at: dict[int, float] = {}
        self.bytes = 0
        self._tail = b""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._stop.is_set():
            try:
                data = os.read(self.terminal.fd, 65536)
            except OSError:
                return
            at = time.time()
            self.bytes += len(data)
            for found in _EVENT.findall(self._tail + data):
                self.at.setdefault(int(found), at)
            self._tail = data[-5:]

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(5)


def run(report: Report) -> None:
    """One minute of watching everything."""
    with tempfile.TemporaryDirectory(prefix="orch-bench-") as name, crowd(Path(name)) as laptop:
        folder = Path(name)
        laptop.run("status", within_s=120)  # as before the first launch: every host gets its release
        before = connections(folder)
        with Terminal([ORCH, "watch"], environment=laptop.environment, cwd=laptop.folder, columns=120, rows=50) as terminal:
            terminal.until(lambda text: f"{HOSTS} connected" in text, "all hosts are connected", within_s=180)
            report.say(f"   {HOSTS} hosts connected; settling")
            shown = Shown(terminal)
            time.sleep(SETTLE_S)
            used, written, began = cpu_s([terminal.pid]), shown.bytes, time.time()
            time.sleep(MEASURE_S)
            ended = time.time()
            used, written = cpu_s([terminal.pid]) - used, shown.bytes - written
            time.sleep(LATE_S)
            peak = rss_mib(terminal.pid)
            shown.stop()
            events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
            due = [(number, at) for number, at in events if began <= at <= ended]
            late = sorted(shown.at[number] - at if number in shown.at else LATE_S for number, at in due)
            made = connections(folder) - before
        wait_until(lambda: not terminal_runs(terminal.pid), "the watcher is gone")
    what = f"{HOSTS} hosts, {HOSTS * EACH} jobs"
    seconds = ended - began
    report.add(Row("watchers", f"laptop CPU, {what}", "% of a core", [100 * used / seconds], 10.0))
    report.add(Row("watchers", "laptop RSS, peak", "MiB", [peak], 120.0))
    report.add(Row("watchers", "connections per host", "", [made / HOSTS], 1.0))
    report.add(Row("watchers", f"event to screen, p95 of {len(late)}", "s", [late[int(len(late) * 0.95)]], 0.5))
    report.add(Row("watchers", "event to screen, median", "s", [late[len(late) // 2]]))
    report.add(Row("watchers", "written to the terminal", "KiB/s", [written / 1024 / seconds]))


def connections(folder: Path) -> int:
    """How many were ever made to the hosts."""
    return int(json.loads((folder / "stats.json").read_text())["connections"])


def terminal_runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
