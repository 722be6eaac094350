"""The life of a job in Slurm, seen from the login node: submitted, waiting, running, stopped, retried."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.conftest import JOB, Login, events_of, submissions, until, view
from tests.support.host_side import Agent, Refused, attempts, ended, look
from tests.support.waiting import wait_until

STAYS = "echo up; touch up; exec sleep 600"


def test_a_job_runs_in_its_allocation(cluster: Cluster, login: Login, agent: Agent) -> None:
    """Supervisor and work run inside the batch job; log, result and states are those of any job."""
    job = login.launch(agent, "echo on $SLURMD_NODENAME in $SLURM_JOB_ID")
    assert ended(job) == "succeeded"
    [number] = submissions(job)
    assert job.log(1, "work").read_text() in (f"on n1 in {number}\n", f"on n2 in {number}\n")
    assert attempts(agent, JOB) == [("succeeded", 0)]
    wait_until(lambda: cluster.queue()[number] == "COMPLETED", "Slurm's job has completed")
    note = view(agent)["notes"][0]["text"]
    assert note.startswith(f"runs as Slurm job {number} on n")
    assert not (job.path / "secrets.json").exists()


def test_a_waiting_job_says_why_and_until_when_and_can_be_stopped(cluster: Cluster, login: Login, agent: Agent) -> None:
    """PENDING shows Slurm's reason in words and the expected start; a stop takes it out of the queue, nothing ran."""
    with cluster.full():
        job = login.launch(agent, STAYS, slurm={"gres": "gpu", "time_limit": "30"})
        wait_until(lambda: (view(agent)["slurm"] or {})["reason"] in ("Resources", "Priority"), "the reason is known", within_s=20, seen=lambda: view(agent))
        wait_until(lambda: view(agent)["slurm"]["start"] is not None, "the start is forecast", within_s=20)
        state = view(agent)
        [number] = submissions(job)
        assert state["state"] == "queued"
        assert look(agent, JOB)["alive"] is True
        waiting = state["steps"][0]["waiting"]
        assert waiting.startswith(f"Slurm job {number}: pending, ")
        assert "expected start 20" in waiting
        agent.request("control", job=JOB, action="stop", args={})
        assert ended(job) == "stopped"
        assert cluster.queue()[number] == "CANCELLED"
        assert attempts(agent, JOB) == []


def test_stop_of_a_running_job_climbs_the_steps_own_ladder(cluster: Cluster, login: Login, agent: Agent) -> None:
    """TERM to the step, its own time to save, and Slurm only sees a batch script that ends by itself."""
    job = login.launch(agent, "trap 'sleep 1; touch saved; exit 0' TERM; touch up; while true; do sleep 0.1; done")
    wait_until((login.work / "up").exists, "the step runs")
    answer = agent.request("control", job=JOB, action="stop", args={})
    assert answer["acknowledged"] is True
    assert ended(job) == "stopped"
    assert (login.work / "saved").exists()
    [number] = submissions(job)
    wait_until(lambda: cluster.queue()[number] == "COMPLETED", "Slurm's job has completed")


def test_a_step_in_an_allocation_gets_more_time(cluster: Cluster, login: Login, agent: Agent) -> None:
    """The supervisor in the allocation hears of it, and the step outlives its first limit."""
    step = {"name": "work", "run": "touch up; sleep 10; touch late", "timeout_s": 8.0, "retry": {"attempts": 1}}
    job = login.launch(agent, [step])
    wait_until((login.work / "up").exists, "the step runs")
    answer = agent.request("control", job=JOB, action="extend", args={"timeout_s": 600.0})
    assert (answer["acknowledged"], answer["limits_s"]) == (True, {"work": 608.0})
    assert ended(job) == "succeeded"
    assert (login.work / "late").exists()


