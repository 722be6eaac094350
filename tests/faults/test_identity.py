"""The fault matrix, clocks and identities: the clock jumps, a pid is somebody else's by now, the host was rebooted.

The clock is moved by libfaketime, for agent and supervisor only (a job's own sleeps would be moved as well); the
monotonic clock is left alone, as the kernel leaves it. A reused pid and another boot are records that are forged to say so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import Cells
from tests.faults.stage import Stage, alive, kill
from tests.support.jobdir import JobDir
from tests.support.waiting import wait_until

HOUR_S = 3600
REAL_CLOCK = {"LD_PRELOAD": ""}
"""Environment of the step: its program keeps the real clock."""


def python_with_a_clock(folder: Path) -> Path:
    """A python3 whose wall clock is moved by the number of seconds in ``folder/clock``."""
    [library] = Path("/usr/lib").glob("*/faketime/libfaketime.so.1")
    set_clock(folder, 0)
    script = folder / "python-with-a-clock"
    script.write_text(
        "#!/bin/sh\n"
        f"export LD_PRELOAD='{library}' FAKETIME_TIMESTAMP_FILE='{folder}/clock' FAKETIME_NO_CACHE=1\n"
        f"export FAKETIME_DONT_FAKE_MONOTONIC=1 DONT_FAKE_MONOTONIC=1\nexec '{sys._base_executable}' \"$@\"\n"
    )
    script.chmod(0o755)
    return script


def set_clock(folder: Path, offset_s: int) -> None:
    (folder / "clock.new").write_text(f"{offset_s:+d}s\n")
    (folder / "clock.new").replace(folder / "clock")


def clock_jumps_under_a_running_job(offset_s: int) -> Callable[[Path], None]:
    def play(folder: Path) -> None:
        folder.mkdir()
        python = python_with_a_clock(folder)
        with Stage(folder / "stage", step={"timeout_s": 600, "env": REAL_CLOCK}, entry={"agent_python": str(python)}) as stage:
            job = stage.launch()
            stage.reached("load")
            with stage.waiting() as controller:
                set_clock(folder, offset_s)
                stage.go("load")
                stage.reached("work")
                seen = stage.laptop.status(job.id)
                assert seen["state"] == "running"
                stage.go()
                assert controller.ended().status == 0
            outcome = stage.outcome()
            assert (outcome.state, outcome.starts) == ("succeeded", 1)
            monos = [event["mono"] for event in job.events()]
            assert monos == sorted(monos)
            assert stage.laptop.status(job.id)["age_s"] >= 0
            stage.nothing_left()

    return play


def clock_jumps_back_during_a_backoff(folder: Path) -> None:
    """A wait of 5 s is 5 s, whatever the wall clock says meanwhile."""
    folder.mkdir()
    python = python_with_a_clock(folder)
    with Stage(folder / "stage", step={"retry": {"attempts": 2}, "env": REAL_CLOCK}, entry={"agent_python": str(python)}) as stage:
        job = stage.launch()
        stage.reached("load")
        kill(job.main)
        job.wait_for_kind("retry_scheduled")
        set_clock(folder, -HOUR_S)
        stage.go()
        job.wait_for_kind("attempt_started", count=2)
        mono = {event["kind"]: event["mono"] for event in job.events()}  # the last of each kind
        assert 2 < mono["attempt_started"] - mono["retry_scheduled"] < 30
        stage.laptop.run("wait", job.id, expect=0)
        stage.nothing_left()


def forge(job: JobDir, change: Callable[[dict[str, Any]], None]) -> None:
    """Apply ``change`` to every process identity in the job's records."""

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if "start_ticks" in value:
                change(value)
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)

    events = job.events()
    walk(events)
    (job.path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    for path in [job.path / "state.json", job.path / "lock", job.log(1, "work").with_name("attempt.json")]:
        record = json.loads(path.read_bytes())
        walk(record)
        path.write_text(json.dumps(record) + "\n")


def lost_job(stage: Stage) -> tuple[JobDir, int, int]:
    """A job whose supervisor and main process were killed; (job, supervisor, main)."""
    job = stage.launch()
    stage.reached("load")
    supervisor, main = job.supervisor, job.main
    kill(supervisor)
    kill(main)
    wait_until(lambda: not job.supervisors() and not job.marked(), "both are gone")
    return job, supervisor, main


def pid_of_the_main_process_is_reused(folder: Path) -> None:
    """An innocent process has the dead main process's pid (and leads a session of that number): it is left alone."""
    with Stage(folder) as stage:
        job, _supervisor, main = lost_job(stage)
        innocent = subprocess.Popen(["sleep", "300"], start_new_session=True)
        try:
            swap = {main: innocent.pid}
            forge(job, lambda process: process.update(pid=swap.get(process["pid"], process["pid"])))
            for event_file in [job.path / "state.json"]:
                event_file.write_text(event_file.read_text().replace(f'"pid": {main}', f'"pid": {innocent.pid}'))
            seen = stage.laptop.status(job.id)
            assert seen["state"] == "lost"
            assert seen["lost"]["processes"] == [], "the innocent is not ours"
            stage.laptop.run("retry", job.id, expect=0)
            stage.go()
            stage.laptop.run("wait", job.id, expect=0)
            assert innocent.poll() is None, "an innocent process was killed"
        finally:
            innocent.kill()
            innocent.wait()
        stage.nothing_left()


def pid_of_the_supervisor_is_reused(folder: Path) -> None:
    """A living process has the dead supervisor's pid: the job is lost all the same, and the process is left alone."""
    with Stage(folder) as stage:
        job, supervisor, _ = lost_job(stage)
        innocent = subprocess.Popen(["sleep", "300"])
        try:
            forge(job, lambda process: process.update(
                pid=innocent.pid if process["pid"] == supervisor else process["pid"]))
            assert stage.laptop.status(job.id)["state"] == "lost"
            stage.laptop.run("stop", job.id, "--wait")
            stage.laptop.run("retry", job.id, expect=0)
            stage.go()
            stage.laptop.run("wait", job.id, expect=0)
            assert innocent.poll() is None, "an innocent process was killed"
        finally:
            innocent.kill()
            innocent.wait()
        stage.nothing_left()


def host_was_rebooted(folder: Path) -> None:
    """Records of another boot: lost, and the reboot is named; `retry` goes on."""
    with Stage(folder) as stage:
        job, _, _ = lost_job(stage)
        old = "11111111-2222-3333-4444-555555555555"
        forge(job, lambda process: process.update(boot_id=old))
        state = job.record("state.json")
        (job.path / "state.json").write_text(json.dumps({**state, "boot_id": old}))
        answer = stage.laptop.run("status", job.id, expect=0)
        assert stage.laptop.status(job.id)["state"] == "lost"
        assert "reboot" in answer.out, answer
        stage.laptop.run("retry", job.id, expect=0)
        stage.go()
        stage.laptop.run("wait", job.id, expect=0)
        stage.nothing_left()


def marker_of_another_job(folder: Path) -> None:
    """A process that only carries a similar marker, or our job's id in its arguments, is never touched."""
    with Stage(folder) as stage:
        job = stage.launch()
        stage.reached("load")
        environment = {**os.environ, "ORCH_JOB": job.id + "x"}
        others = [
            subprocess.Popen(["sleep", "300"], env=environment),
            subprocess.Popen(["sh", "-c", "sleep 300; :", job.id]),
        ]
        try:
            stage.laptop.run("stop", job.id, "--wait", expect=0)
            stage.nothing_left()
            assert all(other.poll() is None and alive(other.pid) for other in others)
        finally:
            for other in others:
                for child in Path(f"/proc/{other.pid}/task/{other.pid}/children").read_text().split():
                    kill(int(child))
                other.kill()
                other.wait()


TABLE: dict[str, Callable[[Path], None]] = {
    "clock an hour ahead": clock_jumps_under_a_running_job(HOUR_S),
    "clock an hour back": clock_jumps_under_a_running_job(-HOUR_S),
    "clock back during a backoff": clock_jumps_back_during_a_backoff,
    "pid of the main process reused": pid_of_the_main_process_is_reused,
    "pid of the supervisor reused": pid_of_the_supervisor_is_reused,
    "host rebooted": host_was_rebooted,
    "marker of another job": marker_of_another_job,
}


@dataclass(frozen=True)
class Cell:
    """One scene."""

    name: str

    def play(self, folder: Path) -> None:
        TABLE[self.name](folder)


@pytest.mark.cell
@pytest.mark.parametrize("cell", [Cell(name) for name in TABLE], ids=lambda cell: cell.name)
def test_identity(cell: Cell, cells: Cells, request: pytest.FixtureRequest) -> None:
    cells.result(request.node.nodeid)
