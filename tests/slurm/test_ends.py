"""How an allocation can end under a job, and what becomes of the job: nothing is lost before Slurm says so."""

from __future__ import annotations

import os
import signal

from tests.slurm.cluster import Cluster
from tests.slurm.conftest import JOB, Login, events_of, submissions, until, view
from tests.support.host_side import Agent, attempts, ended, look
from tests.support.jobdir import alive
from tests.support.waiting import wait_until

ONCE = "echo $$ >pid; test -e second && exit 0; touch second up; exec sleep 600"
"""Runs for ever the first time, ends well the second time."""


def running_node(cluster: Cluster, number: str) -> str:
    """The node that a job runs on."""
    return cluster.run("squeue", "-h", "-j", number, "-o", "%N").strip()


def verdict(agent: Agent, attempt: int = 0) -> dict[str, object]:
    """Verdict of an attempt of the first step."""
    return dict(view(agent)["steps"][0]["attempts"][attempt]["verdict"])


def test_a_killed_batch_script_is_noticed_and_the_job_goes_on(cluster: Cluster, login: Login, agent: Agent) -> None:
    """SIGKILL of the batch script: what it left running is ended, the attempt is lost with Slurm's words, a new one runs."""
    job = login.launch(agent, [{"name": "work", "run": ONCE}])
    wait_until((login.work / "up").exists, "the step runs")
    job.wait_for_kind("attempt_started")
    work = int((login.work / "pid").read_text())
    os.kill(job.supervisor, signal.SIGKILL)
    until(agent, "succeeded", within_s=30)
    assert not alive(work)
    assert [state for state, _ in attempts(agent, JOB)] == ["lost", "succeeded"]
    assert verdict(agent)["signature"] == "slurm_failed"
    assert len(submissions(job)) == 2


def test_a_node_that_fails_is_named_and_the_job_runs_again(cluster: Cluster, login: Login, agent: Agent) -> None:
    """NODE_FAIL: the verdict names the node that is down; the job waits for another and succeeds there."""
    job = login.launch(agent, [{"name": "work", "run": ONCE}])
    wait_until((login.work / "up").exists, "the step runs")
    job.wait_for_kind("attempt_started")
    [number] = submissions(job)
    node = running_node(cluster, number)
    cluster.node(node, "down")
    try:
        until(agent, "succeeded", within_s=40)
        assert verdict(agent)["signature"] == "slurm_node_fail"
        assert verdict(agent)["class"] == "killed"
        assert f"({node} down: test" in str(verdict(agent)["summary"])
        assert len(submissions(job)) == 2
    finally:
        cluster.node(node, "resume")
        wait_until(lambda: set(cluster.node_states()) <= {"idle", "mixed"}, "the node is back", within_s=20)


def test_requeued_by_slurm_where_the_plan_goes_on_by_itself(cluster: Cluster, login: Login, agent: Agent) -> None:
    """`restart_after_reboot: true` leaves preemption to Slurm's own requeue: same job, next attempt, no agent needed."""
    slurm = {"gres": "gpu:4", "sbatch": ["--nodelist=n1"]}
    job = login.launch(agent, [{"name": "work", "run": ONCE}], slurm=slurm, restart_after_reboot=True)
    wait_until((login.work / "up").exists, "the step runs")
    [number] = submissions(job)
    other = cluster.run("sbatch", "--parsable", "-p", "urgent", "-w", "n1", "--gres=gpu:4", "-o", "/dev/null", "--wrap", "sleep 600").strip()
    wait_until(lambda: cluster.queue().get(other) == "RUNNING", "the urgent job runs", within_s=20)
    wait_until(lambda: cluster.queue()[number] == "PENDING", "ours waits again", within_s=20)
    assert until(agent, "queued")["steps"][0]["waiting"].startswith(f"Slurm job {number}: pending")
    cluster.run("scancel", other)
    until(agent, "succeeded", within_s=40)
    assert submissions(job) == [number]
    assert attempts(agent, JOB)[-1] == ("succeeded", 0)


