"""Words for numbers, times and foreign text, as pure functions.

Why: text from a host (logs, process names, error messages) may hold anything, so all of it passes `clean` before it
reaches a terminal.  Must not import hosts or a clock: the present moment is always an argument.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from datetime import datetime, tzinfo

from orchestrator.core.times import iso, parse_time

_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC, DCS, SOS, PM, APC with their strings
    r"|\x1b[ -/]*[0-~]"  # two-byte escapes
    r"|\x9b[0-?]*[ -/]*[@-~]"  # CSI as one C1 character
)
_BIDI = dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x061C, 0x200E, 0x200F], None)
"""Characters that reorder what a terminal shows: a log line could hide behind them."""
_CONTROLS = {code: "�" for code in (*range(0x20), *range(0x7F, 0xA0), *range(0xD800, 0xE000)) if code != 0x09}
"""Also halves of surrogate pairs: a file name that is no UTF-8 has some, and no stream takes them."""


_UNPRINTABLE = {code: char for code, char in {**_CONTROLS, **_BIDI}.items() if code != 0x0A}


def printable(text: str) -> str:
    """Text of ours that may hold foreign words, at the last moment before a terminal: no byte of it is a control.

    Renderers use `clean`, which also takes escape sequences out whole; this is for what one of them forgot.
    """
    return text if text.isprintable() else text.translate(_UNPRINTABLE)


def clean(text: str) -> str:
    r"""One line of foreign text, safe on a terminal: escape sequences gone, ``\r`` collapsed, controls visible."""
    text = _ESCAPES.sub("", text)
    if "\r" in text:
        parts = [part for part in text.split("\r") if part.strip()]
        text = parts[-1] if parts else ""
    return text.replace("\n", " ").translate(_CONTROLS).translate(_BIDI)


def clean_lines(text: str) -> list[str]:
    """Several lines of foreign text, each made safe."""
    return [clean(line) for line in text.split("\n")]


def one_line(text: str) -> str:
    """Foreign text for a list or a log of ours: all white space as single spaces, made safe."""
    return " ".join(clean(part) for part in text.split() if part)


def duration(seconds: float | None) -> str:
    """How long, in at most two units: ``0.4s``, ``47s``, ``12m04s``, ``3h20m``, ``2d04h``; ``-`` when unknown."""
    if seconds is None:
        return "-"
    if seconds < 0:
        return "-" + duration(-seconds)
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, second = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{second:02d}s"
    hours, minute = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minute:02d}m"
    return f"{hours // 24}d{hours % 24:02d}h"


def size(count: float | None) -> str:
    """Bytes in binary units: ``512 B``, ``1.5 GiB``; ``-`` when unknown."""
    if count is None:
        return "-"
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def clock_time(
    moment: datetime | None, now: datetime, zone: tzinfo | None = None, *, seconds: bool = False
) -> str:
    """Time of day on the reader's clock; the date is added when it is not today's."""
    if moment is None:
        return "-"
    local, today = moment.astimezone(zone), now.astimezone(zone)
    text = local.strftime("%H:%M:%S" if seconds else "%H:%M")
    return text if local.date() == today.date() else f"{local:%a} {local.day} {local:%b} {text}"


def seconds_between(start: str | None, end: str | None, now: datetime) -> float | None:
    """Seconds from one ISO time to another, or to ``now`` while there is no end; None without a start."""
    begin = parse_time(start)
    if begin is None:
        return None
    return max(0.0, ((parse_time(end) or now) - begin).total_seconds())


def plural(count: int, word: str, many: str | None = None) -> str:
    """``1 job``, ``2 jobs``, ``2 processes``."""
    return f"{count} {word}" if count == 1 else f"{count} {many or word + 's'}"


def number(value: float | None) -> str:
    """A count or a rate with few digits: ``12``, ``3.14``, ``1,204``."""
    if value is None:
        return "?"
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def cell_width(text: str) -> int:
    """Columns that a text takes on a terminal (wide East Asian characters take two, marks none)."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )


def columns(rows: Iterable[Sequence[str]], gap: str = "  ") -> list[str]:
    """Rows as aligned lines of any length: nothing is wrapped, folded or shortened; no trailing blanks."""
    table = [list(row) for row in rows]
    if not table:
        return []
    count = max(len(row) for row in table)
    widths = [max((cell_width(row[i]) for row in table if i < len(row)), default=0) for i in range(count)]
    return [
        gap.join(cell + " " * (widths[i] - cell_width(cell)) for i, cell in enumerate(row)).rstrip()
        for row in table
    ]


__all__ = [
    "cell_width",
    "clean",
    "clean_lines",
    "clock_time",
    "columns",
    "duration",
    "iso",
    "number",
    "one_line",
    "parse_time",
    "plural",
    "printable",
    "seconds_between",
    "size",
]
