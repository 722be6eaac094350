"""The stage of one cell: its own sshd, cable, laptop and host root, a job, and the hands that break things.

Each cell has everything for itself, so cells may run side by side and a kill meets nobody else's processes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.sshd.server import Sshd
from tests.support.jobdir import JobDir, agents, alive, kill
from tests.support.laptop import Answer, Laptop
from tests.support.proxy import Proxy
from tests.support.waiting import PATIENCE, wait_until

PHASED = Path(__file__).parents[1] / "data" / "workloads" / "phased.py"
PHASES = ("load", "work", "save")
BALLAST_BYTES = 2 << 20


@dataclass
class Outcome:
    """What a stranger with an empty ledger sees at the end of a cell, and what lies in the work folder."""

    state: str
    attempts: list[tuple[str, int | None, str | None]]
    starts: int
    wait_status: int | None = None
    """Exit status of the controller that was waiting when the fault came."""
    notes: list[str] = field(default_factory=list)


class Stage:
    """Context manager; everything it started is ended at the end of the block, by pid.

    Args:
        folder: created.
        steps: extra keys of the step, such as retry.
        ballast: ship a file large enough to hold an upload half-way.
        top: extra keys of the plan.
        entry: extra keys of the inventory entry.
    """

    def __init__(
        self,
        folder: Path,
        *,
        step: dict[str, Any] | None = None,
        ballast: bool = False,
        top: dict[str, Any] | None = None,
        entry: dict[str, Any] | None = None,
        root: Path | None = None,
    ) -> None:
        self.folder = folder
        self.root = root or folder / "root"
        self.work = folder / "work"
        self.work.mkdir(parents=True)
        self.sshd = Sshd(folder / "sshd")
        self.entry = {"root": str(self.root), **(entry or {})}
        self.files = [str(PHASED)]
        if ballast:
            (folder / "ballast.bin").write_bytes(os.urandom(BALLAST_BYTES))
            self.files.append(str(folder / "ballast.bin"))
        self.step = {"name": "work", "run": "python3 {files}/phased.py", "files": self.files, **(step or {})}
        self.top = {"workdir": str(self.work), **(top or {})}
        self.job: JobDir | None = None
        self._stack = contextlib.ExitStack()
        self._stopped: list[int] = []

    def __enter__(self) -> Self:
        self._stack.enter_context(self.sshd)
        self.cable = self._stack.enter_context(Proxy((self.sshd.address, self.sshd.port)))
        key = self.sshd.known_hosts_line().split(" ", 1)[1]
        with self.sshd.known_hosts.open("a") as file:
            file.write(f"[127.0.0.1]:{self.cable.port} {key}")
        self.laptop = self.another_laptop("laptop")
        self.plan = self.laptop.plan([self.step], **self.top)
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._stopped:
            kill(pid, signal.SIGCONT)
        for job in self.jobs():
            job.end_everything()
        self._stack.close()
        for pid in agents(self.root):
            kill(pid)

    def another_laptop(self, name: str) -> Laptop:
        """A controller with an empty ledger, plugged into the same cable."""
        entry = self.sshd.inventory_entry(**self.entry)
        entry["ssh"] = f"{self.sshd.user}@127.0.0.1:{self.cable.port}"
        return Laptop(self.folder / name, {"box": entry})

    def jobs(self) -> list[JobDir]:
        """Every job folder under this root."""
        folder = self.root / "jobs"
        return [JobDir(self.root, path.name) for path in sorted(folder.iterdir())] if folder.is_dir() else []

    # ------------------------------------------------------------------------------------------------ on the way

    def launch(self, *arguments: object) -> JobDir:
        """Launch the cell's plan and remember the job."""
        self.job = JobDir(self.root, self.laptop.launch(self.plan, *arguments))
        return self.job

    def the_job(self) -> JobDir:
        """The one job of this cell."""
        if self.job is None:
            [self.job] = self.jobs()
        return self.job

    def reached(self, phase: str) -> None:
        """Block until the workload is in a phase (and its worker lives) and its records say that it runs.

        A program may be faster than its supervisor: that it was started is written down when it runs, state.json last.
        """
        wait_until(
            lambda: (self.work / f"reached-{phase}").exists()
            and (self.work / "worker").exists()
            and any(job.state == "running" for job in self.jobs()),
            f"the job reaches {phase}",
            seen=lambda: [job.kinds() for job in self.jobs()],
        )

    def go(self, *phases: str) -> None:
        """Let the workload pass the named phases; all of them when none is named."""
        for phase in phases or PHASES:
            (self.work / f"go-{phase}").touch()

    def stop_process(self, pid: int) -> None:
        """SIGSTOP, until `continue_process` or the end of the cell."""
        os.kill(pid, signal.SIGSTOP)
        self._stopped.append(pid)

    def continue_process(self, pid: int) -> None:
        """SIGCONT; the process may be gone."""
        kill(pid, signal.SIGCONT)

    def worker(self) -> int:
        """Pid of the newest worker of the workload."""
        return int((self.work / "worker").read_text())

    def starts(self) -> int:
        """How many copies of the workload ever started."""
        with contextlib.suppress(OSError):
            return len((self.work / "starts").read_text().splitlines())
        return 0

    def agent(self) -> int:
        """Pid of the agent that serves this cell's root."""
        return int(wait_until(lambda: agents(self.root), "an agent serves the root")[0])

    @contextlib.contextmanager
    def waiting(self, *arguments: object) -> Iterator[Controller]:
        """`orch wait JOB` running beside the test, once an answer has reached it."""
        before = set(agents(self.root))
        with self.laptop.started("wait", self.the_job().id, *arguments) as process:
            controller = Controller(process)
            wait_until(
                lambda: any(writes(pid) >= 3 for pid in set(agents(self.root)) - before),
                "a new agent has said hello and answered two looks: the first answer has arrived",
            )
            yield controller

    # ------------------------------------------------------------------------------------------------ at the end

    def settled(self, job: JobDir, *, within_s: float = 40.0) -> None:
        """Block until the job's supervisor is gone, which writes the whole record of an end before it leaves."""
        wait_until(
            lambda: not job.supervisors(),
            f"{job.id} has ended or is lost",
            within_s=within_s,
            every_s=0.1,
            seen=job.kinds,
        )

    def outcome(self, wait_status: int | None = None) -> Outcome:
        """What a new laptop sees, with the invariants of every cell checked on the way."""
        job = self.the_job()
        assert [found.id for found in self.jobs()] == [job.id], "one launch left more than one job folder"
        assert not (self.work / "SECOND-COPY").exists(), "two copies ran at the same time"
        seqs = [event["seq"] for event in job.events()]
        assert seqs == sorted(set(seqs)), f"seq must rise: {seqs}"
        stranger = self.another_laptop("stranger")
        seen = stranger.status(job.id)
        assert seen["reachable"] is True
        attempts = [
            (attempt["state"], attempt["exit_status"], (attempt["verdict"] or {}).get("class"))
            for attempt in seen["steps"][0]["attempts"]
        ]
        return Outcome(seen["state"], attempts, self.starts(), wait_status)

    def nothing_left(self) -> None:
        """No supervisor and no marked process of any job of this cell is alive."""
        for job in self.jobs():
            wait_until(
                lambda job=job: not job.supervisors() and not job.marked(),
                f"nothing of {job.id} is left running",
                seen=lambda job=job: (job.supervisors(), job.marked()),
            )


