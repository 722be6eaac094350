"""The fault matrix, links and controllers: silence, cuts in the middle of answers, two controllers at once.

The silence here is a cable that carries nothing (the kernels still acknowledge), so every limit must be ours and not
TCP's; lost packets are in tests/sshd with network namespaces.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.conftest import Cells
from tests.faults.stage import Controller, Stage, alive, kill
from tests.support.proxy import DOWN
from tests.support.waiting import wait_until

NO_HANG_S = 60.0
"""No question may take longer than this when the network says nothing."""
GIVEN_UP_S = 150.0
"""A held look is given up after 45 s; the rest is for a machine that is busy with other cells."""


def black_hole_while_waiting(stage: Stage) -> None:
    """The cable goes dead under `orch wait`, long enough for it to notice; it heals, and the end is known at once."""
    job = stage.launch()
    stage.reached("load")
    with stage.waiting() as controller:
        before = stage.cable.connections
        stage.cable.freeze()
        wait_until(
            lambda: stage.cable.connections > before, "the waiter has given the dead connection up", within_s=GIVEN_UP_S
        )
        stage.go()
        stage.settled(job)
        stage.cable.thaw()
        healed = time.monotonic()
        assert controller.ended().status == 0
        assert time.monotonic() - healed < 20


def black_hole_for_a_question(stage: Stage) -> None:
    """status on a dead cable: exit 3 inside the limit, never `failed` or `lost`, what was known with its age."""
    job = stage.launch()
    stage.reached("load")
    stage.laptop.status(job.id)
    stage.cable.freeze()
    answer = stage.laptop.run("status", "--json", within_s=NO_HANG_S, expect=3)
    [seen] = answer.json["jobs"]
    assert (seen["id"], seen["state"], seen["reachable"]) == (job.id, "running", False)
    assert seen["age_s"] > 0
    stage.cable.thaw()
    stage.go()
    stage.laptop.run("wait", job.id, expect=0)


def black_hole_during_launch(stage: Stage) -> None:
    """launch on a dead cable ends inside the limit with exit 3, and can be repeated."""
    stage.cable.freeze()
    answer = stage.laptop.run("launch", stage.plan, "--no-preflight", within_s=NO_HANG_S, expect=3)
    assert answer.one_screen, answer
    stage.cable.thaw()
    job = stage.launch()
    stage.go()
    stage.laptop.run("wait", job.id, expect=0)


def link_down_at_every_connect(stage: Stage) -> None:
    """The port accepts and hangs up at once: exit 3 with a message; the job is fine."""
    job = stage.launch()
    stage.reached("load")
    stage.cable.refuse(True)
    stage.cable.cut_now()
    answer = stage.laptop.run("status", job.id, within_s=NO_HANG_S, expect=3)
    assert answer.one_screen or answer.out, answer
    stage.cable.refuse(False)
    stage.go()
    stage.laptop.run("wait", job.id, expect=0)


def cuts_in_the_middle_of_an_answer(stage: Stage) -> None:
    """A log of 300 KB is read while the cable breaks every 50 KB: all bytes arrive once and in order."""
    lines = "".join(f"line {number:06d} of a log that is read over a bad cable\n" for number in range(6000))
    (stage.folder / "lines.txt").write_text(lines)
    step = {"name": "work", "run": "cat {files}/lines.txt", "files": [str(stage.folder / "lines.txt")]}
    job = stage.laptop.launch(stage.laptop.plan([step], name="lines", **stage.top))
    stage.laptop.run("wait", job, expect=0)
    cuts = stage.cable.cuts
    for num_bytes in (3000, 20000, 60000, 150000, 290000):
        stage.cable.cut_after(num_bytes, DOWN)
        answer = stage.laptop.run("logs", job, expect=0)
        assert answer.out == lines
    assert stage.cable.cuts >= cuts + 4


def status_cut_in_the_middle(stage: Stage) -> None:
    """EOF inside the answer of `status`: asked again, one whole document."""
    job = stage.launch()
    stage.reached("load")
    total = 0
    for share in (0.5, 0.8, 0.95, 0.99):
        if total:
            stage.cable.cut_after(int(total * share), DOWN)
        assert stage.laptop.status(job.id)["state"] == "running"
        total = total or stage.cable.carried(DOWN)
    stage.go()
    stage.laptop.run("wait", job.id, expect=0)


def two_watchers(stage: Stage) -> None:
    """Two controllers wait for one job; both know the end."""
    job = stage.launch()
    stage.reached("load")
    other = stage.another_laptop("other")
    with stage.waiting() as one, other.started("wait", job.id) as process:
        two = Controller(process)
        wait_until(lambda: stage.sshd.connections() >= 3, "both are connected")
        stage.go()
        assert (one.ended().status, two.ended().status) == (0, 0)


def two_stops(stage: Stage) -> None:
    """Two controllers stop the same job at once: one stop, both content."""
    job = stage.launch()
    stage.reached("load")
    other = stage.another_laptop("other")
    with (
        stage.laptop.started("stop", job.id, "--wait") as one,
        other.started("stop", job.id, "--wait") as two,
    ):
        assert [Controller(one).ended().status, Controller(two).ended().status] == [0, 0]
    assert stage.laptop.status(job.id)["state"] == "stopped"
    stage.go()
    stage.laptop.run("retry", job.id, expect=0)
    stage.laptop.run("wait", job.id, expect=0)


def two_retries(stage: Stage) -> None:
    """Two controllers retry the same lost job at once: one new supervisor, one new attempt."""
    job = stage.launch()
    stage.reached("load")
    supervisor, main = job.supervisor, job.main
    kill(supervisor)
    kill(main)
    wait_until(lambda: not job.supervisors() and not job.marked(), "both are gone")
    other = stage.another_laptop("other")
    with stage.laptop.started("retry", job.id) as one, other.started("retry", job.id) as two:
        statuses = [Controller(one).ended().status, Controller(two).ended().status]
    assert 0 in statuses, statuses
    wait_until(lambda: stage.starts() == 2, "the second copy starts")
    # A fork of the supervisor holds its lock for the moment until it lets go of it.
    wait_until(lambda: len(job.supervisors()) == 1, "one supervisor lives", seen=job.supervisors)
    stage.go()
    stage.laptop.run("wait", job.id, expect=0)
    assert stage.starts() == 2


def sshd_restarts(stage: Stage) -> None:
    """An administrator restarts sshd, sessions and all, under `orch wait`."""
    job = stage.launch()
    stage.reached("load")
    with stage.waiting() as controller:
        main = job.main
        stage.sshd.restart()
        assert alive(main)
        stage.go()
        assert controller.ended().status == 0


def frozen_sshd(stage: Stage) -> None:
    """The session's sshd is stopped (a host that swaps to death): the question ends with exit 3; then all is well."""
    job = stage.launch()
    stage.reached("load")
    with stage.waiting() as controller:
        stage.sshd.freeze(frozen=True)
        frozen = stage.sshd.sessions()
        before = stage.cable.connections
        wait_until(lambda: stage.cable.connections > before, "the waiter has connected anew", within_s=GIVEN_UP_S)
        stage.go()
        assert controller.ended().status == 0
        for pid in frozen:
            kill(pid)
    assert json.loads(stage.laptop.run("status", job.id, "--json", expect=0).out)["jobs"][0]["state"] == "succeeded"


TABLE: tuple[Callable[[Stage], None], ...] = (
    black_hole_while_waiting, black_hole_for_a_question, black_hole_during_launch, link_down_at_every_connect,
    cuts_in_the_middle_of_an_answer, status_cut_in_the_middle, two_watchers, two_stops, two_retries, sshd_restarts,
    frozen_sshd,
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One scene."""

    scene: Callable[[Stage], None]

    def play(self, folder: Path) -> None:
        with Stage(folder) as stage:
            self.scene(stage)
            stage.nothing_left()
            assert not (stage.work / "SECOND-COPY").exists()


@pytest.mark.cell
@pytest.mark.parametrize("cell", [Cell(scene) for scene in TABLE], ids=lambda cell: cell.scene.__name__)
def test_link(cell: Cell, cells: Cells, request: pytest.FixtureRequest) -> None:
    cells.result(request.node.nodeid)
