"""`orch watch` and `orch logs` on a real terminal: keys, resize, disconnect while open, nothing raw from a log."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import pytest

from tests.cli.terminal import Terminal
from tests.cli.test_jobs import BAR, GO, Host, host  # noqa: F401 - the fixture
from tests.support.laptop import ORCH

SLOW_BAR = (
    "i=0; until [ -e go ]; do i=$((i+1)); printf '\\rLoading shards: %d%%|#| %d/1000 [00:01<00:09, 10.00it/s]' $((i/10)) $i; "
    "sleep 0.1; done; echo"
)


@pytest.fixture
def watching(host: Host) -> Iterator[tuple[Terminal, str]]:  # noqa: F811
    job, work = host.launch(SLOW_BAR)
    with Terminal([ORCH, "watch", job], environment=host.laptop.environment, cwd=host.laptop.folder) as terminal:
        terminal.shows(f"{job}  running")
        yield terminal, job
    (work / "go").touch()


def test_keys_log_processes_help_and_leaving(host: Host, watching: tuple[Terminal, str]) -> None:  # noqa: F811
    terminal, job = watching
    terminal.shows("q leave")
    terminal.type("p")
    terminal.shows("/bin/bash -c")
    terminal.type("l")
    terminal.shows("log of work, attempt 1")
    terminal.shows("Loading shards:")
    terminal.type("l")
    terminal.until(lambda text: "log of work" not in text, "the log is closed")
    terminal.type("?")
    terminal.shows("take the chosen job up again")
    terminal.type("?")
    terminal.type("q")
    assert terminal.ended() == 0
    assert b"\x1b[?1049l" in terminal.raw, "the person's own screen comes back"
    assert "the jobs go on" in terminal.raw.decode()
    assert host.status(job)["state"] == "running"


def test_resize_and_ctrl_c(host: Host, watching: tuple[Terminal, str]) -> None:  # noqa: F811
    terminal, job = watching
    for columns, rows in ((60, 15), (200, 50), (100, 30)):
        terminal.resize(columns, rows)
        terminal.screen.reset()
        terminal.until(
            lambda text: "q leave" in text.splitlines()[-1] and f"{job}  running" in text, f"a frame of {columns}x{rows}"
        )
    os.kill(terminal.pid, signal.SIGINT)
    assert terminal.ended() == 130
    assert host.status(job)["state"] == "running"


def test_a_broken_link_is_shown_and_heals(host: Host, watching: tuple[Terminal, str]) -> None:  # noqa: F811
    terminal, _ = watching
    terminal.shows("connected")
    connections = host.sshd.connections()
    host.sshd.kill_sessions()
    terminal.until(lambda _: host.sshd.connections() > connections, "it connects again")
    terminal.shows("connected")
    terminal.type("q")
    assert terminal.ended() == 0


def test_stop_asks_first(host: Host, watching: tuple[Terminal, str]) -> None:  # noqa: F811
    terminal, job = watching
    terminal.type("s")
    terminal.shows(f"stop {job} on box? [y/N]")
    terminal.type("n")
    terminal.until(lambda text: "[y/N]" not in text, "the question is gone")
    assert host.status(job)["state"] == "running"
    terminal.type("s")
    terminal.shows("[y/N]")
    terminal.type("y")
    assert terminal.ended() == 1
    assert "stopped" in terminal.text
    assert host.status(job)["state"] == "stopped"


def test_a_log_cannot_speak_to_the_terminal(host: Host) -> None:  # noqa: F811
    job, _ = host.launch(f"printf 'one\\033[2Jtwo\\033]0;title\\007\\n'; {BAR}; printf '\\033[31mred\\033[0m\\n'")
    host.quick("wait", job, expect=0)
    with Terminal([ORCH, "logs", job], environment=host.laptop.environment, cwd=host.laptop.folder) as terminal:
        assert terminal.ended() == 0
    text = terminal.raw.decode().replace("\r\n", "\n")
    assert text == "onetwo\nLoading: 100%|#| 4/4 [00:01<00:01, 1.00it/s]\nred\n"


def test_no_color_is_obeyed(host: Host) -> None:  # noqa: F811
    job, _ = host.launch("true")
    host.quick("wait", job, expect=0)
    for extra, coloured in (({"NO_COLOR": "1"}, False), ({}, True)):
        environment = {**host.laptop.environment, **extra}
        with Terminal([ORCH, "status", job], environment=environment, cwd=host.laptop.folder) as terminal:
            assert terminal.ended() == 0
        assert bool(re.search(rb"\x1b\[[0-9;]*3\dm", terminal.raw)) is coloured
