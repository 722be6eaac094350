"""What a program says of its own phase is a bar like any other: with an end, once, and only as far as it makes sense."""

from __future__ import annotations

import math
from typing import Any

import pytest

from remote_jobs.agent.phasebars import PhaseBars


def phase(**more: Any) -> dict[str, Any]:
    return {"name": "count", "state": "running", "started_line": 3, **more}


def followed(*counts: tuple[float, Any], total: Any = 25, bars: tuple[dict[str, Any], ...] = ()) -> list[dict[str, Any]]:
    """The bars after these (seconds, done)."""
    found, now = PhaseBars(), phase(total=total)
    for mono, done in counts:
        now = phase(done=done, total=total)
        found.take([now], mono)
    return found.missing([now], bars)


def test_a_steady_count_has_an_end() -> None:
    [bar] = followed(*((100.0 + 2 * n, n) for n in range(1, 18)))
    assert (bar["label"], bar["done"], bar["total"], bar["percent"]) == ("count", 17, 25, 68)
    assert bar["s_per_item"] == 2.0
    assert bar["eta_s"] == pytest.approx(16.0, rel=0.2)
    assert bar["eta_low_s"] < bar["eta_s"] < bar["eta_high_s"]


def test_what_was_there_before_the_start_is_no_pace() -> None:
    """An attempt that goes on at 9000 of 10000 has not done 9000 in its first second."""
    [bar] = followed(*((float(n), 9000 + n) for n in range(1, 30)), total=10000)
    assert bar["eta_s"] == pytest.approx(971.0, rel=0.2)


def test_a_phase_with_a_bar_of_its_own_gets_no_second_one() -> None:
    counts = ((0.0, 1), (5.0, 2))
    assert followed(*counts, bars=({"line": 9, "total": 25},)) == []
    assert followed(*counts, bars=({"line": 2, "total": 25},)), "a bar that stood before the phase began is another's"
    assert followed(*counts, bars=({"line": 9, "total": 640},)), "an inner loop's bar is not the phase's"
    assert followed(*counts, total=None, bars=({"line": 9, "total": 640},)) == []


@pytest.mark.parametrize("total", [0, None, -1, True, "25", math.nan, math.inf, 1e300])
def test_without_a_total_that_can_be_one_a_count_is_a_count(total: Any) -> None:
    [bar] = followed((0.0, 1), (5.0, 17), total=total)
    assert (bar["done"], bar["total"], bar["percent"], bar["eta_s"]) == (17, None, None, None)


@pytest.mark.parametrize("done", [-1, True, "17", math.nan, math.inf, None])
def test_a_count_that_is_none_is_the_beginning(done: Any) -> None:
    [bar] = followed((0.0, done))
    assert (bar["done"], bar["total"], bar["eta_s"]) == (0, 25, None)
    assert followed((0.0, done), total=None) == []


def test_more_than_all_is_all() -> None:
    [bar] = followed((0.0, 1), (5.0, 30))
    assert (bar["done"], bar["percent"], bar["eta_s"]) == (30, 100, 0.0)


def test_only_what_runs_is_drawn_and_the_same_name_again_is_another_bar() -> None:
    found = PhaseBars()
    phases = [phase(state="done", done=5, total=5), phase(started_line=9, done=1, total=5)]
    found.take(phases, 0.0)
    assert [(bar["instance"], bar["done"]) for bar in found.missing(phases, [])] == [(2, 1)]


def test_a_long_count_costs_little_and_moves_are_told() -> None:
    found = PhaseBars()
    assert [found.take([phase(done=done)], 0.0) for done in (1, 1, 2)] == [True, False, True]
    moved = [found.take([phase(done=n, total=50_000)], n / 10) for n in range(3, 20_000)]
    assert all(moved)
    [bar] = found.missing([phase(done=19_999, total=50_000)], [])
    assert bar["eta_s"] == pytest.approx(3000, rel=0.2)
