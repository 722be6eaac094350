"""The fault matrix, records: what lies in the job directory is torn, halved, missing, garbled or from the future.

One row: while the job is `running`, `ended` or `lost`, damage is done; then status must still tell the truth, and
(after `orch retry` where the job was lost) the job must end well.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.conftest import Cells
from tests.faults.stage import Stage, kill
from tests.support.jobdir import JobDir
from tests.support.waiting import wait_until


def halve(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2])


def torn_last_event(job: JobDir) -> None:
    with (job.path / "events.jsonl").open("ab") as file:
        file.write(b'{"seq":99,"at":"2026-11-29T16:00:00.000Z","kind":"finished","data":{"state":"fai')


def garbage_between_events(job: JobDir) -> None:
    path = job.path / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"\x00\xff{not json\n", b"[]\n", b"17\n", *lines[1:]]))


def event_from_the_future(job: JobDir) -> None:
    event = {**job.events()[-1], "kind": "teleported", "data": {"to": ["mars"]}, "colour": "red"}
    event["seq"] += 1
    with (job.path / "events.jsonl").open("ab") as file:
        file.write(json.dumps(event).encode() + b"\n")


def half_state(job: JobDir) -> None:
    halve(job.path / "state.json")


def empty_state(job: JobDir) -> None:
    (job.path / "state.json").write_bytes(b"")


def no_state(job: JobDir) -> None:
    (job.path / "state.json").unlink()


def state_of_another_type(job: JobDir) -> None:
    (job.path / "state.json").write_bytes(b'["running"]\n')


def half_result(job: JobDir) -> None:
    halve(job.path / "result.json")


def no_result(job: JobDir) -> None:
    (job.path / "result.json").unlink()


def half_attempt(job: JobDir) -> None:
    halve(job.log(1, "work").with_name("attempt.json"))


def no_attempt(job: JobDir) -> None:
    job.log(1, "work").with_name("attempt.json").unlink()


def no_log(job: JobDir) -> None:
    job.log(1, "work").unlink()


def garbage_in_control(job: JobDir) -> None:
    (job.path / "control" / "0.json").write_bytes(b"\x00\xff")
    (job.path / "control" / "1.json").write_bytes(b'{"v":1,"id":"1","action":"explode","args":{}}\n')
    (job.path / "control" / "2.json").write_bytes(b'{"v":1,"id":"2","action":"stop","args":{"step":"no such"}}\n')


def no_reserve(job: JobDir) -> None:
    (job.path / "reserve").unlink(missing_ok=True)


# when, damage
TABLE: list[tuple[str, Callable[[JobDir], None]]] = [
    ("running", half_state),
    ("running", empty_state),
    ("running", no_state),
    ("running", state_of_another_type),
    ("running", garbage_in_control),
    ("running", half_attempt),
    ("running", no_log),
    ("running", no_reserve),
    ("ended", torn_last_event),
    ("ended", half_state),
    ("ended", no_state),
    ("ended", half_result),
    ("ended", no_result),
    ("ended", half_attempt),
    ("lost", torn_last_event),
    ("lost", garbage_between_events),
    ("lost", event_from_the_future),
    ("lost", half_state),
    ("lost", no_state),
    ("lost", half_attempt),
    ("lost", no_attempt),
    ("lost", garbage_in_control),
]


@dataclass(frozen=True)
class Cell:
    """One damage to the job directory."""

    when: str
    damage: Callable[[JobDir], None]

    def play(self, folder: Path) -> list[str]:
        """The states that `status` told: after the damage, and at the end."""
        with Stage(folder) as stage:
            job = stage.launch()
            stage.reached("load")
            if self.when == "ended":
                stage.go()
                stage.settled(job)
                wait_until(lambda: not job.supervisors(), "every record is written")
            if self.when == "lost":
                supervisor, main = job.supervisor, job.main
                kill(supervisor)
                kill(main)
                wait_until(lambda: not job.marked() and not job.supervisors(), "both are gone")
            self.damage(job)
            told = [stage.laptop.status(job.id)["state"]]
            if self.when == "lost":
                stage.laptop.run("retry", job.id, expect=0)
            stage.go()
            stage.laptop.run("wait", job.id, expect=0)
            told.append(stage.outcome().state)
            stage.nothing_left()
            assert job.record("result.json")["state"] == "succeeded", "any look makes the result again"
            return told


def cell_id(cell: Cell) -> str:
    return f"{cell.when}-{cell.damage.__name__}"


@pytest.mark.cell
@pytest.mark.parametrize("cell", [Cell(*row) for row in TABLE], ids=cell_id)
def test_damaged_record(cell: Cell, cells: Cells, request: pytest.FixtureRequest) -> None:
    first = {"running": "running", "ended": "succeeded", "lost": "lost"}[cell.when]
    assert cells.result(request.node.nodeid) == [first, "succeeded"]


def half_spec(job: JobDir) -> None:
    halve(job.path / "spec.json")


def spec_is_a_list(job: JobDir) -> None:
    (job.path / "spec.json").write_bytes(b"[]\n")


def spec_of_version_99(job: JobDir) -> None:
    (job.path / "spec.json").write_bytes(json.dumps({**job.record("spec.json"), "v": 99}).encode())


# damage -> what the message must name
SPECS: list[tuple[Callable[[JobDir], None], tuple[str, ...]]] = [
    (half_spec, ("spec.json",)),
    (spec_is_a_list, ("spec.json",)),
    (spec_of_version_99, ("99", "1")),
]


@dataclass(frozen=True)
class SpecCell:
    """A job whose spec cannot be read, beside one that is fine."""

    damage: Callable[[JobDir], None]
    words: tuple[str, ...]

    def play(self, folder: Path) -> None:
        with Stage(folder) as stage:
            job = stage.launch()
            stage.reached("load")
            healthy = stage.laptop.launch(stage.laptop.plan([{**stage.step, "run": "true", "files": []}], name="healthy"))
            stage.laptop.run("wait", healthy, expect=0)
            original = (job.path / "spec.json").read_bytes()
            self.damage(job)
            seen = stage.laptop.run("status", "--json", expect=0)
            states = {found["id"]: found["state"] for found in seen.json["jobs"]}
            assert states[healthy] == "succeeded", "one bad job hides no other"
            answer = stage.laptop.run("status", job.id)
            text = answer.out + answer.err
            assert "Traceback" not in text
            assert all(word in text for word in self.words), answer
            kill(job.supervisor)
            wait_until(lambda: not job.supervisors(), "the supervisor is gone")
            refused = stage.laptop.run("retry", job.id)
            assert refused.status in {2, 3, 5}, refused
            assert refused.one_screen, refused
            (job.path / "spec.json").write_bytes(original)
            stage.laptop.run("retry", job.id, expect=0)
            stage.go()
            stage.laptop.run("wait", job.id, expect=0)
            stage.nothing_left()


def spec_cell_id(cell: SpecCell) -> str:
    return cell.damage.__name__


@pytest.mark.cell
@pytest.mark.parametrize("cell", [SpecCell(*row) for row in SPECS], ids=spec_cell_id)
def test_unreadable_spec(cell: SpecCell, cells: Cells, request: pytest.FixtureRequest) -> None:
    cells.result(request.node.nodeid)
