"""How often hosts are looked at, as users can tell: not more often than the inventory says, all at once when many are
asked, and after this laptop slept once before anything is judged.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.services.resolve import FoundJob
from orchestrator.services.session import Session
from orchestrator.services.watch import Watch
from tests.cli.terminal import Terminal
from tests.faults.stage import Stage, writes
from tests.sshd.server import free_port
from tests.support.jobdir import JobDir, agents
from tests.support.laptop import ORCH, Laptop
from tests.support.waiting import wait_until

HOLD_S = 2.0
UNTIL_GO = "until [ -e go ]; do sleep 0.1; done"
CHANGING = "i=0; until [ -e go ]; do i=$((i+1)); echo '::orch {\"phase\": \"p'$i'\", \"state\": \"start\"}'; sleep 0.3; done"


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with Stage(tmp_path / "stage", step={"run": UNTIL_GO, "files": []}) as ready:
        yield ready


def running(stage: Stage) -> JobDir:
    """A job that says that it runs."""
    job = stage.launch()
    wait_until(lambda: job.state == "running", "the job runs", seen=job.kinds)
    return job


def the_agents_answers(stage: Stage, known: set[int]) -> tuple[int, int]:
    """(pid, answers so far) of the agent that came last."""
    [pid] = wait_until(lambda: set(agents(stage.root)) - known, "a new agent serves the root")
    return pid, writes(pid)


# ------------------------------------------------------------------------------------------------------------ the pace


def test_a_host_is_not_looked_at_more_often_than_it_allows(stage: Stage) -> None:
    entry = {**stage.sshd.inventory_entry(**stage.entry), "ssh": f"{stage.sshd.user}@127.0.0.1:{stage.cable.port}"}
    shy = Laptop(stage.folder / "shy", {"box": {**entry, "min_look_interval_s": 3}})
    work = stage.folder / "busy"
    work.mkdir()
    plan = stage.laptop.plan([{"name": "work", "run": CHANGING}], name="busy", workdir=str(work))
    job = stage.laptop.launch(plan)
    counts, took_s = {}, {}
    for laptop, wish in ((shy, "1"), (stage.laptop, "60")):
        before = set(agents(stage.root))
        argv = [ORCH, "watch", job, "--interval", wish]
        with Terminal(argv, environment=laptop.environment, cwd=laptop.folder) as terminal:
            terminal.shows(f"{job}  running")
            pid, start = the_agents_answers(stage, before)
            terminal.type("   ")  # asking to look now is no exception
            began = time.monotonic()
            while time.monotonic() < began + 10:
                terminal.read(0.2)
            counts[laptop] = writes(pid) - start
            took_s[laptop] = time.monotonic() - began
            terminal.type("q")
            assert terminal.ended() == 0
    (work / "go").touch()
    # What is counted are writes: beside the looks the first answer's rest and the facts of the machine.
    assert 1 <= counts[shy] <= took_s[shy] / 3 + 4, "one every 3 s, whatever happens there and whatever --interval says"
    assert counts[stage.laptop] > counts[shy], "a host without such a wish is looked at when something happens"


def test_status_asks_twenty_hosts_at_once_and_shows_the_unreachable_as_last_seen(stage: Stage) -> None:
    job = running(stage)
    entry = {**stage.sshd.inventory_entry(**stage.entry), "ssh": f"{stage.sshd.user}@127.0.0.1:{stage.cable.port}"}
    seen = stage.laptop.status(job.id)
    assert seen["state"] == "running"
    with slow_and_dead() as port:
        dead = {**entry, "ssh": f"{stage.sshd.user}@127.0.0.1:{port}"}
        stage.laptop.write_inventory({f"dead{number}": dead for number in range(19)} | {"box": entry})
        began = time.monotonic()
        answer = stage.laptop.run("status", "--json", within_s=120)
        took_s = time.monotonic() - began
    assert answer.status == 3
    assert took_s < 19 * HOLD_S, "hosts are asked in parallel: one after the other, the dead alone take longer"
    reachable = {host["name"]: host["reachable"] for host in answer.json["hosts"]}
    assert (sum(reachable.values()), reachable["box"], len(reachable)) == (1, True, 20)
    [found] = answer.json["jobs"]
    assert (found["id"], found["reachable"]) == (job.id, True)

    stage.laptop.write_inventory({"box": {**entry, "ssh": f"{stage.sshd.user}@127.0.0.1:{free_port()}"}})
    answer = stage.laptop.run("status", "--json", within_s=60)
    [found] = answer.json["jobs"]
    assert (found["state"], found["reachable"], found["id"]) == ("running", False, job.id)
    assert found["age_s"] > 0
    people = stage.laptop.run("status", within_s=60)
    assert people.status == 3
    assert re.search(rf"{job.id}  running  on box .*\(host unreachable, last seen [\dmhs.]+ ago\)", people.out), people
    stage.job = job
    (stage.work / "go").touch()


@contextlib.contextmanager
def slow_and_dead() -> Iterator[int]:
    """A port that takes every connection, says nothing and closes it after `HOLD_S`."""

    def hold(connection: socket.socket) -> None:
        time.sleep(HOLD_S)
        connection.close()

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=hold, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)


# ------------------------------------------------------------------------------------------------------------ the sleep


class Sleeper:
    """A laptop whose wall clock runs ahead of its monotonic one, as after a suspension, with a watch open."""

    def __init__(self, stage: Stage, watch: Watch, patch: pytest.MonkeyPatch) -> None:
        self.stage, self.watch, self.patch = stage, watch, patch
        self.links: list[str] = []

    def sleep(self, seconds: float) -> None:
        real = time.time
        self.patch.setattr(time, "time", lambda: real() + seconds)

    def until(self, link: str) -> None:
        """Take updates until the host's link is this."""

        def seen() -> bool:
            self.links += [update.link for update in self.watch.next(0.05) if update.link]
            return link in self.links

        wait_until(seen, f"the link is {link}", within_s=40, seen=lambda: self.links)