def test_scancel_by_hand_stops_the_job(cluster: Cluster, login: Login, agent: Agent) -> None:
    """Whoever cancels in Slurm has stopped the job: it is not submitted again, and the reason is told."""
    job = login.launch(agent, STAYS)
    wait_until((login.work / "up").exists, "the step runs")
    job.wait_for_kind("attempt_started")
    [number] = submissions(job)
    cluster.run("scancel", number)
    state = until(agent, "stopped")
    assert [event["data"]["reason"] for event in events_of(job, "stop_requested")] == [f"cancelled in Slurm (scancel {number})"]
    assert len(submissions(job)) == 1
    assert state["steps"][0]["attempts"][0]["state"] == "stopped"


def test_a_failed_attempt_is_retried_inside_the_allocation(login: Login, agent: Agent) -> None:
    """Retries are the supervisor's: no second place in the queue."""
    step = {"name": "work", "run": "test -e again || { touch again; kill -9 $$; }"}
    job = login.launch(agent, [step])
    assert ended(job, within_s=30) == "succeeded"
    assert attempts(agent, JOB) == [("failed", -9), ("succeeded", 0)]
    assert len(submissions(job)) == 1


def test_retry_with_a_change_is_a_new_submission(login: Login, agent: Agent) -> None:
    """A job that is over has no allocation any more; `orch retry` gets it another, with what was changed."""
    job = login.launch(agent, "exit 3")
    assert ended(job) == "failed"
    answer = agent.request("control", job=JOB, action="retry", args={"set": {"work.run": "touch fine"}})
    assert answer["acknowledged"] is True
    until(agent, "succeeded")
    assert (login.work / "fine").exists()
    assert len(submissions(job)) == 2
    with pytest.raises(Refused, match="nothing to retry"):
        agent.request("control", job=JOB, action="retry", args={})


def test_a_stop_during_a_retrys_wait(login: Login, agent: Agent) -> None:
    """Stopped between two attempts: at once, and for good."""
    job = login.launch(agent, [{"name": "work", "run": "kill -9 $$", "retry": {"attempts": 5}}])
    job.wait_for_kind("retry_scheduled")
    agent.request("control", job=JOB, action="stop", args={})
    assert ended(job) == "stopped"


def test_what_slurm_refuses_is_said_and_leaves_nothing(cluster: Cluster, login: Login, agent: Agent) -> None:
    """An unknown partition is Slurm's own words and the line to correct; there is no job afterwards."""
    with pytest.raises(Refused, match=r"(?i)invalid partition") as refusal:
        login.launch(agent, "true", slurm={"partition": "nowhere"})
    assert refusal.value.code == "slurm_refused"
    assert "inventory" in refusal.value.error["hint"]
    assert login.jobs() == []


def test_a_lost_answer_of_sbatch_never_makes_a_second_job(cluster: Cluster, login: Login, tmp_path: Path) -> None:
    """`sbatch` arrives, its answer does not: the same launch again finds the job by its name."""
    agent = login.agent_that_misses_an_answer(tmp_path / "bin")
    with pytest.raises(Refused, match="Socket timed out") as refusal:
        login.launch(agent, STAYS)
    assert refusal.value.code == "slurm_unanswered"
    login.launch(agent, STAYS)
    wait_until((login.work / "up").exists, "the step runs")
    names = cluster.run("squeue", "-h", "--states=all", f"--name=orch-{JOB}.1", "-o", "%T").split()
    assert names.count("RUNNING") == 1
    until(agent, "running")


def test_many_looks_ask_slurm_once(cluster: Cluster, login: Login, tmp_path: Path) -> None:
    """The queue is read once for all jobs and all agents of a host, and not again before the interval is over."""
    folder = tmp_path / "bin"
    slurm = {"queue_interval_s": 600, "gres": "gpu"}
    counted = {"squeue": f'echo "$@" >>{folder}/asked\nexec /usr/bin/squeue "$@"'}
    agent = login.agent_behind(folder, **counted)
    with cluster.full():
        for number in range(3):
            login.launch(agent, STAYS, f"{JOB}-{number}", slurm=slurm)
        for _ in range(3):
            other = login.agent_behind(folder, **counted)
            assert len(other.request("look")["jobs"]) == 3
            other.close()
        assert len((folder / "asked").read_text().splitlines()) == 1
        for number in range(3):
            agent.request("control", job=f"{JOB}-{number}", action="stop", args={})
