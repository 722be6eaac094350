"""`orch demo`: a whole job on this machine, with a crash in the middle, through the ordinary commands.

Nothing in the product knows about the demo: the host is a real SSH server (services/demo_host.py), the job is an ordinary
plan, and every step below is an `orch` command run as a process of its own, printed before it runs. Torch is only used by
programs that are started from here (remote_jobs/steps/demo/), never imported.

Whatever ends the demo (success, failure, Ctrl-C, SIGTERM), the host and everything it started are ended with it.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from orchestrator.core.errors import OrchError
from orchestrator.services import demo_host
from orchestrator.services.demo_stage import (
    DemoFailed,
    HostAway,
    Stage,
    Tell,
    check_requirements,
    clear,
    orch,
    program,
    save_logs,
    start_host,
    stop_signals_as_ctrl_c,
    watching,
)

HOST_NAME = "demo"
STEP = "extract"
SAMPLE_BAR = "Extracting hidden states"
KILL_AT = 0.45
"""Share of the samples at which the worker is killed."""
POLL_S = 1.5
RUN_S = 600.0
"""Longest wait in s for a stretch of the job: a slow or busy machine gets its time."""
INTERRUPTED = 130


def demo(*, keep: bool = False, tell: Tell | None = None) -> int:
    """Play the demo; returns the exit status: 0 when everything happened as it should, 1 when not, 130 when interrupted.

    Args:
        keep: leave the host up at the end and print what can be tried on it.
        tell: gets every line for people; standard output when left out.

    Raises:
        UsageError: a package of the `demo` extra is missing, or the system is not Linux.
        LocalError: not enough room for the model.
    """
    check_requirements()
    began = time.monotonic()
    stage = Stage(Path(tempfile.mkdtemp(prefix="orch-demo-")).resolve(), tell or _print)
    kept = False
    with stop_signals_as_ctrl_c():
        try:
            _play(stage)
            kept = keep
            took = time.monotonic() - began
            stage.tell("")
            stage.tell(f"Everything happened as it should, in {took:.0f} s.")
            if keep:
                _explain_keep(stage)
            return 0
        except Exception as error:  # whatever it is, the logs are worth more than a traceback
            saved = save_logs(stage)
            stage.tell("")
            stage.tell(f"The demo failed: {error if isinstance(error, OrchError) else repr(error)}")
            for line in (getattr(error, "hint", None) or "").splitlines():
                stage.tell(f"  {line}")
            stage.tell(f"Logs of the host and of the job: {saved}")
            return 1
        except KeyboardInterrupt:
            stage.tell("")
            stage.tell("Interrupted: ending the demo's job and host.")
            return INTERRUPTED
        finally:
            clear(stage, kept=kept)


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
    start_host(stage)
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
    stage.job = orch(stage, "launch", str(stage.plan), show=False).strip()
    if not stage.job or "\n" in stage.job:
        raise DemoFailed(f"`orch launch` should print one job id, it printed {stage.job!r}")
    tell(f"  | {stage.job}")
    tell(
        "The job is on its own now: a small supervisor on the host watches it, whether or not anybody is connected."
    )

    _headline(tell, "3. Watch it, and kill it half-way")
    tell("Look for the bar over the 64 shards, then the bar over the samples.")
    with watching(stage) as watcher:
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
        orch(stage, "wait", stage.job, "--timeout", f"{RUN_S:.0f}", show=False, quiet=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            watcher.wait(15)

    _headline(tell, "4. What happened, from the host's records")
    orch(stage, "status", stage.job)
    orch(stage, "why", stage.job, "--step", STEP, "--attempt", "1")
    attempts = _attempts(stage)
    _expect(len(attempts) == 2, f"two attempts were expected, there are {len(attempts)}")
    _expect(attempts[1]["state"] == "succeeded", f"attempt 2 is {attempts[1]['state']}")
    resumed = _resumed_from(stage)
    _expect(resumed >= done, f"attempt 2 found {resumed} whole files, attempt 1 had shown {done}")
    tell(f"Attempt 1 had finished {resumed} of {model['samples']} samples when it was killed; attempt 2 made the other "
         f"{model['samples'] - resumed}.")  # fmt: skip

    _headline(tell, "5. Bring the results home and check them")
    results = stage.folder / "results"
    orch(stage, "fetch", stage.job, str(results))
    _check(stage, results)


# ------------------------------------------------------------------------------------------------------------ the parts


def _attempts(stage: Stage) -> list[dict[str, Any]]:
    """Attempts of the step, as `orch status --json` gives them."""
    view = json.loads(orch(stage, "status", stage.job, "--json", show=False, quiet=True))
    attempts: list[dict[str, Any]] = view["jobs"][0]["steps"][0]["attempts"]
    return attempts


def _wait_for(stage: Stage, what: str, true: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    """Ask `orch status` until something is true of the attempts; returns them.

    Raises:
        DemoFailed: it took too long.
    """
    deadline = time.monotonic() + RUN_S
    while True:
        with contextlib.suppress(HostAway):  # one look that failed says nothing about the job
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
    log = orch(stage, "logs", stage.job, "--step", STEP, "--attempt", "2", show=False, quiet=True)
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
        program(
            stage, "check_states.py", str(work / "model"), str(work / "prompts.jsonl"), str(found[0].parent)
        )
    )
    stage.tell(
        f"{report['files']} files for {report['prompts']} prompts, {report['tokens']} tokens, all with the right token ids. "
        f"{report['recomputed']} samples from both attempts were computed afresh with transformers:"
    )
    stage.tell(
        f"the states at layer ids {report['layer_ids']} (id k = input of layer k) agree; largest relative difference "
        f"{report['worst_relative_difference']:.1g}, {report['tolerance']:g} is allowed."
    )


def _expect(condition: bool, otherwise: str) -> None:  # noqa: FBT001 - reads as a sentence
    if not condition:
        raise DemoFailed(otherwise)


def _headline(tell: Tell, text: str) -> None:
    tell("")
    tell(f"== {text}")


def _make_model(stage: Stage) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(program(stage, "make_model.py", str(stage.folder / "host" / "work")))
    return report


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


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _explain_keep(stage: Stage) -> None:
    """What to try while the host is up, and how to end it."""
    server = stage.server
    assert server is not None
    tell, env = stage.tell, stage.env
    tell("")
    tell("The host stays up. To play with it:")
    if shutil.which("orch") is None:  # started as .venv/bin/orch, by `make demo` for one
        tell(f"  export PATH={shlex.quote(str(Path(sys.argv[0]).resolve().parent))}:$PATH")
    for name in ("ORCH_INVENTORY", "ORCH_HOME"):
        tell(f"  export {name}={shlex.quote(env[name])}")
    tell("  orch hosts check")
    tell(f"  orch status {stage.job}")
    tell(f"  orch logs {stage.job} --tail 20")
    tell(f"  orch launch {shlex.quote(str(stage.plan))} --new --watch --set extract.with.output=again")
    tell("To end it, with everything it started:")
    tell(f"  kill {server.pid} && rm -r {shlex.quote(str(stage.folder))}")
