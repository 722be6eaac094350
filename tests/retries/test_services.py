"""A service and the steps that need it: the model is not loaded twice, and nobody pays for somebody else's death."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from tests.retries.box import Box, events
from tests.support.jobdir import JobDir, alive, kill
from tests.support.waiting import wait_until

SERVICE = "echo $$ >> serve.pids; echo up and ready; exec sleep 600"


def service(run: str = SERVICE, **more: Any) -> dict[str, Any]:
    return {"name": "serve", "run": run, "service": {"ready": {"log": "up and ready"}, "timeout_s": 30}, "grace_s": 1.0, **more}


def user(run: str, **more: Any) -> dict[str, Any]:
    return {"name": "use", "run": run, "needs": ["serve"], "grace_s": 1.0, **more}


def pids(box: Box, name: str = "serve.pids") -> list[int]:
    """Pids that a step wrote down, one per start."""
    path = box.work / name
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def test_a_healthy_service_is_kept_while_its_user_is_tried_again(box: Box) -> None:
    job = box.launch(service(), user("[ $ORCH_ATTEMPT = 3 ] || kill -9 $$"))
    box.hurry(job, "succeeded")
    assert len(pids(box)) == 1, "the service was started once"
    assert box.verdicts(job, 1) == ["killed", "killed", None]
    assert job.kinds().count("step_ready") == 1
    assert not alive(pids(box)[0]), "and stopped at the end"


def test_the_death_of_a_service_costs_its_users_nothing(box: Box) -> None:
    """The user is allowed one attempt: the service dies under it, comes back, and the user still has that attempt."""
    job = box.launch(
        service(), user("echo $$ >> use.pids; until [ -e go ]; do sleep 0.05; done", retry={"attempts": 1})
    )
    wait_until(lambda: pids(box, "use.pids"), "the user runs")
    kill(pids(box)[0])
    wait_until(lambda: box.step(job, 0)["state"] == "retry_wait", "the service is to be tried again")
    wait_until(lambda: box.step(job, 1)["state"] == "queued", "the user waits for it")
    assert "serve" in (events(job, "stop_sent")[0]["reason"])
    assert not alive(pids(box, "use.pids")[0])
    box.skip_backoff(job)
    wait_until(lambda: len(pids(box, "use.pids")) == 2, "the user runs again, when the service is ready")
    assert len(pids(box)) == 2
    box.release_go()
    box.hurry(job, "succeeded")
    assert box.verdicts(job, 1) == ["killed", None], "it is told that orch ended it, and why"


def test_a_user_that_felt_it_first_is_not_charged_either(box: Box) -> None:
    """The user loses its connection and ends before the service's main process is gone."""
    run = (
        "echo x >> uses; [ $(wc -l < uses) -gt 2 ] && exit 0; "
        "echo 'requests.exceptions.ConnectionError: Connection refused'; touch failed; exit 1"
    )
    job = box.launch(service(), user(run, retry={"attempts": 2}))
    job.wait_for_kind("retry_scheduled")
    kill(pids(box)[0])
    wait_until(lambda: job.kinds().count("retry_scheduled") == 2, "the service is to be tried again, too")
    box.hurry(job, "succeeded")
    assert len(pids(box)) == 2


def test_a_service_that_served_in_between_is_not_given_up(box: Box) -> None:
    """Five deaths, samples of its user between each: that is no crash loop (three in vain would be)."""
    use = (
        "mkdir -p out; n=$(ls out | wc -l); [ $n -ge 5 ] && exit 0; touch out/$n; "
        "kill -9 $(tail -1 serve.pids); sleep 600"
    )
    job = box.launch(service(), user(use, done={"count": "out/*", "at_least": 5}))
    box.hurry(job, "succeeded", within_s=120)
    assert len(pids(box)) == 6


def test_a_service_in_a_crash_loop_is_given_up_and_its_users_are_skipped(box: Box) -> None:
    job = box.launch(service("echo $$ >> serve.pids; echo up and ready; sleep 0.5; kill -9 $$"), user("sleep 600"))
    box.hurry(job, "failed", within_s=120)
    assert len(pids(box)) == 3
    assert [box.step(job, index)["state"] for index in (0, 1)] == ["failed", "skipped"]


def test_a_retry_of_one_step_takes_its_service_along_and_leaves_the_others(box: Box) -> None:
    def steps() -> list[dict[str, Any]]:
        once = {"attempts": 1}
        return [
            {"name": "other", "run": "echo x >> others; exit 1", "retry": once},
            service(),
            user("echo x >> uses; [ $(wc -l < uses) -gt 1 ]", retry=once),
            {"name": "after", "run": "touch after", "needs": ["use"], "retry": once},
        ]

    job: JobDir = box.launch(*steps())
    box.hurry(job, "failed")
    box.control(job, "retry", args={"step": "use"})
    box.hurry(job, "failed")
    assert [box.step(job, index)["state"] for index in range(4)] == ["failed", "succeeded", "succeeded", "succeeded"]
    assert (box.work / "others").read_text().split() == ["x"]
    assert (box.work / "after").exists()
    assert len(pids(box)) == 2


def cpu_s(pid: int) -> float:
    """CPU time of a process in s, from ticks of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def test_a_probe_under_way_when_its_service_ends_costs_nothing(box: Box) -> None:
    """The probe's answer wakes the loop, and nobody takes it any more: the loop must not spin until the next try."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        rule = {"http": f"http://127.0.0.1:{silent.getsockname()[1]}/"}  # it connects, and is never answered
        job = box.launch({**service("sleep 1; exit 3"), "service": {"ready": rule, "timeout_s": 30}}, user("true"))
        job.wait_for_kind("retry_scheduled")
        before = cpu_s(job.supervisor)
        job.wait_for_kind("attempt_started", count=2, within_s=60)
        assert cpu_s(job.supervisor) - before < 0.4, "most of a backoff of 5 s is slept through"
