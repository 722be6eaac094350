"""Where a log's bytes come from: a file, a stream, or the head and tail of a huge file. The only I/O in this package."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, BinaryIO, Dict, Iterator, List, Optional, Sequence

from remote_jobs.logs.reader import LogReader, iter_updates

CHUNK_BYTES = 1 << 20
COUNT_LIMIT_BYTES = 4 << 30
"""Up to so many skipped bytes are read once more only to count line breaks, so that line numbers stay right."""


@contextlib.contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """A file, or standard input for ``-`` (which is left open).

    Raises:
        OSError: the file cannot be opened.
    """
    if path == "-":
        yield sys.stdin.buffer
    else:
        with open(path, "rb") as stream:
            yield stream


def chunks_of(stream: BinaryIO) -> Iterator[bytes]:
    """The bytes of a stream, as they come, at most 1 MiB at a time."""
    read = getattr(stream, "read1", stream.read)
    while True:
        chunk: bytes = read(CHUNK_BYTES)
        if not chunk:
            return
        yield chunk


def explain_stream(stream: BinaryIO, exit_status: Optional[int] = None, host: Optional[List[str]] = None) -> Dict[str, Any]:
    """Explain everything a stream holds, in bounded memory."""
    reader = LogReader()
    for chunk in chunks_of(stream):
        reader.feed(chunk)
    return reader.finish(exit_status, host)


def updates_of(stream: BinaryIO) -> Iterator[Dict[str, Any]]:
    """Every bar update of a stream as the object that `--updates` prints."""
    for update in iter_updates(chunks_of(stream)):
        yield update.to_json()


def explain_file(
    path: str,
    exit_status: Optional[int] = None,
    head_bytes: int = 0,
    tail_bytes: int = 0,
    host: Optional[Sequence[str]] = None,
) -> Dict[str, Any]:
    """Explain a file (``-``: standard input).

    With ``tail_bytes`` a file larger than head and tail together is read at both ends only. The middle is counted for
    line breaks, so that line numbers are those of the file (holes of a punched log cost nothing: they hold none).

    Raises:
        OSError: the file cannot be read.
    """
    lines = list(host or [])
    if path == "-":
        return explain_stream(sys.stdin.buffer, exit_status, lines)
    with open(path, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if tail_bytes <= 0 or size <= head_bytes + tail_bytes:
            return explain_stream(stream, exit_status, lines)
        reader = LogReader()
        left = head_bytes
        while left > 0:
            chunk = stream.read(min(CHUNK_BYTES, left))
            if not chunk:
                break
            left -= len(chunk)
            reader.feed(chunk)
        gap = size - tail_bytes - stream.tell()
        reader.skip(_count_newlines(stream, gap))
        for chunk in chunks_of(stream):
            reader.feed(chunk)
        return reader.finish(exit_status, lines)


def _count_newlines(stream: BinaryIO, size_bytes: int) -> int:
    end = stream.tell() + size_bytes
    newlines = 0
    if size_bytes <= COUNT_LIMIT_BYTES:
        while stream.tell() < end:
            chunk = stream.read(min(CHUNK_BYTES, end - stream.tell()))
            if not chunk:
                break
            newlines += chunk.count(b"\n")
    stream.seek(end)
    return newlines
