"""`orch explain LOG`: read a log at hand, from a file or stdin, in bounded memory. No host, no inventory.

Must not import hosts: this verb works where no host is known, and on Windows and macOS.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from orchestrator.core.errors import UsageError
from remote_jobs.logs.source import explain_stream, opened, updates_of


def explain(stream: BinaryIO, exit_status: int | None = None) -> dict[str, Any]:
    """The `explain` document of the design for everything that the stream holds.

    Args:
        stream: bytes of a log, read to its end.
        exit_status: how the program ended, negative for a signal; None when unknown.
    """
    return explain_stream(stream, exit_status)


def updates(stream: BinaryIO) -> Iterator[dict[str, Any]]:
    """Every bar update in print order, as soon as it is read (a pipe may still be written to)."""
    return updates_of(stream)


@contextmanager
def open_log(source: str) -> Iterator[BinaryIO]:
    """A log file for reading; ``-`` is stdin.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        with opened(source) as stream:
            yield stream
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(
            f"cannot read the log {source}: {error.strerror or error}",
            "give a log file, or pipe one: ssh HOST cat run.log | orch explain -",
        ) from None
