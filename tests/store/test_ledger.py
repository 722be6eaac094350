"""The ledger: intents that survive, memories that never go backwards, and a broken file that stops nobody."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.errors import LocalError
from orchestrator.store.ledger import SCHEMA_VERSION, Ledger

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
PROJECT = Path(__file__).parents[2]


def view(job: str, seq: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "id": job,
        "name": "kimi",
        "host": "box",
        "state": "running",
        "seq": seq,
        "created_at": "2026-11-29T10:00:00Z",
        **more,
    }


def intend(
    ledger: Ledger, job: str, *, plan: str = "p1", host: str = "box", created_at: str = "2026-11-29T10:00:00Z"
) -> None:
    ledger.record_intent(job, host=host, plan_sha256=plan, name="kimi", created_at=created_at)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "ledger.sqlite3"


def test_an_intent_is_found_again_until_it_is_confirmed(path: Path) -> None:
    with Ledger.open(path) as ledger:
        intend(ledger, "a-1")
    with Ledger.open(path) as ledger:  # another process, after a crash
        found = ledger.unconfirmed("p1", "box")
        assert found is not None
        assert (found.id, found.created_at, found.confirmed) == ("a-1", "2026-11-29T10:00:00Z", False)
        assert ledger.unconfirmed("p1", "other") is None
        assert ledger.unconfirmed("p2", "box") is None
        ledger.confirm("a-1", NOW)
        assert ledger.unconfirmed("p1", "box") is None
        ledger.drop_intent("a-1")  # too late: a confirmed job stays
        assert [row.id for row in ledger.jobs()] == ["a-1"]


def test_the_newest_intent_counts_and_can_be_dropped(path: Path) -> None:
    with Ledger.open(path) as ledger:
        intend(ledger, "a-1")
        intend(ledger, "a-2", created_at="2026-11-29T11:00:00Z")
        intend(ledger, "a-2", created_at="2026-11-29T09:00:00Z")  # recorded twice: nothing happens
        assert ledger.unconfirmed("p1", "box").id == "a-2"  # type: ignore[union-attr]
        ledger.drop_intent("a-2")
        assert ledger.unconfirmed("p1", "box").id == "a-1"  # type: ignore[union-attr]


def test_a_job_that_is_seen_is_remembered_and_an_open_launch_of_it_stays_open(path: Path) -> None:
    with Ledger.open(path) as ledger:
        intend(ledger, "a-1")
        ledger.saw([view("a-1", 3), view("b-1", 1, created_at="2026-11-29T11:30:00Z", note="é\n")], NOW)
        assert ledger.unconfirmed("p1", "box").id == "a-1"  # type: ignore[union-attr]
        rows = ledger.jobs()
        assert [row.id for row in rows] == ["b-1", "a-1"]
        assert rows[0].view["note"] == "é\n"  # type: ignore[index]
        assert rows[0].seen_at == "2026-11-29T12:00:00.000Z"
        assert rows[1].plan_sha256 == "p1"
        assert ledger.jobs("elsewhere") == []


def test_memory_never_goes_backwards(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.saw([view("a-1", 7, state="succeeded")], NOW)
        ledger.saw([view("a-1", 5, state="running")], NOW + timedelta(seconds=5))
        ledger.saw([view("a-1", 9, state="lost", reachable=False)], NOW)  # a memory, not an answer
        row = ledger.job("a-1")
        assert row is not None
        assert row.view is not None
        assert (row.view["state"], row.view["seq"]) == ("succeeded", 7)
        ledger.saw([view("a-1", 7, state="succeeded", eta=None)], NOW + timedelta(seconds=9))
        assert ledger.job("a-1").seen_at == "2026-11-29T12:00:09.000Z"  # type: ignore[union-attr]


def test_history_is_mirrored(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.mirror_runs("box", [{"job": "a-1", "score": 1}, {"no_job": 1}])
        ledger.mirror_runs("box", [{"job": "a-1", "score": 2}])
        assert ledger.runs("box") == [{"job": "a-1", "score": 2}]
        assert ledger.runs("other") == []
        ledger.forget("a-1")
        assert ledger.job("a-1") is None


def test_the_ledger_is_private(path: Path) -> None:
    Ledger.open(path).close()
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0


def test_default_place_is_orch_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "a b" / "ü"))
    with Ledger.open() as ledger:
        assert ledger.path == tmp_path / "a b" / "ü" / "ledger.sqlite3"
        assert ledger.path.exists()


BREAKS = {
    "text": lambda path: path.write_text(
        "not a database, just some text that is longer than a header of SQLite " * 50
    ),
    "header": lambda path: path.write_bytes(b"\0" * 100 + path.read_bytes()[100:]),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 + 7]),
    "middle": lambda path: path.write_bytes(
        path.read_bytes()[:1024] + os.urandom(path.stat().st_size - 1024)
    ),
}


@pytest.mark.parametrize("how", BREAKS)
def test_a_broken_file_is_set_aside_and_said(how: str, path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.saw([view(f"a-{i}", 1, pad="x" * 500) for i in range(200)], NOW)
    BREAKS[how](path)
    broken = path.read_bytes()
    said: list[str] = []
    with Ledger.open(path, say=said.append) as ledger:
        intend(ledger, "b-1")
        assert [row.id for row in ledger.jobs()][:1] == ["b-1"]
    assert len(said) == 1
    assert "set aside" in said[0]
    assert "orch status" in said[0]
    (aside,) = path.parent.glob("ledger.sqlite3.broken-*")
    assert str(aside) in said[0]
    assert aside.read_bytes() == broken
    with Ledger.open(path, say=said.append):
        pass
    assert len(said) == 1, "said once, not at every start"


def test_damage_while_open_is_repaired_on_the_next_use(path: Path) -> None:
    said: list[str] = []
    with Ledger.open(path, say=said.append) as ledger:
        ledger.saw([view(f"a-{i}", 1, pad="x" * 500) for i in range(200)], NOW)
        ledger._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        ledger._connection.execute("PRAGMA shrink_memory")  # what is cached would hide the damage
        with path.open("r+b") as file:
            file.write(b"garbage!" * 2000)
        intend(ledger, "b-1")
        assert [row.id for row in ledger.jobs()] == ["b-1"]
        assert len(said) == 1


def test_the_database_of_another_program_is_left_whole(path: Path) -> None:
    path.parent.mkdir(parents=True)
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE precious (x)")
        db.execute("INSERT INTO precious VALUES (42)")
    db.close()
    said: list[str] = []
    with Ledger.open(path, say=said.append) as ledger:
        assert ledger.jobs() == []
    (aside,) = path.parent.glob("*.broken-*")
    db = sqlite3.connect(aside)
    assert db.execute("SELECT x FROM precious").fetchall() == [(42,)]
    db.close()
    assert "another program" in said[0]


def test_a_newer_ledger_is_refused_with_both_versions(path: Path) -> None:
    Ledger.open(path).close()
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 4}")
    db.close()
    with pytest.raises(LocalError, match=f"version {SCHEMA_VERSION + 4}.*version {SCHEMA_VERSION}") as caught:
        Ledger.open(path)
    assert caught.value.exit_status == 2
    assert "ORCH_HOME" in (caught.value.hint or "")
    assert path.exists()


def test_a_folder_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalError, match="cannot be used") as caught:
        Ledger.open(tmp_path / "file" / "sub" / "ledger.sqlite3")
    assert "ORCH_HOME" in (caught.value.hint or "")


def test_a_folder_in_its_place_is_explained(path: Path) -> None:
    path.mkdir(parents=True)
    with pytest.raises(LocalError, match="cannot be used"):
        Ledger.open(path)


WRITER = """
import sys
from datetime import UTC, datetime
from pathlib import Path
from orchestrator.store.ledger import Ledger
path, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
with Ledger.open(path) as ledger:
    for i in range(count):
        ledger.record_intent(f"{name}-{i}", host="box", plan_sha256=name, name=name, created_at="2026-11-29T10:00:00Z")
        ledger.saw([{"id": "shared", "host": "box", "name": "s", "seq": i, "state": name}], datetime.now(UTC))
