"""Fixtures that every test area may use. Real servers and processes only, all torn down at the end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sshd.server import Sshd

# Started in the background of a script, everything below would inherit an ignored Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    """A fresh private sshd with empty log; for tests that count connections or break things."""
    with Sshd(tmp_path / "sshd") as server:
        yield server


@pytest.fixture(scope="session")
def shared_sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """One private sshd for the whole run; for tests that only need a host to talk to."""
    with Sshd(tmp_path_factory.mktemp("shared-sshd")) as server:
        yield server
