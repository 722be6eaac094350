"""Progress that people read and orch parses: phase markers, vLLM's shard bar, a tqdm sample bar. All on stderr.

Markers start at column 0, as the log reader wants them, so an open carriage-return bar is ended with a newline first.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

from tqdm import tqdm

MARKER = "::orch "
SHARD_BAR_FORMAT = (
    "{desc}: {percentage:3.0f}% Completed | {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]\n"
)
"""vLLM's own format (model_loader/weight_utils.py): every refresh is a line of its own."""


class Progress:
    """Writes markers, lines and bars to one stream, so that their order in the log is the order of events."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._bar_open = False

    def say(self, text: str) -> None:
        """Print a line for people."""
        if self._bar_open:
            self._stream.write("\n")
        self._stream.write(text + "\n")
        self._stream.flush()

    def mark(self, phase: str, state: str, **counts: Any) -> None:
        """Print a marker line: `::orch {"phase": ..., "state": "start|progress|done|failed", ...}`."""
        self.say(MARKER + json.dumps({"phase": phase, "state": state, **counts}))

    @contextlib.contextmanager
    def phase(self, name: str, **counts: Any) -> Iterator[None]:
        """A phase of the run: start marker, and `done` or `failed` at its end."""
        self.mark(name, "start", **counts)
        try:
            yield
        except BaseException:
            self.mark(name, "failed")
            raise
        self.mark(name, "done")

    @contextlib.contextmanager
    def shard_bar(self, total: int, desc: str = "Loading safetensors checkpoint shards") -> Iterator[tqdm]:
        """VLLM's bar over the files of a checkpoint."""
        with tqdm(total=total, desc=desc, bar_format=SHARD_BAR_FORMAT, file=self._stream) as bar:
            yield bar

    @contextlib.contextmanager
    def sample_bar(self, total: int, done: int, desc: str, unit: str = "sample") -> Iterator[tqdm]:
        """Bar over samples; `done` of them were there before this run and do not count for the rate."""
        interval_s = 0.1 if self._stream.isatty() else 0.5
        with tqdm(
            total=total, initial=done, desc=desc, unit=unit, file=self._stream, mininterval=interval_s
        ) as bar:
            self._bar_open = True
            try:
                yield bar
            finally:
                self._bar_open = False


def utc_now() -> str:
    """ISO UTC time, to the second, with Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
