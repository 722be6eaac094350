"""The fixture itself: other tests trust its counters, so they are checked against the real ssh client."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.sshd.server import Sshd, wait_until


def ssh(sshd: Sshd, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command through the real ssh client."""
    argv = ["ssh", "-F", str(sshd.ssh_config), "-o", "BatchMode=yes", sshd.alias, *command]
    return subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)


def test_counts_connections_and_executions(tmp_path: Path) -> None:
    """One ssh command is one connection and one execution, in a HOME of its own; the folder may hold spaces."""
    with Sshd(tmp_path / "a server") as sshd:
        assert sshd.connections() == 0
        answer = ssh(sshd, "echo ~")
        assert (answer.returncode, answer.stdout) == (0, f"{sshd.home}\n"), answer.stderr
        assert (sshd.connections(), sshd.executions()) == (1, 1)


def test_kill_sessions_cuts_the_client_and_the_listener_lives_on(sshd: Sshd) -> None:
    """A killed session ends the client with 255; the next connection works."""
    before = sshd.connections()
    argv = ["ssh", "-F", str(sshd.ssh_config), sshd.alias, "sleep", "60"]
    with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as client:
        wait_until(lambda: sshd.connections() > before, "the client has logged in")
        assert sshd.kill_sessions() >= 1
        assert client.wait(timeout=10) == 255
    assert ssh(sshd, "true").returncode == 0


def test_restart_keeps_port_and_keys(sshd: Sshd) -> None:
    """After a restart the same configuration still connects."""
    sshd.restart()
    assert ssh(sshd, "true").returncode == 0
