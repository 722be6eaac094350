"""Follow a growing log cheaply: the newest state of each bar, the phases, `::orch` markers, a question that waits.

Why this file exists: the supervisor must know at each moment where an attempt stands, in a few megabytes and with
little CPU time. It never runs a failure rule; verdicts are made afterwards by a child of its own (see reader.py).

Must not import anything but the standard library and its siblings; no I/O.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from remote_jobs.logs.bars import ANCHOR, Bar, BarUpdate, parse_bars
from remote_jobs.logs.eta import History
from remote_jobs.logs.lines import Block, Cursor, Splitter
from remote_jobs.logs.prompts import prompt_in
from remote_jobs.logs.scan import FOLLOW_TEXTS, KINDS, BarReader, bar_anchors, bar_json, text_anchors

BARS_KEPT = 64
_TAIL_BYTES = 4096


class Update(NamedTuple):
    """Something changed. ``kind``: bar, phase or prompt; ``data`` as in `explain` (the prompt's: line and text)."""

    kind: str
    line: int
    data: Dict[str, Any]


class Follower:
    """Feed a log's bytes as they come.

    Args:
        usual: earlier runs' paces by bar label, to be blended into forecasts.
    """

    def __init__(self, usual: Optional[Dict[str, History]] = None) -> None:
        self._splitter = Splitter()
        self._bars = BarReader(BARS_KEPT)
        self._usual = usual or {}
        self._tail = b""
        self._changed: Dict[int, Bar] = {}
        self._waiting: Optional[Dict[str, Any]] = None
        self._shown: Dict[int, Tuple[Bar, BarUpdate, Dict[str, Any]]] = {}

    def feed(self, data: bytes) -> List[Update]:
        """Take the next bytes; returns what changed: each bar at most once (its newest state), then phases."""
        changes = self._bars.phases.changes
        self._changed.clear()
        for start in range(0, len(data), 1 << 18):
            block = self._splitter.feed(data[start : start + (1 << 18)])
            if block is not None:
                self._read(block)
        self._read_unfinished()
        updates = [Update("bar", bar.update.line, self._bar(bar)) for bar in self._changed.values()]
        if self._bars.phases.changes != changes and self._bars.phases.phases:
            phases = self._bars.phases.phases
            new = min(self._bars.phases.changes - changes, len(phases))
            updates += [Update("phase", p.ended_line or p.started_line, p.to_json()) for p in phases[-new:]]
        updates += self._look_for_prompt()
        return updates

    def snapshot(self) -> Dict[str, Any]:
        """Where the log stands: ``bars`` and ``phases`` as in `explain`, and ``waiting_for_input``."""
        return {
            "bars": [self._bar(bar) for bar in self._bars.tracker.bars],
            "phases": [phase.to_json() for phase in self._bars.phases.phases],
            "waiting_for_input": self._waiting,
        }

    @property
    def waiting_for_input(self) -> Optional[Dict[str, Any]]:
        """The question at the very end of the log (line and text), or None."""
        return self._waiting

    @property
    def bars(self) -> List[Bar]:
        """The bars themselves, for stall limits (see stall.py)."""
        return self._bars.tracker.bars

    def _bar(self, bar: Bar) -> Dict[str, Any]:
        """The bar's JSON; its forecast, which costs most of following a log, is made once per state of the bar."""
        known = self._shown.get(id(bar))
        if known is None or known[0] is not bar or known[1] is not bar.update:
            known = (bar, bar.update, bar_json(bar, self._usual.get(bar.update.label)))
            if len(self._shown) > 2 * BARS_KEPT:
                self._shown.clear()
            self._shown[id(bar)] = known
        return dict(known[2])

    def _read(self, block: Block) -> None:
        data = block.data
        anchors = bar_anchors(data) + text_anchors(data, FOLLOW_TEXTS)
        anchors.sort()
        cursor = Cursor(block)
        at = 0
        while at < len(anchors):
            segment = cursor.segment_at(anchors[at] // KINDS)
            kinds = 0
            while at < len(anchors) and anchors[at] // KINDS < cursor.at:
                kinds |= anchors[at] % KINDS
                at += 1
            self._bars.take(data[segment.start : segment.end], segment, kinds, self._note)
        self._tail = (self._tail + data)[-_TAIL_BYTES:]

    def _note(self, _update: BarUpdate, bar: Bar) -> None:
        self._changed[id(bar)] = bar

    def _read_unfinished(self) -> None:
        """A tqdm bar ends a state with the next one's carriage return: read a finished state without waiting for it.

        Harmless when the segment comes again complete: the same state changes nothing.
        """
        pending = self._splitter.pending()
        if b"]" not in pending.data[-200:] or not ANCHOR.search(pending.data):
            return
        for update in parse_bars(pending.data, pending.line, pending.seg, pending.head):
            self._note(update, self._bars.tracker.take(update))

    def _look_for_prompt(self) -> List[Update]:
        pending = self._splitter.pending()
        found = prompt_in((self._tail + pending.data)[-_TAIL_BYTES:], self._splitter.line)
        waiting: Optional[Dict[str, Any]] = None if found is None else {"line": found[0], "text": found[1]}
        if waiting == self._waiting:
            return []
        self._waiting = waiting
        return [] if waiting is None else [Update("prompt", waiting["line"], waiting)]
