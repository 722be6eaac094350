"""`orch demo`: a whole job on this machine, with a crash in the middle, through the ordinary commands.

Nothing in the product knows about the demo: the host is a real SSH server (services/demo_host.py), the job is an ordinary
plan, and every step below is an `orch` command run as a process of its own, printed before it runs. Torch is only used by
programs that are started from here (remote_jobs/steps/demo/), never imported.

Whatever ends the demo (success, failure, Ctrl-C, SIGTERM), the host and everything it started are ended with it.
"""

from __future__ import annotations

import contextlib
import getpass
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
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from orchestrator.core.errors import LocalError, OrchError, UsageError
from orchestrator.services import demo_host

Tell = Callable[[str], None]
NEEDED = ("asyncssh", "torch", "transformers", "safetensors", "tokenizers", "numpy")
NEEDED_BYTES = 3 * 1024**3
PROGRAMS = Path(__file__).resolve().parents[2] / "remote_jobs" / "steps" / "demo"
HOST_NAME = "demo"
STEP = "extract"
SAMPLE_BAR = "Extracting hidden states"
KILL_AT = 0.45
"""Share of the samples at which the worker is killed."""
POLL_S = 1.0
START_S, RUN_S = 60.0, 600.0
"""Longest waits in s: for the host to listen, and for a stretch of the job (a slow or busy machine gets its time)."""


class DemoFailed(OrchError):
    """The demo did not go as it should; the message says at which point."""

    code = "demo_failed"


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


def demo(*, keep: bool = False, tell: Tell | None = None) -> int:
    """Play the demo; returns the exit status, 0 when everything happened as it should.

    Args:
        keep: leave the host up at the end and print what can be tried on it.
        tell: gets every line for people; standard output when left out.

    Raises:
        UsageError: a package of the `demo` extra is missing, or the system is not Linux.
        LocalError: not enough room for the model.
    """
    _check_requirements()
    began = time.monotonic()
    stage = Stage(Path(tempfile.mkdtemp(prefix="orch-demo-")).resolve(), tell or _print)
    kept = False
    with _stop_signals_as_ctrl_c():
        try:
            _play(stage)
            kept = keep
            took = time.monotonic() - began
            stage.tell("")
            stage.tell(f"Everything happened as it should, in {took:.0f} s.")
            if keep:
                _explain_keep(stage)
            return 0
        except OrchError as error:
            kept_logs = _save_logs(stage)
            stage.tell("")
            stage.tell(f"The demo failed: {error.message}")
            if error.hint:
                stage.tell(f"  {error.hint}")
            stage.tell(f"  logs of the host and of the job: {kept_logs}")
            return 1
        except KeyboardInterrupt:
            stage.tell("")
            stage.tell("Interrupted: ending the demo's job and host.")
            raise
        finally:
            _clear(stage, kept=kept)


