"""A log on a terminal: text with its control sequences taken out and carriage returns collapsed, as it streams in.

The line being written (a progress bar, mostly) is redrawn in place with two sequences of our own; all others are gone.
"""

from __future__ import annotations

import codecs

from orchestrator.ui.text import clean

_REDRAW = "\r\x1b[K"
MAX_PENDING = 64 * 1024
"""An unfinished line longer than this keeps only its end: memory stays bounded."""


class TerminalText:
    """Turns raw log bytes into text for a terminal; feed chunks in order, then `end`.

    Args:
        width: columns for the unfinished line, so that redrawing it never scrolls.
    """

    def __init__(self, width: int = 79) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._width = width
        self._pending = ""
        self._shown = False

    def feed(self, data: bytes) -> str:
        """Text to write for these bytes."""
        text = self._pending + self._decoder.decode(data)
        *lines, self._pending = text.split("\n")
        out = []
        if lines and self._shown:
            out.append(_REDRAW)
            self._shown = False
        out.extend(clean(line) + "\n" for line in lines)
        # Of a bar that is redrawn over and over, only the last state is kept.
        self._pending = self._pending[max(0, self._pending.rstrip().rfind("\r")) :]
        if len(self._pending) > MAX_PENDING:
            self._pending = self._pending[-MAX_PENDING:]
        shown = clean(self._pending)[: self._width]
        if shown:
            out.append((_REDRAW if self._shown else "") + shown)
            self._shown = True
        return "".join(out)

    def end(self) -> str:
        """Text to write when the stream ends or something else is to be printed."""
        self._pending += self._decoder.decode(b"", final=True)
        rest, self._pending = clean(self._pending), ""
        if not rest:
            return ""
        redraw, self._shown = (_REDRAW if self._shown else ""), False
        return f"{redraw}{rest}\n"
