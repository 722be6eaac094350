"""Phases get times from who follows the log: when they began, how long they took, how long they usually take on."""

from __future__ import annotations

from typing import Any

from remote_jobs.agent.phaseclock import PhaseClock

WALL = 1_796_000_000.0


def phase(name: str, state: str, line: int, took_s: float | None = None) -> dict[str, Any]:
    return {"name": name, "state": state, "started_line": line, "ended_line": None, "took_s": took_s}


def test_a_running_phase_has_its_own_start_and_what_is_usually_left() -> None:
    clock = PhaseClock(lambda: {"load_weights": 900.0})
    clock.take([phase("import", "running", 1)], 10.0, WALL)
    clock.take([phase("import", "done", 1), phase("load_weights", "running", 5)], 22.0, WALL + 12)
    done, running = clock.annotate([phase("import", "done", 1), phase("load_weights", "running", 5)], 322.0)
    assert (done["took_s"], done["started_at"], "left_s" in done) == (12.0, "2026-11-30T00:53:20.000Z", False)
    assert (running["took_s"], running["left_s"], running["started_at"]) == (None, 600.0, "2026-11-30T00:53:32.000Z")
    assert clock.annotate([phase("load_weights", "running", 5)], 5000.0)[0]["left_s"] == 0.0


def test_the_log_knows_a_duration_better() -> None:
    clock = PhaseClock()
    clock.take([phase("load_weights", "running", 1)], 0.0, WALL)
    clock.take([phase("load_weights", "done", 1, 41.5)], 60.0, WALL)
    assert clock.annotate([phase("load_weights", "done", 1, 41.5)], 60.0)[0]["took_s"] == 41.5


def test_an_unknown_phase_stays_as_it_is_and_the_same_name_again_is_another_phase() -> None:
    clock = PhaseClock()
    assert clock.annotate([phase("x", "running", 1)], 5.0) == [phase("x", "running", 1)]
    clock.take([phase("epoch", "done", 1), phase("epoch", "running", 9)], 5.0, WALL)
    first, second = clock.annotate([phase("epoch", "done", 1), phase("epoch", "running", 9)], 6.0)
    assert first["took_s"] == 0.0
    assert second["took_s"] is None
