"""The demo's stage: its folder, its host, and how commands are run on it; what is needed before, what is cleared after.

The story is told in services/demo.py. Whatever ends it (success, failure, Ctrl-C, SIGTERM), `clear` ends the host and
everything that it started.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from orchestrator.core.errors import LocalError, OrchError, UsageError
from orchestrator.services import demo_host

Tell = Callable[[str], None]
NEEDED = ("asyncssh", "torch", "transformers", "safetensors", "tokenizers", "numpy")
NEEDED_BYTES = 3 * 1024**3
PROGRAMS = Path(__file__).resolve().parents[2] / "remote_jobs" / "steps" / "demo"
UNREACHABLE = 3
"""Exit status of a command that could not reach its host."""
START_S = 60.0
"""Longest wait in s for the host to listen."""


class DemoFailed(OrchError):
    """The demo did not go as it should; the message says at which point."""

    code = "demo_failed"


class HostAway(DemoFailed):
    """A command could not reach the demo's host in its time (exit status 3), though its server lives: a very busy machine."""


@dataclass
class Stage:
    """Where the demo plays: its folder, its host, and how it speaks."""

    folder: Path
    tell: Tell
    server: subprocess.Popen[str] | None = None
    token: str = ""
    port: int = 0
    job: str = ""

    @property
    def env(self) -> dict[str, str]:
        """Environment of the `orch` commands: an inventory and a ledger of their own, nothing of the user's."""
        own = {
            "ORCH_INVENTORY": str(self.folder / "inventory.yaml"),
            "ORCH_HOME": str(self.folder / "laptop"),
            "COLUMNS": "400",
        }
        return {**os.environ, **own}

    @property
    def plan(self) -> Path:
        """The demo's plan file."""
        return self.folder / "plan.yaml"

    @property
    def job_folder(self) -> Path:
        """Where the job's records and logs lie on the host."""
        return self.folder / "host" / "orch" / "jobs" / self.job


def check_requirements() -> None:
    """Refuse to start what cannot end well.

    Raises:
        UsageError: not Linux, or a package of the `demo` extra is missing.
        LocalError: too little room for the model.
    """
    if not sys.platform.startswith("linux"):
        raise UsageError(
            "the demo's host needs Linux (/proc)", "run it on a Linux machine, in a container, or under WSL"
        )
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"the demo needs {', '.join(missing)}, not installed in this Python ({sys.executable})",
            "install the extra: pip install 'orch-gpu[demo]', or run `make demo` in a checkout",
        )
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < NEEDED_BYTES:
        raise LocalError(
            f"the demo needs {NEEDED_BYTES / 1e9:.0f} GB in {tempfile.gettempdir()}, {free / 1e9:.1f} GB are free",
            "free some, or point TMPDIR at another disk",
        )


def start_host(stage: Stage) -> None:
    """Start the SSH server and wait until it listens."""
    host = stage.folder / "host"
    host.mkdir()
    with (stage.folder / "host.log").open("w") as log:
        stage.server = subprocess.Popen(
            [sys.executable, "-m", demo_host.__name__, str(host)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C is for us; we end the host ourselves
        )
    line = _first_line(stage.server, START_S)
    if not line:
        raise DemoFailed(
            "the SSH server of the demo did not start", (stage.folder / "host.log").read_text()[-2000:]
        )
    ready = json.loads(line)
    stage.port, stage.token = ready["port"], ready["token"]


def _first_line(process: subprocess.Popen[str], within_s: float) -> str:
    """First line that a process prints; empty when it ends or takes too long."""
    lines: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: lines.append(process.stdout.readline()), daemon=True)  # type: ignore[union-attr]
    reader.start()
    reader.join(within_s)
    return lines[0] if lines else ""


def program(stage: Stage, name: str, *arguments: str) -> str:
    """Run one of the demo's torch programs; returns what it printed.

    Raises:
        DemoFailed: it failed; the end of its errors is the hint.
    """
    command = [sys.executable, str(PROGRAMS / name), *arguments]
    # Spinning threads are slow where cores are shared; torch leaves folders in the place for temporary files.
    env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "TMPDIR": str(stage.folder)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=stage.folder, env=env)
    if done.returncode != 0:
        raise DemoFailed(
            f"{name} ended with {done.returncode}: {done.stdout.strip()[-500:]}", done.stderr[-2000:]
        )
    return done.stdout


def orch(stage: Stage, *arguments: str, show: bool = True, quiet: bool = False) -> str:
    """Run an `orch` command and return its standard output; `show` prints it too, `quiet` hides the command.

    Raises:
        HostAway: the host could not be reached.
        DemoFailed: the command failed.
    """
    if not quiet:
        stage.tell(f"$ orch {shlex.join(arguments)}")
    done = subprocess.run(_command(*arguments), env=stage.env, capture_output=True, text=True, check=False)
    if show:
        for line in (done.stdout + done.stderr).splitlines():
            stage.tell(f"  | {line}")
    if done.returncode != 0:
        said = done.stdout if "--json" in arguments else done.stderr  # where each kind of error is told
        alive = stage.server is not None and stage.server.poll() is None
        kind = HostAway if done.returncode == UNREACHABLE and alive else DemoFailed
        raise kind(f"`orch {shlex.join(arguments)}` ended with {done.returncode}", said.strip()[-2000:])
    return done.stdout


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "orchestrator.cli.main", *arguments]


@contextlib.contextmanager
def watching(stage: Stage) -> Iterator[subprocess.Popen[str]]:
    """Run `orch watch` beside the story and print its lines as they come."""
    stage.tell(f"$ orch watch {stage.job}")
    watcher = subprocess.Popen(
        _command("watch", stage.job),
        env=stage.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def relay() -> None:
        for line in watcher.stdout or ():
            stage.tell(f"  | {line.rstrip()}")

    printer = threading.Thread(target=relay, daemon=True)
    printer.start()
    try:
        yield watcher
    finally:
        if watcher.poll() is None:
            watcher.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                watcher.wait(10)
            watcher.kill()
        watcher.wait()
        printer.join(10)


@contextlib.contextmanager
def stop_signals_as_ctrl_c() -> Iterator[None]:
    """SIGTERM and SIGHUP end the demo as Ctrl-C does, so that nothing stays behind."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def clear(stage: Stage, *, kept: bool) -> None:
    """End the host with everything on it and remove the folder; or leave both, when the user wants to play."""
    with _uninterrupted():
        server = stage.server
        if server is not None and server.stdin is not None:
            with contextlib.suppress(OSError):
                if kept:
                    server.stdin.write("keep\n")
                server.stdin.close()
        if server is not None and server.stdout is not None:
            server.stdout.close()
        if kept:
            return
        if server is not None:
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
            if stage.token:
                demo_host.end_marked_processes(stage.token)
        shutil.rmtree(stage.folder, ignore_errors=True)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """An impatient second Ctrl-C must not leave half of it running."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def save_logs(stage: Stage) -> Path:
    """Keep the logs of a failed demo, without the model; returns their folder."""
    saved = Path(tempfile.mkdtemp(prefix="orch-demo-failed-"))
    for source in (stage.folder / "host.log", stage.folder / "inventory.yaml", stage.plan):
        with contextlib.suppress(OSError):
            shutil.copy2(source, saved)
    if stage.job and stage.job_folder.is_dir():
        # The supervisor may still write; sockets and FIFOs in there are no logs.
        shutil.copytree(
            stage.job_folder,
            saved / "job",
            ignore=shutil.ignore_patterns("control", "lock", "reserve"),
            dirs_exist_ok=True,
        )
    return saved
