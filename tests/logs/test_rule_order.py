"""What the ranks and marks of the rule table are for: which of two lines is the cause, and which lines end nothing.

Each log is made of the test lines of the table, so these hold for the table as it stands.
"""

from __future__ import annotations

import pytest

from remote_jobs.logs import explain_bytes
from remote_jobs.logs.evidence import match_rule
from remote_jobs.logs.rules import RULES
from remote_jobs.logs.rules.rule import RAISED

BY_ID = {rule.id: rule for rule in RULES}
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\n    main()\n'
BAR = [f"Extracting: {n:3d}%|{'#' * (n // 10):10}| {n}/100 [00:{n // 2:02d}<00:{50 - n // 2:02d},  2.00it/s]\n" for n in range(101)]
UNDER_WAY, FINISHED = "".join(BAR[:50]), "".join(BAR)


def cause(*lines: str, status: int | None = 1, before: str = "") -> str | None:
    """Signature of the verdict on a log in which the test lines of these rules stand in this order."""
    log = before
    for name in lines:
        rule = BY_ID[name]
        log += (TRACEBACK if rule.shows_end == RAISED else "") + rule.example + "\n"
    failure = explain_bytes(log.encode(), status)["failure"]
    return failure["signature"] if failure else None


ROOT_BEFORE_SYMPTOM = [
    # the error of a collective says more than its peers' lost connections
    ("nccl-error", "nccl-remote"), ("nccl-error", "connection"), ("nccl-error", "store-connect"),
    # what killed a process, told by who lost it, is more than the launcher's exit status ...
    ("loader-killed", "elastic-exitcode-9"), ("shell-killed", "elastic-exitcode-9"), ("pool-died", "elastic-exitcode-11"),
    ("kernel-oom-killer", "elastic-exitcode-9"), ("loader-bus", "elastic-exitcode-7"), ("cuda-oom", "elastic-exitcode-9"),
    # ... which is more than what the other ranks complain about
    ("elastic-exitcode-9", "nccl-error"), ("elastic-exitcode-11", "nccl-remote"), ("elastic-exitcode-7", "nccl-remote"),
    ("elastic-exitcode-11", "connection"), ("elastic-exitcode-9", "gloo-peer"), ("elastic-exitcode-7", "gloo-peer"),
    # a named cause is more than any of those, and than an exception known by its type
    ("cuda-oom", "nccl-error"), ("cuda-oom", "key-error"), ("cuda-oom", "python-exception"), ("no-such-file", "python-exception"),
    ("no-such-file", "key-error"), ("no-weights", "nccl-error"), ("import-error", "nccl-error"), ("import-error", "timeout-error"),
    ("no-such-file", "elastic-exitcode-9"), ("no-weights", "elastic-exitcode-9"), ("import-error", "elastic-exitcode-9"),
    # wrappers only say that something else failed
    ("python-exception", "child-failed"), ("terminate-called", "child-failed"), ("ray-actor-died", "called-process"),
    ("exit-143", "called-process"), ("elastic-exitcode-9", "child-failed"), ("nccl-error", "child-failed"),
]  # fmt: skip


@pytest.mark.parametrize(("root", "symptom"), ROOT_BEFORE_SYMPTOM)
def test_the_root_cause_is_named_wherever_it_stands(root: str, symptom: str) -> None:
    assert cause(root, symptom) == root
    assert cause(symptom, root) == root


FIRST_COME = [
    # the end that was asked for comes first, or the error that made somebody ask
    ("exit-143", "type-error"), ("ray-actor-died", "type-error"), ("exit-143", "key-error"), ("ray-actor-died", "python-exception"),
    ("elastic-death-signal", "python-exception"),
    # exceptions known by type only, and those that no rule knows
    ("key-error", "python-exception"), ("terminate-called", "python-exception"), ("terminate-called", "key-error"),
    # causes with a broad text are causes like any other
    ("no-such-file", "import-error"), ("no-weights", "import-error"), ("no-such-file", "no-weights"), ("no-such-file", "hub-gated"),
    ("no-weights", "permission"), ("import-error", "no-space"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), FIRST_COME)
def test_of_equals_the_first_is_the_cause(one: str, other: str) -> None:
    assert cause(one, other) == one
    assert cause(other, one) == other


ONE_LINE = [
    ("ImportError: cannot import name 'x' from 'y' (/usr/lib/y.py): No such file or directory", "cannot-import"),
    ("ImportError: libfoo.so.1: No such file or directory", "import-error"),
    ("safetensors_rust.SafetensorError: Error while deserializing header: No such file or directory (os error 2)", "safetensors-header"),
    ("OSError: [Errno 28] No space left on device: '/data/out' does not exist", "no-space"),
    ("ValueError: the file /data/x.parquet does not exist", "no-weights"),
    ("mypkg.CustomError: file not found", "no-weights"),
    ("KeyError: 'x'", "key-error"),
]


@pytest.mark.parametrize(("line", "rule"), ONE_LINE)
def test_a_line_is_read_by_the_most_specific_rule(line: str, rule: str) -> None:
    found = match_rule(line)
    assert found is not None
    assert found.id == rule


AFTER_THE_WORK = [
    "nccl-watchdog-timeout", "nccl-watchdog", "gloo-peer", "vllm-worker-died", "elastic-sigkill", "loader-killed",
    "loader-segfault", "keyboard-interrupt", "segfault", "fatal-python", "terminate-called", "vllm-dead-wrapper",
]  # fmt: skip


@pytest.mark.parametrize("name", AFTER_THE_WORK)
def test_how_programs_fall_apart_after_their_work_is_no_failure(name: str) -> None:
    assert cause(name, status=None, before=FINISHED) is None
    assert cause(name, status=None, before=UNDER_WAY) is not None


def test_a_scratch_folder_still_in_use_is_no_failure_once_the_work_is_done() -> None:
    busy = f"{TRACEBACK}OSError: [Errno 16] Device or resource busy: '/scratch/tmp1'\n"
    assert cause(status=None, before=UNDER_WAY + busy) == "text-busy"
    assert cause(status=None, before=FINISHED + busy) is None


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.id not in (*AFTER_THE_WORK, "text-busy")], ids=lambda rule: rule.id)
def test_any_other_end_is_a_failure_after_the_bar_as_well(rule) -> None:
    alone = cause(rule.id, status=None, before=UNDER_WAY)
    assert cause(rule.id, status=None, before=FINISHED) == alone


UNFINISHED = ["slurm-time-limit", "slurm-cancel", "elastic-signal", "interrupted-training"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_success_is_doubted_by_those_that_say_that_the_work_was_cut_short(rule) -> None:
    assert cause(rule.id, status=0) == (rule.id if rule.id in UNFINISHED else None)
