"""`orch launch --any`: the first host whose gate is open, and no second copy when an earlier launch is in doubt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hosts import Hosts
from tests.support.jobdir import JobDir
from tests.support.laptop import Answer
from tests.support.waiting import wait_until

STEP = {"name": "work", "run": "touch $ORCH_WORKDIR/started; sleep 0.1", "gpus": 1}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    entry = {"gpus": 1, "group": "cards"}
    with Hosts(tmp_path_factory.mktemp("any"), {"first": entry, "second": entry, "third": entry}) as ready:
        yield ready


@pytest.fixture
def foreigner() -> Iterator[subprocess.Popen[bytes]]:
    """Somebody else's process."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; time.sleep(600)"], env={"PATH": os.defpath}
    )
    yield process
    process.kill()
    process.wait()


@pytest.fixture(autouse=True)
def all_free(hosts: Hosts) -> None:
    for smi in hosts.smi.values():
        smi.save(processes=[])


def launch(hosts: Hosts, plan: Path, *more: str, group: str = "cards") -> Answer:
    return hosts.laptop.run("launch", plan, "--any", group, "--json", "--no-preflight", *more, within_s=90)


def plan_of(hosts: Hosts, name: str, **step: object) -> Path:
    """A plan that names no host and may run on any."""
    path = hosts.laptop.folder / f"{name}.yaml"
    workdir = f"{hosts.folder}/{name}"
    path.write_text(json.dumps({"name": name, "workdir": workdir, "steps": [{**STEP, **step}]}))
    return path


def ids(hosts: Hosts) -> dict[str, set[str]]:
    """The jobs of each host."""
    return {name: {job.id for job in hosts.jobs(name)} for name in hosts.entries}


def test_the_first_open_gate_wins_and_the_closed_are_said(
    hosts: Hosts, foreigner: subprocess.Popen[bytes]
) -> None:
    plan = plan_of(hosts, "wins")
    hosts.smi["first"].hold(0, foreigner.pid, 40_000)
    before = ids(hosts)
    answer = launch(hosts, plan)
    assert answer.status == 0, answer
    assert answer.json["host"] == "second"
    assert answer.json["adopted"] is False
    assert "first is passed over" in answer.err
    assert f"pid {foreigner.pid}" in answer.err
    assert "third" not in answer.err
    hosts.laptop.run("wait", answer.json["job"], expect=0)
    assert {**ids(hosts), "second": before["second"]} == before

    # With its own job on the card a host would queue the next one: that is no open gate either.
    for smi in hosts.smi.values():
        smi.save(processes=[])
    busy = launch(hosts, plan_of(hosts, "busy", run="until [ -e go ]; do sleep 0.05; done")).json
    assert busy["host"] == "first"
    mine = wait_until(lambda: JobDir(hosts.root("first"), busy["job"]).main, "the job runs")
    hosts.smi["first"].hold(0, mine, 40_000)
    assert launch(hosts, plan_of(hosts, "next")).json["host"] == "second"
    (hosts.folder / "busy" / "go").touch()
    hosts.laptop.run("wait", busy["job"], expect=0)


def test_all_closed_is_exit_4_with_a_reason_each(hosts: Hosts, foreigner: subprocess.Popen[bytes]) -> None:
    plan = plan_of(hosts, "closed")
    before = ids(hosts)
    hosts.smi["first"].hold(0, foreigner.pid, 40_000)
    hosts.smi["third"].hold(0, foreigner.pid, 500)
    hosts.sshd["second"].stop()
    try:
        answer = launch(hosts, plan)
    finally:
        hosts.sshd["second"].start()
    assert answer.status == 4, answer
    assert answer.json["error"]["code"] == "gate_closed"
    message = answer.json["error"]["message"]
    assert [line.split(":")[0].strip() for line in message.splitlines()[1:]] == ["first", "second", "third"]
    assert message.count(f"pid {foreigner.pid}") == 2
    assert ids(hosts) == before
    preflight = hosts.laptop.run("launch", plan, "--any", "first,third", expect=4)
    assert "no host of first,third is free" in preflight.err


def test_unreachable_hosts_are_said_and_skipped(hosts: Hosts) -> None:
    hosts.sshd["first"].stop()
    try:
        answer = launch(hosts, plan_of(hosts, "away"))
        assert answer.status == 0, answer
        assert answer.json["host"] == "second"
        assert "first is passed over" in answer.err
        alone = launch(hosts, plan_of(hosts, "alone"), group="first")
        assert alone.status == 3, alone
    finally:
        hosts.sshd["first"].start()


def test_a_launch_in_doubt_is_taken_up_where_it_was_sent(
    hosts: Hosts, foreigner: subprocess.Popen[bytes]
) -> None:
    """The laptop told nobody of the job on the second host; the first is free by now, and is not asked."""
    plan = plan_of(hosts, "doubt", run="echo $$ >> starts; until [ -e go ]; do sleep 0.05; done")
    hosts.smi["first"].hold(0, foreigner.pid, 40_000)
    began = launch(hosts, plan).json
    assert began["host"] == "second"
    forget_confirmation(hosts, began["job"])
    hosts.smi["first"].save(processes=[])
    again = launch(hosts, plan)
    assert again.json == {"schema": 1, "job": began["job"], "host": "second", "adopted": True}

    forget_confirmation(hosts, began["job"])
    hosts.sshd["second"].stop()
    try:
        cut = launch(hosts, plan)
    finally:
        hosts.sshd["second"].start()
    assert cut.status == 3, "unknown whether it runs there: no other host is tried"
    assert "may run there" in cut.err
    wait_until((hosts.folder / "doubt" / "starts").exists, "it runs")  # which makes the folder
    (hosts.folder / "doubt" / "go").touch()
    hosts.laptop.run("wait", began["job"], expect=0)
    assert len((hosts.folder / "doubt" / "starts").read_text().split()) == 1


def forget_confirmation(hosts: Hosts, job: str) -> None:
    """As if the laptop had died before it told the id."""
    import sqlite3

    with sqlite3.connect(hosts.laptop.store / "ledger.sqlite3") as ledger:
        changed = ledger.execute("UPDATE jobs SET confirmed_at = NULL WHERE id = ?", (job,))
        assert changed.rowcount == 1
    ledger.close()


def test_groups_of_the_inventory_and_contradictions(hosts: Hosts) -> None:
    laptop = hosts.laptop
    plan = plan_of(hosts, "groups")
    inventory = json.loads(laptop.inventory.read_text())
    own = laptop.folder / "own.yaml"
    own.write_text(json.dumps({**inventory, "groups": {"mine": ["third", "first"]}}))
    assert launch(hosts, plan, "--inventory", str(own), group="mine").json["host"] == "third"
    own.write_text(json.dumps({**inventory, "groups": {"mine": ["fourth"]}}))
    wrong = launch(hosts, plan, "--inventory", str(own), group="mine")
    assert wrong.status == 2
    assert "groups.mine: no host is called 'fourth'" in wrong.err
    unknown = launch(hosts, plan, group="card")
    assert unknown.status == 2
    assert "did you mean 'cards'" in unknown.err
    laptop.environment["ORCH_HOST"] = "second"
    usual = launch(hosts, plan)
    del laptop.environment["ORCH_HOST"]
    assert usual.json["host"] == "first", "the usual host is only that"
    assert "say one of them" in launch(hosts, plan, "--host", "first").err
    assert "free now" in launch(hosts, plan, "--wait", "5m").err
