"""Four ways a job can end without succeeding look alike through SSH; `orch` tells them apart, truthfully.

Also: what a job outlives. Everything through the real `orch` and a real sshd.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.stage import Controller, Stage, alive, kill
from tests.support.waiting import wait_until


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A job that is tried once."""
    with Stage(tmp_path, step={"retry": {"attempts": 1}}) as ready:
        yield ready


def test_an_exit_status_is_told_as_it_was(tmp_path: Path) -> None:
    with Stage(tmp_path, step={"run": "echo so be it; exit 37", "files": [], "retry": {"attempts": 1}}) as stage:
        job = stage.launch()
        answer = stage.laptop.run("wait", job.id, expect=1)
        assert answer.one_screen
        seen = stage.outcome()
        assert (seen.state, [attempt[:2] for attempt in seen.attempts]) == ("failed", [("failed", 37)])
        stage.nothing_left()


def test_sigkill_of_the_job(stage: Stage) -> None:
    job = stage.launch()
    stage.reached("load")
    kill(job.main)
    stage.laptop.run("wait", job.id, expect=1)
    seen = stage.outcome()
    assert (seen.state, seen.attempts) == ("failed", [("failed", -9, "killed")])
    stage.nothing_left()


def test_sigkill_of_the_supervisor_is_lost_with_what_still_runs(stage: Stage) -> None:
    job = stage.launch()
    stage.reached("load")
    main = job.main
    kill(job.supervisor)
    answer = stage.laptop.run("wait", job.id, expect=5)
    assert answer.one_screen
    seen = stage.laptop.status(job.id)
    assert seen["state"] == "lost"
    assert main in [process["pid"] for process in seen["lost"]["processes"]]
    assert alive(main), "nothing is killed behind the user's back"
    stage.go()
    wait_until((stage.work / "saved").exists, "what still runs may end its work")


def test_sigkill_of_both_is_lost_with_nothing_left(stage: Stage) -> None:
    job = stage.launch()
    stage.reached("load")
    kill(job.supervisor)
    kill(job.main)
    wait_until(lambda: not job.marked(), "the worker ends with its parent")
    stage.laptop.run("wait", job.id, expect=5)
    seen = stage.laptop.status(job.id)
    assert seen["state"] == "lost"
    assert seen["lost"]["processes"] == []


def test_outlives_sigkill_of_the_controller_and_is_found_from_an_empty_store(stage: Stage) -> None:
    with stage.laptop.started("launch", stage.plan, "--no-preflight", "--watch") as process:
        controller = Controller(process)
        stage.go("load")
        stage.reached("work")
        controller.kill()
    job = stage.the_job()
    wait_until(lambda: not stage.sshd.sessions(), "sshd has noticed")
    assert alive(job.main)
    stranger = stage.another_laptop("stranger")
    [seen] = stranger.run("status", "--json", expect=0).json["jobs"]
    assert (seen["id"], seen["state"]) == (job.id, "running")
    stage.go()
    stranger.run("wait", job.id, expect=0)
    stage.nothing_left()


def test_outlives_the_sshd_session_and_the_watcher_reconnects(stage: Stage) -> None:
    job = stage.launch()
    stage.reached("load")
    with stage.waiting() as controller:
        for _ in range(3):
            before = stage.sshd.connections()
            assert stage.sshd.kill_sessions() > 0
            wait_until(lambda before=before: stage.sshd.connections() > before, "the watcher has reconnected")
        assert alive(job.main)
        stage.go()
        assert controller.ended().status == 0
    stage.nothing_left()


def test_ctrl_c_never_touches_the_job(stage: Stage) -> None:
    job = stage.launch()
    stage.reached("load")
    with stage.laptop.started("watch", job.id) as process:
        controller = Controller(process)
        stage.agent()
        wait_until(lambda: stage.sshd.connections() > 1, "the watcher is connected")
        os.killpg(process.pid, 2)
        assert controller.ended(10).status == 130
    assert alive(job.main)
    stage.go()
    stage.laptop.run("wait", job.id, expect=0)


def test_a_sigterm_meant_for_the_supervisor_changes_nothing_but_is_noted(stage: Stage) -> None:
    job = stage.launch()
    stage.reached("load")
    kill(job.supervisor, 15)
    job.wait_for_kind("note")
    stage.go()
    stage.laptop.run("wait", job.id, expect=0)
