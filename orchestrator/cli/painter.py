"""A full-screen view on a terminal that changes only the lines that changed, in one write: nothing flickers, and a frame
costs a slow link a few hundred bytes.

Where the terminal can, a frame is shown as a whole (synchronized output, DEC private mode 2026; others ignore it).
Codes: ECMA-48; `?1049` is the alternate screen, `?25` the cursor.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"
LEAVE = "\x1b[0m\x1b[?25h\x1b[?1049l"
BEGIN, END = "\x1b[?2026h", "\x1b[?2026l"


class Painter:
    """Context manager around the alternate screen; `paint` shows a frame."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._stream: IO[str] = console.file
        self._shown: list[str] = []
        self._lines: list[Text] = []
        self._size: tuple[int, int] | None = None
        self._inside = False

    def __enter__(self) -> Self:
        self.enter()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            self.leave()

    def enter(self) -> None:
        """Take the screen; the next frame is painted whole."""
        if sys.platform == "win32":
            os.system("")  # noqa: S605 - an old console interprets escape codes only after this
        self._write(ENTER)
        self._size, self._inside = None, True

    def leave(self) -> None:
        """Give the person's own screen back."""
        if self._inside:
            self._inside = False
            self._write(LEAVE)

    def again(self) -> None:
        """Whatever is on the screen is not ours any more: paint the next frame whole."""
        self._size = None

    def paint(self, lines: Sequence[Text], size: tuple[int, int]) -> None:
        """Show these lines from the top. ``size``: columns and rows of the terminal; longer lines are cut."""
        columns, rows = size
        out = []
        if size != self._size:
            out.append("\x1b[0m\x1b[2J")
            self._shown, self._size, self._lines = [], size, []
        drawn = [self._codes_of(row, line, columns) for row, line in enumerate(lines[:rows])]
        self._lines = list(lines[:rows])
        for row, code in enumerate(drawn):
            if row >= len(self._shown) or self._shown[row] != code:
                out.append(f"\x1b[{row + 1};1H{code}")
        out.extend(f"\x1b[{row + 1};1H\x1b[2K" for row in range(len(drawn), len(self._shown)))
        self._shown = drawn
        if out:
            self._write(BEGIN + "".join(out) + END)

    def _codes_of(self, row: int, line: Text, columns: int) -> str:
        """As `_codes`; a line that is what it was costs nothing."""
        if row < len(self._lines):
            old = self._lines[row]
            if old is line or (old == line and old.style == line.style):
                return self._shown[row]
        return self._codes(line, columns)

    def _codes(self, line: Text, columns: int) -> str:
        """One line with its colours; what it does not cover of the row is erased, the last column never twice."""
        width = line.cell_len
        if width > columns:
            line = line.copy()
            line.truncate(columns, overflow="crop")
        with self.console.capture() as drawn:
            self.console.print(line, end="", no_wrap=True, overflow="crop", width=max(1, columns))
        return drawn.get() + ("\x1b[0m\x1b[K" if width < columns else "\x1b[0m")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
