r"""Cut a byte stream into lines and segments, and read who wrote a line.

Why this file exists: everything else here works on *segments*, the pieces of a line between carriage returns, and must
give the same answer however the stream was cut when it arrived. So the splitter hands out blocks that hold whole
segments only, each with the line number (from 1, split at ``\n``) and segment number (from 0, split at ``\r``) of
its first byte. Memory is bounded: a segment keeps its first MAX_SEGMENT bytes, the rest up to the next separator is
dropped.

Must not import anything but the standard library; no I/O.
"""

from __future__ import annotations

import re
from typing import Dict, Iterator, List, NamedTuple, Optional

MAX_SEGMENT = 65536
"""Bytes kept of one segment; real log lines are far shorter, a 10 MB line of one character costs no more than this."""
HEAD_BYTES = 240
"""Bytes kept of the start of the current line: the writer's prefix of a bar stands there, before the first ``\\r``."""


class Block(NamedTuple):
    """Whole segments, in order. ``head`` is the start of the line that ``data`` continues (empty at a line's start)."""

    data: bytes
    line: int
    seg: int
    head: bytes


class Segment(NamedTuple):
    """One piece of a line, without its separator."""

    line: int
    seg: int
    start: int
    end: int
    head: bytes


class Splitter:
    """Collect chunks of any size; give back blocks of whole segments."""

    def __init__(self, line: int = 1) -> None:
        self.line = line
        self.seg = 0
        self._head = b""
        self._held: List[bytes] = []
        self._held_size = 0

    def feed(self, chunk: bytes) -> Optional[Block]:
        """Take the next bytes; returns a block when at least one segment became complete."""
        cut = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
        if not cut:
            self._hold(chunk)
            return None
        self._held.append(chunk[:cut])
        data = _shorten(b"".join(self._held))
        self._held = []
        self._held_size = 0
        self._hold(chunk[cut:])
        return self._advance(data)

    def pending(self) -> Block:
        """The unfinished last segment as a block of its own, without taking it out."""
        return Block(b"".join(self._held), self.line, self.seg, self._head)

    def flush(self) -> Block:
        """Take out the unfinished last segment (empty when the stream ended with a separator)."""
        block = self.pending()
        self._held = []
        self._held_size = 0
        return block

    def _hold(self, part: bytes) -> None:
        room = MAX_SEGMENT - self._held_size
        if room > 0 and part:
            self._held.append(part[:room])
            self._held_size += min(len(part), room)
            if len(self._held) > 256:  # many one-byte chunks: keep the list short
                self._held = [b"".join(self._held)]

    def _advance(self, data: bytes) -> Block:
        block = Block(data, self.line, self.seg, self._head)
        newline = data.rfind(b"\n") + 1
        if newline:
            self.line += data.count(b"\n")
            self.seg = data.count(b"\r", newline)
            self._head = data[newline : newline + HEAD_BYTES]
        else:
            self.seg += data.count(b"\r")
            if len(self._head) < HEAD_BYTES:
                self._head += data[: HEAD_BYTES - len(self._head)]
        return block


def _shorten(data: bytes) -> bytes:
    """Cut every segment of ``data`` to MAX_SEGMENT bytes; quick when none is longer."""
    size = len(data)
    if size <= MAX_SEGMENT:
        return data
    kept: List[bytes] = []
    taken = start = 0
    while start + MAX_SEGMENT < size:
        stop = start + MAX_SEGMENT + 1
        last = max(data.rfind(b"\n", start, stop), data.rfind(b"\r", start, stop))
        if last >= 0:
            start = last + 1
            continue
        ends = [at for at in (data.find(b"\n", stop), data.find(b"\r", stop)) if at >= 0]
        kept.append(data[taken : start + MAX_SEGMENT])
        taken = start = min(ends) if ends else size
    kept.append(data[taken:])
    return b"".join(kept)