def _play(stage: Stage) -> None:
    """The story, in order."""
    tell = stage.tell
    tell(
        "This is orch's demo. It starts a small SSH host on this machine, runs a real extraction of hidden states on it,"
    )
    tell(
        "kills the worker half-way, and shows how the job is found dead, retried from where it was, and checked."
    )
    tell("Every line that starts with $ is an ordinary command, run just as you would.")

    _headline(tell, "1. A host and a model")
    _start_host(stage)
    tell(
        f"An SSH server listens on 127.0.0.1:{stage.port}; only a key made a moment ago may log in. It plays your GPU box."
    )
    model = _make_model(stage)
    tell(
        f"A random Qwen3-like model of {model['bytes'] / 1e6:.0f} MB in {model['shards']} shards, with a tokenizer, and "
        f"{model['samples']} prompts ({model['tokens']} tokens) lie on the host."
    )
    _write_files(stage, model)
    tell("inventory.yaml says how to reach the host, plan.yaml what to run:")
    for line in stage.plan.read_text().splitlines():
        tell(f"  | {line}")

    _headline(tell, "2. Launch")
    stage.job = _orch(stage, "launch", str(stage.plan), show=False).strip()
    if not stage.job or "\n" in stage.job:
        raise DemoFailed(f"`orch launch` should print one job id, it printed {stage.job!r}")
    tell(f"  | {stage.job}")
    tell(
        "The job is on its own now: a small supervisor on the host watches it, whether or not anybody is connected."
    )

    _headline(tell, "3. Watch it, and kill it half-way")
    tell("Look for the bar over the 64 shards, then the bar over the samples.")
    with _watching(stage) as watcher:
        killed_at, done = _kill_worker(stage)
        first = _wait_for(stage, "the host to find the worker dead", lambda attempts: _ended(attempts, 1))
        verdict = first[0].get("verdict") or {}
        tell(
            f">>> The host noticed by itself: attempt 1 {first[0]['state']}, exit status {first[0]['exit_status']}, "
            f"class {verdict.get('class')}: {verdict.get('summary')}"
        )
        _expect(
            first[0]["exit_status"] == -signal.SIGKILL,
            f"exit status of attempt 1 is {first[0]['exit_status']}, not -9",
        )
        tell(
            ">>> A kill from outside is worth another try, so attempt 2 is started after a short pause. It keeps every"
        )
        tell(">>> file that is whole and computes only the rest: its bar does not start at 0.")
        _wait_for(stage, "attempt 2 to start", lambda attempts: len(attempts) >= 2)
        tell(f">>> Attempt 2 runs, {time.time() - killed_at:.0f} s after the kill, with nobody's help.")
        _orch(stage, "wait", stage.job, "--timeout", f"{RUN_S:.0f}", show=False, quiet=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            watcher.wait(15)

    _headline(tell, "4. What happened, from the host's records")
    _orch(stage, "status", stage.job)
    _orch(stage, "why", stage.job, "--step", STEP, "--attempt", "1")
    attempts = _attempts(stage)
    _expect(len(attempts) == 2, f"two attempts were expected, there are {len(attempts)}")
    _expect(attempts[1]["state"] == "succeeded", f"attempt 2 is {attempts[1]['state']}")
    resumed = _resumed_from(stage)
    _expect(resumed >= done, f"attempt 2 found {resumed} whole files, attempt 1 had shown {done}")
    tell(f"Attempt 1 had finished {resumed} of {model['samples']} samples when it was killed; attempt 2 made the other "
         f"{model['samples'] - resumed}.")  # fmt: skip

    _headline(tell, "5. Bring the results home and check them")
    results = stage.folder / "results"
    _orch(stage, "fetch", stage.job, str(results))
    _check(stage, results)


# ------------------------------------------------------------------------------------------------------------ the parts


def _check_requirements() -> None:
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


def _start_host(stage: Stage) -> None:
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
    assert process.stdout is not None  # noqa: S101 - opened as a pipe
    reader = threading.Thread(target=lambda: lines.append(process.stdout.readline()), daemon=True)  # type: ignore[union-attr]
    reader.start()
    reader.join(within_s)
    return lines[0] if lines else ""


def _make_model(stage: Stage) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(_program(stage, "make_model.py", str(stage.folder / "host" / "work")))
    return report


def _program(stage: Stage, name: str, *arguments: str) -> str:
    """Run one of the demo's torch programs; returns what it printed.

    Raises:
        DemoFailed: it failed; the end of its errors is the hint.
    """
    command = [sys.executable, str(PROGRAMS / name), *arguments]
    env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}  # spinning threads are slow where cores are shared
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=stage.folder, env=env)
    if done.returncode != 0:
        raise DemoFailed(
            f"{name} ended with {done.returncode}: {done.stdout.strip()[-500:]}", done.stderr[-2000:]
        )
    return done.stdout


def _write_files(stage: Stage, model: dict[str, Any]) -> None:
    """Write inventory.yaml and plan.yaml, as a user would. (JSON strings are YAML.)"""
    host, quote = stage.folder / "host", json.dumps
    (stage.folder / "inventory.yaml").write_text(
        f"""\
hosts:
  {HOST_NAME}:
    ssh: {quote(f"{getpass.getuser()}@127.0.0.1:{stage.port}")}
    gpus: 0
    root: {quote(str(host / "orch"))}
    python: {quote(sys.executable)}
    agent_python: {quote(sys.executable)}
    identity_file: {quote(str(host / demo_host.CLIENT_KEY))}
    known_hosts: {quote(str(host / demo_host.KNOWN_HOSTS))}
    allow_tmpfs: true      # the temporary folder may be one
"""
    )
    stage.plan.write_text(
        f"""\
name: demo-extract
host: {HOST_NAME}
workdir: {quote(str(host / "work"))}
steps:
  - name: {STEP}
    uses: extract
    with: {{model: model, dataset: prompts.jsonl, layers: {model["layers"]}, backend: transformers, batch_size: 2}}
    retry: {{attempts: 3}}
"""
    )


def _orch(stage: Stage, *arguments: str, show: bool = True, quiet: bool = False) -> str:
    """Run an `orch` command and return its standard output; `show` prints it too, `quiet` hides the command.

    Raises:
        DemoFailed: the command failed.
    """
    if not quiet:
        stage.tell(f"$ orch {shlex.join(arguments)}")
    done = subprocess.run(_command(*arguments), env=stage.env, capture_output=True, text=True, check=False)
    if show:
        for line in (done.stdout + done.stderr).splitlines():
            stage.tell(f"  | {line}")
    if done.returncode != 0:
        raise DemoFailed(
            f"`orch {shlex.join(arguments)}` ended with {done.returncode}", done.stderr.strip()[-2000:]
        )
    return done.stdout


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "orchestrator.cli.main", *arguments]


@contextlib.contextmanager
def _watching(stage: Stage) -> Iterator[subprocess.Popen[str]]:
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


def _attempts(stage: Stage) -> list[dict[str, Any]]:
    """Attempts of the step, as `orch status --json` gives them."""
    view = json.loads(_orch(stage, "status", stage.job, "--json", show=False, quiet=True))
    attempts: list[dict[str, Any]] = view["jobs"][0]["steps"][0]["attempts"]
    return attempts


