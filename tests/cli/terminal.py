"""A person at a terminal: a program on a pty, its screen kept by pyte, keys typed, the window resized."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import pyte


class Screen(pyte.Screen):
    """pyte knows no alternate screen (`?1049`): leaving it gives an empty one back, instead of writing over the frame."""

    def reset_mode(self, *modes: int, **words: bool) -> None:
        super().reset_mode(*modes, **words)
        if 1049 in modes:
            self.erase_in_display(2)
            self.cursor_position()


class Terminal:
    """Context manager; the program is killed at the end of the block if it still runs."""

    def __init__(
        self, argv: Sequence[str], *, environment: Mapping[str, str], cwd: Path, columns: int = 100, rows: int = 30
    ) -> None:
        self.argv, self.environment, self.cwd = argv, {**environment, "TERM": "xterm-256color"}, cwd
        self.screen = Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.status: int | None = None

    def __enter__(self) -> Self:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(self.cwd)
            # The window's size is there before the program looks.
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", self.screen.lines, self.screen.columns, 0, 0))
            os.execvpe(self.argv[0], list(self.argv), self.environment)
        return self

    def __exit__(self, *_: object) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self.fd, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        """Give the window another size, as a window manager does."""
        self.screen.resize(rows, columns)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.kill(self.pid, signal.SIGWINCH)

    @property
    def text(self) -> str:
        """What the person sees."""
        return "\n".join(line.rstrip() for line in self.screen.display)

    def read(self, seconds: float) -> bool:
        """Take what the program writes; False at its end."""
        if not select.select([self.fd], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self.fd, 65536)
        except OSError:
            return False
        self.raw += data
        self._stream.feed(data)
        return bool(data)

    def until(self, condition: Callable[[str], bool], sentence: str, within_s: float = 30.0) -> str:
        """Read until the screen fits."""
        deadline = time.monotonic() + within_s
        while not condition(self.text):
            assert self.read(0.05) or condition(self.text), f"the program ended before: {sentence}\n{self.text}"
            assert time.monotonic() < deadline, f"not seen: {sentence}\n{self.text}"
        return self.text

    def shows(self, words: str, within_s: float = 30.0) -> str:
        """Read until the screen shows words."""
        return self.until(lambda text: words in text, f"{words!r} is shown", within_s)

    def ended(self, within_s: float = 30.0) -> int:
        """Read to the end; the exit status."""
        deadline = time.monotonic() + within_s
        while self.read(0.05):
            assert time.monotonic() < deadline, f"still runs\n{self.text}"
        self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status
