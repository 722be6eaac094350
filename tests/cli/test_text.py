"""Foreign text never reaches a terminal raw, and words for numbers read well."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.services.local_paths import Destination, UnsafeName, safe_parts
from orchestrator.services.logs import last_lines
from orchestrator.ui import text
from orchestrator.ui.logtext import TerminalText

HOSTILE = [
    "\x1b[2J\x1b[Hgone",
    "\x1b]0;title\x07rest",
    "\x1b]52;c;ZXZpbA==\x1b\\rest",
    "\x1bP1$r0m\x1b\\rest",
    "a\x9b31mred",
    "\x1bcreset",
    "half \x1b",
    "half \x1b[",
    "bell\x07 nul\x00 del\x7f",
]


@pytest.mark.parametrize("line", HOSTILE)
def test_clean_leaves_no_control_character(line: str) -> None:
    shown = text.clean(line)
    assert all(char.isprintable() or char == "\t" for char in shown), repr(shown)


@given(st.text())
def test_clean_is_always_printable_and_one_line(line: str) -> None:
    shown = text.clean(line)
    assert not any(ord(char) < 32 and char != "\t" for char in shown)
    assert "\x1b" not in shown
    assert "\x9b" not in shown


def test_clean_collapses_a_progress_bar_to_its_last_state() -> None:
    assert text.clean("\r 10%|#\r 20%|##\r 30%|###\r") == " 30%|###"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "-"), (0.42, "0.4s"), (9.96, "10s"), (47, "47s"), (724, "12m04s"), (12000, "3h20m"), (187200, "2d04h"), (-5, "-5.0s")],
)
def test_durations(seconds: float | None, words: str) -> None:
    assert text.duration(seconds) == words


@pytest.mark.parametrize(("count", "words"), [(None, "-"), (0, "0 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"), (200 << 20, "200 MiB")])
def test_sizes(count: int | None, words: str) -> None:
    assert text.size(count) == words


def test_clock_times_name_the_day_when_it_is_not_today() -> None:
    now = datetime(2026, 11, 29, 14, 0, tzinfo=UTC)
    assert text.clock_time(now + timedelta(hours=2), now, UTC) == "16:00"
    assert text.clock_time(now + timedelta(hours=12), now, UTC) == "Mon 30 Nov 02:00"


def test_columns_are_never_shortened() -> None:
    wide = "x" * 5000
    assert text.columns([["a", wide, "c"], ["bb", "y", "d"]])[0] == f"a   {wide}  c"
    assert text.columns([["日本", "x"], ["a", "y"]]) == ["日本  x", "a     y"]


def test_a_stream_of_chunks_gives_the_same_text_as_the_whole() -> None:
    raw = "one\ntw\x1b[31mo\x1b[0m\r\nthree ä\n".encode()
    for cut in range(len(raw)):
        screen = TerminalText()
        shown = screen.feed(raw[:cut]) + screen.feed(raw[cut:]) + screen.end()
        final = [line.rsplit("\r\x1b[K", 1)[-1] for line in shown.split("\n")]
        assert final == ["one", "two", "three ä", ""], (cut, shown)


def test_a_bar_of_carriage_returns_is_redrawn_in_bounded_memory() -> None:
    screen = TerminalText(width=20)
    shown = "".join(screen.feed(f"\r{i}% of a bar that is longer than the screen".encode()) for i in range(20000))
    assert "\n" not in shown
    assert shown.rsplit("\r\x1b[K", 1)[-1] == "19999% of a bar that"
    assert screen.end().endswith("19999% of a bar that is longer than the screen\n")


@pytest.mark.parametrize(
    ("data", "lines", "whole", "expected"),
    [
        (b"a\nb\nc\n", 2, True, b"b\nc\n"),
        (b"a\nb\nc", 2, True, b"b\nc"),
        (b"a\nb\n", 5, True, b"a\nb\n"),
        (b"rt of a\nb\n", 5, False, b"b\n"),
        (b"one endless line", 1, False, b"one endless line"),
        (b"half of it\n", 3, False, b"half of it\n"),
        (b"a\n", 0, True, b""),
        (b"", 3, True, b""),
    ],
)
def test_last_lines(data: bytes, lines: int, whole: bool, expected: bytes) -> None:
    assert last_lines(data, lines, whole=whole) == expected


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/.", "a\0b", "a/" + "x" * 256]
)
def test_hostile_names_are_refused(name: str) -> None:
    with pytest.raises(UnsafeName):
        safe_parts(name, windows=False)


@pytest.mark.parametrize("name", ["a\\..\\b", "C:x", "con", "NUL.txt", "a/aux.log", "end.", "end ", "a?b", "a\nb"])
def test_names_that_windows_cannot_hold_are_refused_there_only(name: str) -> None:
    with pytest.raises(UnsafeName):
        safe_parts(name, windows=True)
    assert safe_parts(name, windows=False)


@given(st.text(min_size=1, max_size=60))
def test_no_name_leads_out_of_the_destination(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    place = Destination(tmp_path_factory.getbasetemp() / "dest")
    try:
        path = place.place(name)
    except (UnsafeName, UnicodeEncodeError):
        return
    assert path.resolve().is_relative_to(place.folder)
    assert path != place.folder
