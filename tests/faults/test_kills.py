"""The fault matrix, kills: at each point of a job's life, each process that can be killed is killed with SIGKILL.

One row is one cell: (point, fault) -> what a stranger sees at the end. In every cell it also holds that there is one
job folder, never two copies at the same time, a rising seq, and nothing left running.

Points: `upload` half of a file has arrived; `claim` the job folder exists and nothing was started; `start` the main
process exists and its program has not begun; `load`, `work`, `save` phases of the program; `finish` it has ended and
the supervisor has not noticed yet.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import Cells
from tests.faults.stage import BALLAST_BYTES, Controller, Outcome, Stage, alive, is_zombie, kill
from tests.support.proxy import UP
from tests.support.waiting import wait_until

FINE = ("succeeded", 0, None)
KILLED = ("failed", -9, "killed")
WORKER_DIED = ("failed", 1, "unknown")
LOST = ("lost", None, "killed")

# point, fault: attempts at the end (after `orch retry` where the job was lost), copies ever started,
# exit status of the controller that waited (None: it was the victim, or had gone home)
TABLE: dict[tuple[str, str], tuple[list[Any], int, int | None]] = {
    ("upload", "controller"): ([FINE], 1, None),
    ("upload", "session"): ([FINE], 1, 0),
    ("upload", "agent"): ([FINE], 1, 0),
    ("claim", "controller"): ([FINE], 1, None),
    ("claim", "session"): ([FINE], 1, 0),
    ("claim", "agent"): ([FINE], 1, 0),
    ("start", "main"): ([KILLED, FINE], 1, 0),
    ("start", "supervisor"): ([LOST, FINE], 1, 5),
    ("start", "supervisor and main"): ([LOST, FINE], 1, 5),
    ("start", "agent"): ([FINE], 1, 0),
    ("start", "session"): ([FINE], 1, 0),
    ("start", "controller"): ([FINE], 1, None),
    ("load", "main"): ([KILLED, FINE], 2, 0),
    ("load", "worker"): ([WORKER_DIED, FINE], 2, 0),
    ("load", "supervisor"): ([LOST, FINE], 2, 5),
    ("load", "supervisor and main"): ([LOST, FINE], 2, 5),
    ("load", "agent"): ([FINE], 1, 0),
    ("load", "session"): ([FINE], 1, 0),
    ("load", "controller"): ([FINE], 1, None),
    ("work", "main"): ([KILLED, FINE], 2, 0),
    ("work", "worker"): ([WORKER_DIED, FINE], 2, 0),
    ("work", "supervisor"): ([LOST, FINE], 2, 5),
    ("work", "supervisor and main"): ([LOST, FINE], 2, 5),
    ("work", "agent"): ([FINE], 1, 0),
    ("work", "session"): ([FINE], 1, 0),
    ("work", "controller"): ([FINE], 1, None),
    ("save", "main"): ([KILLED, FINE], 2, 0),
    ("save", "worker"): ([WORKER_DIED, FINE], 2, 0),
    ("save", "supervisor"): ([LOST, FINE], 2, 5),
    ("save", "supervisor and main"): ([LOST, FINE], 2, 5),
    ("save", "agent"): ([FINE], 1, 0),
    ("save", "session"): ([FINE], 1, 0),
    ("save", "controller"): ([FINE], 1, None),
    ("finish", "main"): ([FINE], 1, 0),
    ("finish", "supervisor"): ([LOST, FINE], 2, 5),
    ("finish", "agent"): ([FINE], 1, 0),
    ("finish", "session"): ([FINE], 1, 0),
    ("finish", "controller"): ([FINE], 1, None),
}


@dataclass(frozen=True)
class Cell:
    """One cell; ``play`` runs it in a folder of its own."""

    point: str
    fault: str

    def play(self, folder: Path) -> Outcome:
        before = self.point in ("upload", "claim")
        step: dict[str, Any] = {"retry": {"attempts": 2}}
        if self.point == "start":
            step["env"] = {"BASH_ENV": str(folder / "hold.sh")}
        entry = {"agent_python": str(folder / "python-that-waits")} if self.point == "claim" else {}
        with Stage(folder, step=step, entry=entry, ballast=self.point == "upload") as stage:
            write_holds(folder, stage.work)
            with (launching if before else running)(stage, self.point) as controller:
                supervisor, main = self.hit(stage, controller)
                stage.cable.thaw()
                if "supervisor" not in self.fault:  # what survives its supervisor stands still until the take-over
                    stage.go("claim", "start", "load", "work", "save")
                if supervisor and self.point == "finish":
                    stage.continue_process(supervisor)
                wait_status = None if self.fault == "controller" else controller.ended().status
            if self.fault == "controller" and before:
                stage.job = None
                answer = stage.laptop.run("launch", stage.plan, "--no-preflight", "--json", expect=0).json
                assert answer["adopted"] is True, "the second launch must take up the first"
            job = stage.the_job()
            stage.settled(job)
            if "supervisor" in self.fault:
                take_over(stage, main_survived=alive(main), main=main)
                stage.go("start", "load", "work", "save")
                stage.settled(job)
            seen = stage.outcome(wait_status)
            stage.nothing_left()
            assert (stage.work / "saved").exists()
            return seen

    def hit(self, stage: Stage, controller: Controller) -> tuple[int, int]:
        """The fault; returns (supervisor, main) as they were before it, 0 where there is none yet."""
        jobs = stage.jobs()
        supervisor, main = (jobs[0].supervisor, jobs[0].main) if jobs and self.point != "claim" else (0, 0)
        if "supervisor" in self.fault:
            kill(supervisor)
        if "main" in self.fault:
            assert alive(main) or is_zombie(main)
            kill(main)
        if self.fault == "worker":
            kill(stage.worker())
            wait_until(lambda: not alive(main) or is_zombie(main), "the main process notices")
        if self.fault == "agent":
            kill(stage.agent())
        if self.fault == "session":
            assert stage.sshd.kill_sessions() > 0
        if self.fault == "controller":
            controller.kill()
        return supervisor, main


def write_holds(folder: Path, work: Path) -> None:
    """Two places where a start can be held: before the supervisor's Python, and before the step's command line."""

    def hold(point: str) -> str:
        return f"touch '{work}/reached-{point}'; until [ -e '{work}/go-{point}' ]; do sleep 0.03; done\n"

    # A shell that is not interactive reads this file (BASH_ENV) before the command line of the step.
    (folder / "hold.sh").write_text(hold("start"))
    # Python takes its own path from argv[0], so what the agent starts comes through here as well.
    python = folder / "python-that-waits"
    python.write_text(
        f"#!/bin/bash\nif [ \"$4\" = supervise ]; then {hold('claim')}fi\nexec -a \"$0\" '{sys._base_executable}' \"$@\"\n"  # type: ignore[attr-defined]
    )
    python.chmod(0o755)


@contextlib.contextmanager
def launching(stage: Stage, point: str) -> Iterator[Controller]:
    """`orch launch` held at a point before its answer."""
    if point == "upload":
        stage.cable.freeze_after(BALLAST_BYTES // 2, UP)
    with stage.laptop.started("launch", stage.plan, "--no-preflight") as process:
        controller = Controller(process)
        if point == "upload":
            wait_until(lambda: stage.cable.frozen, "half of the upload has passed")
        else:
            wait_until((stage.work / "reached-claim").exists, "a supervisor is about to start")
            assert (stage.the_job().path / "spec.json").exists()
        yield controller


@contextlib.contextmanager
def running(stage: Stage, point: str) -> Iterator[Controller]:
    """`orch wait` beside a job that stands at a point."""
    job = stage.launch()
    if point == "start":
        wait_until((stage.work / "reached-start").exists, "the shell of the step runs", seen=job.kinds)
        job.wait_for_kind("attempt_started")
    else:
        if point != "load":
            stage.go(*(["load"] if point == "work" else ["load", "work"]))
        stage.reached("save" if point == "finish" else point)
    with stage.waiting() as controller:
        if point == "finish":
            stage.stop_process(job.supervisor)
            stage.go("save")
            wait_until(lambda: is_zombie(job.main), "the main process has ended, unnoticed")
        yield controller


def take_over(stage: Stage, *, main_survived: bool, main: int) -> None:
    """The job is lost: `status` says so and names what still runs; `retry` goes on."""
    job = stage.the_job()
    seen = stage.laptop.status(job.id)
    assert seen["state"] == "lost", seen
    listed = [process["pid"] for process in seen["lost"]["processes"]]
    assert (main in listed) == main_survived, f"main process {main}, listed {listed}"
    stage.laptop.run("retry", job.id, expect=0)
    job.wait_for_kind("recovered")


@pytest.mark.cell
@pytest.mark.parametrize("cell", [Cell(*key) for key in TABLE], ids=lambda cell: f"{cell.point}-{cell.fault}")
def test_kill(cell: Cell, cells: Cells, request: pytest.FixtureRequest) -> None:
    attempts, starts, wait_status = TABLE[cell.point, cell.fault]
    seen = cells.result(request.node.nodeid)
    assert seen == Outcome("succeeded", attempts, starts, wait_status)
