"""The job's state as a fold over its events, told as the stories that hosts write down."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remote_jobs import protocol
from remote_jobs.agent.fold import Fold, fingerprint, fold


def spec(**steps: dict[str, Any]) -> protocol.JobSpec:
    records = [protocol.to_dict(protocol.StepSpec(name=name, **more)) for name, more in steps.items()]
    return protocol.JobSpec(
        id="j", name="n", host="h", workdir="/w", plan_sha256="", created_at="T0", release="r", steps=records
    )


TWO = spec(serve={"uses": "serve"}, work={"run": "x", "needs": ["serve"]})


def told(*lines: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Events from (kind, step, attempt, data), at T1, T2, ..."""
    events = []
    for seq, line in enumerate(lines, start=1):
        kind, step, attempt, data = (*line, None, None, None)[:4] if len(line) < 4 else line
        events.append({"seq": seq, "at": f"T{seq}", "kind": kind, "step": step, "attempt": attempt, "data": data or {}})
    return events


START = ("attempt_started", "work", 1, {"process": {"pid": 7}, "gpus": [0], "changes": {}})
END = ("attempt_ended", "work", 1, {"state": "failed", "exit_status": -9})


def test_a_new_job_waits() -> None:
    state = fold(TWO, []).state
    assert (state["v"], state["id"], state["name"], state["host"], state["state"], state["seq"]) == (1, "j", "n", "h", "queued", 0)
    assert (state["created_at"], state["started_at"], state["ended_at"], state["eta"]) == ("T0", None, None, None)
    assert (state["stop_requested"], state["notes"]) == (False, [])
    serve, work = state["steps"]
    assert (serve["service"], work["service"]) == (True, False)
    assert (work["needs"], work["state"], work["waiting"], work["retry_at"], work["attempts"]) == (["serve"], "queued", None, None, [])
    assert spec(web={"run": "x", "service": {"ready": {"port": 1}}}).step_specs()[0].service
    assert fold(spec(web={"run": "x", "service": {"ready": {"port": 1}}}), []).state["steps"][0]["service"] is True


def test_an_attempt_from_start_to_verdict() -> None:
    verdict = {"class": "killed"}
    events = told(
        START,
        END,
        ("attempt_judged", "work", 1, {"state": "failed", "verdict": verdict, "phases": [{"name": "p"}], "bars": [{"label": "b"}]}),
        ("step_failed", "work"),
        ("finished", None, None, {"state": "failed"}),
    )
    started = fold(TWO, events[:1])
    [attempt] = started.attempts("work")
    assert attempt == {
        "n": 1, "state": "running", "started_at": "T1", "ended_at": None, "exit_status": None, "verdict": None, "phases": [],
        "bars": [], "pid": 7, "changes": None, "gpus": [0],
    }  # fmt: skip
    assert (started.state["state"], started.state["started_at"], started.step("work")["state"]) == ("running", "T1", "running")
    state = fold(TWO, events).state
    [attempt] = state["steps"][1]["attempts"]
    assert (attempt["state"], attempt["exit_status"], attempt["ended_at"], attempt["verdict"]) == ("failed", -9, "T2", verdict)
    assert (attempt["phases"], attempt["bars"]) == ([{"name": "p"}], [{"label": "b"}])
    assert (state["state"], state["ended_at"], state["seq"], state["started_at"]) == ("failed", "T5", 5, "T1")


def test_what_a_verdict_leaves_out_stays_as_it_was() -> None:
    judged = ("attempt_judged", "work", 1, {"verdict": {"class": "x"}})
    [attempt] = fold(TWO, told(START, END, judged)).attempts("work")
    assert (attempt["state"], attempt["phases"], attempt["bars"]) == ("failed", [], [])
    ended = ("attempt_ended", "work", 1, {"exit_status": 3, "phases": [{"name": "p"}]})
    [attempt] = fold(TWO, told(START, ended)).attempts("work")
    assert (attempt["state"], attempt["exit_status"], attempt["phases"], attempt["bars"]) == ("failed", 3, [{"name": "p"}], [])


def test_a_second_attempt_is_another_one() -> None:
    retry = ("retry_scheduled", "work", 1, {"at": "T9", "changes": {"x": 1}})
    second = ("attempt_started", "work", 2, {"changes": {"x": 1}})
    waiting = fold(TWO, told(START, END, retry))
    assert (waiting.step("work")["state"], waiting.step("work")["retry_at"], waiting.state["state"]) == ("retry_wait", "T9", "retry_wait")
    story = fold(TWO, told(START, END, retry, second, ("attempt_ended", "work", 2, {"state": "succeeded", "exit_status": 0})))
    first, later = story.attempts("work")
    assert (first["n"], first["state"], first["exit_status"]) == (1, "failed", -9)
    assert (later["n"], later["state"], later["exit_status"], later["changes"], later["pid"]) == (2, "succeeded", 0, {"x": 1}, None)
    assert story.step("work")["retry_at"] is None
    assert story.state["started_at"] == "T1"


