"""A laptop whose only host is hostile, and one whose only host is a real sshd."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.laptop import ORCH, Laptop

EVIL = Path(__file__).with_name("evil_host.py")


@pytest.fixture
def evil(tmp_path: Path) -> Laptop:
    """A laptop whose host `box` lies; set ``environment["ORCH_EVIL"]`` to choose how."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "ssh").write_text(f"#!/bin/sh\nexec {sys._base_executable} -I -S {EVIL} \"$@\"\n")  # type: ignore[attr-defined]
    (tools / "ssh").chmod(0o755)
    entry = {"ssh": "me@192.0.2.7:22", "transport": "openssh", "gpus": 1, "root": "/nowhere"}
    environment = {
        "PATH": f"{tools}:{Path(ORCH).parent}:{os.environ['PATH']}",
        "ORCH_REAL_SSH": shutil.which("ssh") or "/usr/bin/ssh",
    }
    return Laptop(tmp_path / "laptop", {"box": entry}, environment=environment)
