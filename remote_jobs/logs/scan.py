"""Search a block for what can matter, at C speed, and read the bars, phases and markers of the segments it stands in.

Why this file exists: the full reader and the supervisor's cheap follower share it. It knows no failure rule.

Must not import anything but the standard library and its siblings (never rules, evidence or verdict); no I/O.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from remote_jobs.logs import eta
from remote_jobs.logs.bars import (
    ANCHOR,
    COUNTER_ANCHOR,
    MAX_SECONDS,
    PLAIN,
    Bar,
    BarTracker,
    BarUpdate,
    WriterCache,
    parse_bars,
    parse_counter,
    read_plain,
    seconds_of,
)
from remote_jobs.logs.lines import Segment, read_prefix, to_text
from remote_jobs.logs.phases import ANCHORS, PhaseTracker

PHASE_TEXT = 1
COUNTER = 2
CLOCK = 4
TRIGGER = 8
KINDS = 16
"""Kinds of anchors, as bits; an anchor is offset * KINDS + kind."""
FOLLOW_TEXTS = tuple((text, PHASE_TEXT) for text in ANCHORS)
"""What the follower looks for."""
_BREAK = re.compile(rb"[\r\n]")
_COUNTER_WORD = re.compile(rb"(?:iter|step|batch|epoch|round|sample|shard|chunk|update|episode|file|prompt|request|task|\()", re.IGNORECASE)


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
    clocks = [match.start() for match in ANCHOR.finditer(data)]
    found = [at * KINDS + CLOCK for at in clocks]
    for match in COUNTER_ANCHOR.finditer(data):
        at = match.start()
        before = data[at - 1 : at]
        if not (before.isdigit() or before == b" "):
            continue
        # What is found must not depend on what else is in the block: look at this segment only.
        nearest = bisect_left(clocks, at)
        if nearest < len(clocks) and clocks[nearest] < at + 24 and _BREAK.search(data, at, clocks[nearest]) is None:
            continue  # the fraction of a bar that has a clock
        begin = max(0, at - 60)
        begin = max(begin, data.rfind(b"\n", begin, at) + 1, data.rfind(b"\r", begin, at) + 1)
        if _COUNTER_WORD.search(data, begin, at):
            found.append(at * KINDS + COUNTER)
    at = data.find(b"global_step=")
    while at >= 0:
        found.append(at * KINDS + COUNTER)
        at = data.find(b"global_step=", at + 12)
    return found


class _Run:
    """Updates of one bar, one behind the other: most of a log of bars."""

    __slots__ = ("bar", "done", "head", "label", "line", "match", "seg", "total")

    def __init__(self, bar: Bar, label: bytes, total: bytes, head: bytes) -> None:
        self.bar = bar
        self.label = label
        self.total = total
        self.head = head
        self.done = bar.update.done
        self.match: Optional["re.Match[bytes]"] = None
        self.line = bar.update.line
        self.seg = bar.update.seg


class BarReader:
    """What the full reader and the cheap follower share: bars, phases and markers of each interesting segment."""

    def __init__(self, bar_limit: int = 1000) -> None:
        self.tracker = BarTracker(bar_limit)
        self.phases = PhaseTracker()
        self._writers = WriterCache()
        self._run: Optional[_Run] = None

    def settle(self) -> None:
        """Give the bar of the present run its last state; before anybody looks at the tracker."""
        run, self._run = self._run, None
        if run is not None and run.match is not None:
            run.bar.update = read_plain(run.match, run.line, run.seg, run.head, self._writers)

    def take(self, raw: bytes, segment: Segment, kinds: int, on_update: Optional[Callable[[BarUpdate, Bar], None]]) -> bool:
        """Read one segment; ``kinds`` says what is in it. Returns whether a bar with a clock was read."""
        plain = PLAIN.match(raw) if kinds & CLOCK else None
        if plain is not None and on_update is None and not kinds & PHASE_TEXT and self._goes_on(plain, segment):
            return True
        self.settle()
        updates: List[BarUpdate] = []
        if plain is not None:
            updates = [read_plain(plain, segment.line, segment.seg, segment.head, self._writers)]
        elif kinds & CLOCK:
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
        if plain is not None and bar.advances and self.tracker.only(bar):
            self._run = _Run(bar, plain.group("label"), plain.group("total"), segment.head)
        return clocked

    def _goes_on(self, plain: "re.Match[bytes]", segment: Segment) -> bool:
        """The same bar, further on: count it, and read the rest only if it turns out to be the last state."""
        run = self._run
        if run is None:
            return False
        done = int(plain.group("done"))
        same = plain.group("label") == run.label and plain.group("total") == run.total and segment.head == run.head
        if not same or done < run.done:
            return False
        if done > run.done:
            run.bar.advance(seconds_of(plain.group("elapsed")), done)
            self.tracker.advances += 1
            run.done = done
        run.match, run.line, run.seg = plain, segment.line, segment.seg
        return True


def _forecast(bar: Bar, usual: Optional[eta.History]) -> Optional[eta.Forecast]:
    update = bar.update
    if update.total is None or update.elapsed_s is None:
        return None
    samples = bar.samples
    if not samples or (samples[-1] != (float(update.elapsed_s), update.done) and update.done >= samples[-1][1]):
        samples = [*samples, (float(update.elapsed_s), update.done)]
    forecast = eta.forecast(
        samples,
        update.total,
        printed_s_per_item=update.s_per_item,
        history=usual,
        last_is_smaller=update.label.endswith("shards"),
    )
    return forecast if forecast is not None and forecast.high_s <= MAX_SECONDS else None


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
