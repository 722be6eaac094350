"""A hostile host cannot eat the laptop's memory or hold it for ever: its answers are refused, other hosts go on."""

from __future__ import annotations

import re
import subprocess
import time

import pytest

from tests.support.laptop import ORCH, Laptop
from tests.support.memory import measured, peak_mib
from tests.support.waiting import PATIENCE

LIMIT_MIB = 600
"""One answer may be 64 MiB; it is held twice while it is taken apart, and what was parsed comes on top."""


def peak(evil: Laptop, mode: str) -> tuple[int, float, str]:
    """(exit status, MiB at most, what was said) of `orch status` on a host that lies in this way."""
    environment = {**evil.environment, "ORCH_EVIL": mode}
    began = time.monotonic()
    note = evil.folder / "peak"
    done = subprocess.run(
        measured(note, [ORCH, "status"]), cwd=evil.folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True,
        check=False, start_new_session=True,
    )  # fmt: skip
    assert time.monotonic() - began < 40 * PATIENCE
    return done.returncode, peak_mib(note), (done.stdout + done.stderr).decode()


MODES = {
    "no-newline": 3,  # an endless line in place of the hello
    "lines": 3,  # a login that prints for ever
    "need-again": 3,  # asks for the release again and again
    "after-no-newline": 3,  # an endless line in place of an answer
    "nested": 3,
    "nested-object": 3,
    "values": 3,
    "keys": 3,
    "huge-int": 3,
    "payload": 3,
    "negative": 3,
    "numbers": 0,  # the job is unreadable, the host is not
    "types": 0,
    "list": 3,
}


@pytest.mark.parametrize("mode", MODES)
def test_a_hostile_answer_costs_little(evil: Laptop, mode: str) -> None:
    status, used_mib, said = peak(evil, mode)
    assert status == MODES[mode], said
    assert not {"Traceback", "bug in orch"} & set(re.findall("Traceback|bug in orch", said))
    assert 0 < len(said.splitlines()) <= 24
    assert used_mib < LIMIT_MIB, said
    if status == 0:
        assert "20261129-abcdef: record" in said  # which job, and what is wrong with it
