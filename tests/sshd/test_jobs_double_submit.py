"""A launch that is interrupted anywhere between its first byte and its answer never leads to a second copy.

The cable counts bytes. One clean launch measures how many go each way; then the same launch is cut at chosen
points, by a reset (the controller lives and resends) or by the end of the controller (a person types it again).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faults.stage import Controller, Stage
from tests.support.jobdir import JobDir
from tests.support.proxy import DOWN, UP
from tests.support.waiting import wait_until

STEP = {"run": "echo $$ >> starts; until [ -e go ]; do sleep 0.03; done", "files": []}
# Where the cable breaks, as a share of the bytes of a clean launch; 0 is the very first byte. The request itself is
# the last of what goes up, the answer the last of what comes down.
POINTS = [
    (UP, 0.0),
    (UP, 0.4),
    (UP, 0.7),
    (UP, 0.85),
    (UP, 0.95),
    (UP, 0.99),
    (UP, 1.0),
    (DOWN, 0.5),
    (DOWN, 0.9),
    (DOWN, 0.97),
    (DOWN, 0.995),
]


@dataclass
class Measured:
    """Bytes that one clean launch carries, the release being there already."""

    up: int
    down: int


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with Stage(tmp_path_factory.mktemp("double") / "stage", step=STEP) as ready:
        yield ready


@pytest.fixture(scope="module")
def measured(stage: Stage) -> Measured:
    """Launch twice: the first takes the release up, the second is measured."""
    (stage.work / "go").touch()
    for number in range(2):
        stage.laptop.launch(stage.laptop.plan([stage.step], name=f"measure-{number}", workdir=str(stage.work)))
    (stage.work / "go").unlink()
    return Measured(stage.cable.carried(UP), stage.cable.carried(DOWN))


def workdir(stage: Stage, name: str) -> Path:
    folder = stage.folder / name
    folder.mkdir()
    return folder


@pytest.mark.parametrize(("direction", "share"), POINTS)
def test_link_cut_during_the_launch(stage: Stage, measured: Measured, direction: str, share: float) -> None:
    name = f"cut-{direction}-{share}".replace(".", "-")
    work = workdir(stage, name)
    plan = stage.laptop.plan([stage.step], name=name, workdir=str(work))
    before = {job.id for job in stage.jobs()}
    cuts = stage.cable.cuts
    total = measured.up if direction == UP else measured.down
    stage.cable.cut_after(max(1, round(total * share) - 1), direction)
    answer = stage.laptop.run("launch", plan, "--no-preflight")
    stage.cable.disarm()
    assert stage.cable.cuts == cuts + 1 or share > 0.98, "the cable broke where it should"
    if answer.status != 0:
        assert answer.status == 3, answer
        assert answer.one_screen, answer
        answer = stage.laptop.run("launch", plan, "--no-preflight", expect=0)
    one_copy(stage, work, before, answer.out.strip())


@pytest.mark.parametrize(("direction", "share"), POINTS)
def test_controller_killed_during_the_launch(stage: Stage, measured: Measured, direction: str, share: float) -> None:
    name = f"kill-{direction}-{share}".replace(".", "-")
    work = workdir(stage, name)
    plan = stage.laptop.plan([stage.step], name=name, workdir=str(work))
    before = {job.id for job in stage.jobs()}
    total = measured.up if direction == UP else measured.down
    stage.cable.freeze_after(max(1, round(total * share) - 1), direction)
    with stage.laptop.started("launch", plan, "--no-preflight") as process:
        controller = Controller(process)
        wait_until(lambda: stage.cable.frozen or process.poll() is not None, "the point is reached")
        told = controller.kill() if process.poll() is None else controller.ended().out
    stage.cable.disarm()
    stage.cable.thaw()
    answer = stage.laptop.run("launch", plan, "--no-preflight", "--json", expect=0).json
    # Who was told the id has launched, and means a second job when the command is typed again. The kill may fall
    # between the telling and its note in the ledger: then the very job that was told is taken up once more.
    assert told or answer["adopted"] is True, f"told nothing, then {answer}"
    assert answer["adopted"] is not bool(told) or answer["job"] == told.strip(), f"told {told!r}, then {answer}"
    one_copy(stage, work, before, answer["job"], at_most=2 if told else 1)


def test_a_look_between_the_kill_and_the_resend_changes_nothing(stage: Stage, measured: Measured) -> None:
    """`status` lists the job, but whoever launched it was never told its id. Who names that id has learnt it."""
    work = workdir(stage, "looked-at")
    plan = stage.laptop.plan([stage.step], name="looked-at", workdir=str(work))
    before = {job.id for job in stage.jobs()}
    with stage.laptop.started("launch", plan, "--no-preflight") as process:
        controller = Controller(process)
        # The host has the spec; its answer comes when a supervisor has started.
        wait_until(lambda: any((job.path / "spec.json").exists() for job in new_jobs(stage, before)), "it arrived", every_s=0.002)
        assert not controller.kill()
    [found] = [job.id for job in new_jobs(stage, before)]
    assert found in {job["id"] for job in stage.laptop.run("status", "--json", expect=0).json["jobs"]}
    again = stage.laptop.run("launch", plan, "--no-preflight", "--json", expect=0).json
    assert (again["job"], again["adopted"]) == (found, True)
    one_copy(stage, work, before, found)


def new_jobs(stage: Stage, before: set[str]) -> list[JobDir]:
    """Jobs of the host that were not there before."""
    return [job for job in stage.jobs() if job.id not in before]


def one_copy(stage: Stage, work: Path, before: set[str], job: str, *, at_most: int = 1) -> None:
    """One job folder, one start, and the id that was printed is that job's."""
    new = {found.id for found in stage.jobs()} - before
    assert job in new
    assert len(new) <= at_most, f"{len(new)} job folders after one launch"

    def starts() -> list[str]:
        return (work / "starts").read_text().split() if (work / "starts").exists() else []

    wait_until(lambda: len(starts()) >= len(new), "each runs")
    (work / "go").touch()
    stage.laptop.run("wait", job, expect=0)
    assert len(starts()) == len(new), f"{len(starts())} copies started"


def test_two_launches_of_one_plan_at_once_are_as_many_copies_as_ids(stage: Stage, measured: Measured) -> None:
    work = workdir(stage, "at-once")
    plan = stage.laptop.plan([stage.step], name="at-once", workdir=str(work))
    with (
        stage.laptop.started("launch", plan, "--no-preflight", "--json") as one,
        stage.laptop.started("launch", plan, "--no-preflight", "--json") as two,
    ):
        answers = [Controller(one).ended(), Controller(two).ended()]
    (work / "go").touch()
    ids = {json.loads(answer.out)["job"] for answer in answers if answer.status == 0}
    assert ids, [str(answer) for answer in answers]
    for job in ids:
        stage.laptop.run("wait", job, expect=0)
    assert len((work / "starts").read_text().split()) == len(ids)
