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
    parse_bars,
    parse_counter,
    text_behind_bars,
)
from remote_jobs.logs.evidence import TRIGGERS, EvidenceCollector
from remote_jobs.logs.lines import Block, Cursor, Prefix, Segment, Splitter, read_prefix, to_text
from remote_jobs.logs.phases import PhaseTracker, needles
from remote_jobs.logs.rules.context import ACTIVITY_NEEDLES, PROMPT, WORK
from remote_jobs.logs.verdict import Circumstances, judge

SCHEMA = 1
TAIL_BYTES = 65536
_PHASE_NEEDLES = tuple(needle for needle in needles() if not any(trigger in needle for trigger in TRIGGERS))
_MARKER = b"::orch "
_METRIC_STEP = b"global_step="
_COUNTER_WORD = re.compile(rb"(?:iter|step|batch|epoch|round|sample|shard|chunk|update|episode|file|prompt|request|task|\()", re.IGNORECASE)
_METRIC_LINE = re.compile(r"['\"]?\b(?:loss|train/loss|lm loss)['\"]?\s*[:=]\s*['\"]?(?P<loss>[-+\w.]+)")
_GRAD = re.compile(r"['\"]?grad_norm['\"]?\s*[:=]\s*['\"]?(?P<norm>[-+\w.]+)")
_SIDE_BAR = re.compile(
    r"(?i)load|captur|fetch|download|\bmap\b|map \(|writing|saving|render|filter|token|split|warm|resolv|flatten|convert|prefetch|shard|collat|cach|eval|valid|upload"
)


def anchors_of(low: bytes, texts: Sequence[bytes]) -> List[int]:
    """Offsets of all occurrences of any of ``texts`` (lower case) in ``low``."""
    found: List[int] = []
    for text in texts:
        at = low.find(text)
        while at >= 0:
            found.append(at)
            at = low.find(text, at + len(text))
    return found


def bar_anchors(data: bytes) -> List[int]:
    """Offsets of bar clocks and of counters' slashes."""
    found = [match.start() for match in ANCHOR.finditer(data)]
    clocks = len(found)
    for match in COUNTER_ANCHOR.finditer(data):
        at = match.start()
        before = data[at - 1 : at]
        if before.isdigit() or before == b" ":
            if clocks and data.find(b" [", at, at + 24) >= 0:
                continue  # the fraction of a bar that has a clock
            start = max(0, at - 60)
            if _COUNTER_WORD.search(data, start, at):
                found.append(at)
    return found


class BarReader:
    """What the full reader and the cheap follower share: bars, phases and markers of each interesting segment."""

    def __init__(self, bar_limit: int = 1000) -> None:
        self.tracker = BarTracker(bar_limit)
        self.phases = PhaseTracker()

    def take(self, block: Block, segment: Segment, on_update: Optional[Callable[[BarUpdate, Bar], None]]) -> Tuple[bytes, bool]:
        """Read one segment. Returns (its bytes, whether a bar with a clock was in it)."""
        raw = block.data[segment.start : segment.end]
        updates = parse_bars(raw, segment.line, segment.seg, segment.head) if ANCHOR.search(raw) else []
        clocked = bool(updates)
        if not updates and (b"/" in raw or _METRIC_STEP in raw) and len(raw) < 4096:
            text = to_text(raw)
            prefix = read_prefix(text)
            counter = parse_counter(text[prefix.size :], segment.line, segment.seg, prefix.worker, prefix.pid)
            if counter is not None:
                updates = [counter]
        for update in updates:
            bar = self.tracker.take(update)
            if on_update is not None:
                on_update(update, bar)
        return raw, clocked


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
        self._skipped_bytes = 0
        self._texts = (*_PHASE_NEEDLES, _MARKER, _METRIC_STEP) + (TRIGGERS if verdict else ())

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the log."""
        for start in range(0, len(data), 1 << 20):
            block = self._splitter.feed(data[start : start + (1 << 20)])
            if block is not None:
                self._read(block)

    def skip(self, newlines: int, size_bytes: int) -> None:
        """The middle of the log was left out: ``newlines`` line breaks and ``size_bytes`` bytes are not shown."""
        block = self._splitter.flush()
        if block.data:
            self._read(block)
        self._splitter = Splitter(self._splitter.line + newlines)
        self._skipped_bytes += size_bytes

    def _read(self, block: Block) -> None:
        data = block.data
        low = data.lower()
        offsets = sorted(set(anchors_of(low, self._texts) + bar_anchors(data)))
        counts = 0
        cursor = Cursor(block)
        at = 0
        size = len(data)
        counted = 0
        while True:
            if self._evidence.dense and self._verdict:
                if cursor.at >= size:
                    break
                offset = cursor.at
            else:
                while at < len(offsets) and offsets[at] < cursor.at:
                    at += 1
                if at >= len(offsets):
                    break
                offset = offsets[at]
            segment = cursor.segment_at(offset)
            if segment.start > counted:
                counts += _activity(data, counted, segment.start)
                counted = segment.start
            self._take(block, segment, self._activity + counts + self._bars.tracker.advances * WORK)
        self._activity += counts + _activity(data, counted, size)
        self._tail = (self._tail + data)[-TAIL_BYTES:]

    def _take(self, block: Block, segment: Segment, activity: int) -> None:
        raw, clocked = self._bars.take(block, segment, self._on_update)
        text = to_text(raw)
        head: Optional[Prefix] = None
        if segment.head:
            head = read_prefix(to_text(segment.head).lstrip("\r"))
        prefix = read_prefix(text)
        self._bars.phases.take(text[prefix.size :], segment.line)
        if not self._verdict:
            return
        if clocked:
            text = to_text(text_behind_bars(raw))
        self._evidence.take(text, segment.line, activity, head)

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
        if failure is not None and failure["class"] != "waiting_for_input":
            waiting = None
        if exit_status is not None:
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


def _activity(data: bytes, start: int, end: int) -> int:
    work = sum(data.count(needle, start, end) for needle in ACTIVITY_NEEDLES)
    return work * WORK + data.count(b"INFO", start, end) - data.count(b"NCCL INFO", start, end)


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


