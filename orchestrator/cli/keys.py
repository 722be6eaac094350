"""Single key presses from a terminal, without echo and without waiting; POSIX and Windows."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, Self

_NAMES = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1b": "escape",
    " ": "space",
}


class Keys:
    """Context manager; `pressed` gives the names or characters of keys pressed since the last call."""

    def __enter__(self) -> Self:
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def take(self) -> None:
        """Have keys one by one and unseen from now on."""
        self._saved: Any = None
        if sys.platform != "win32":
            import termios
            import tty

            self._fd = sys.stdin.fileno()
            self._saved = termios.tcgetattr(self._fd)
            # cbreak, not raw: Ctrl-C stays a signal and output processing stays on.
            tty.setcbreak(self._fd, termios.TCSANOW)

    def release(self) -> None:
        """Leave the terminal as it was."""
        if sys.platform != "win32" and self._saved is not None:
            import termios

            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._fd, termios.TCSADRAIN, self._saved)

    def pressed(self) -> list[str]:
        """Keys pressed since the last call; empty when none was."""
        return list(split_keys(self._read()))

    def _read(self) -> str:
        if sys.platform == "win32":
            import msvcrt

            text = ""
            while msvcrt.kbhit():
                key = msvcrt.getwch()
                if key in {"\x00", "\xe0"}:
                    key = {"H": "\x1b[A", "P": "\x1b[B"}.get(msvcrt.getwch(), "")
                text += key
            return text
        import select

        text = b""
        while select.select([self._fd], [], [], 0)[0]:
            chunk = os.read(self._fd, 1024)
            if not chunk:
                break
            text += chunk
        return text.decode("utf-8", "replace")


def split_keys(text: str) -> Iterator[str]:
    """Names of the keys in what a terminal sent; unknown escape sequences are swallowed whole."""
    at = 0
    while at < len(text):
        if text[at] == "\x1b":
            end = at + 1
            if text[end : end + 1] in {"[", "O"}:
                end += 1
                while end < len(text) and not text[end].isalpha() and text[end] != "~":
                    end += 1
                end += 1
            name = _NAMES.get(text[at:end])
            at = end
            if name:
                yield name
            continue
        yield _NAMES.get(text[at], text[at])
        at += 1
