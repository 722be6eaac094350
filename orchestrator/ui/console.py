"""The two streams: data and results on stdout, words for people on stderr.

Off a terminal a console is as wide as any line, so that nothing is ever wrapped or shortened; markup, emoji and
highlighting are off everywhere, since text from a host must not be able to style itself.  Everything that leaves here
has passed `printable`: no control character of a host reaches a terminal, even where a renderer forgot to clean it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import IO, TYPE_CHECKING, Any

from orchestrator.ui.text import clean, printable

if TYPE_CHECKING:
    from rich.console import Console

UNLIMITED_WIDTH = 1_000_000


def is_terminal(stream: IO[Any]) -> bool:
    """True when a person looks at this stream; ``TERM=dumb`` and CI logs are not terminals."""
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):
        return False


def console(stream: IO[str] | None = None) -> Console:
    """A rich console on a stream (default stdout) with our habits."""
    from orchestrator.ui.safe_console import SafeConsole

    stream = stream or sys.stdout
    terminal = is_terminal(stream)
    return SafeConsole(
        file=stream,
        width=None if terminal else UNLIMITED_WIDTH,
        force_terminal=terminal,
        no_color=True if os.environ.get("NO_COLOR") else None,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=not terminal,
    )


def out(line: str = "") -> None:
    """One line on stdout, never wrapped."""
    sys.stdout.write(printable(line) + "\n")
    sys.stdout.flush()


def say(line: str = "") -> None:
    """One line for people on stderr."""
    sys.stdout.flush()
    sys.stderr.write(printable(line) + "\n")
    sys.stderr.flush()


def say_lines(lines: Iterable[str]) -> None:
    """Lines for people on stderr."""
    for line in lines:
        say(line)


def document(data: Mapping[str, Any]) -> None:
    """The one JSON document of a command on stdout, indented for a person, one line for a program."""
    indent = 2 if is_terminal(sys.stdout) else None
    # ASCII only, so that no control character is left but DEL, which JSON lets through as it is.
    out(json.dumps({"schema": 1, **data}, indent=indent, default=str).replace("\x7f", "\\u007f"))


def error_lines(message: str, hint: str | None) -> list[str]:
    """A failure for a person: what happened, then what to do; foreign text in it is made safe."""
    first, *rest = message.split("\n")
    lines = [f"orch: {clean(first)}", *(clean(line) for line in rest)]
    if hint:
        lines.extend("  " + clean(line) for line in hint.split("\n"))
    return lines
