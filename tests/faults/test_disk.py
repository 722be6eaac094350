"""The fault matrix, full disk: at each write of ours there is no byte free. Needs root (a small tmpfs is the disk).

A full disk may delay and is said; it never invents a failure, never loses a record, never leaves a torn folder.
One row: the write that meets the full disk -> what is told meanwhile, and how the job ends once there is room.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.conftest import Cells
from tests.faults.stage import Stage, kill, small_disk
from tests.support.waiting import wait_until

SILENT = {"run": "echo $$ >> starts; touch reached-load worker; until [ -e go-load ]; do sleep 0.03; done", "files": []}
DISK_MIB = 12


def refused_then_fine(stage: Stage, fill: Callable[[bool], None]) -> None:
    """A launch on a full disk: exit 3, one screen, names the disk; the same command works once there is room."""
    fill(True)
    answer = stage.laptop.run("launch", stage.plan, "--no-preflight", expect=3)
    assert answer.one_screen, answer
    assert "full" in answer.err or "space" in answer.err, answer
    assert stage.starts() == 0
    fill(False)
    stage.job = None
    job = stage.launch()
    stage.go()
    stage.laptop.run("wait", job.id, expect=0)


def release(stage: Stage, fill: Callable[[bool], None]) -> None:
    """The very first bytes: not even the release fits."""
    refused_then_fine(stage, fill)


def spec(stage: Stage, fill: Callable[[bool], None]) -> None:
    """The release is there; spec.json does not fit."""
    warm(stage)
    refused_then_fine(stage, fill)


def blob(stage: Stage, fill: Callable[[bool], None]) -> None:
    """A file of the plan does not fit (some of it does)."""
    warm(stage)
    big = stage.folder / "big.bin"
    with big.open("wb") as file:
        file.truncate((DISK_MIB + 2) << 20)
    plan = stage.laptop.plan([{**stage.step, "files": [*stage.step["files"], str(big)]}], name="big", **stage.top)
    answer = stage.laptop.run("launch", plan, "--no-preflight", expect=3)
    assert answer.one_screen, answer
    assert "full" in answer.err or "space" in answer.err, answer
    assert stage.starts() == 0
    job = stage.launch("--new")
    stage.go()
    stage.laptop.run("wait", job.id, expect=0)


def warm(stage: Stage) -> None:
    """Take the release up by a job that is removed again."""
    warmer = stage.laptop.plan([{"name": "warm", "run": "true"}], name="warm", workdir=str(stage.work))
    job = stage.laptop.launch(warmer)
    stage.laptop.run("wait", job, expect=0)
    for found in stage.jobs():
        wait_until(lambda found=found: not found.supervisors(), "its supervisor has left")
    import shutil

    shutil.rmtree(stage.root / "jobs")


def running(stage: Stage, fill: Callable[[bool], None]) -> None:
    """The disk fills under a running job: it goes on, status goes on; that log lines may be missing is said afterwards."""
    job = stage.launch()
    stage.reached("load")
    fill(True)
    full_at = time.monotonic()  # long enough to be seen by a look every half second
    while time.monotonic() < full_at + 5:
        assert stage.laptop.status(job.id)["state"] == "running"
    fill(False)

    def notes() -> list[str]:
        return [note["text"] for note in stage.laptop.status(job.id)["notes"]]

    wait_until(lambda: any("the disk of the job's logs was full from 20" in text for text in notes()), "it is said", seen=notes)
    assert "was full from" in stage.laptop.run("status", job.id, expect=0).out
    stage.go()
    stage.laptop.run("wait", job.id, expect=0)


def final_record(stage: Stage, fill: Callable[[bool], None]) -> None:
    """The job ends on a full disk: the reserve holds the final record, nothing has to be freed by hand."""
    job = stage.launch()
    stage.reached("load")
    fill(True)
    stage.go()
    stage.laptop.run("wait", job.id, "--timeout", "80", expect=0)


def final_record_without_reserve(stage: Stage, fill: Callable[[bool], None]) -> None:
    """Even the reserve is gone: the end is recorded as soon as there is room, by the same supervisor."""
    job = stage.launch()
    stage.reached("load")
    wait_until((job.path / "reserve").exists, "the reserve is made")
    (job.path / "reserve").unlink()
    fill(True)
    stage.go()
    wait_until(lambda: not job.marked(), "the job's program has ended")
    for _ in range(2):
        # The end may still fit into the last block of events.jsonl. If not, it is not told yet, and nothing is lost.
        assert stage.laptop.status(job.id)["state"] in {"running", "succeeded"}
    fill(False)
    stage.laptop.run("wait", job.id, expect=0)


def control(stage: Stage, fill: Callable[[bool], None]) -> None:
    """A stop cannot be written: said so; later it works."""
    job = stage.launch()
    stage.reached("load")
    fill(True)
    answer = stage.laptop.run("stop", job.id, "--wait")
    if answer.status != 0:
        assert answer.status == 3, answer
        assert answer.one_screen, answer
        assert job.marked(), "not asked, so not stopped"
        fill(False)
        stage.laptop.run("stop", job.id, "--wait", expect=0)
    fill(False)
    assert stage.laptop.run("wait", job.id).status == 1


def killed_while_full(stage: Stage, fill: Callable[[bool], None]) -> None:
    """Supervisor and job die on a full disk: lost; with room again, `retry` goes on."""
    job = stage.launch()
    stage.reached("load")
    fill(True)
    kill(job.supervisor)
    kill(job.main)
    wait_until(lambda: not job.supervisors() and not job.marked(), "both are gone")
    assert stage.laptop.status(job.id)["state"] == "lost"
    refused = stage.laptop.run("retry", job.id)
    if refused.status:
        assert refused.one_screen, refused
    fill(False)
    stage.laptop.run("retry", job.id)
    stage.go()
    stage.laptop.run("wait", job.id, expect=0)


def test_a_program_that_fills_the_disk_of_its_log(tmp_path: Path) -> None:
    """Its own lines fill the disk, and it dies of that: the verdict says so instead of trying again."""
    step = {"run": "exec yes", "files": []}
    disk = tmp_path / "disk"
    with small_disk(disk, DISK_MIB), Stage(tmp_path / "stage", step=step, root=disk / "root", entry={"allow_tmpfs": True}) as stage:
        job = stage.launch("--no-preflight")
        stage.laptop.run("wait", job.id, expect=1)
        why = stage.laptop.run("why", job.id, "--json").json
        assert why["verdict"]["class"] == "disk_full"
        assert len(why["attempts"]) == 1


def test_a_program_that_does_not_care_whether_its_lines_were_written(tmp_path: Path) -> None:
    """It ends with 0 at once, and a second step does too: that lines may be missing is said all the same."""
    fills = "head -c 40000000 /dev/zero | tr '\\0' x | fold -w 100; true"
    disk = tmp_path / "disk"
    with small_disk(disk, DISK_MIB), Stage(tmp_path / "stage", step=SILENT, root=disk / "root", entry={"allow_tmpfs": True}) as stage:
        steps = [{"name": "fills", "run": fills}, {"name": "after", "run": "echo b; true", "needs": ["fills"]}]
        plan = stage.laptop.plan(steps, name="careless", workdir=str(stage.work))
        job = stage.laptop.launch(plan, "--no-preflight")
        stage.laptop.run("wait", job, expect=0)
        notes = [note["text"] for note in stage.laptop.status(job)["notes"]]
        assert [note for note in notes if "the disk of the job's logs was full from 20" in note], notes
        assert "was full from" in stage.laptop.run("status", job, expect=0).out


TABLE = (
    release, spec, blob, running, final_record, final_record_without_reserve, control, killed_while_full,
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One write that meets a full disk."""

    scene: Callable[[Stage, Callable[[bool], None]], None]

    def play(self, folder: Path) -> str:
        disk = folder / "disk"
        with (
            small_disk(disk, DISK_MIB) as fill,
            Stage(folder / "stage", step=SILENT, root=disk / "root", entry={"allow_tmpfs": True}) as stage,
        ):
            self.scene(stage, fill)
            stage.nothing_left()
            if self.scene is not blob:
                return stage.outcome().state
            return "succeeded"


@pytest.mark.cell
@pytest.mark.parametrize("cell", [Cell(scene) for scene in TABLE], ids=lambda cell: cell.scene.__name__)
def test_full_disk_at(cell: Cell, cells: Cells, request: pytest.FixtureRequest) -> None:
    assert cells.result(request.node.nodeid) == ("stopped" if cell.scene is control else "succeeded")
