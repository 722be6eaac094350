"""Text on a stream whose encoding lacks some of its characters: a pipe on Windows (cp1252), `LC_ALL=C` (ASCII).

A log's evidence may hold any letter, and our pictures hold blocks: nothing of it may end a command.  Each character
becomes one other, so that columns stay where they are.  JSON documents are ASCII, and `orch logs` writes bytes.
"""

from __future__ import annotations

import codecs
import io
from typing import IO

NAME = "orch-plain"
_PLAIN = str.maketrans(
    "▁▂▃▄▅▆▇█▓░━─│├└·…—–‘’“”",  # noqa: RUF001 - what logs hold
    "_.-=+*#@=x#-||`.~--''\"\"",
)
"""Our own signs, and what typographers put into logs. Bars keep their levels, those of failures their other look."""


def plain(error: UnicodeError) -> tuple[str, int]:
    """An error handler for `codecs`: signs as their like in ASCII, letters as question marks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_PLAIN)
    return "".join(char if char.isascii() else "?" for char in text), error.end


def take_any_text(stream: IO[str]) -> None:
    """Let a stream write what its encoding lacks; one in UTF-8 stays as it is."""
    if isinstance(stream, io.TextIOWrapper) and "utf" not in stream.encoding.lower():
        codecs.register_error(NAME, plain)
        stream.reconfigure(errors=NAME)
