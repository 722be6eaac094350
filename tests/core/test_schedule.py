"""The pace of looks, on a clock that only moves when told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.schedule import CAP_S, FIRST_S, LookSchedule


def middle(low: float, high: float) -> float:
    return (low + high) / 2


class Watcher:
    """A watcher that looks exactly when the schedule says, on a fake clock."""

    def __init__(self, **limits: float) -> None:
        self.mono, self.wall = 1000.0, 5000.0
        self.schedule = LookSchedule(uniform=middle, **limits)

    def look(self, *, changed: bool = False, ends_in_s: float | None = None, failed: bool = False) -> float:
        if failed:
            wait = self.schedule.after_error(self.mono, wall_s=self.wall)
        else:
            wait = self.schedule.after_answer(
                self.mono, changed=changed, ends_in_s=ends_in_s, wall_s=self.wall
            )
        self.mono += wait
        self.wall += wait
        return wait

    def sleep(self, seconds: float) -> None:
        """The lid is shut: only the wall clock goes on."""
        self.wall += seconds


def test_doubles_from_half_a_second_to_a_minute() -> None:
    watcher = Watcher()
    assert [watcher.look() for _ in range(9)] == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]


def test_a_change_starts_over() -> None:
    watcher = Watcher()
    for _ in range(6):
        watcher.look()
    assert [watcher.look(changed=True), watcher.look(), watcher.look()] == [0.5, 1, 2]


def test_an_expected_end_is_approached_and_never_overslept() -> None:
    watcher = Watcher()
    for _ in range(10):
        watcher.look()
    end = watcher.mono + 100
    waits = []
    while watcher.mono < end - FIRST_S:
        waits.append(watcher.look(ends_in_s=end - watcher.mono))
        assert watcher.mono <= end
    assert waits[:3] == [50, 25, 12.5]
    assert len(waits) < 12
    # An end that is overdue is looked for often, but not in a spin.
    assert watcher.look(ends_in_s=-30) == FIRST_S


def test_sleep_is_noticed_and_spread() -> None:
    watcher = Watcher()
    for _ in range(9):
        watcher.look()
    watcher.sleep(3600)
    assert watcher.look() == FIRST_S + 1.5  # quick again, plus the middle of the spread
    assert watcher.look() == 1.0
    assert watcher.look() == 2.0


def test_a_clock_set_back_or_a_little_ahead_is_no_sleep() -> None:
    watcher = Watcher()
    for _ in range(9):
        watcher.look()
    watcher.sleep(-7200)
    assert watcher.look() == CAP_S
    watcher.sleep(2)
    assert watcher.look() == CAP_S


def test_limits_of_the_host_and_of_the_person() -> None:
    floor = Watcher(min_interval_s=5)
    assert [floor.look(), floor.look(changed=True), floor.look(ends_in_s=0.1)] == [5, 5, 5]
    cap = Watcher(max_interval_s=3)
    assert [cap.look() for _ in range(5)] == [0.5, 1, 2, 3, 3]
    both = Watcher(min_interval_s=10, max_interval_s=3)  # the host's wish wins
    assert both.look() == 10


def test_errors_back_off_on_their_own_and_recovery_is_quick() -> None:
    watcher = Watcher()
    for _ in range(9):
        watcher.look()
    assert [watcher.look(failed=True) for _ in range(9)] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert watcher.look() == FIRST_S
    assert watcher.look(failed=True) == 1


def test_errors_are_spread_at_random() -> None:
    waits = {LookSchedule().after_error(0.0) for _ in range(20)}
    assert len(waits) > 10
    assert all(0.8 <= wait <= 1.2 for wait in waits)


@given(
    st.lists(
        st.tuples(
            st.booleans(),
            st.booleans(),
            st.one_of(st.none(), st.floats(-1e6, 1e6)),
            st.floats(-1e5, 1e5),
        ),
        max_size=40,
    ),
    st.floats(0, 20),
    st.floats(0.1, 100),
)
def test_every_wait_is_within_the_limits(
    looks: list[tuple[bool, bool, float | None, float]], floor: float, cap: float
) -> None:
    watcher = Watcher(min_interval_s=floor, max_interval_s=cap)
    for failed, changed, ends_in_s, gap in looks:
        watcher.sleep(gap)
        wait = watcher.look(failed=failed, changed=changed, ends_in_s=ends_in_s)
        assert floor <= wait
        assert wait <= max(cap, floor) + 3


def test_without_a_wall_clock_nothing_is_assumed() -> None:
    schedule = LookSchedule(uniform=middle)
    assert schedule.after_answer(0, changed=False) == 0.5
    assert schedule.after_answer(1e6, changed=False) == pytest.approx(1.0)
