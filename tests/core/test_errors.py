"""The tree of errors: codes, exit statuses and JSON are a contract."""

from __future__ import annotations

import pytest

from orchestrator.core import errors
from orchestrator.core.errors import ConfigError, HostError, OrchError, Problem

TREE = {
    "OrchError": ("error", 1),
    "UsageError": ("usage", 2),
    "NoSuchJob": ("no_job", 2),
    "AmbiguousJob": ("ambiguous_job", 2),
    "WrongState": ("wrong_state", 2),
    "ConfigError": ("config", 2),
    "MissingSecret": ("missing_secret", 2),
    "LocalError": ("local", 2),
    "HostError": ("host", 3),
    "Unreachable": ("unreachable", 3),
    "AuthRefused": ("auth_refused", 3),
    "HostKeyUnknown": ("host_key_unknown", 3),
    "HostKeyChanged": ("host_key_changed", 3),
    "NoPython": ("no_python", 3),
    "HostFull": ("host_full", 3),
    "HostRefused": ("host_refused", 3),
    "ChannelTimeout": ("channel_timeout", 3),
    "ProtocolError": ("protocol", 3),
    "GateClosed": ("gate_closed", 4),
    "PreflightFailed": ("preflight_failed", 4),
    "JobFailed": ("job_failed", 1),
    "Incomplete": ("incomplete", 1),
    "JobLost": ("job_lost", 5),
    "WaitTimeout": ("wait_timeout", 124),
    "Interrupted": ("interrupted", 130),
}
CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, OrchError)
}


def test_the_tree_is_complete() -> None:
    assert {name: (cls.code, cls.exit_status) for name, cls in CLASSES.items()} == TREE
    for name in CLASSES:
        assert f" {name} " in (errors.__doc__ or "") + " OrchError ", f"{name} is not drawn in the docstring"


@pytest.mark.parametrize("name", TREE)
def test_json_of_every_error(name: str) -> None:
    error = CLASSES[name]("it broke", "do this")
    assert error.to_json() == {
        "schema": 1,
        "error": {"code": TREE[name][0], "message": "it broke", "hint": "do this"},
    }
    assert str(error) == "it broke\n  do this"


def test_transience() -> None:
    transient = {name for name, cls in CLASSES.items() if issubclass(cls, HostError) and cls("x").transient}
    assert transient == {"Unreachable", "ChannelTimeout"}
    assert HostError("x", transient=True).transient


def test_one_problem_reads_like_a_compiler() -> None:
    error = ConfigError.of([Problem("bad", "do this", "p.yaml", 3)], "the plan p.yaml")
    assert (error.file, error.line, error.hint) == ("p.yaml", 3, "do this")
    assert str(error) == "p.yaml:3: bad\n  do this"
