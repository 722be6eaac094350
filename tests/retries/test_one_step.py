"""A stop or a retry of one step leaves the others as they are, and no step is started, or waits, in vain."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from tests.retries.box import Box, events
from tests.retries.test_by_hand import forge_boot, lose
from tests.retries.test_services import service, user
from tests.support.host_side import Refused
from tests.support.jobdir import JobDir, alive, kill
from tests.support.waiting import wait_until


def step(name: str, run: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "run": f"echo $$ >> {name}.pids; {run}", "grace_s": 1.0, **more}


def pids(box: Box, name: str) -> list[int]:
    """Pids that a step wrote down, one per start."""
    path = box.work / f"{name}.pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def states(box: Box, job: JobDir) -> list[str]:
    return [box.step(job, index)["state"] for index in (0, 1)]


def both_run(box: Box, job: JobDir) -> None:
    """Until both have said so, and their starts are on record: a program may be faster than its supervisor."""
    wait_until(lambda: pids(box, "a") and pids(box, "b") and states(box, job) == ["running", "running"], "both run")


def test_a_job_of_which_one_step_was_stopped_ends_as_its_other_steps_do(box: Box) -> None:
    job = box.launch(
        step("a", "sleep 600"),
        step("b", "until [ -e go ]; do sleep 0.05; done; exit 3", retry={"attempts": 1}),
    )
    both_run(box, job)
    box.control(job, "stop", args={"step": "a"})
    wait_until(lambda: states(box, job) == ["stopped", "running"], "only that step is stopped")
    assert job.state == "running"
    box.release_go()
    box.hurry(job, "failed")
    assert states(box, job) == ["stopped", "failed"]


def test_a_stop_of_one_step_of_a_lost_job_is_refused_and_ends_nothing(box: Box) -> None:
    job = box.launch(step("a", "sleep 600"), step("b", "sleep 600"))
    both_run(box, job)
    lose(job)
    with pytest.raises(Refused, match="lost"):
        box.control(job, "stop", args={"step": "a"})
    assert alive(pids(box, "a")[0])
    assert alive(pids(box, "b")[0])
    box.control(job, "stop")
    box.hurry(job, "stopped")


def test_a_stop_of_one_step_is_final_also_when_the_host_restarts_in_the_middle(box: Box) -> None:
    hold = "until [ -e go ]; do sleep 0.05; done"
    job = box.launch(step("a", "trap '' TERM; " + hold, grace_s=60.0), step("b", hold), restart_after_reboot=True)
    both_run(box, job)
    box.control(job, "stop", args={"step": "a"})
    job.wait_for_kind("stop_sent")
    lose(job)
    for pid in job.marked():
        kill(pid)
    forge_boot(job)
    resume = [box.side.python, "-I", "-S", str(box.side.release), "resume", "--root", str(box.root)]
    subprocess.run(resume, env=box.environment, check=True, timeout=60, stdin=subprocess.DEVNULL)
    wait_until(lambda: box.step(job)["state"] == "stopped", "a stays stopped")
    box.release_go()
    box.hurry(job, "stopped")
    assert states(box, job) == ["stopped", "succeeded"]
    assert (len(pids(box, "a")), len(pids(box, "b"))) == (1, 2)


def test_a_retry_of_one_step_of_a_lost_job_starts_no_other(box: Box) -> None:
    hold = "until [ -e go ]; do sleep 0.05; done"
    job = box.launch(step("a", hold), step("b", "sleep 600"))
    both_run(box, job)
    lose(job)
    box.control(job, "retry", args={"step": "a"})
    wait_until(lambda: len(pids(box, "a")) == 2, "a runs again")
    box.release_go()
    box.hurry(job, "failed")
    assert states(box, job) == ["succeeded", "failed"]
    assert len(pids(box, "b")) == 1, "b was lost, and nobody asked for it"
    assert not alive(pids(box, "b")[0])


def test_a_service_that_had_ended_well_runs_again_for_the_step_that_needs_it(box: Box) -> None:
    web = service("echo up and ready; exec sleep 600")
    job = box.launch(web, user("[ -e go ]", retry={"attempts": 1}))
    box.hurry(job, "failed")
    box.release_go()
    answer = box.control(job, "retry", args={"step": "use"})
    assert answer["steps"] == ["serve", "use"]
    box.hurry(job, "succeeded")
    with pytest.raises(Refused, match="nothing to retry") as refusal:
        box.control(job, "retry", args={"step": "use"})
    assert refusal.value.code == "wrong_state"


def test_a_retry_in_the_backoff_ends_the_wait_of_the_step_that_it_names(box: Box) -> None:
    again = {"attempts": 9}
    job = box.launch(step("a", "kill -9 $$", retry=again), step("b", "kill -9 $$", retry=again))
    wait_until(lambda: states(box, job) == ["retry_wait", "retry_wait"], "both wait")
    box.control(job, "retry", args={"step": "a"})
    wait_until(lambda: len(pids(box, "a")) == 2, "a is tried again")
    assert len(pids(box, "b")) == 1
    box.control(job, "stop")
    box.hurry(job, "stopped")


def test_a_step_in_its_backoff_is_skipped_once_its_service_has_failed_for_good(box: Box) -> None:
    job = box.launch(
        service("echo up and ready; until [ -e go ]; do sleep 0.05; done; exit 3", retry={"attempts": 1}),
        user("echo x >> uses; exit 7", retry={"attempts": 9}),
    )
    wait_until(lambda: box.step(job, 1)["state"] == "retry_wait", "the user is to be tried again")
    box.release_go()
    wait_until(lambda: "finished" in job.kinds(), "the job has ended without waiting for that")
    assert states(box, job) == ["failed", "skipped"]
    assert (box.work / "uses").read_text().split() == ["x"], "nothing was started against a dead service"


def test_a_service_in_its_backoff_is_not_started_for_nobody(box: Box) -> None:
    job = box.launch(service("echo $$ >> a.pids; exit 3", retry={"attempts": 9}), user("true"))
    wait_until(lambda: box.step(job)["state"] == "retry_wait", "the service is to be tried again")
    box.control(job, "stop", args={"step": "use"})
    wait_until(lambda: "finished" in job.kinds(), "the job has ended at once")
    assert states(box, job) == ["skipped", "stopped"]
    assert len(pids(box, "a")) == 1
    assert not events(job, "attempt_started")[1:]
