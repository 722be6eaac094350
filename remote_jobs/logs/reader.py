"""Read one log, incrementally: bytes in, the design's ``explain`` object out.

Why this file exists: a log of 100 MB must be read in seconds, so a block is first searched, at C speed, for the few
texts that can matter (bar clocks, phase markers, trigger words); only the segments around them are looked at. The
answer does not depend on how the stream was cut.

Must not import anything but the standard library and its siblings; no I/O.
"""

from __future__ import annotations

import re
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from remote_jobs.logs.bars import Bar, BarUpdate, text_behind_bars
from remote_jobs.logs.evidence import TRIGGERS, EvidenceCollector
from remote_jobs.logs.lines import Block, Cursor, Segment, Splitter, read_prefix, to_text
from remote_jobs.logs.phases import ANCHORS
from remote_jobs.logs.prompts import prompt_in
from remote_jobs.logs.rules.context import ACTIVITY_NEEDLES, WORK
from remote_jobs.logs.scan import (
    FOLLOW_TEXTS,
    KINDS,
    PHASE_TEXT,
    TRIGGER,
    BarReader,
    bar_anchors,
    bar_json,
    text_anchors,
)
from remote_jobs.logs.verdict import Circumstances, judge

SCHEMA = 1
TAIL_BYTES = 65536
ALL_TEXTS = tuple(
    (text, (PHASE_TEXT if text in ANCHORS else 0) | (TRIGGER if text in TRIGGERS else 0))
    for text in dict.fromkeys(ANCHORS + TRIGGERS)
)
_METRIC_LINE = re.compile(r"['\"]?\b(?:loss|train/loss|lm loss)['\"]?\s*[:=]\s*['\"]?(?P<loss>[-+\w.]+)")
_GRAD = re.compile(r"['\"]?grad_norm['\"]?\s*[:=]\s*['\"]?(?P<norm>[-+\w.]+)")
_SIDE_BAR = re.compile(
    r"(?i)load|captur|fetch|download|\bmap\b|map \(|writing|saving|render|filter|token|split|warm|resolv|flatten|convert|prefetch|shard|collat|cach|eval|valid|upload"
)


class _Work:
    """Count healthy work in a block, up to an offset, only when somebody asks."""

    def __init__(self, data: bytes, before: int) -> None:
        self._data = data
        self._counted = 0
        self.units = before

    def up_to(self, offset: int) -> int:
        if offset > self._counted:
            data, start = self._data, self._counted
            work = sum(data.count(needle, start, offset) for needle in ACTIVITY_NEEDLES)
            info = data.count(b"INFO", start, offset) - data.count(b"NCCL INFO", start, offset)
            self.units += work * WORK + info
            self._counted = offset
        return self.units


