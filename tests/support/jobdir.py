"""A job directory and its processes, read as a person with a shell on the host would read them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

from tests.support.waiting import wait_until


def alive(pid: int) -> bool:
    """True while a process runs (a zombie does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def kill(pid: int, signum: int = signal.SIGKILL) -> None:
    """Signal a process that the test knows; it may be gone."""
    assert pid > 0, "no process is known yet: 0 would mean everything here, the tests too"
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def environment(pid: int) -> dict[str, str]:
    """Initial environment of a process."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if b"=" in item)
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, _, value in pairs}


def command_line(pid: int) -> list[str]:
    """argv of a process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def pids() -> list[int]:
    """Every pid that can be seen."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


class JobDir:
    """``<root>/jobs/<id>`` on the host, which in tests is this machine."""

    def __init__(self, root: Path, job: str) -> None:
        self.root = root
        self.id = job
        self.path = root / "jobs" / job

    def events(self) -> list[dict[str, Any]]:
        """Whole lines of events.jsonl that are events."""
        found = []
        with contextlib.suppress(OSError):
            for line in (self.path / "events.jsonl").read_bytes().split(b"\n")[:-1]:
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line))
        return [event for event in found if isinstance(event, dict) and "kind" in event]

    def kinds(self) -> list[str]:
        """The kinds of all events in order."""
        return [event["kind"] for event in self.events()]

    def record(self, name: str) -> dict[str, Any]:
        """A JSON file of the directory; empty when it is not there."""
        try:
            record = json.loads((self.path / name).read_bytes())
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    @property
    def state(self) -> str:
        """The state in state.json."""
        return str(self.record("state.json").get("state", ""))

    @property
    def supervisor(self) -> int:
        """Pid of the newest supervisor, from its event; 0 when none started yet."""
        for event in reversed(self.events()):
            process = event.get("data", {}).get("supervisor")
            if process:
                return int(process["pid"])
        return 0

    @property
    def main(self) -> int:
        """Pid of the newest attempt's main process; 0 when none started yet."""
        for event in reversed(self.events()):
            if event["kind"] == "attempt_started":
                return int(event["data"]["process"]["pid"])
        return 0

    def marked(self) -> list[int]:
        """Pids that carry this job's marker in their environment."""
        return [pid for pid in pids() if alive(pid) and environment(pid).get("ORCH_JOB") == self.id]

    def supervisors(self) -> list[int]:
        """Pids of live supervisors of this very job, found by command line and by the open lock file."""
        found = set()
        lock = self.path / "lock"
        for pid in pids():
            if not alive(pid) or environment(pid).get("ORCH_JOB") == self.id:
                continue
            with contextlib.suppress(OSError):
                for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        if Path(os.readlink(descriptor)) == lock and command_line(pid):
                            found.add(pid)
        return sorted(found)

    def log(self, step: int, name: str, attempt: int = 1) -> Path:
        """The log file of one attempt."""
        return self.path / "steps" / f"{step}-{name}" / "attempts" / str(attempt) / "log"

    def wait_for_kind(self, kind: str, *, count: int = 1, within_s: float = 20.0) -> None:
        """Block until the events hold ``count`` of a kind."""
        wait_until(
            lambda: self.kinds().count(kind) >= count,
            f"{self.id} has {count} event(s) {kind}",
            within_s=within_s,
            seen=self.kinds,
        )

    def end_everything(self) -> None:
        """End what a test may have left: supervisor and marked processes of this job, by pid."""
        for _ in range(50):
            left = [*self.supervisors(), *self.marked()]
            if not left:
                return
            for pid in left:
                kill(pid, signal.SIGKILL)


def agents(root: Path) -> list[int]:
    """Pids of live agents that serve this root (`... agent --root ROOT`)."""
    found = []
    for pid in pids():
        argv = command_line(pid)
        if "agent" in argv and str(root) in argv and alive(pid):
            found.append(pid)
    return found
