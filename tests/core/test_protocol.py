"""The schema that both sides share: its table of states, and what readers do with other versions' bytes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.retry import FAILURE_CLASSES
from orchestrator.core.states import exit_status, is_over
from remote_jobs import protocol
from remote_jobs.protocol import (
    JOB_TERMINAL,
    STATE_EVENTS,
    STEP_TERMINAL,
    STEP_TRANSITIONS,
    EventKind,
    IllegalTransition,
    JobSpec,
    JobState,
    LogCursor,
    LookRequest,
    ProtocolVersionError,
    StepState,
    advance,
    check_version,
    dumps,
    from_dict,
    job_state,
    to_dict,
)

KINDS = [kind.value for kind in EventKind]
RECORDS = [
    value
    for value in vars(protocol).values()
    if isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__ == protocol.__name__
]


def walk(state: str, kinds: list[str]) -> str:
    """Follow events, an illegal one changing nothing."""
    for kind in kinds:
        try:
            state = advance(state, kind)
        except IllegalTransition:
            continue
    return state


@given(
    st.sampled_from(sorted(STEP_TERMINAL)),
    st.lists(st.sampled_from([k for k in KINDS if k != "reopened"]), max_size=30),
)
def test_terminal_states_absorb_everything_but_reopened(state: str, kinds: list[str]) -> None:
    end = walk(state, kinds)
    # The one exception is written in the table: a service that ended may be needed again.
    again = (
        {"queued", *STEP_TRANSITIONS["queued"].values()}
        if state == "succeeded" and "step_queued" in kinds
        else set()
    )
    assert end == state or again


@given(st.sampled_from(sorted(STEP_TERMINAL - {"succeeded"})))
def test_reopened_leaves_a_terminal_state(state: str) -> None:
    assert advance(state, "reopened") == "queued"


@given(st.sampled_from([state.value for state in StepState]), st.lists(st.sampled_from(KINDS), max_size=40))
def test_events_lead_to_known_states_only(state: str, kinds: list[str]) -> None:
    assert walk(state, kinds) in {known.value for known in StepState}


def reachable_from(start: str) -> set[str]:
    found, queue = {start}, [start]
    while queue:
        for state in STEP_TRANSITIONS[queue.pop()].values():
            if state not in found:
                found.add(state)
                queue.append(state)
    return found


def test_every_state_has_a_row_and_can_be_reached() -> None:
    assert set(STEP_TRANSITIONS) == {state.value for state in StepState}
    # "lost" is never written by an event: a supervisor that is gone writes none; the agent judges it.
    assert reachable_from("queued") == {state.value for state in StepState} - {"lost"}


@pytest.mark.parametrize("state", [state.value for state in StepState])
def test_every_state_can_end(state: str) -> None:
    assert reachable_from(state) & {"succeeded"}
    assert reachable_from(state) & {"failed"}
    assert reachable_from(state) & {"stopped"}


def test_the_table_uses_known_events_only() -> None:
    assert set(KINDS) >= STATE_EVENTS


def test_an_illegal_step_names_state_event_and_step() -> None:
    with pytest.raises(IllegalTransition, match=r"attempt_started is not legal in succeeded \(step train\)"):
        advance("succeeded", "attempt_started", "train")


def test_events_that_are_not_about_states_change_nothing() -> None:
    for kind in set(KINDS) - STATE_EVENTS:
        for state in StepState:
            assert advance(state.value, kind) == state.value
    assert advance("running", "an_event_of_a_newer_version") == "running"


@given(st.lists(st.sampled_from([state.value for state in StepState]), max_size=6), st.booleans())
def test_job_states_are_known(steps: list[str], stopping: bool) -> None:
    assert job_state(steps, stopping=stopping) in {state.value for state in JobState}
    for final in JOB_TERMINAL:
        assert job_state(steps, finished=final, stopping=stopping) == final


@pytest.mark.parametrize(
    ("steps", "state"),
    [
        (["queued", "queued"], "queued"),
        (["succeeded", "queued"], "running"),  # between two steps
        (["succeeded", "ready"], "running"),
        (["ready", "gated"], "gated"),
        (["retry_wait", "gated"], "retry_wait"),
        (["stopping", "retry_wait"], "running"),
        (["failed", "succeeded"], "running"),  # until the supervisor says how it ended
    ],
)
def test_a_job_is_as_the_most_active_of_its_steps(steps: list[str], state: str) -> None:
    assert job_state(steps) == state
    assert job_state(steps[::-1]) == state
    assert job_state(steps, stopping=True) == "stopping"


def test_what_a_writer_leaves_out_means_the_careful_thing() -> None:
    spec = JobSpec("i", "n", "h", "w", "p", "c", "r", [])
    assert spec.log_limit_bytes == 5 << 30
    assert (spec.allow_tmpfs, spec.restart_after_reboot) == (False, False)
    look = LookRequest()
    assert (look.processes, look.gpus, look.active_only) == (False, False, False)
    assert LogCursor("j", "s", 0).offset == -1, "the end of the log, not its whole"


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_readers_ignore_fields_of_a_newer_writer(record: type) -> None:
    required = {
        field.name: "x"
        for field in dataclasses.fields(record)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    made = from_dict(record, {**required, "a_field_of_tomorrow": {"deep": [1]}})
    again = from_dict(record, json.loads(dumps(to_dict(made))))
    assert again == made


def test_another_version_is_refused_with_both_named() -> None:
    check_version({"v": protocol.VERSION}, "spec.json")
    for found in (protocol.VERSION + 1, 0, None, "1"):
        with pytest.raises(ProtocolVersionError) as caught:
            check_version({"v": found}, "spec.json of job x")
        assert repr(found) in str(caught.value)
        assert f"version {protocol.VERSION}" in str(caught.value)
        assert "spec.json of job x" in str(caught.value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.text() | st.integers(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=10,
    )
)
def test_one_message_is_one_line(value: object) -> None:
    line = dumps({"value": value})
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert json.loads(line)["value"] == value


def test_defaults_are_not_shared() -> None:
    assert LookRequest().logs is not LookRequest().logs
    first = JobSpec("i", "n", "h", "w", "p", "c", "r", [])
    first.env["A"] = "1"
    assert JobSpec("i", "n", "h", "w", "p", "c", "r", []).env == {}


def test_failure_classes_are_those_that_the_host_knows() -> None:
    from remote_jobs.agent.policy import POLICY

    assert set(POLICY) == set(FAILURE_CLASSES)


@pytest.mark.parametrize(
    ("state", "status"), [("succeeded", 0), ("failed", 1), ("stopped", 1), ("lost", 5), ("running", 5)]
)
def test_exit_status_of_waiting(state: str, status: int) -> None:
    assert exit_status(state) == status
    assert is_over(state) == (state != "running")


def test_protocol_imports_nothing_but_the_standard_library() -> None:
    import ast
    import sys

    tree = ast.parse(Path(protocol.__file__).read_text("utf-8"))
    names = {
        (node.module or "").split(".")[0] if isinstance(node, ast.ImportFrom) else alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert names <= sys.stdlib_module_names


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"phase": "p", "state": "progress", "done": 1, "total": 2}', {"phase": "p", "state": "progress", "done": 1, "total": 2}),
        ('{"phase": "p", "done": 0.5, "other": 7}', {"phase": "p", "state": "", "done": 0.5}),
        ('{"phase": "p", "state": 3, "done": true, "total": "9"}', {"phase": "p", "state": ""}),
        ('{"phase": "p", "done": 0, "total": 9007199254740992}', {"phase": "p", "state": "", "done": 0, "total": 1 << 53}),
        ('{"phase": "p", "done": -1, "total": 9007199254740993}', {"phase": "p", "state": ""}),
        ('{"phase": "p", "done": NaN, "total": Infinity}', {"phase": "p", "state": ""}),
        ('{"phase": "' + "x" * 101 + '"}', {"phase": "x" * 100, "state": ""}),
        ('{"phase": "a\\ud800b", "state": "\\udfff"}', {"phase": "a?b", "state": "?"}),
        ('{"phase": 1}', None), ('{"state": "start"}', None), ('["phase"]', None), ("{", None), ("[" * 100000, None), ("9" * 5000, None),
    ],
)  # fmt: skip
def test_of_a_marker_only_what_can_be_meant_is_read(text: str, said: dict[str, object] | None) -> None:
    assert protocol.read_marker(text) == said