def test_an_event_of_an_attempt_nobody_started_changes_no_attempt() -> None:
    story = fold(TWO, told(START, ("attempt_ended", "work", 5, {"state": "failed", "exit_status": 1})))
    assert [item["state"] for item in story.attempts("work")] == ["running"]


@pytest.mark.parametrize(
    ("kind", "data", "words"),
    [
        ("step_queued", {"reason": "held by job x"}, "held by job x"),
        ("step_gated", {"reasons": ["a", "b"]}, "a; b"),
        ("step_gated", {"reason": "c", "reasons": ["a"]}, "c"),
        ("step_gated", {}, None),
    ],
)
def test_why_a_step_waits(kind: str, data: dict[str, Any], words: str | None) -> None:
    story = fold(TWO, told((kind, "work", None, data)))
    assert story.step("work")["waiting"] == words
    assert story.step("serve")["waiting"] is None
    for event in told(("note", "work", None, {"text": "x"}), ("phase_changed", "work", 1, {})):
        story.apply({**event, "seq": 8})
    assert story.step("work")["waiting"] == words, "what is not about states says nothing of the wait"
    story.apply(told(START)[0])
    assert story.step("work")["waiting"] is None


def test_a_stop_of_the_job_and_of_a_step() -> None:
    assert fold(TWO, told(START, ("stop_requested", "work"))).state["stop_requested"] is False
    story = fold(TWO, told(START, ("stop_requested",), ("stop_sent", "work", 1, {"signal": "TERM"})))
    assert story.state["stop_requested"] is True
    assert [item["state"] for item in story.attempts("work")] == ["stopping"]
    assert story.step("work")["state"] == "stopping"
    assert story.state["state"] == "stopping"
    story.apply({"seq": 4, "at": "T4", "kind": "finished", "data": {"state": "stopped"}})
    assert (story.state["state"], story.state["stop_requested"], story.state["ended_at"]) == ("stopped", False, "T4")
    story = fold(TWO, told(START, ("finished",)))
    assert story.state["state"] == "failed", "an end that does not say how it was is a bad one"


REOPENED = [
    ({}, ["queued", "queued"]),
    ({"steps": ["work"]}, ["failed", "queued"]),
    ({"steps": []}, ["failed", "failed"]),
    ({"step_filter": "serve"}, ["queued", "failed"]),
]


@pytest.mark.parametrize(("data", "states"), REOPENED)
def test_a_retry_takes_up_the_steps_it_names(data: dict[str, Any], states: list[str]) -> None:
    over = told(START, END, ("step_failed", "work"), ("step_failed", "serve"), ("finished", None, None, {"state": "failed"}))
    story = fold(TWO, over)
    story.apply({"seq": 6, "at": "T6", "kind": "reopened", "data": data})
    assert [item["state"] for item in story.state["steps"]] == states
    assert (story.state["ended_at"], story.state["stop_requested"]) == (None, False)
    assert story.state["state"] == ("queued" if set(states) == {"queued"} else "running")


@pytest.mark.parametrize("kind", ["note", "recovered", "reaped", "stragglers", "hang_suspected"])
def test_what_a_person_should_know_is_kept_the_newest_fifty(kind: str) -> None:
    story = fold(TWO, told(*[(kind, None, None, {"text": f"n{n}"}) for n in range(60)]))
    assert [note["text"] for note in story.state["notes"]] == [f"n{n}" for n in range(10, 60)]
    assert story.state["notes"][-1] == {"at": "T60", "text": "n59"}
    assert fold(TWO, told((kind, None, None, {}))).state["notes"] == []


def test_other_events_are_no_notes() -> None:
    assert fold(TWO, told(("created", None, None, {"text": "x"}))).state["notes"] == []


def test_an_illegal_event_changes_nothing() -> None:
    story = fold(TWO, told(START))
    before = copy.deepcopy(story.state)
    with pytest.raises(protocol.IllegalTransition):
        story.apply({"seq": 9, "at": "T9", "kind": "reopened", "step": "work", "data": {}} | {"kind": "step_skipped"})
    assert story.state == before


@pytest.mark.parametrize("kind", ["a_kind_of_tomorrow", "from_the_future", "z_last"])
def test_an_unknown_kind_only_counts(kind: str) -> None:
    story = fold(TWO, told(START))
    before = copy.deepcopy(story.state)
    data = {"state": "failed", "exit_status": 1, "verdict": {"class": "x"}, "text": "t", "at": "T5", "phases": [1]}
    story.apply({"seq": 9, "at": "T9", "kind": kind, "step": "work", "attempt": 1, "data": data})
    assert story.state == {**before, "seq": 9}
    story.apply({"seq": 10, "at": "T9", "kind": "phase_changed", "step": "no such step"})
    assert story.state["seq"] == 10


