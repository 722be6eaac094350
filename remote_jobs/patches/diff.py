"""Apply a unified diff to a text exactly, or not at all: no fuzz, no offsets. Pure.

The original's hash is checked before, so every line must match where the diff says; a diff that does not fit is a broken
set, never something to guess around. Format: https://www.gnu.org/software/diffutils/manual/html_node/Detailed-Unified.html
"""

from __future__ import annotations

import re

_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class DiffError(ValueError):
    """The diff is malformed or does not fit the text."""


def apply(text: str, diff: str) -> str:
    """Return the patched text.

    Raises:
        DiffError: names the hunk and line that did not match.
    """
    source = text.splitlines(keepends=True)
    lines = diff.splitlines(keepends=True)
    result: list[str] = []
    position = 0  # in source, 0-based
    index = 0
    hunks = 0
    while index < len(lines):
        head = _HUNK.match(lines[index])
        index += 1
        if head is None:
            continue  # file names and what comes before the first hunk
        hunks += 1
        old_start, old_count = int(head.group(1)), int(head.group(2) or 1)
        start = old_start - 1 if old_count else old_start
        if start < position:
            raise DiffError(f"hunk {hunks} overlaps the one before")
        result += source[position:start]
        position = start
        old_left, new_left = old_count, int(head.group(4) or 1)
        while old_left or new_left:
            if index >= len(lines):
                raise DiffError(f"hunk {hunks} ends too early")
            line = lines[index]
            index += 1
            if line.startswith("\\"):  # "\ No newline at end of file"
                continue
            kind, body = line[:1], line[1:]
            if line in ("\n", "\r\n"):
                kind, body = " ", line  # editors strip the single space of an empty context line
            if kind not in (" ", "-", "+"):
                raise DiffError(f"hunk {hunks}: cannot read {line!r}")
            if kind in " -":
                found = source[position] if position < len(source) else None
                if found is None or found.rstrip("\r\n") != body.rstrip("\r\n"):
                    raise DiffError(
                        f"hunk {hunks}: line {position + 1} is {found!r}, the diff expects {body!r}"
                    )
                position += 1
                old_left -= 1
            if kind in " +":
                result.append(body if kind == "+" else source[position - 1])
                new_left -= 1
    if not hunks:
        raise DiffError("no hunk in the diff")
    return "".join(result + source[position:])
