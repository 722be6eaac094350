"""A bar for uploads and downloads on a terminal's stderr; nothing anywhere else, and nothing for small files."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

SHOWN_FROM_BYTES = 4 << 20


class Quiet:
    """No bar."""

    def start(self, name: str, total_bytes: int, done_bytes: int) -> None:
        """See services.upload.Progress."""

    def advance(self, num_bytes: int) -> None:
        """See services.upload.Progress."""

    def finish(self) -> None:
        """See services.upload.Progress."""


class Bar:
    """A rich progress bar; files below a few MiB pass without one."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._progress: Any = None
        self._task: Any = None

    def start(self, name: str, total_bytes: int, done_bytes: int) -> None:
        """A file begins."""
        self._task = None
        if total_bytes < SHOWN_FROM_BYTES:
            return
        if self._progress is None:
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )

            from orchestrator.ui.console import console

            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=console(sys.stderr),
                transient=True,
            )
            self._progress.start()
        from orchestrator.ui.text import one_line

        self._task = self._progress.add_task(
            f"{self._verb} {one_line(name)}", total=total_bytes, completed=done_bytes
        )

    def advance(self, num_bytes: int) -> None:
        """More bytes arrived."""
        if self._task is not None:
            self._progress.advance(self._task, num_bytes)

    def finish(self) -> None:
        """The file is whole."""
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None

    def close(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()


@contextlib.contextmanager
def transfer_progress(verb: str) -> Iterator[Quiet | Bar]:
    """A bar where a person looks at stderr."""
    from orchestrator.ui.console import is_terminal

    if not is_terminal(sys.stderr):
        yield Quiet()
        return
    bar = Bar(verb)
    try:
        yield bar
    finally:
        bar.close()