class Cursor:
    """Walk through a block, forwards only, from one interesting offset to the next in linear time."""

    def __init__(self, block: Block) -> None:
        self._data = block.data
        self._at = 0
        self._line = block.line
        self._seg = block.seg
        self._head = block.head
        self._line_start = 0
        self._newline = -1
        self._return = -1

    @property
    def at(self) -> int:
        """Offset behind the last segment given out."""
        return self._at

    def segment_at(self, offset: int) -> Segment:
        """The segment that holds ``offset`` (>= at). Afterwards the cursor stands at the segment behind it."""
        data = self._data
        newline = data.rfind(b"\n", self._at, offset) + 1
        if newline:
            self._line += data.count(b"\n", self._at, newline)
            self._seg = 0
            self._line_start = newline
            self._head = b""
            self._at = newline
        returned = data.rfind(b"\r", self._at, offset) + 1
        if returned:
            self._seg += data.count(b"\r", self._at, returned)
            self._at = returned
        start = self._at
        if self._newline < offset:
            at = data.find(b"\n", offset)
            self._newline = len(data) if at < 0 else at
        if self._return < offset:
            at = data.find(b"\r", offset)
            self._return = len(data) if at < 0 else at
        end = min(self._newline, self._return)
        # What stands before this segment in its line, wherever the stream was cut.
        head = self._head + data[self._line_start : min(start, self._line_start + HEAD_BYTES - len(self._head))]
        segment = Segment(self._line, self._seg, start, end, head)
        if end < len(data) and data[end] == 10:
            self._line += 1
            self._seg = 0
            self._line_start = end + 1
            self._head = b""
        else:
            self._seg += 1
        self._at = end + 1
        return segment


_ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


def strip_ansi(raw: bytes) -> bytes:
    """Remove terminal escape sequences (colours, cursor moves, titles)."""
    return _ANSI.sub(b"", raw) if b"\x1b" in raw else raw


def to_text(raw: bytes) -> str:
    """Readable text of raw log bytes; bytes that are no UTF-8 become U+FFFD."""
    return strip_ansi(raw).decode("utf-8", "replace")


class Prefix(NamedTuple):
    """Who wrote a line, when it says so. ``size`` is the length of the prefix in the text it was read from."""

    worker: Optional[str]
    pid: Optional[int]
    level: str
    time: str
    size: int


_PREFIXES = [
    # vLLM "(EngineCore_DP0 pid=12) ", Ray "(WorkerDict pid=12, ip=10.0.0.2) ", "(raylet, ip=..) ", "(raylet) "
    re.compile(
        r"\((?P<worker>[A-Za-z_][\w.:<>\[\]-]*)(?: rank=\d+)?(?:,? pid=(?P<pid>\d+))(?:, ip=[\d.a-f:]+)?\) ?"
        r"|\((?P<ray>raylet|gcs_server|autoscaler|dashboard)(?:, ip=[\d.a-f:]+)?\) ?"
    ),
    # torchrun "[rank0]: ", "[default0]:", accelerate/deepspeed launcher "[rank0] "
    re.compile(r"\[(?P<worker>rank\d+|default\d+|\d+)\]: ?|\[(?P<rank>[Rr]ank ?\d+|(?:TP|DP|PP)\d+)\] "),
    # docker -t / kubernetes "2026-05-12T03:16:16.123456789Z stdout F "
    re.compile(r"(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)(?: std(?:out|err) [FP])? "),
    # journald / syslog "May 12 03:16:16 host unit[12]: "
    re.compile(
        r"(?P<time>(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) [ \d]\d \d\d:\d\d:\d\d)"
        r"(?: (?P<host>[\w.-]+))? (?P<worker>[\w@./-]+)(?:\[(?P<pid>\d+)\])?: "
    ),
    # docker compose "vllm-1  | ", kubectl logs --prefix "[pod/name/container] "
    re.compile(r"(?P<worker>[a-z][\w.-]*-\d+) +\| |\[pod/(?P<pod>[\w./-]+)\] "),
    # glog / c10d "[E512 12:00:00.123456 ProcessGroupNCCL.cpp:629] ", "E0512 12:00:00.1 123 file.py:1] "
    re.compile(
        r"\[?(?P<level>[IWEF])\d{3,4} (?P<time>\d\d:\d\d:\d\d\.\d+)(?: (?P<pid>\d+))?(?: [\w./+-]+:\d+)?\] ?"
    ),
    # vLLM "ERROR 05-16 05:26:20 [core.py:1210] ", sglang "[2026-05-16 05:26:20 TP0] "
    re.compile(
        r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) (?P<time>\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?) "
        r"\[?[\w./-]*:\d+\]? ?"
    ),
    re.compile(r"\[(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?)(?: (?P<worker>(?:(?:TP|DP|PP|EP|ATTN_TP)\d+ ?)+))?\] ?"),
    # logging "2026-05-09 01:08:20,139 - root - INFO - ", loguru "2026-.. | INFO     | module:function:1 - "
    re.compile(
        r"(?P<time>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?)(?: - [\w.]+)?(?: - | \| | \[| )"
        r"(?P<level>DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL|SUCCESS)\]?\s*(?:[-:|]| (?=\S))? ?"
        r"(?:[\w.]+:[\w<>]+:\d+ - )?"
    ),
    # transformers "[INFO|trainer.py:1580] 2026-02-10 19:08:17,314 >> "
    re.compile(r"\[(?P<level>INFO|WARNING|ERROR|DEBUG|CRITICAL)\|[\w.]+:\d+\] (?P<time>[\d-]+ [\d:,]+) >> ?"),
    # rich "[13:13:34] INFO     ", uvicorn / plain "INFO:     ", "[INFO] ", "ERROR: "
    re.compile(r"(?:\[(?P<time>\d\d:\d\d:\d\d)\] )? *(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) {2,}(?=\S)"),
    re.compile(r"\[?(?P<level>DEBUG|INFO|WARNING|WARN|CRITICAL)\]?:?[ :](?=\s*\S)"),
    # srun -l "0: "
    re.compile(r" {0,3}(?P<worker>\d{1,4}): (?=\S)"),
]
_LEVELS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "FATAL", "WARN": "WARNING", "SUCCESS": "INFO"}