def test_preempted_without_requeue_is_submitted_again(cluster: Cluster, login: Login, agent: Agent) -> None:
    """`--no-requeue` is the default: a preempted job ends in Slurm, and orch submits it anew."""
    slurm = {"gres": "gpu:4", "sbatch": ["--nodelist=n1"]}
    job = login.launch(agent, [{"name": "work", "run": ONCE}], slurm=slurm)
    wait_until((login.work / "up").exists, "the step runs")
    [first] = submissions(job)
    other = cluster.run("sbatch", "--parsable", "-p", "urgent", "-w", "n1", "--gres=gpu:4", "-o", "/dev/null", "--wrap", "sleep 600").strip()
    wait_until(lambda: cluster.queue().get(other) == "RUNNING", "the urgent job runs", within_s=20)
    wait_until(lambda: view(agent)["state"] == "queued" and len(submissions(job)) == 2, "it is submitted again", within_s=20)
    assert cluster.queue()[first] == "PREEMPTED"
    cluster.run("scancel", other)
    until(agent, "succeeded", within_s=40)


def test_time_limit_saves_and_goes_on_in_a_follow_on_submission(cluster: Cluster, login: Login, agent: Agent) -> None:
    """Near the limit the step is told to save; what it kept counts, so the job is submitted again, from the node itself."""
    run = "trap 'touch saved; exit 143' TERM; test -e saved && { touch out-2; exit 0; }; touch out-1 up; while true; do sleep 0.1; done"
    step = {"name": "work", "run": run, "done": {"count": "out-*", "equals": 2}}
    agent.close()  # nobody looks meanwhile
    job = login.launch(login.agent(), [step], slurm={"time_limit": "1", "sbatch": ["--signal=B:USR2@52"]})
    assert ended(job, within_s=60) == "succeeded"
    assert len(submissions(job)) == 2
    found = [(event["data"]["state"], event["data"].get("verdict")) for event in events_of(job, "attempt_judged")]
    assert found == [("stopped", None), ("succeeded", None)]


def test_time_limit_without_anything_kept_is_a_failure_with_advice(login: Login, agent: Agent) -> None:
    """A second allocation would go the same way: fail, and say which number to raise."""
    job = login.launch(agent, [{"name": "work", "run": "exec sleep 600"}, {"name": "then", "run": "true", "needs": ["work"]}], slurm={"time_limit": "1", "sbatch": ["--signal=B:USR2@55"]})
    assert ended(job, within_s=60) == "failed"
    [failed] = events_of(job, "step_failed")
    assert failed["data"]["verdict"]["signature"] == "slurm_time_limit"
    assert "time_limit" in failed["data"]["verdict"]["advice"]
    assert events_of(job, "step_skipped")
    assert len(submissions(job)) == 1


def test_a_controller_that_is_down_proves_nothing(cluster: Cluster, login: Login, agent: Agent) -> None:
    """Running and waiting jobs keep their states while slurmctld is away, with a note; back again, all goes on."""
    login.launch(agent, "touch up; until test -e go; do sleep 0.1; done", JOB)
    wait_until((login.work / "up").exists, "the step runs")
    login.launch(agent, "true", JOB + "b", slurm={"sbatch": ["--hold"]})
    wait_until(lambda: "JobHeldUser" in str(view(agent, JOB + "b")["steps"][0]["waiting"]), "the reason is known")
    assert view(agent, JOB + "b")["state"] == "queued"
    cluster.stop_controller()
    try:
        wait_until(lambda: (view(agent, JOB + "b")["slurm"] or {}).get("error"), "the error is seen", within_s=30)
        assert view(agent, JOB)["state"] == "running"
        waiting = look(agent, JOB + "b")
        assert waiting["state"]["state"] == "queued"
        assert waiting["lost"] is None
        assert "Slurm does not answer" in waiting["state"]["steps"][0]["waiting"]
        (login.work / "go").touch()
        until(agent, "succeeded", JOB)  # the directory tells, without Slurm
    finally:
        cluster.start_controller()
    wait_until(lambda: not (view(agent, JOB + "b")["slurm"] or {}).get("error"), "Slurm answers again", within_s=30)
    assert view(agent, JOB + "b")["state"] == "queued"
    agent.request("control", job=JOB + "b", action="stop", args={})
    until(agent, "stopped", JOB + "b")
