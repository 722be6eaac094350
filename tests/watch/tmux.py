"""A person in tmux: the real program in a real terminal multiplexer, keys sent, the pane read, resized, detached."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.support.waiting import wait_until


class Tmux:
    """Context manager around a tmux server of its own with one window; everything in it is ended with the block.

    Args:
        folder: for the socket and the file that the exit status is written to.
        argv: the program.
        environment: its whole environment; TERM is set by tmux.
    """

    def __init__(
        self,
        folder: Path,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str],
        cwd: Path,
        columns: int = 100,
        rows: int = 30,
    ) -> None:
        self.folder, self.argv, self.cwd, self.size = folder, argv, cwd, (columns, rows)
        # The start of the environment, so that nothing of this shell is in it.
        self.environment = {name: value for name, value in environment.items() if name != "TERM"}
        self.status_file = folder / "status"

    def _tmux(self, *arguments: str, check: bool = True) -> str:
        # The path of a Unix socket has at most 107 bytes, pytest's folders are long: the folder is where tmux starts.
        command = ["tmux", "-S", "tmux.sock", "-f", "/dev/null", *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        assert not check or done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def __enter__(self) -> Self:
        words = shlex.join(self.argv)
        # A shell with job control: what Ctrl-Z stopped goes on once there is a file `fg`. It stays until the pane was read.
        fg, status = shlex.quote(str(self.folder / "fg")), shlex.quote(str(self.status_file))
        script = (
            f"set -m; {words}; s=$?; while [ $s = 148 ]; do until [ -e {fg} ]; do sleep 0.1; done; rm {fg}; fg; s=$?; done; "
            f"echo $s >{status}.new; mv {status}.new {status}; exec sleep 600"
        )
        columns, rows = map(str, self.size)
        self._tmux("new-session", "-d", "-s", "w", "-x", columns, "-y", rows, "-c", str(self.cwd), "/bin/bash", "-c", script)
        return self

    def __exit__(self, *_: object) -> None:
        self._tmux("kill-server", check=False)

    def keys(self, *keys: str) -> None:
        """Press keys, by tmux's names (`Up`, `C-c`) or as they are."""
        self._tmux("send-keys", "-t", "w", *keys)

    def resize(self, columns: int, rows: int) -> None:
        """Give the window another size."""
        self._tmux("resize-window", "-t", "w", "-x", str(columns), "-y", str(rows))

    @property
    def text(self) -> str:
        """What the pane shows."""
        return self._tmux("capture-pane", "-p", "-t", "w")

    @property
    def coloured(self) -> str:
        """The same with its colours as escape codes."""
        return self._tmux("capture-pane", "-p", "-e", "-t", "w")

    @property
    def pid(self) -> int:
        """The program's process."""
        shell = self._tmux("display-message", "-p", "-t", "w", "#{pane_pid}").strip()
        return int(subprocess.run(["ps", "-o", "pid=", "--ppid", shell], capture_output=True, text=True, check=True).stdout)

    def until(self, condition: Callable[[str], object], sentence: str, within_s: float = 20.0) -> str:
        """Wait until the pane fits; the very text that did."""

        def fitting() -> str:
            text = self.text
            return text if condition(text) else ""

        return wait_until(fitting, sentence, within_s=within_s, every_s=0.1, seen=lambda: "\n" + self.text)

    def shows(self, words: str, within_s: float = 20.0) -> str:
        """Wait until the pane shows words."""
        return self.until(lambda text: words in text, f"{words!r} is shown", within_s)

    def ended(self, within_s: float = 20.0) -> int:
        """Wait for the program's end; its exit status."""
        wait_until(self.status_file.exists, "the program ends", within_s=within_s, every_s=0.1, seen=lambda: "\n" + self.text)
        return int(self.status_file.read_text())
