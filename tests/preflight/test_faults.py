"""Every planted fault is found before the launch, by its own check, through sshd; the sound world passes."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remote_jobs.agent import checks
from tests.preflight.world import World
from tests.sshd.server import Sshd
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
FAULTS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "faults.json").read_text())
DEPENDS_ON_THE_MACHINE = {"limits", "cache", "locale"}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "world")
    yield made
    made.close()


@pytest.fixture(scope="session")
def connection(shared_sshd: Sshd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """One ssh connection for all faults, as the controller keeps one; the command's beginning."""
    path = tmp_path_factory.mktemp("mux") / "socket"
    ssh = ["ssh", "-F", str(shared_sshd.ssh_config), "-S", str(path)]
    master = subprocess.Popen([*ssh, "-M", "-N", shared_sshd.alias])
    wait_until(path.exists, "the ssh master listens")
    yield [*ssh, shared_sshd.alias]
    master.terminate()
    master.wait()


def preflight(world: World, connection: list[str]) -> dict[str, Any]:
    """The checks over ssh, as a controller's agent would start them."""
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in world.environment().items())
    command = f"cd {shlex.quote(str(ROOT))} && {variables} {shlex.quote(sys.executable)} -S -E -m remote_jobs.agent.checks"
    done = subprocess.run(
        [*connection, command],
        input=json.dumps(world.request()),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_the_sound_world_passes(world: World, connection: list[str]) -> None:
    answer = preflight(world, connection)
    wrong = [row for row in answer["checks"] if row["verdict"] in {"warn", "fail"}]
    assert [row for row in wrong if row["name"] not in DEPENDS_ON_THE_MACHINE] == []
    seen = {(row["step"], row["name"]) for row in answer["checks"] if row["verdict"] == "ok"}
    for step in ("serve", "extract"):
        assert {(step, name) for name in ("checkpoint", "versions", "memory", "timers")} <= seen
    assert {
        ("extract", "disk"),
        ("extract", "data"),
        ("serve", "port"),
        (None, "gpus"),
        (None, "write"),
    } <= seen
    timers = next(row for row in answer["checks"] if row["step"] == "serve" and row["name"] == "timers")
    assert int(timers["exports"]["VLLM_ENGINE_READY_TIMEOUT_S"]) >= 1800
    assert "VLLM_ENGINE_READY_TIMEOUT_S" in timers["found"]


def test_there_are_at_least_25_faults() -> None:
    assert len({fault["name"] for fault in FAULTS}) >= 25


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["name"])
def test_a_planted_fault_is_found(world: World, connection: list[str], fault: dict[str, Any]) -> None:
    world.plant(fault["plant"])
    if (
        fault["check"] != "versions"
    ):  # it starts the step's Python, which these faults have nothing to do with
        world.facts["only"] = [name for name in checks.NAMES if name != "versions"]
    began = time.monotonic()
    answer = preflight(world, connection)
    assert time.monotonic() - began < 30
    rows = [r for r in answer["checks"] if r["step"] == fault["step"] and r["name"] == fault["check"]]
    assert len(rows) == 1, answer["checks"]
    assert rows[0]["verdict"] == fault.get("verdict", "fail"), rows[0]
    assert fault["found"] in rows[0]["found"], rows[0]
    assert fault["fix"] in rows[0]["fix"], rows[0]
    assert answer["ok"] is not any(row["verdict"] == "fail" for row in answer["checks"])
    assert set(rows[0]) >= {"step", "name", "verdict", "took_s", "found", "fix"}