def _by_first_character() -> Dict[str, List["re.Pattern[str]"]]:
    """Which patterns can start with which character: most texts start with none of them."""
    starts = {
        "(": (0,),
        "[": (1, 4, 5, 7, 9, 10, 11),
        " ": (10, 12),
    }
    table = {char: [_PREFIXES[at] for at in places] for char, places in starts.items()}
    for char in "0123456789":
        table[char] = [_PREFIXES[2], _PREFIXES[8], _PREFIXES[12]]
    for char in "abcdefghijklmnopqrstuvwxyz":
        table[char] = [_PREFIXES[4]]
    for char in "ADEFIJMNOSCW":
        table[char] = [_PREFIXES[3], _PREFIXES[5], _PREFIXES[6], _PREFIXES[10], _PREFIXES[11]]
    return table


_STARTING = _by_first_character()


def read_prefix(text: str) -> Prefix:
    """Peel off process, rank, time stamp and level from the start of a line; the innermost process wins."""
    worker: Optional[str] = None
    pid: Optional[int] = None
    level = time = ""
    at = 0
    for _ in range(8):
        patterns = _STARTING.get(text[at : at + 1])
        if patterns is None:
            break
        for pattern in patterns:
            match = pattern.match(text, at)
            if match is None or match.end() == at:
                continue
            found = match.groupdict()
            name = found.get("worker") or found.get("ray") or found.get("rank") or found.get("pod")
            if name:
                worker = name.strip()
            if found.get("pid"):
                pid = int(found["pid"])
            level = found.get("level") or level
            time = time or found.get("time") or ""
            at = match.end()
            break
        else:
            break
    return Prefix(worker, pid, _LEVELS.get(level, level), time, at)


def iter_segments(data: bytes) -> Iterator[Segment]:
    """All segments of a complete log, for tests and small texts; an empty last segment is left out."""
    splitter = Splitter()
    first = splitter.feed(data)
    for block in (first, splitter.flush()):
        if block is None or not block.data:
            continue
        cursor = Cursor(block)
        while cursor.at < len(block.data):
            yield cursor.segment_at(cursor.at)
