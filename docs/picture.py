"""Make docs/watch.svg, the picture of the README: `orch watch` on a real terminal, in the middle of a real `orch demo`.

    .venv/bin/python docs/picture.py        # about two minutes

The demo runs as for anybody. Beside it `orch watch` of its job runs in a pseudo-terminal; what pyte makes of its output at a
moment of the second attempt is exported by rich as SVG. Nothing in the picture is drawn by hand.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import pty
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

HERE = Path(__file__).parent
ORCH = str(Path(sys.executable).with_name("orch"))
COLUMNS, ROWS = 104, 34
SHARE = 0.55
"""Which of the pictures of the second attempt is taken: early ones have no forecast, late ones no suspense."""
COLOURS = {"brown": "yellow", "brightbrown": "bright_yellow", "default": None}


class Terminal:
    """`orch watch` in a pseudo-terminal, read by a thread; its screen can be had at any time."""

    def __init__(self, argv: list[str], environment: dict[str, str]) -> None:
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self.screen)
        self._lock = threading.Lock()
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execve(argv[0], argv, environment)  # noqa: S606 - no shell is wanted
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._over.is_set():
            if not select.select([self._fd], [], [], 0.2)[0]:
                continue
            try:
                data = os.read(self._fd, 65536)
            except OSError:
                return
            if not data:
                return
            # What pyte does not know (synchronised output, the kitty keyboard) would print rubbish.
            data = re.sub(rb"\x1b\[[<>=?][\d;]*[a-zA-Z]", lambda m: m[0] if m[0][-1:] in b"hl" else b"", data)
            with self._lock:
                self._stream.feed(data)

    def picture(self) -> Text:
        """The screen with its colours, empty lines at the end left out."""
        with self._lock:
            lines = [[self.screen.buffer[y][x] for x in range(COLUMNS)] for y in range(ROWS)]
        text = Text()
        while lines and not "".join(char.data for char in lines[-1]).strip():
            lines.pop()
        for line in lines:
            for look, run in itertools.groupby(line, key=style):  # one piece a style keeps the file small
                text.append("".join(char.data for char in run), look)
            text.append("\n")
        return text

    def close(self) -> None:
        """End it."""
        self._over.set()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, 15)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        self._thread.join(2)
        os.close(self._fd)


def style(char: pyte.screens.Char) -> Style:
    """Rich's style of one cell."""

    def colour(name: str) -> str | None:
        if re.fullmatch(r"[0-9a-f]{6}", name):
            return f"#{name}"
        return COLOURS.get(name, name.replace("bright", "bright_"))

    return Style(
        color=colour(char.fg), bgcolor=colour(char.bg), bold=char.bold, italic=char.italics,
        underline=char.underscore, reverse=char.reverse,
    )  # fmt: skip


def main() -> int:
    """Play the demo, take the picture, write the file."""
    with tempfile.TemporaryDirectory(prefix="orch-picture-") as folder:
        environment = {**os.environ, "TMPDIR": folder}
        demo = subprocess.Popen([ORCH, "demo"], stdout=subprocess.PIPE, text=True, env=environment, stdin=subprocess.DEVNULL)
        assert demo.stdout is not None
        terminal, pictures, second = None, [], threading.Event()
        over = threading.Event()

        def keep() -> None:
            while not over.wait(0.5):
                if second.is_set() and terminal is not None:
                    pictures.append(terminal.picture())

        keeper = threading.Thread(target=keep)
        keeper.start()
        try:
            for line in demo.stdout:
                print(line, end="", flush=True)
                job = re.match(r"  \| (\S+-\d{8}-\S+)$", line)
                if job and terminal is None:
                    [stage] = Path(folder).glob("orch-demo-*")
                    own = {
                        "PATH": os.environ["PATH"], "HOME": str(stage), "TERM": "xterm-256color", "LANG": "C.UTF-8",
                        "COLORTERM": "truecolor", "ORCH_INVENTORY": str(stage / "inventory.yaml"),
                        "ORCH_HOME": str(stage / "laptop"),
                    }  # fmt: skip
                    terminal = Terminal([ORCH, "watch", job[1]], own)
                if "Attempt 2 runs" in line:
                    second.set()
                if line.startswith("4.") or "What happened" in line:
                    over.set()
        finally:
            over.set()
            keeper.join()
            if terminal is not None:
                terminal.close()
            demo.wait(60)
    if not pictures:
        print("no picture was taken: did the demo fail?", file=sys.stderr)
        return 1
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w", encoding="utf-8"), force_terminal=True)  # noqa: SIM115
    console.print(pictures[int(len(pictures) * SHARE)], end="")
    svg = console.export_svg(title="orch watch", unique_id="orch")
    (HERE / "watch.svg").write_text(svg)
    print(f"wrote docs/watch.svg, {len(svg) / 1000:.0f} kB, at {time.strftime('%Y-%m-%d')}")
    return demo.returncode


if __name__ == "__main__":
    sys.exit(main())
