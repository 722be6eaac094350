"""The ledger stays small, however long it is used and whatever hosts say."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from orchestrator.store import ledger as module
from orchestrator.store.ledger import Ledger

NOW = datetime(2026, 11, 29, tzinfo=UTC)


def view(number: int, **more: object) -> dict[str, object]:
    return {
        "id": f"job-{number:05d}",
        "host": "box",
        "name": "n",
        "state": "succeeded",
        "seq": 1,
        "created_at": f"2026-01-01T{number:06d}",
        "steps": [],
        **more,
    }


def test_the_newest_jobs_are_kept_and_no_open_launch_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_JOBS", 50)
    monkeypatch.setattr(module, "MAX_RUNS", 20)
    path = tmp_path / "ledger.sqlite3"
    with Ledger.open(path) as ledger:
        ledger.record_intent("oldest", host="box", plan_sha256="x", name="n", created_at="2025-01-01")
        ledger.saw([view(number) for number in range(120)], NOW)
        ledger.mirror_runs("box", [{"job": f"job-{number:05d}"} for number in range(120)])
    with Ledger.open(path) as ledger:
        kept = [row.id for row in ledger.jobs()]
        assert kept == [*(f"job-{number:05d}" for number in range(119, 69, -1)), "oldest"]
        assert [run["job"] for run in ledger.runs()] == [f"job-{number:05d}" for number in range(100, 120)]


def test_a_bloated_view_is_kept_without_its_steps(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger.sqlite3") as ledger:
        ledger.saw([view(1, steps=[{"name": "x" * 1000}] * 1000), view(2)], NOW)
        [second, first] = ledger.jobs()
    assert first.view is not None
    assert second.view is not None
    assert (first.view["state"], first.view["steps"], first.view.get("ended_at")) == ("succeeded", [], None)
    assert second.view["created_at"] == "2026-01-01T000002"
    assert (tmp_path / "ledger.sqlite3").stat().st_size < module.MAX_VIEW_BYTES


def test_gc_gives_the_room_back(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    with Ledger.open(path) as ledger:
        ledger.saw([view(number, steps=["x" * 20_000]) for number in range(200)], NOW)
        ledger.trim(shrink=True)
        before = path.stat().st_size
        for number in range(200):
            ledger.forget(f"job-{number:05d}")
        ledger.trim(shrink=True)
        assert path.stat().st_size < before / 10