class Controller:
    """A running `orch` whose end is awaited while its pipes are drained."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.out = b""
        self.err = b""
        self._readers = [threading.Thread(target=self._drain, args=(name,), daemon=True) for name in ("out", "err")]
        for reader in self._readers:
            reader.start()

    def _drain(self, name: str) -> None:
        stream = self.process.stdout if name == "out" else self.process.stderr
        assert stream is not None
        with contextlib.suppress(OSError, ValueError):  # the pipes may be closed at the end of a failed test
            while data := os.read(stream.fileno(), 65536):
                setattr(self, name, getattr(self, name) + data)

    def kill(self) -> str:
        """SIGKILL, as a flat battery; what it had printed."""
        kill(self.process.pid)
        return self.ended().out

    def ended(self, within_s: float = 40.0) -> Answer:
        """Its answer, once it ended by itself."""
        argv = list(map(str, self.process.args)) if isinstance(self.process.args, list) else []
        try:
            status = self.process.wait(within_s * PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {within_s:g} s: {argv}; printed {self.out + self.err!r}") from None
        for reader in self._readers:
            reader.join(5)
        return Answer(argv, status, self.out.decode(errors="replace"), self.err.decode(errors="replace"))


def writes(pid: int) -> int:
    """How many times a process has written; an agent writes once per answer, its hello included."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/io").read_text().splitlines():
            if line.startswith("syscw:"):
                return int(line.split()[1])
    return 0


def is_zombie(pid: int) -> bool:
    """True for a process that ended and was not reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False


@contextlib.contextmanager
def small_disk(folder: Path, size_mib: int) -> Iterator[Callable[[bool], None]]:
    """A tmpfs of ``size_mib`` at ``folder`` (root only); yields fill(True) = no byte free, fill(False) = free again."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mib}m,mode=755", "orch-test", str(folder)], check=True)
    filler = folder / "filler"

    def fill(full: bool) -> None:
        if not full:
            filler.unlink(missing_ok=True)
            return
        with filler.open("ab", buffering=0) as file:
            for chunk in (1 << 20, 4096, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(b"\0" * chunk)

    try:
        yield fill
    finally:
        filler.unlink(missing_ok=True)
        deadline = time.monotonic() + 10
        while subprocess.run(["umount", str(folder)], capture_output=True, check=False).returncode:
            if time.monotonic() > deadline:
                subprocess.run(["umount", "-l", str(folder)], check=False)
                break
            time.sleep(0.1)
        shutil.rmtree(folder, ignore_errors=True)


__all__ = ["PHASES", "Controller", "Outcome", "Stage", "alive", "is_zombie", "kill", "small_disk"]
