"""Jobs that are submitted as one array: one `sbatch`, and after that each is a job of its own."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.conftest import JOB, Login, events_of, submissions, until, view
from tests.support.host_side import Agent, Refused, attempts
from tests.support.jobdir import JobDir, alive
from tests.support.waiting import wait_until

RUN = "echo $$ >pid-$ME; touch up-$ME; until test -e go; do sleep 0.1; done"


def name(number: int) -> str:
    """Id of one of the jobs."""
    return f"{JOB}-{number}"


def launch(login: Login, agent: Agent, number: int, count: int, run: str = RUN, **slurm: object) -> JobDir:
    """Launch one of an array's jobs."""
    step = {"name": "work", "run": run, "env": {"ME": str(number)}, "retry": {"attempts": 2}}
    first = number // 10 * 10 + 1  # the tests share the queue: 1, 2, 3 are of one array, 11, 12 of another
    jobs = [name(other) for other in range(first, first + count)]
    return login.launch(agent, [step], name(number), slurm={"array": jobs, **slurm})


def array_rows(cluster: Cluster, first: int = 1) -> dict[str, tuple[str, str]]:
    """{id: (array, state)} of the tasks of our arrays, ended ones included."""
    text = cluster.run("squeue", "-h", "-r", "--states=all", f"--name=orch-{name(first)}.array", "-o", "%i %F %T")
    return {row: (array, state) for row, array, state in map(str.split, text.splitlines())}


def test_one_array_whose_tasks_are_stopped_killed_and_retried_alone(cluster: Cluster, login: Login, agent: Agent) -> None:
    """Nothing is submitted before the last job is there; then each waits, ends and comes back without the others."""
    with cluster.full():
        jobs = [launch(login, agent, number, 4, gres="gpu:1") for number in (1, 2, 3, 4)]
        rows = array_rows(cluster)
        [array] = {of for of, _ in rows.values()}
        ids = [f"{array}_{number}" for number in (1, 2, 3, 4)]
        assert rows == dict.fromkeys(ids, (array, "PENDING"))
        assert [submissions(job) for job in jobs] == [[task] for task in ids]
        shown = cluster.run("scontrol", "show", "job", ids[1])
        assert f"ArrayJobId={array}" in shown
        wait_until(lambda: (view(agent, name(2))["slurm"] or {})["reason"] in ("Resources", "Priority"), "the reason is known", within_s=20)
        assert view(agent, name(2))["steps"][0]["waiting"].startswith(f"Slurm job {ids[1]}: pending, ")
        agent.request("control", job=name(3), action="stop", args={})
        cluster.run("scancel", ids[3])  # by hand, and Slurm keeps no record of it
        assert until(agent, "stopped", name(3))["steps"][0]["attempts"] == []
        until(agent, "stopped", name(4))
        assert [event["data"]["reason"] for event in events_of(jobs[3], "stop_requested")] == [f"cancelled in Slurm (scancel {ids[3]})"]
        assert [array_rows(cluster)[task][1] for task in ids[:2]] == ["PENDING", "PENDING"], "the others still wait"
    wait_until(lambda: all((login.work / f"up-{number}").exists() for number in (1, 2)), "two run", within_s=30)
    runs = f"runs as Slurm job {ids[1]} on n"
    wait_until(lambda: any(note["text"].startswith(runs) for note in view(agent, name(2))["notes"]), "the task knows its id")
    main = int((login.work / "pid-1").read_text())
    jobs[0].wait_for_kind("attempt_started")
    os.kill(jobs[0].supervisor, signal.SIGKILL)  # the batch script of one task
    agent.request("control", job=name(2), action="stop", args={})
    until(agent, "stopped", name(2))
    assert array_rows(cluster)[ids[1]][1] in ("COMPLETED", "COMPLETING", "RUNNING")
    agent.request("control", job=name(3), action="retry", args={"set": {"work.run": "echo changed >changed"}})
    until(agent, "succeeded", name(3))
    assert (login.work / "changed").exists()
    (login.work / "go").touch()
    until(agent, "succeeded", name(1), within_s=30)
    assert not alive(main)
    assert [state for state, _ in attempts(agent, name(1))] == ["lost", "succeeded"]
    [verdict] = [one["verdict"] for one in view(agent, name(1))["steps"][0]["attempts"] if one["verdict"]]
    assert verdict["summary"].startswith(f"Slurm job {ids[0]}: ")
    assert [len(submissions(job)) for job in jobs] == [2, 1, 2, 1]
    assert all("_" not in submissions(jobs[at])[1] for at in (0, 2)), "a retry is a submission of its own"