KINDS = sorted(kind.value for kind in protocol.EventKind)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(["serve", "work", None])), max_size=25))
def test_folding_piece_by_piece_is_folding_at_once(words: list[tuple[str, str | None]]) -> None:
    """Whatever legal story: the states are known ones, and a supervisor that started in the middle sees the same."""
    story, kept = Fold(TWO), []
    for seq, (kind, step) in enumerate(words, start=1):
        event = {"seq": seq, "at": f"T{seq}", "kind": kind, "step": step, "attempt": 1, "data": {}}
        try:
            story.apply(event)
        except protocol.IllegalTransition:
            continue
        kept.append(event)
        assert story.state["state"] in {item.value for item in protocol.JobState}
        assert all(step["state"] in {item.value for item in protocol.StepState} for step in story.state["steps"])
    assert fold(TWO, kept).state == story.state


def test_a_fingerprint_leaves_out_numbers_and_nothing_else() -> None:
    def of(text: str, **more: Any) -> str:
        return fingerprint({"class": "c", "signature": "s", "root_cause": {"text": text}, **more})

    assert of("pid 7 at 0xfF1 took 1.25 s") == of("pid 123 at 0x0 took 3 s") == "c|s|pid # at # took # s"
    assert of("a") != of("b")
    assert of("a", signature="t") != of("a")
    assert of("a", **{"class": "d"}) != of("a")
    assert of("x" * 300) == "c|s|" + "x" * 200
    assert fingerprint({"class": "c", "signature": "s"}) == "c|s|"
    assert fingerprint(None) == fingerprint({}) == "none"


@pytest.mark.parametrize("kind", sorted({"created", "step_queued", "attempt_ended", "attempt_judged", "finished", "note"}))
def test_only_an_attempt_starts_a_job(kind: str) -> None:
    assert fold(TWO, told((kind, "work" if kind == "step_queued" else None, 1, {}))).state["started_at"] is None


@pytest.mark.parametrize("kind", ["step_failed", "step_stopped", "attempt_started", "step_queued"])
def test_what_moves_a_step_on_ends_its_wait(kind: str) -> None:
    story = fold(TWO, told(("step_gated", "work", None, {"reasons": ["held"]}), (kind, "work", 1, {})))
    assert story.step("work")["waiting"] is None


def test_a_wait_that_a_retry_follows_is_still_told() -> None:
    story = fold(TWO, told(("step_gated", "work", None, {"reasons": ["held"]}), ("retry_scheduled", "work", 1, {"at": "T9"})))
    assert (story.step("work")["waiting"], story.step("work")["retry_at"]) == ("held", "T9")


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"attempt_started", "attempt_ended", "attempt_judged", "stop_sent"}))
def test_only_its_own_events_tell_how_an_attempt_is(kind: str) -> None:
    story = fold(TWO, told(START, ("stop_sent", "work", 1)))
    [before] = copy.deepcopy(story.attempts("work"))
    data = {"text": "x", "state": "failed", "exit_status": 3, "verdict": {"class": "x"}, "phases": [{"name": "p"}]}
    try:
        story.apply({"seq": 3, "at": "T3", "kind": kind, "step": "work", "attempt": 1, "data": data})
    except protocol.IllegalTransition:
        assert kind in protocol.STATE_EVENTS
    assert story.attempts("work") == [before]


ABOUT_THE_WHOLE_JOB = {"stop_requested", "finished", "reopened"}


@pytest.mark.parametrize("kind", sorted(set(KINDS) - ABOUT_THE_WHOLE_JOB))
def test_nothing_else_asks_for_a_stop_or_takes_one_back(kind: str) -> None:
    event = {"seq": 3, "at": "T3", "kind": kind, "data": {}}
    going, stopping = fold(TWO, told(START)), fold(TWO, told(START, ("stop_requested",)))
    going.apply(event)
    stopping.apply(event)
    assert (going.state["stop_requested"], stopping.state["stop_requested"]) == (False, True)
    over = fold(TWO, told(START, ("finished", None, None, {"state": "stopped"})))
    over.apply(event)
    assert (over.state["state"], over.state["ended_at"]) == ("stopped", "T2")


@pytest.mark.parametrize("kind", sorted(set(KINDS) - protocol.STATE_EVENTS))
def test_what_is_not_about_states_keeps_the_time_of_the_next_try(kind: str) -> None:
    retry = ("retry_scheduled", "work", 1, {"at": "T9"})
    story = fold(TWO, told(START, END, retry, (kind, "work", 1, {"text": "n"})))
    assert story.step("work")["retry_at"] == "T9"


def test_attempts_are_told_apart_by_number_however_many() -> None:
    events = json.loads(json.dumps(told(*[(kind, "work", n, {}) for n in (299, 300) for kind in ("attempt_started", "step_queued")])))
    story = fold(TWO, events)
    story.apply(json.loads('{"seq": 9, "at": "T9", "kind": "attempt_judged", "step": "work", "attempt": 300, "data": {"state": "lost"}}'))
    assert [(item["n"], item["state"]) for item in story.attempts("work")] == [(299, "running"), (300, "lost")]


def test_only_a_range_of_a_split_step_says_which_part_it_is() -> None:
    part = {"of": "work", "index": 1, "count": 2}
    ranged, whole = fold(spec(first={"run": "x", "part": part}, work={"run": "x"}), []).state["steps"]
    assert ranged["part"] == part
    assert "part" not in whole