@pytest.fixture
def sleeper(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sleeper]:
    job = running(stage)
    for name in ("HOME", "ORCH_HOME", "ORCH_INVENTORY"):
        monkeypatch.setenv(name, stage.laptop.environment[name])
    with Session(stage.laptop.inventory) as session, Watch(session, [FoundJob(job.id, "box")]) as watch:
        sleeper = Sleeper(stage, watch, monkeypatch)
        sleeper.until("connected")
        sleeper.links.clear()
        yield sleeper
        (stage.work / "go").touch()
        wait_until(lambda: watch.next(0.05) is not None and watch.done(), "the job's end is seen", within_s=60)
        assert watch.exit_status() == 0
        monkeypatch.undo()


def test_a_laptop_that_wakes_looks_before_it_judges(sleeper: Sleeper) -> None:
    # While it slept the router forgot the connection: what is under way fails, a new one works.
    sleeper.sleep(3 * 3600)
    sleeper.stage.cable.cut_now()
    sleeper.until("waking")
    sleeper.until("connected")
    assert sleeper.links == ["waking", "connected"], "nobody was called unreachable"
    assert sleeper.watch.view.jobs[sleeper.stage.the_job().id]["state"] == "running"


def test_a_laptop_that_wakes_without_network_says_so_after_one_look(sleeper: Sleeper) -> None:
    sleeper.stage.cable.refuse(True)
    sleeper.sleep(3600)
    sleeper.stage.cable.cut_now()
    sleeper.until("reconnecting")
    assert sleeper.links == ["waking", "reconnecting"]
    assert sleeper.watch.view.jobs[sleeper.stage.the_job().id]["state"] == "running"
    sleeper.stage.cable.refuse(False)
    sleeper.until("connected")
