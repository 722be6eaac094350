"""People see a split step with its ranges below it; many ranges are counted, those that need an eye are listed."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from orchestrator.services.views import HostView, WatchView
from orchestrator.ui.job import Moment
from orchestrator.ui.parts import rows
from orchestrator.ui.screen import Screen
from orchestrator.ui.status import job_lines
from orchestrator.ui.tree import job_tree

NOW = Moment(datetime(2026, 11, 29, 12, 0, tzinfo=UTC), UTC)


def job(count: int, states: dict[int, str], *, joining: str = "queued", here: bool = True) -> dict[str, Any]:
    steps = []
    for index in range(1, count + 1):
        state = states.get(index, "queued")
        bar = {"label": "Extracting", "done": 25 * index, "total": 100}
        attempt = {"n": 1, "state": state, "started_at": "2026-11-29T11:59:00Z", "phases": [], "bars": [bar]}
        steps.append(
            {
                "name": f"extract-{index}of{count}", "state": state, "needs": ["generate"],
                "part": {"of": "extract", "index": index, "count": count},
                "attempts": [] if state == "queued" else [attempt],
            }
        )  # fmt: skip
    last = [{"name": "extract", "state": joining, "needs": [step["name"] for step in steps], "attempts": []}]
    first = [{"name": "generate", "state": "succeeded", "attempts": []}]
    return {"id": "job-1", "state": "running", "host": "box", "steps": [*first, *steps, *(last if here else [])]}


def shown(view: dict[str, Any]) -> list[str]:
    return [line.plain for line in job_lines(view, NOW)]


def test_the_step_stands_above_its_ranges_with_what_they_did_together() -> None:
    lines = shown(job(4, {1: "succeeded", 2: "running", 3: "running", 4: "failed"}))
    assert [line.split()[0] for line in lines[1:]] == ["generate", "extract", "1/4", "2/4", "3/4", "4/4"]
    assert "running     4 ranges: 2 running, 1 succeeded, 1 failed, 250/400 62%" in lines[2]
    assert lines[4].startswith("    2/4")
    assert "50/100 50%" in lines[4]
    tree = job_tree(WatchView({"box": HostView("box")}, {"job-1": job(2, {1: "running"})}), Screen(100, 30), NOW)
    text = [line.plain if hasattr(line, "plain") else line().plain for line in tree.lines]
    assert any("extract" in line and "2 ranges: 1 running, 1 queued" in line for line in text), text
    assert sum("extract" in line for line in text) == 1


def test_many_ranges_are_counted_and_those_that_need_an_eye_are_listed() -> None:
    states = {**dict.fromkeys(range(1, 50), "succeeded"), 50: "failed", 51: "running"}
    found = rows(job(64, states)["steps"])
    assert [row.name for row in found] == ["generate", "extract", "50/64", "51/64"]
    assert found[1].summary == "64 ranges: 49 succeeded, 13 queued, 1 failed, 1 running"
    assert found[1].step["state"] == "running"
    found = rows(job(64, {**dict.fromkeys(range(1, 64), "running"), 64: "retry_wait"})["steps"])
    assert [row.name for row in found][2:] == [*(f"{index}/64" for index in range(1, 8)), "64/64"]


def test_all_done_is_the_joining_steps_word_and_a_share_has_none() -> None:
    done = dict.fromkeys((1, 2), "succeeded")
    assert rows(job(2, done, joining="running")["steps"])[1].step["state"] == "running"
    assert rows(job(2, done, here=False)["steps"])[1].step["state"] == "succeeded"
    assert rows(job(2, {1: "failed", 2: "succeeded"}, joining="skipped")["steps"])[1].step["state"] == "failed"