"""


def start_writer(path: Path, name: str, count: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), name, str(count)],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_several_processes_at_once_lose_nothing(path: Path) -> None:
    writers = [start_writer(path, f"w{n}", 25) for n in range(4)]
    for writer in writers:
        _, err = writer.communicate(timeout=100)
        assert writer.returncode == 0, err.decode()
        assert err == b""
    with Ledger.open(path) as ledger:
        assert len(ledger.jobs()) == 4 * 25 + 1
        assert ledger.job("shared").view["seq"] == 24  # type: ignore[union-attr,index]


def test_several_processes_find_the_same_broken_file(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(os.urandom(20_000))
    writers = [start_writer(path, f"w{n}", 5) for n in range(4)]
    said = b""
    for writer in writers:
        _, err = writer.communicate(timeout=100)
        assert writer.returncode == 0, err.decode()
        said += err
    assert len(list(path.parent.glob("*.broken-*"))) == 1, "set aside once"
    assert said.count(b"set aside") == 1
    with Ledger.open(path) as ledger:
        assert len(ledger.jobs()) == 4 * 5 + 1
    assert not list(path.parent.glob("*.repair"))


def test_a_writer_that_is_killed_leaves_a_sound_file(path: Path) -> None:
    Ledger.open(path).close()
    for _ in range(3):
        writer = start_writer(path, "w", 100_000)
        with Ledger.open(path) as ledger:
            before = len(ledger.jobs())
            while len(ledger.jobs()) <= before + 3:
                assert writer.poll() is None
        writer.kill()
        writer.communicate(timeout=30)
        with Ledger.open(path, say=pytest.fail) as ledger:
            ledger.drop_intent("w-0")
            assert ledger.job("shared") is not None


def test_threads_share_one_ledger(path: Path) -> None:
    errors: list[BaseException] = []
    with Ledger.open(path) as ledger:

        def work(name: str) -> None:
            try:
                for i in range(20):
                    ledger.saw([view(f"{name}-{i}")], NOW)
                    ledger.jobs()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(f"t{n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert len(ledger.jobs()) == 80


def test_a_failed_write_leaves_no_open_transaction(path: Path) -> None:
    with Ledger.open(path) as ledger:
        with pytest.raises(KeyError):
            ledger.saw([{"host": "no id"}], NOW)
        with pytest.raises(TypeError), ledger._writing():
            raise TypeError
        with Ledger.open(path) as other:
            intend(other, "a-1")
        assert [row.id for row in ledger.jobs()] == ["a-1"]
