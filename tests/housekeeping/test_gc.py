"""`orch gc`: what is old and done goes, what runs or cannot be judged stays, and nothing goes without --apply."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.host_side import JOB, Agent, HostSide, ended
from tests.support.jobdir import JobDir, kill
from tests.support.laptop import Laptop
from tests.support.waiting import wait_until

DAY_S = 86400.0
OTHER = "feedfeedfeedfeed"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[HostSide]:
    with HostSide(tmp_path) as side:
        yield side


def age(path: Path, days: float) -> None:
    """As if nothing below had been touched for some days."""
    then = time.time() - days * DAY_S
    for item in [*path.rglob("*"), path]:
        os.utime(item, (then, then), follow_symlinks=False)


def end_long_ago(host: HostSide, job: str, days: float) -> None:
    """As if the job had ended some days ago: its events say so."""
    folder = host.root / "jobs" / job
    then = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(time.time() - days * DAY_S))
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    (folder / "events.jsonl").write_text(
        "".join(json.dumps({**event, "at": then}) + "\n" for event in events)
    )
    (folder / "state.json").unlink()
    age(folder, days)


def collect(
    agent: Agent, days: float = 30.0, *, apply: bool = False
) -> tuple[dict[str, str], dict[str, str]]:
    """({name: kind} that goes, {name: why} that stays)."""
    answer = agent.request("gc", older_than_s=days * DAY_S, apply=apply)
    return {row["name"]: row["kind"] for row in answer["items"]}, {
        row["name"]: row["why"] for row in answer["kept"]
    }


def run(host: HostSide, agent: Agent, job: str, line: str = "true", **more: Any) -> None:
    """A job that has ended."""
    assert ended(host.launch(agent, line, job, **more)) in {"succeeded", "failed"}


def test_old_jobs_go_and_younger_ones_stay(host: HostSide) -> None:
    agent = host.agent()
    for job in ("old-good", "old-bad", "young"):
        run(host, agent, job, "false" if job == "old-bad" else "true")
    end_long_ago(host, "old-good", 40)
    end_long_ago(host, "old-bad", 31)
    end_long_ago(host, "young", 29)
    work = host.work / "result"
    work.write_text("mine")

    goes, stays = collect(agent)
    assert goes == {"old-good": "job", "old-bad": "job"}
    assert stays == {"young": "ended 29 days ago"}
    why = {row["name"]: row["why"] for row in agent.request("gc", older_than_s=30 * DAY_S, apply=False)["items"]}
    assert why == {
        "old-good": "succeeded, ended 40 days ago (asked for: more than 30 days)",
        "old-bad": "failed, ended 31 days ago (asked for: more than 30 days)",
    }
    for asked_s, told in ((0, "any age"), (5400, "more than 1h30m"), (36 * 3600, "more than 1d12h"), (86400, "more than 1 day")):
        rows = agent.request("gc", older_than_s=asked_s, apply=False)["items"]
        [said] = [row["why"] for row in rows if row["name"] == "young"]
        assert said == f"succeeded, ended 29 days ago (asked for: {told})"
    assert {path.name for path in (host.root / "jobs").iterdir()} == {"old-good", "old-bad", "young"}, (
        "a dry run"
    )

    assert collect(agent, apply=True)[0] == goes
    assert {path.name for path in (host.root / "jobs").iterdir()} == {"young"}
    assert work.read_text() == "mine"
    assert set(agent.request("look")["jobs"]) == {"young"}
    assert collect(agent)[0] == {}


def test_what_runs_is_lost_or_unreadable_never_goes(host: HostSide) -> None:
    agent = host.agent()
    running = host.launch(agent, "sleep 600", "running")
    lost = host.launch(agent, "sleep 600", "lost")
    run(host, agent, "leaver")
    run(host, agent, "newer")
    wait_until(lambda: running.state == lost.state == "running", "both run and say so")
    kill(lost.supervisor)
    wait_until(lambda: not lost.supervisors(), "the supervisor is gone")
    spec = host.root / "jobs/newer/spec.json"
    spec.write_text(json.dumps({**json.loads(spec.read_text()), "v": 99}))
    end_long_ago(host, "leaver", 90)
    import subprocess

    # A process of an ended job that still lives: started by hand from its shell, say.
    left = subprocess.Popen(["sleep", "600"], env={"ORCH_JOB": "leaver", "PATH": os.environ["PATH"]})
    try:
        wait_until(lambda: b"sleep" in Path(f"/proc/{left.pid}/cmdline").read_bytes(), "it runs")
        goes, stays = collect(agent, 0.0, apply=True)
    finally:
        left.kill()
        left.wait()
    assert not set(goes) & {"running", "lost", "leaver", "newer"}
    assert "is running" in stays["running"]
    assert "orch retry, orch stop" in stays["lost"]
    assert "processes of it still run" in stays["leaver"]
    assert "version 99" in stays["newer"]
    assert running.state == "running"
    assert collect(agent, 0.0, apply=True)[0] == {"leaver": "job"}


def test_a_retry_that_comes_in_between_wins(host: HostSide) -> None:
    """gc holds the job's lock while it deletes; where a supervisor holds it, the job stays."""
    import fcntl

    agent = host.agent()
    run(host, agent, JOB)
    end_long_ago(host, JOB, 40)
    with (host.root / "jobs" / JOB / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        goes, stays = collect(agent, apply=True)
    assert (goes, stays) == ({}, {JOB: "somebody took it up just now"})
    assert (host.root / "jobs" / JOB / "spec.json").exists()


def test_releases_uploads_and_overlays(host: HostSide) -> None:
    agent = host.agent()
    run(host, agent, "young")
    releases, blobs, overlays = host.root / "releases", host.root / "blobs", host.root / "overlays"
    for name in ("0" * 16, OTHER, "1" * 16, ".tmp-" + "2" * 16 + "-x"):
        (releases / name).mkdir(parents=True)
        (releases / name / "code.py").write_text("x")
    (overlays / "o1").mkdir(parents=True)
    for name in ("a" * 64, "b" * 64 + ".part", "c" * 64, "notes.txt"):
        (blobs / name).write_bytes(b"z" * 5000)
    age(releases, 40)
    age(blobs, 40)
    age(overlays, 40)
    spec = host.root / "jobs/young/spec.json"
    spec.write_text(json.dumps({**json.loads(spec.read_text()), "release": OTHER}))
    assert agent.request("have", sha256=["c" * 64])["missing"] == []  # about to be used by a launch

    import subprocess

    using = subprocess.Popen(["sh", "-c", "sleep 600; true", str(releases / ("1" * 16))])
    try:
        goes, _ = collect(agent, apply=True)
    finally:
        using.kill()
        using.wait()
    assert goes == {
        "0" * 16: "release", ".tmp-" + "2" * 16 + "-x": "upload", "a" * 64: "upload", "b" * 64 + ".part": "upload", "o1": "overlay",
    }  # fmt: skip
    assert {path.name for path in releases.iterdir()} == {OTHER, "1" * 16}
    assert {path.name for path in blobs.iterdir()} == {"c" * 64, "notes.txt"}


def test_a_job_that_cannot_be_read_keeps_every_release(host: HostSide) -> None:
    agent = host.agent()
    run(host, agent, "broken")
    (host.root / "jobs/broken/spec.json").write_text("{")
    (host.root / "releases" / OTHER).mkdir(parents=True)
    age(host.root, 90)
    goes, stays = collect(agent, apply=True)
    assert goes == {}
    assert "it may need this release" in stays[OTHER]


def test_a_broken_off_run_is_finished_by_the_next(host: HostSide) -> None:
    agent = host.agent()
    run(host, agent, JOB)
    end_long_ago(host, JOB, 40)
    doomed = host.root / "jobs" / f".gc-{JOB}-77"
    (host.root / "jobs" / JOB).rename(doomed)
    assert agent.request("look")["jobs"] == {}
    assert collect(agent, apply=True)[0] == {doomed.name: "leftover"}
    assert not doomed.exists()


def test_a_link_in_the_jobs_folder_is_not_followed(host: HostSide, tmp_path: Path) -> None:
    agent = host.agent()
    run(host, agent, JOB)
    end_long_ago(host, JOB, 40)
    (host.root / "jobs" / JOB).rename(tmp_path / "elsewhere")
    (host.root / "jobs" / JOB).symlink_to(tmp_path / "elsewhere")
    goes, stays = collect(agent, apply=True)
    assert (goes, stays[JOB]) == ({}, "is no folder of ours")
    assert (tmp_path / "elsewhere/spec.json").exists()


def test_the_command(shared_sshd: Any, tmp_path: Path) -> None:
    root = tmp_path / "root"
    laptop = Laptop(tmp_path / "laptop", {"box": shared_sshd.inventory_entry(root=str(root))})
    plan = laptop.plan([{"name": "work", "run": "true"}], workdir=str(tmp_path / "work"))
    job = laptop.launch(plan)
    laptop.run("wait", job, expect=0)
    wait_until(lambda: not JobDir(root, job).supervisors(), "the supervisor has left")
    document = laptop.run("gc", "--older-than", "0s", "--json", expect=0).json
    assert set(document) == {"schema", "apply", "older_than_s", "hosts", "ledger"}
    assert set(document["hosts"][0]) == {"name", "reachable", "error", "items", "kept", "bytes"}
    assert {frozenset(item) for item in document["hosts"][0]["items"]} == {
        frozenset({"kind", "name", "bytes", "age_s", "why"})
    }
    assert set(document["ledger"]) == {"path", "bytes", "jobs", "forgotten"}
    told = laptop.run("gc", "--older-than", "0s", expect=0)
    assert job in told.out
    assert "nothing was deleted" in told.out
    assert (root / "jobs" / job).exists()
    [host] = laptop.run("gc", "box", "box", "--older-than", "0s", "--apply", "--json", expect=0).json["hosts"]
    assert [item["name"] for item in host["items"] if item["kind"] == "job"] == [job]
    assert not (root / "jobs" / job).exists()
    assert host["bytes"] > 0
    assert job in laptop.run("history", expect=0).out, "what was is remembered here"
    assert laptop.run("gc", "--older-than", "soon").status == 2