def _wait_for(stage: Stage, what: str, true: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    """Ask `orch status` until something is true of the attempts; returns them.

    Raises:
        DemoFailed: it took too long.
    """
    deadline = time.monotonic() + RUN_S
    while True:
        attempts = _attempts(stage)
        if true(attempts):
            return attempts
        if time.monotonic() > deadline:
            raise DemoFailed(f"waited {RUN_S:.0f} s for {what}")
        time.sleep(POLL_S)


def _ended(attempts: Sequence[dict[str, Any]], number: int) -> bool:
    return any(attempt["n"] == number and attempt["ended_at"] for attempt in attempts)


def _samples_done(attempt: dict[str, Any]) -> tuple[int, int]:
    """(done, total) of the sample bar of an attempt; (0, 0) before there is one."""
    bars = [bar for bar in attempt.get("bars") or [] if str(bar.get("label", "")).startswith(SAMPLE_BAR)]
    return (int(bars[-1]["done"] or 0), int(bars[-1]["total"] or 0)) if bars else (0, 0)


def _kill_worker(stage: Stage) -> tuple[float, int]:
    """SIGKILL the worker when it is nearly half-way; returns the time and the number of samples done by then."""

    def half_way(attempts: list[dict[str, Any]]) -> bool:
        done, total = _samples_done(attempts[-1]) if attempts else (0, 0)
        return bool(total and done >= KILL_AT * total) or _ended(attempts, 1)

    attempt = _wait_for(stage, "the extraction to get half-way", half_way)[-1]
    done, total = _samples_done(attempt)
    if attempt["ended_at"]:
        raise DemoFailed(
            f"attempt 1 ended ({attempt['state']}) before it could be killed",
            (attempt.get("verdict") or {}).get("summary")
            or "this machine was too quick for the demo's number of prompts",
        )
    workers = [process for process in attempt.get("processes") or [] if "extract.py" in process["command"]]
    _expect(bool(workers), "`orch status --json` lists no process of the running attempt")
    worker = workers[0]
    stage.tell(
        f">>> {done} of {total} samples are done. `orch status --json` names the worker: pid {worker['pid']}."
    )
    stage.tell(f"$ kill -9 {worker['pid']}")
    os.kill(worker["pid"], signal.SIGKILL)
    return time.time(), done


def _resumed_from(stage: Stage) -> int:
    """How many whole files attempt 2 found, from its own log through `orch logs`."""
    log = _orch(stage, "logs", stage.job, "--step", STEP, "--attempt", "2", show=False, quiet=True)
    line = next((line for line in log.splitlines() if "valid files are there" in line), "")
    words = line.split(" valid files are there", maxsplit=1)[0].split()
    _expect(bool(words) and words[-1].isdigit(), "the log of attempt 2 does not say how many files it found")
    return int(words[-1])


def _check(stage: Stage, results: Path) -> None:
    """Compare the fetched files with a fresh forward pass by a program that shares no code with the extraction."""
    found = sorted(results.rglob("manifest.json"))
    _expect(bool(found), f"no manifest.json among the fetched files in {results}")
    work = stage.folder / "host" / "work"
    report = json.loads(
        _program(
            stage, "check_states.py", str(work / "model"), str(work / "prompts.jsonl"), str(found[0].parent)
        )
    )
    stage.tell(
        f"{report['files']} files for {report['prompts']} prompts, {report['tokens']} tokens, all with the right token ids. "
        f"{report['recomputed']} samples from both attempts were computed afresh with transformers:"
    )
    stage.tell(
        f"the states at layer ids {report['layer_ids']} (id k = input of layer k) agree to "
        f"{report['worst_relative_difference']:.1g}, relative (allowed: {report['tolerance']:g})."
    )


def _expect(condition: bool, otherwise: str) -> None:  # noqa: FBT001 - reads as a sentence
    if not condition:
        raise DemoFailed(otherwise)


def _headline(tell: Tell, text: str) -> None:
    tell("")
    tell(f"== {text}")


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


# ---------------------------------------------------------------------------------------------------------- ending it


@contextlib.contextmanager
def _stop_signals_as_ctrl_c() -> Iterator[None]:
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


def _clear(stage: Stage, *, kept: bool) -> None:
    """End the host with everything on it and remove the folder; or leave both, when the user wants to play."""
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


def _save_logs(stage: Stage) -> Path:
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


def _explain_keep(stage: Stage) -> None:
    """What to try while the host is up, and how to end it."""
    server = stage.server
    assert server is not None  # noqa: S101 - it was started, or we would not be here
    tell, env = stage.tell, stage.env
    tell("")
    tell("The host stays up. To play with it:")
    for name in ("ORCH_INVENTORY", "ORCH_HOME"):
        tell(f"  export {name}={shlex.quote(env[name])}")
    tell("  orch hosts check")
    tell(f"  orch status {stage.job}")
    tell(f"  orch logs {stage.job} --tail 20")
    tell(f"  orch launch {shlex.quote(str(stage.plan))} --new --watch --set extract.with.output=again")
    tell("To end it, with everything it started:")
    tell(f"  kill {server.pid} && rm -r {shlex.quote(str(stage.folder))}")
