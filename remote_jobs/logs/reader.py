"""Read one log, incrementally: bytes in, the design's ``explain`` object out.

Why this file exists: a log of 100 MB must be read in seconds, so a block is first searched, at C speed, for the few
texts that can matter (bar clocks, phase markers, trigger words); only the segments around them are looked at. The
answer does not depend on how the stream was cut.

Must not import anything but the standard library and its siblings; no I/O.
"""

from __future__ import annotations

import re
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from remote_jobs.logs import eta
from remote_jobs.logs.bars import (
    ANCHOR,
    COUNTER_ANCHOR,
    Bar,
    BarTracker,
    BarUpdate,
    WriterCache,
    parse_bars,
    parse_counter,
    text_behind_bars,
)
from remote_jobs.logs.evidence import TRIGGERS, EvidenceCollector
from remote_jobs.logs.lines import Block, Cursor, Segment, Splitter, read_prefix, to_text
from remote_jobs.logs.phases import ANCHORS as PHASE_TEXTS
from remote_jobs.logs.phases import PhaseTracker
from remote_jobs.logs.rules.context import ACTIVITY_NEEDLES, PROMPT, WORK
from remote_jobs.logs.verdict import Circumstances, judge

SCHEMA = 1
TAIL_BYTES = 65536
PHASE_TEXT = 1
COUNTER = 2
CLOCK = 4
TRIGGER = 8
KINDS = 16
"""Kinds of anchors, as bits; an anchor is offset * KINDS + kind."""
ALL_TEXTS = tuple(
    (text, (PHASE_TEXT if text in PHASE_TEXTS else 0) | (TRIGGER if text in TRIGGERS else 0))
    for text in dict.fromkeys(PHASE_TEXTS + TRIGGERS)
)
FOLLOW_TEXTS = tuple((text, PHASE_TEXT) for text in PHASE_TEXTS)
_COUNTER_WORD = re.compile(rb"(?:iter|step|batch|epoch|round|sample|shard|chunk|update|episode|file|prompt|request|task|\()", re.IGNORECASE)
_METRIC_LINE = re.compile(r"['\"]?\b(?:loss|train/loss|lm loss)['\"]?\s*[:=]\s*['\"]?(?P<loss>[-+\w.]+)")
_GRAD = re.compile(r"['\"]?grad_norm['\"]?\s*[:=]\s*['\"]?(?P<norm>[-+\w.]+)")
_SIDE_BAR = re.compile(
    r"(?i)load|captur|fetch|download|\bmap\b|map \(|writing|saving|render|filter|token|split|warm|resolv|flatten|convert|prefetch|shard|collat|cach|eval|valid|upload"
)


def text_anchors(data: bytes, texts: Sequence[Tuple[bytes, int]]) -> List[int]:
    """All occurrences of any of ``texts`` (lower case, no digits), as offset * KINDS + kind."""
    low = data.lower()
    found: List[int] = []
    for text, kind in _present(low, texts):
        at = low.find(text)
        while at >= 0:
            found.append(at * KINDS + kind)
            at = low.find(text, at + len(text))
    return found


def _present(low: bytes, texts: Sequence[Tuple[bytes, int]]) -> Sequence[Tuple[bytes, int]]:
    """Those of ``texts`` that can occur in a block.

    Most blocks repeat a few lines with other numbers. Without digits those collapse to a few distinct lines, which are
    searched much faster than the block (deleting digits cannot hide a text that has none).
    """
    lines = low.translate(None, b"0123456789").split(b"\n")
    distinct = set(lines)
    if len(lines) < 100 or len(distinct) * 3 > len(lines):
        return texts
    joined = b"\n".join(distinct)
    return [entry for entry in texts if entry[0] in joined]


def bar_anchors(data: bytes) -> List[int]:
    """Bar clocks, and slashes of counters, as offset * KINDS + kind."""
    found = [match.start() * KINDS + CLOCK for match in ANCHOR.finditer(data)]
    some_clocks = bool(found)
    for match in COUNTER_ANCHOR.finditer(data):
        at = match.start()
        before = data[at - 1 : at]
        if not (before.isdigit() or before == b" "):
            continue
        if some_clocks and data.find(b" [", at, at + 24) >= 0:
            continue  # the fraction of a bar that has a clock
        if _COUNTER_WORD.search(data, max(0, at - 60), at):
            found.append(at * KINDS + COUNTER)
    at = data.find(b"global_step=")
    while at >= 0:
        found.append(at * KINDS + COUNTER)
        at = data.find(b"global_step=", at + 12)
    return found


