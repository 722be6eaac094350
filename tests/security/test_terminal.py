"""Whatever a host or a log says, no control character of it reaches a terminal: no title, clipboard, link, colour."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.ui.console import error_lines
from orchestrator.ui.logtext import TerminalText
from orchestrator.ui.text import clean, one_line, printable
from tests.cli.terminal import Terminal
from tests.security.evil_host import NAME, POISON
from tests.support.laptop import ORCH, Laptop

OURS = re.compile(
    r"\x1b\[(?!5;41)[0-9;]*m"  # colours; blink on red is the host's
    r"|\x1b\[[0-9;]*[HJKABCDG]"  # moves and erases of a live display
    r"|\x1b\[\?(?:25|1049|2026|2004|1004)[hl]"
)
ALLOWED = set("\n\r\t")


def assert_harmless(raw: bytes) -> None:
    """Only our own sequences, and nothing else that a terminal would obey."""
    text = raw.decode("utf-8")
    rest = OURS.sub("", text)
    bad = sorted({char for char in rest if (not char.isprintable() and char not in ALLOWED)})
    assert bad == [], f"{bad!r} in {rest[max(0, rest.index(bad[0]) - 80) :][:200]!r}"
    assert "\x1b[2J\x1b[6n" not in text


COMMANDS = {
    "status": ["status", "--processes"],
    "why": ["why", NAME],
    "logs": ["logs", NAME],
    "gpus": ["gpus", "box"],
    "hosts": ["hosts", "check", "box"],
    "history": ["history"],
    "fetch": ["fetch", NAME, "dest"],
    "stop": ["stop", NAME],
    "retry": ["retry", NAME],
    "wait": ["wait", NAME, "--timeout", "1"],
}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_what_a_hostile_host_says_is_printed_harmless(evil: Laptop, words: list[str]) -> None:
    names = ["../x", f"out/{POISON}", "/etc/x"]
    entries = [{"root": "out", "path": name, "absolute": f"/w/{name}", "size": 8, "mtime_ns": 1, "kind": kind} for name in names for kind in ("file", "link")]
    import json

    environment = {**evil.environment, "ORCH_EVIL_ENTRIES": json.dumps(entries)}
    with Terminal([ORCH, *words], environment=environment, cwd=evil.folder, columns=200) as terminal:
        terminal.ended()
    assert terminal.raw
    assert b"this is a bug" not in terminal.raw, terminal.text
    assert_harmless(terminal.raw)


@pytest.mark.parametrize("mode", ["stderr", "bootstrap-error"])
def test_a_host_that_refuses_with_escapes(evil: Laptop, mode: str) -> None:
    with Terminal([ORCH, "status"], environment={**evil.environment, "ORCH_EVIL": mode}, cwd=evil.folder) as terminal:
        terminal.ended()
    assert_harmless(terminal.raw)


def test_watch_is_harmless(evil: Laptop) -> None:
    with Terminal([ORCH, "watch"], environment=evil.environment, cwd=evil.folder, columns=120, rows=40) as terminal:
        terminal.shows(NAME)
        for key in "lpgl":
            terminal.type(key)
            for _ in range(6):
                terminal.read(0.1)
        terminal.type("q")
        terminal.ended()
    assert b"this is a bug" not in terminal.raw, terminal.text
    assert_harmless(terminal.raw)


@pytest.mark.parametrize("words", [["watch", NAME], ["logs", "-f", NAME]], ids=["watch", "logs -f"])
def test_following_an_ended_job_is_harmless(evil: Laptop, words: list[str]) -> None:
    environment = {**evil.environment, "ORCH_EVIL_OVER": "1"}
    with Terminal([ORCH, *words], environment=environment, cwd=evil.folder, columns=150) as terminal:
        terminal.ended()
    assert_harmless(terminal.raw)


def test_explain_of_a_hostile_log_is_harmless(evil: Laptop, tmp_path: Path) -> None:
    log = tmp_path / "evil.log"
    shape = [
        f"Loading {POISON}:  44%|####    | 28/64 [11:16<14:22, 22.35s/it]",
        f"{POISON}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB {POISON}",
        '::orch {"phase": "' + POISON.encode("unicode_escape").decode().replace("\\x", "\\u00") + '", "state": "start"}',
        "9" * 5000 + "%|##| " + "9" * 5000 + "/" + "9" * 5000 + " [00:01<00:01, 1.0it/s]",
    ]
    log.write_text("\n".join(shape) + "\n")
    for status in ([], ["--exit-status", "1"]):
        with Terminal([ORCH, "explain", str(log), *status], environment=evil.environment, cwd=evil.folder) as terminal:
            assert terminal.ended() == 0, terminal.text
        assert b"bug" not in terminal.raw
        assert_harmless(terminal.raw)


@given(st.text() | st.text(alphabet="\x1b[]0;5m\x07\\P_^\x9b\x9d\x9c\u202ea\n\r", max_size=40))
def test_no_text_gets_through(text: str) -> None:
    for shown in (clean(text), one_line(text), *error_lines(text, text)):
        assert all(char.isprintable() or char == "\t" or ord(char) > 0x9F for char in shown)
        assert not set(shown) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u061c\u200e\u200f")
    assert all(char.isprintable() or char in "\t\n" or ord(char) > 0x9F for char in printable(text))


@given(st.lists(st.binary(max_size=30) | st.sampled_from([b"\x1b", b"]0;x", b"\x07", b"\xc2\x9b", b"5m", b"\n", b"\r"]), max_size=30))
def test_a_log_cut_anywhere_is_harmless(pieces: list[bytes]) -> None:
    """A sequence that is torn between two chunks must not be whole again on the screen."""
    screen = TerminalText()
    shown = "".join(screen.feed(piece) for piece in pieces) + screen.end()
    rest = shown.replace("\r\x1b[K", "")
    assert all(char.isprintable() or char in "\t\n" or ord(char) > 0x9F for char in rest)
