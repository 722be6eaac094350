"""The fault matrix, stops: `orch stop` works at every point and is final, also against jobs that resist.

One row: where the job stands -> (attempt states at the end, the program's own idea of how it was stopped).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import Cells
from tests.faults.stage import Stage, kill
from tests.support.jobdir import JobDir
from tests.support.waiting import wait_until

STUBBORN = "trap '' TERM INT HUP; touch reached-load worker; while :; do sleep 0.1; done"
ESCAPEES = (
    "setsid sleep 997 & (sleep 997 &) ; env -i setsid sleep 997 & nohup setsid -f sleep 997; "
    "touch reached-load worker; until [ -e go-load ]; do sleep 0.05; done"
)
# point -> step keys, states of the attempts afterwards
TABLE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "start": ({}, ["stopped"]),
    "load": ({}, ["stopped"]),
    "work": ({}, ["stopped"]),
    "save": ({}, ["stopped"]),
    "finish": ({}, ["succeeded"]),
    "backoff": ({"retry": {"attempts": 3}}, ["failed"]),
    "second try": ({"retry": {"attempts": 3}}, ["failed", "stopped"]),
    "queued behind another step": ({}, ["stopped"]),
    "stubborn": ({"run": STUBBORN, "files": [], "grace_s": 0.3}, ["stopped"]),
    "escapees": ({"run": ESCAPEES, "files": []}, ["stopped"]),
    "supervisor killed": ({}, ["lost"]),
}


@dataclass(frozen=True)
class Cell:
    """A stop at one point."""

    point: str

    def play(self, folder: Path) -> tuple[str, list[str]]:
        step, _ = TABLE[self.point]
        with Stage(folder, step=step) as stage:
            if self.point == "queued behind another step":
                later = {**stage.step, "name": "later", "needs": ["work"], "run": "touch ran-later", "files": []}
                stage.plan = stage.laptop.plan([stage.step, later], **stage.top)
            job = stage.launch()
            if self.point != "start":
                stage.reached("load")
            if self.point in ("work", "save", "finish"):
                stage.go("load", *(["work"] if self.point != "work" else []))
                stage.reached("work" if self.point == "work" else "save")
            if self.point in ("backoff", "second try"):
                kill(job.main)
                job.wait_for_kind("retry_scheduled")
            if self.point == "second try":
                job.wait_for_kind("attempt_started", count=2)
            if self.point == "finish":
                supervisor = job.supervisor
                stage.stop_process(supervisor)
                stage.go("save")
                wait_until((stage.work / "saved").exists, "the program is through")
                wait_until(lambda: not job.marked(), "its processes are gone")
                stage.laptop.run("stop", job.id, expect=0)
                stage.continue_process(supervisor)
            if self.point == "supervisor killed":
                kill(job.supervisor)
                wait_until(lambda: not job.supervisors(), "the supervisor is gone")
            stage.laptop.run("stop", job.id, "--wait", expect=0)
            stage.laptop.run("stop", job.id, "--wait", expect=0)  # twice is the same as once
            stage.nothing_left()
            leftovers = [pid for pid in Path("/proc").glob("[0-9]*") if _sleeps_997_of(pid, stage.work)]
            assert not leftovers, leftovers
            assert not (stage.work / "ran-later").exists()
            status = stage.laptop.run("wait", job.id).status
            assert status == (0 if self.point == "finish" else 1)
            seen = stage.outcome()
            states = [state for state, _, _ in seen.attempts]
            if self.point == "backoff" and "attempt_started" in before(job, "stop_requested")[-1:]:
                states.remove("stopped")  # a machine so busy that `orch stop` took longer than the backoff
            return seen.state, states


def before(job: JobDir, kind: str) -> list[str]:
    """Starts and retries that came before the first event of a kind."""
    kinds = job.kinds()
    return [one for one in kinds[: kinds.index(kind)] if one in ("attempt_started", "retry_scheduled")]


def _sleeps_997_of(proc: Path, work: Path) -> bool:
    try:
        argv = (proc / "cmdline").read_bytes().split(b"\0")
        return argv[:2] == [b"sleep", b"997"] and (proc / "cwd").resolve() == work.resolve()
    except OSError:
        return False


@pytest.mark.cell
@pytest.mark.parametrize("cell", [Cell(point) for point in TABLE], ids=lambda cell: cell.point)
def test_stop(cell: Cell, cells: Cells, request: pytest.FixtureRequest) -> None:
    state = "succeeded" if cell.point == "finish" else "stopped"
    told, attempts = cells.result(request.node.nodeid)
    if cell.point == "start":  # the stop may come before or after the first attempt began
        assert attempts in ([], ["stopped"])
        assert told == state
    else:
        assert (told, attempts) == (state, TABLE[cell.point][1])