class BarReader:
    """What the full reader and the cheap follower share: bars, phases and markers of each interesting segment."""

    def __init__(self, bar_limit: int = 1000) -> None:
        self.tracker = BarTracker(bar_limit)
        self.phases = PhaseTracker()
        self._writers = WriterCache()

    def take(self, raw: bytes, segment: Segment, kinds: int, on_update: Optional[Callable[[BarUpdate, Bar], None]]) -> bool:
        """Read one segment; ``kinds`` says what is in it. Returns whether a bar with a clock was read."""
        updates: List[BarUpdate] = []
        if kinds & CLOCK:
            updates = parse_bars(raw, segment.line, segment.seg, segment.head, self._writers)
        clocked = bool(updates)
        if kinds & COUNTER and not clocked and len(raw) < 4096:
            text = to_text(raw)
            prefix = read_prefix(text)
            counter = parse_counter(text[prefix.size :], segment.line, segment.seg, prefix.worker, prefix.pid)
            if counter is not None:
                updates = [counter]
        starts = False
        for update in updates:
            bar = self.tracker.take(update)
            starts |= bar.advances == 0 and update.percent == 0
            if on_update is not None:
                on_update(update, bar)
        if kinds & PHASE_TEXT or starts:
            text = to_text(raw)
            self.phases.take(text[read_prefix(text).size :], segment.line)
        return clocked


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
        if self._evidence.first_nan_line is None:
            return None
        streak = 0
        text = ""
        for line in reversed(to_text(self._tail).splitlines()):
            metric = _METRIC_LINE.search(line[:2000])
            if metric is None:
                continue
            norm = _GRAD.search(line[:2000])
            loss = metric.group("loss").lower().rstrip(".")
            bad_norm = norm is not None and norm.group("norm").lower() == "nan"
            if not (loss in {"nan", "-nan"} or (bad_norm and loss.strip("0.") == "")):
                break
            streak += 1
            text = line.strip()
        return (self._evidence.first_nan_line, text) if streak >= 3 else None


def prompt_in(tail: bytes, last_line: int) -> Optional[Tuple[int, str]]:
    """(line, text) of a question that is the last text of a log. ``last_line`` is the number of the last line."""
    kept = tail.rstrip()
    if not kept:
        return None
    start = max(kept.rfind(b"\n"), kept.rfind(b"\r")) + 1
    text = to_text(kept[start:][-2000:])
    body = text[read_prefix(text).size :].strip()
    if not body or len(body) > 600 or not PROMPT.search(body):
        return None
    return last_line - tail[len(kept) :].count(b"\n"), text.strip()


def _forecast(bar: Bar, usual: Optional[eta.History]) -> Optional[eta.Forecast]:
    update = bar.update
    if update.total is None or update.elapsed_s is None:
        return None
    samples = bar.samples
    if samples[-1] != (float(update.elapsed_s), update.done) and update.done >= samples[-1][1]:
        samples = [*samples, (float(update.elapsed_s), update.done)]
    return eta.forecast(
        samples,
        update.total,
        printed_s_per_item=update.s_per_item,
        history=usual,
        last_is_smaller=update.label.endswith("shards"),
    )


def bar_json(bar: Bar, usual: Optional[eta.History] = None) -> Dict[str, Any]:
    """One entry of ``bars``: what the log says last, and our own forecast."""
    update = bar.update
    forecast = _forecast(bar, usual)
    return {
        "label": update.label,
        "instance": bar.instance,
        "worker": update.worker,
        "pid": update.pid,
        "done": update.done,
        "total": update.total,
        "percent": update.percent,
        "elapsed_s": update.elapsed_s,
        "remaining_s": update.remaining_s,
        "s_per_item": update.s_per_item,
        "eta_s": None if forecast is None else round(forecast.remaining_s, 1),
        "eta_low_s": None if forecast is None else round(forecast.low_s, 1),
        "eta_high_s": None if forecast is None else round(forecast.high_s, 1),
        "eta_confidence": None if forecast is None else forecast.confidence,
        "line": update.line,
        "seg": update.seg,
    }


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