def test_a_launch_that_is_interrupted_and_sent_again_makes_one_array(cluster: Cluster, login: Login, tmp_path: Path) -> None:
    """Cut off between two jobs, and while `sbatch` answered: every job is sent again, and there is one array."""
    agent = login.agent_that_misses_an_answer(tmp_path / "bin")
    for number in (1, 2, 1, 2):
        launch(login, agent, 10 + number, 3, array_limit=1)
    assert array_rows(cluster, 11) == {}
    assert view(agent, name(10 + 1))["steps"][0]["waiting"].startswith("not yet submitted to Slurm")
    with pytest.raises(Refused, match="Socket timed out"):
        launch(login, agent, 13, 3, array_limit=1)
    jobs = [launch(login, agent, 10 + number, 3, array_limit=1) for number in (1, 2, 3)]
    rows = array_rows(cluster, 11)
    [array] = {of for of, _ in rows.values()}
    assert set(rows) == {f"{array}_{number}" for number in (1, 2, 3)}
    assert [submissions(job) for job in jobs] == [[f"{array}_{number}"] for number in (1, 2, 3)]
    wait_until((login.work / "up-11").exists, "the first task runs")
    wait_until(lambda: (view(agent, name(10 + 3))["slurm"] or {})["reason"] == "JobArrayTaskLimit", "the limit is the reason")
    assert "as many tasks of its array run as array_limit allows" in view(agent, name(10 + 3))["steps"][0]["waiting"]
    (login.work / "go").touch()
    for number in (1, 2, 3):
        until(agent, "succeeded", name(10 + number))


def test_a_refused_array_is_submitted_with_what_the_next_launch_says(cluster: Cluster, login: Login, tmp_path: Path) -> None:
    """Slurm refuses the submission though its test passed; the inventory is corrected, the launch typed again."""
    refuse = 'case "$*" in *--test-only*) ;; *--time=9*) echo "sbatch: error: AssocMaxSubmitJobLimit" >&2; exit 1;; esac'
    agent = login.agent_behind(tmp_path / "bin", sbatch=f'{refuse}\nexec /usr/bin/sbatch "$@"')
    for number in (31, 32):
        launch(login, agent, number, 3, time_limit="9")
    with pytest.raises(Refused, match="AssocMaxSubmitJobLimit") as refused:
        launch(login, agent, 33, 3, time_limit="9")
    assert "time_limit of the host box in the inventory" in refused.value.error["hint"]
    assert not (login.root / "jobs" / name(33)).exists()
    now = {"time_limit": "7", "array": [name(31), name(32), name(34)]}  # the laptop gives the refused one another id
    jobs = [launch(login, agent, number, 3, **now) for number in (31, 32, 34)]
    [array] = {of for of, _ in array_rows(cluster, 31).values()}
    assert [submissions(job) for job in jobs] == [[f"{array}_{number}"] for number in (1, 2, 3)]
    assert set(cluster.run("squeue", "-h", "-r", f"--name=orch-{name(31)}.array", "-o", "%l").split()) == {"7:00"}
    (login.work / "go").touch()
    for number in (31, 32, 34):
        until(agent, "succeeded", name(number))


def test_an_array_that_never_reached_slurm_is_submitted_again_as_one(cluster: Cluster, login: Login, tmp_path: Path) -> None:
    """Not while it may still arrive, and not while Slurm is silent; then every job of it together."""
    folder, programs = tmp_path / "bin", {}
    for program in ("sbatch", "squeue"):
        lost = f'case "$*" in *--test-only*) ;; *) echo "{program}: error: $(cat {folder}/says)" >&2; exit 1;; esac'
        programs[program] = f'if test -e {folder}/says; then\n{lost}\nfi\nexec /usr/bin/{program} "$@"'
    agent = login.agent_behind(folder, **programs)
    (folder / "says").write_text("Socket timed out on send/recv operation")
    jobs = [launch(login, agent, number, 3) for number in (21, 22)]
    with pytest.raises(Refused, match="Socket timed out"):
        launch(login, agent, 23, 3)
    jobs.append(JobDir(login.root, name(23)))
    (folder / "says").unlink()
    with pytest.raises(Refused, match="may still arrive"):
        launch(login, agent, 21, 3)
    intents = [jobs[0].path / "slurm/array/intent.json", *(job.path / "slurm/1/intent.json" for job in jobs)]
    for intent in intents:  # long ago
        record = json.loads(intent.read_text())
        intent.write_text(json.dumps({**record, "at": record["at"] - 100}))
    (folder / "says").write_text("Unable to contact slurm controller (connect failure)")
    with pytest.raises(Refused, match="Unable to contact"):
        launch(login, agent, 22, 3)
    assert all(intent.exists() for intent in intents), "what may have arrived stays claimed"
    (folder / "says").unlink()
    for number in (22, 21, 23):
        launch(login, agent, number, 3)
    rows = array_rows(cluster, 21)
    [array] = {of for of, _ in rows.values()}
    assert [submissions(job) for job in jobs] == [[f"{array}_{number}"] for number in (1, 2, 3)]
    assert len(rows) == 3
    (login.work / "go").touch()
    for number in (21, 22, 23):
        until(agent, "succeeded", name(number))