class LogReader:
    """Feed a log's bytes; ``finish`` gives the explain object.

    Args:
        on_update: called for every bar update in print order (for ``--updates``).
        verdict: False leaves out all failure evidence (bars and phases only).
    """

    def __init__(self, on_update: Optional[Callable[[BarUpdate], None]] = None, *, verdict: bool = True) -> None:
        self._splitter = Splitter()
        self._bars = BarReader()
        self._evidence = EvidenceCollector()
        self._verdict = verdict
        self._on_update = (lambda update, _bar: on_update(update)) if on_update else None
        self._activity = 0
        self._tail = b""

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the log."""
        for start in range(0, len(data), 1 << 20):
            block = self._splitter.feed(data[start : start + (1 << 20)])
            if block is not None:
                self._read(block)

    def skip(self, newlines: int) -> None:
        """The middle of the log was left out: so many line breaks are not shown."""
        block = self._splitter.flush()
        if block.data:
            self._read(block)
        self._splitter = Splitter(self._splitter.line + newlines)

    def _read(self, block: Block) -> None:
        data = block.data
        anchors = bar_anchors(data) + text_anchors(data, ALL_TEXTS if self._verdict else FOLLOW_TEXTS)
        anchors.sort()
        work = _Work(data, self._activity)
        cursor = Cursor(block)
        at = 0
        while True:
            if self._evidence.dense and cursor.at < len(data):
                offset = cursor.at
            elif at < len(anchors):
                offset = anchors[at] // KINDS
            else:
                break
            segment = cursor.segment_at(offset)
            kinds = 0
            while at < len(anchors) and anchors[at] // KINDS < cursor.at:
                kinds |= anchors[at] % KINDS
                at += 1
            self._take(data, segment, kinds, work)
        self._activity = work.up_to(len(data))
        self._tail = (self._tail + data)[-TAIL_BYTES:]

    def _take(self, data: bytes, segment: Segment, kinds: int, work: _Work) -> None:
        raw = data[segment.start : segment.end]
        clocked = self._bars.take(raw, segment, kinds, self._on_update) if kinds & ~TRIGGER else False
        if not self._verdict or not (kinds & TRIGGER or self._evidence.dense):
            return
        if clocked:
            raw = text_behind_bars(raw)
            if not raw or raw.isspace():
                return
        head = read_prefix(to_text(segment.head).lstrip("\r")) if segment.head else None
        advances = self._bars.tracker.advances * WORK
        self._evidence.take(to_text(raw), segment.line, lambda: work.up_to(segment.start) + advances, head)

    def finish(self, exit_status: Optional[int] = None, host: Optional[List[str]] = None) -> Dict[str, Any]:
        """The explain object (design, `orch explain`).

        Args:
            exit_status: the process's status, negative for a signal; None when unknown.
            host: lines of the host's own records about the end (dmesg, memory.events), when there are any.
        """
        block = self._splitter.flush()
        if block.data:
            self._read(block)
        self._bars.settle()
        prompt = prompt_in(self._tail, self._splitter.line)
        failure = None
        if self._verdict:
            failure = judge(self._evidence.findings, self._circumstances(exit_status, prompt, host or []))
        waiting = prompt
        if exit_status is not None or (failure is not None and failure["class"] != "waiting_for_input"):
            waiting = None
        self._bars.phases.finish(failed=failure is not None)
        return {
            "schema": SCHEMA,
            "bars": [bar_json(bar) for bar in self._bars.tracker.bars],
            "phases": [phase.to_json() for phase in self._bars.phases.phases],
            "failure": failure,
            "waiting_for_input": None if waiting is None else {"line": waiting[0], "text": waiting[1]},
        }

    def _circumstances(self, exit_status: Optional[int], prompt: Optional[Tuple[int, str]], host: List[str]) -> Circumstances:
        return Circumstances(
            exit_status=exit_status,
            last_line=self._splitter.line,
            activity=self._activity + self._bars.tracker.advances * WORK,
            done_line=self._evidence.done_line,
            stopped_line=self._evidence.stopped_line,
            main_bar_done_line=self._main_bar_done(),
            nan_tail=self._nan_tail(),
            prompt=prompt,
            host=host,
        )

    def _main_bar_done(self) -> Optional[int]:
        main: Optional[Bar] = None
        for bar in self._bars.tracker.bars:
            update = bar.update
            if update.total is None or update.total < 2 or _SIDE_BAR.search(update.label):
                continue
            if main is None or (update.elapsed_s or 0) >= (main.update.elapsed_s or 0):
                main = bar
        return main.update.line if main is not None and main.complete else None

    def _nan_tail(self) -> Optional[Tuple[int, str]]:
        """(line, text) of the first of the last metric lines, when at least three in a row show NaN up to the end."""
        if self._evidence.first_nan_line is None:
            return None
        streak: List[Tuple[int, str]] = []
        line = self._splitter.line
        finite_before = False
        for text in reversed(to_text(self._tail).split("\n")):
            metric = _METRIC_LINE.search(text[:2000])
            if metric is not None:
                norm = _GRAD.search(text[:2000])
                loss = metric.group("loss").lower().rstrip(".")
                bad_norm = norm is not None and norm.group("norm").lower() == "nan"
                if not (loss in {"nan", "-nan"} or (bad_norm and loss.strip("0.") == "")):
                    finite_before = True
                    break
                streak.append((line, text.strip()))
            line -= 1
        if len(streak) < 3:
            return None
        return streak[-1] if finite_before else (self._evidence.first_nan_line, streak[-1][1])


def explain_bytes(data: bytes, exit_status: Optional[int] = None) -> Dict[str, Any]:
    """Explain a whole log that is in memory."""
    reader = LogReader()
    reader.feed(data)
    return reader.finish(exit_status)


def iter_updates(chunks: Iterator[bytes]) -> Iterator[BarUpdate]:
    """Every bar update of a stream, in print order."""
    pending: List[BarUpdate] = []
    reader = LogReader(pending.append, verdict=False)
    for chunk in chunks:
        reader.feed(chunk)
        yield from pending
        pending.clear()
    reader.finish()
    yield from pending


