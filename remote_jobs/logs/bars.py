"""Progress bars: the grammar of what tqdm, rich and plain counters print, and which update belongs to which bar.

Why this file exists: ETAs and stall limits come from bars, so each printed update must be read exactly as printed:
(label, done, total, percent, elapsed, remaining, seconds per item), with None where the program printed ``?`` or
nothing. The formats come from tqdm's ``format_meter``, rich's TimeElapsedColumn and vLLM's own bar_format.

Must not import anything but the standard library and lines.py; no I/O.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Dict, List, NamedTuple, Optional, Tuple

from remote_jobs.logs.lines import HEAD_BYTES, read_prefix, strip_ansi

ANCHOR = re.compile(rb"\[[ \t]?(?:\d+ days?, )?\d+:\d\d(?::\d\d)?[ \t]?[<,]")
"""Where a bar's clock starts: ``[01:26<``, ``[ 0:00:01 <``, ``[00:02,`` (no total)."""
COUNTER_ANCHOR = re.compile(rb"/ {0,8}\d")
"""The slash of ``iter 100/2000``; what stands around it decides."""

_CLOCK = re.compile(
    rb"\[\s?(?:(?P<days>\d+) days?, )?(?P<elapsed>\d+:\d\d(?::\d\d)?)\s?"
    rb"(?P<left><\s?(?:(?P<left_days>\d+) days?, )?(?P<remaining>\d+:\d\d(?::\d\d)?|\?|-:--:--|--:--)\s?)?"
    rb",\s*(?P<rate>\?|-?\d[\d.,]*(?:e[+-]?\d+)?)?\s?(?P<unit>[^\],\r\n]{0,40})"
)
_RATE_PER_S = re.compile(rb"(?P<suffix>[kKMGTPEZY]?)(?P<unit>.*?)/s(?:ec)?\b")
_S_PER = re.compile(rb"(?P<suffix>[kKMGTPEZY]?)s/")
_SCALED_UNIT = re.compile(rb"\s|i?[bB]|it|tok|ex|sam|row|line|step|doc|rec|file|im|ba|seq|el|char|w|$", re.IGNORECASE)
_FRACTION = re.compile(
    rb"(?P<done>\d[\d.,]*)(?P<done_suffix>[kKMGTPEZY]?)(?:i?B)?\s?/\s?"
    rb"(?P<total>\d[\d.,]*|\?)(?P<total_suffix>[kKMGTPEZY]?)(?:i?B)?\s*$"
)
_COUNT = re.compile(rb"(?:^|[\s:|\]])(?P<done>\d[\d.,]*)(?P<suffix>[kKMGTPEZY]?)\s?(?:[A-Za-z][\w ]{0,24})?$")
_PERCENT = re.compile(rb"(?P<percent>\d{1,3}(?:\.\d+)?)\s?%$")
_GAP = re.compile(rb"^\s*(?:Completed)?\s*(?:\|[^|]*\|?|[^|\w]*)\s*$")
_SUFFIX = {b"k": 1e3, b"K": 1e3, b"M": 1e6, b"G": 1e9, b"T": 1e12, b"P": 1e15, b"E": 1e18, b"Z": 1e21, b"Y": 1e24}

_COUNTER_WORDS = r"(?:iter(?:ation)?|step|batch|epoch|round|sample|shard|chunk|update|episode|file|prompt|request|task)s?"
_COUNTER = re.compile(
    r"(?:^|(?<=[\s\[(|>,;:]))(?P<label>(?:(?:global|train(?:ing)?|eval|optimizer|opt)[ _])?" + _COUNTER_WORDS + r")"
    r"\s{0,3}[:=#]?\s{0,12}[\[(]?\s{0,12}(?P<done>\d[\d,]{0,15})\s{0,3}/\s{0,12}(?P<total>\d[\d,]{0,15})(?![\w./-])",
    re.IGNORECASE,
)
_PERCENT_COUNTER = re.compile(
    r"(?P<label>[A-Za-z][\w .()-]{2,60}?):\s+(?P<percent>\d{1,3})%\s\((?P<done>\d{1,15})/(?P<total>\d{1,15})\)"
)
_METRIC_STEP = re.compile(r"\bglobal_step=(?P<done>\d{1,15})\b")


class BarUpdate(NamedTuple):
    """One printed state of a bar. ``line``/``seg`` say where; None is what was not printed."""

    line: int
    seg: int
    label: str
    done: int
    total: Optional[int]
    percent: Optional[int]
    elapsed_s: Optional[int]
    remaining_s: Optional[int]
    s_per_item: Optional[float]
    worker: Optional[str] = None
    pid: Optional[int] = None

    def to_json(self) -> Dict[str, object]:
        """The object that ``explain --updates`` prints."""
        return {
            "line": self.line,
            "seg": self.seg,
            "label": self.label,
            "done": self.done,
            "total": self.total,
            "percent": self.percent,
            "elapsed_s": self.elapsed_s,
            "remaining_s": self.remaining_s,
            "s_per_item": self.s_per_item,
        }


MAX_COUNT_DIGITS = 15
"""Longer counts are not meant."""
MAX_SECONDS = 10**9
"""Thirty years: times beyond are not meant, and no clock could be set to them."""


@lru_cache(maxsize=4096)
def seconds_of(clock: bytes, days: Optional[bytes] = None) -> Optional[int]:
    """Seconds of ``1:02:03`` or ``26:40``; None for ``?`` and ``-:--:--``, and for times that are not meant."""
    if not clock[:1].isdigit():
        return None
    total = 0
    for part in clock.split(b":"):
        total = total * 60 + int(part[:12] or 0)
    total += 86400 * int(days[:12] if days else 0)
    return total if total <= MAX_SECONDS else None


def _number(digits: bytes, suffix: bytes) -> Optional[int]:
    text = digits.replace(b",", b"").rstrip(b".")
    if len(text) > 24 or text.count(b".") > 1:
        return None
    if suffix:
        number = round(float(text) * _SUFFIX[suffix])
    else:
        number = int(float(text)) if b"." in text else int(text)
    return number if number < 10**MAX_COUNT_DIGITS else None


def _seconds_per_item(rate: Optional[bytes], unit: bytes) -> Tuple[bool, Optional[float]]:
    """(is this a rate at all, seconds per item). ``2.42`` ``s/it`` -> 2.42; ``16.68`` ``it/s`` -> 0.059952."""
    per = _S_PER.match(unit)
    flat = None if per else _RATE_PER_S.match(unit)
    if per is None and flat is None:
        return False, None
    if rate is None or rate == b"?":
        return rate is not None, None
    text = rate.replace(b",", b"")
    if len(text) > 24 or text.count(b".") > 1:
        return False, None
    value = float(text)
    if flat is None:
        return True, _meant(value * (_SUFFIX.get(per.group("suffix"), 1.0) if per is not None else 1.0))
    suffix = flat.group("suffix")
    if suffix and _SCALED_UNIT.match(flat.group("unit")):
        value *= _SUFFIX[suffix]
    return True, (_meant(round(1.0 / value, 6)) if value > 0 else None)


def _meant(s_per_item: float) -> Optional[float]:
    return s_per_item if 0 <= s_per_item <= MAX_SECONDS else None


class _Left(NamedTuple):
    label: bytes
    done: int
    total: Optional[int]
    percent: Optional[int]


def _with_total(left: bytes) -> Optional[_Left]:
    """Read ``Loading weights:  12%|# | 9/76 `` (what stands before the clock)."""
    fraction = _FRACTION.search(left, max(0, len(left) - 64))
    if fraction is None:
        return None
    done = _number(fraction.group("done"), fraction.group("done_suffix"))
    total = None
    if fraction.group("total") != b"?":
        total = _number(fraction.group("total"), fraction.group("total_suffix"))
    if done is None:
        return None
    rest = left[: fraction.start()]
    percent = None
    sign = rest.rfind(b"%", max(0, len(rest) - 4096))
    if sign >= 0 and _GAP.match(rest[sign + 1 :]):
        found = _PERCENT.search(rest, max(0, sign - 8), sign + 1)
        if found is not None:
            percent = int(float(found.group("percent")) + 0.5)
            rest = rest[: found.start()]
    return _Left(rest, done, total, percent)


def _without_total(left: bytes) -> Optional[_Left]:
    """Read ``Generating train split: 1000 examples `` or ``5it ``."""
    count = _COUNT.search(left.rstrip(), max(0, len(left) - 64))
    if count is None:
        return None
    done = _number(count.group("done"), count.group("suffix"))
    return None if done is None else _Left(left[: count.start("done")], done, None, None)


_LAST_PREFIX = re.compile(r".*\([A-Za-z_]\w* pid=\d+[^)]{0,40}\) ?", re.DOTALL)
_KNOWN_LABEL = re.compile(
    r"(?:Multi-thread loading|Loading \w+ checkpoint|Loading checkpoint) (?:\w+ checkpoint )?shards(?: \(eager\))?$|Loading weights$"
    r"|Capturing [\w/ ]*CUDA graphs?(?: \([^)]*\))?$|(?:Processed|Rendering) prompts$|Generating responses$|Training Progress$"
)


def _label(raw: bytes) -> str:
    """Label of a bar: no prefix, and none of another writer's text that is glued before it."""
    text = raw.decode("utf-8", "replace")
    text = text[read_prefix(text).size :]
    glued = _LAST_PREFIX.match(text[-2000:])
    if glued is not None:
        text = text[-2000:][glued.end() :]
    text = text.strip(" \t|").rstrip(":").rstrip()[-200:]
    known = _KNOWN_LABEL.search(text)
    return text if known is None else known.group()


class WriterCache:
    """Labels and writers repeat with every update of a bar: read each distinct text once."""

    def __init__(self, limit: int = 512) -> None:
        self._limit = limit
        self._labels: Dict[bytes, str] = {}
        self._writers: Dict[bytes, Tuple[Optional[str], Optional[int]]] = {}

    def label(self, raw: bytes) -> str:
        """Label of what stands before the percentage."""
        found = self._labels.get(raw)
        if found is None:
            if len(self._labels) >= self._limit:
                self._labels.clear()
            found = self._labels[raw] = _label(raw)
        return found

    def writer(self, raw: bytes) -> Tuple[Optional[str], Optional[int]]:
        """(worker, pid) from the start of a line."""
        found = self._writers.get(raw)
        if found is None:
            if len(self._writers) >= self._limit:
                self._writers.clear()
            prefix = read_prefix(strip_ansi(raw).decode("utf-8", "replace").lstrip("\r"))
            found = self._writers[raw] = (prefix.worker, prefix.pid)
        return found


# The form that nearly all updates have, in one go: label, percentage, bar or "Completed |", counts, clock, rate.
PLAIN = re.compile(
    rb"(?P<label>[^|%\[\]\x1b]*?)(?P<percent>\d{1,3})%(?:\|[^|]*\|| Completed \|) *"
    rb"(?P<done>\d{1,15})/(?P<total>\d{1,15}) \[(?P<elapsed>[\d:]+)<(?P<remaining>[\d:]+|\?), *(?P<rate>\?|\d{1,9}(?:\.\d{1,15})?)"
    rb"(?P<unit>s/it|it/s)(?P<rest>(?:, [^\]]*)?\] *)$"
)


def read_plain(match: "re.Match[bytes]", line: int, seg: int, head: bytes, cache: WriterCache) -> BarUpdate:
    """The update of a segment that has the plain form."""
    label, percent, done, total, elapsed, remaining, rate, unit, _ = match.groups()
    s_per_item: Optional[float] = None
    if rate != b"?":
        value = float(rate)
        if unit == b"s/it":
            s_per_item = value
        elif value > 0:
            s_per_item = _meant(round(1.0 / value, 6))
    worker, pid = cache.writer(head or label)
    return BarUpdate(
        line,
        seg,
        cache.label(label),
        int(done),
        int(total),
        int(percent),
        seconds_of(elapsed),
        None if remaining == b"?" else seconds_of(remaining),
        s_per_item,
        worker,
        pid,
    )


def parse_bars(
    raw: bytes, line: int, seg: int, head: bytes = b"", cache: Optional[WriterCache] = None
) -> List[BarUpdate]:
    """All bar updates in one segment, left to right.

    Args:
        raw: the segment without separators.
        line, seg: where it stands.
        head: start of the segment's line (the process prefix often stands before the first carriage return).
        cache: labels and writers read before.
    """
    cache = cache or WriterCache()
    plain = PLAIN.match(raw)
    if plain is not None:
        return [read_plain(plain, line, seg, head, cache)]
    data = strip_ansi(raw)
    updates: List[BarUpdate] = []
    behind = 0
    for anchor in ANCHOR.finditer(data):
        if anchor.start() < behind:
            continue
        clock = _CLOCK.match(data, anchor.start())
        if clock is None:
            continue
        left = data[behind : anchor.start()]
        has_left = clock.group("left") is not None
        found = _with_total(left)
        if found is None and not has_left:
            found = _without_total(left)
        if found is None:
            continue
        is_rate, s_per_item = _seconds_per_item(clock.group("rate"), clock.group("unit"))
        if not is_rate and not (has_left and found.percent is not None):
            continue
        close = data.find(b"]", clock.end())
        behind = clock.end() if close < 0 else close + 1
        worker, pid = cache.writer(head or left[:HEAD_BYTES])
        updates.append(
            BarUpdate(
                line,
                seg,
                cache.label(found.label),
                found.done,
                found.total,
                found.percent,
                seconds_of(clock.group("elapsed"), clock.group("days")),
                seconds_of(clock.group("remaining"), clock.group("left_days")) if has_left else None,
                s_per_item,
                worker,
                pid,
            )
        )
    return updates


def text_behind_bars(raw: bytes) -> bytes:
    """What is glued behind the last bar of a segment (another writer's line), or the whole when there is no bar."""
    data = strip_ansi(raw)
    behind = 0
    for anchor in ANCHOR.finditer(data):
        if anchor.start() >= behind and _CLOCK.match(data, anchor.start()):
            close = data.find(b"]", anchor.end())
            behind = len(data) if close < 0 else close + 1
    return data[behind:]


def parse_counter(text: str, line: int, seg: int, worker: Optional[str], pid: Optional[int]) -> Optional[BarUpdate]:
    """``iter 100/2000``, ``Step [100/600]``, ``Prefetching checkpoint files: 30% (19/64)`` or ``global_step=16``."""
    match = _PERCENT_COUNTER.search(text[:400])
    percent = int(match.group("percent")) if match is not None else None
    if match is None:
        found = list(_COUNTER.finditer(text[:2000]))
        match = found[-1] if found else None  # "Epoch [3/10], Step [100/600]": the inner counter moves
    if match is not None:
        done = int(match.group("done").replace(",", ""))
        total = int(match.group("total").replace(",", ""))
        if total < done or total < 2:
            return None
        return BarUpdate(line, seg, match.group("label").strip(), done, total, percent, None, None, None, worker, pid)
    match = _METRIC_STEP.search(text)
    if match is not None:
        return BarUpdate(line, seg, "global_step", int(match.group("done")), None, None, None, None, None, worker, pid)
    return None


SAMPLES = 256


class Bar:
    """One instance of a bar: its last update and a bounded history of (elapsed_s, done)."""

    __slots__ = ("_skip", "advances", "first_line", "instance", "samples", "update")

    def __init__(self, update: BarUpdate, instance: int) -> None:
        self.update = update
        self.instance = instance
        self.first_line = update.line
        self.samples: List[Tuple[float, int]] = []
        self.advances = 0
        self._skip = 1
        self._sample(update)

    @property
    def complete(self) -> bool:
        """The count has reached the total."""
        return self.update.total is not None and self.update.done >= self.update.total

    def advance(self, elapsed_s: Optional[int], done: int) -> None:
        """Count a state that moved the bar, without keeping all that it printed (the caller hands that in later)."""
        self.advances += 1
        if self.advances % self._skip == 0 and elapsed_s is not None:
            self._keep(elapsed_s, done)

    def take(self, update: BarUpdate) -> None:
        """The bar's next printed state."""
        if update.done > self.update.done:
            self.advances += 1
            if self.advances % self._skip == 0:
                self._sample(update)
        self.update = update

    def _sample(self, update: BarUpdate) -> None:
        if update.elapsed_s is not None:
            self._keep(update.elapsed_s, update.done)

    def _keep(self, elapsed_s: int, done: int) -> None:
        self.samples.append((float(elapsed_s), done))
        if len(self.samples) > SAMPLES:
            del self.samples[1:-1:2]
            self._skip *= 2


class BarTracker:
    """Tell apart the instances of bars: a restart is a new instance, two writers of one bar are two bars.

    Args:
        limit: most instances kept; beyond it finished ones in the middle of the log are forgotten, oldest first.
    """

    def __init__(self, limit: int = 1000) -> None:
        self.bars: List[Bar] = []
        self.forgotten = 0
        self.advances = 0
        self._limit = limit
        self._live: Dict[Tuple[Optional[str], Optional[int], str, Optional[int]], List[Bar]] = {}
        self._instances: Dict[Tuple[Optional[str], Optional[int], str], int] = {}

    def only(self, bar: Bar) -> bool:
        """No other writer shares this bar's name and total."""
        update = bar.update
        return self._live.get((update.worker, update.pid, update.label, update.total)) == [bar]

    def take(self, update: BarUpdate) -> Bar:
        """Assign an update to its bar; returns that bar."""
        key = (update.worker, update.pid, update.label, update.total)
        live = self._live.get(key)
        if live:
            last = live[-1]
            if update.done >= last.update.done and len(live) == 1:
                self.advances += update.done > last.update.done
                last.take(update)
                return last
            bar = self._match(live, update)
            if bar is not None:
                self.advances += update.done > bar.update.done
                bar.take(update)
                return bar
        return self._start(key, update, live)

    @staticmethod
    def _match(live: List[Bar], update: BarUpdate) -> Optional[Bar]:
        """The writer (of several that share one label) whose count and clock this update continues."""
        best = None
        for bar in live:
            old = bar.update
            behind_clock = (
                old.elapsed_s is not None and update.elapsed_s is not None and update.elapsed_s < old.elapsed_s
            )
            if update.done >= old.done and not behind_clock and (best is None or old.done > best.update.done):
                best = bar
        return best

    def _start(
        self,
        key: Tuple[Optional[str], Optional[int], str, Optional[int]],
        update: BarUpdate,
        live: Optional[List[Bar]],
    ) -> Bar:
        name = key[:3]
        self._instances[name] = number = self._instances.get(name, 0) + 1
        bar = Bar(update, number)
        self.bars.append(bar)
        restarted = live is None or _restarted(live, update)
        if restarted or live is None or len(live) >= 8:
            self._live[key] = [bar]
        else:
            live.append(bar)
        if len(self.bars) > self._limit:
            self._forget()
        return bar

    def _forget(self) -> None:
        middle = len(self.bars) // 4
        for at in range(middle, len(self.bars)):
            bar = self.bars[at]
            key = (bar.update.worker, bar.update.pid, bar.update.label, bar.update.total)
            live = self._live.get(key)
            if live is None or bar not in live:
                del self.bars[at]
                self.forgotten += 1
                return
        bar = self.bars.pop(middle)
        self._live.pop((bar.update.worker, bar.update.pid, bar.update.label, bar.update.total), None)
        self.forgotten += 1


def _restarted(live: List[Bar], update: BarUpdate) -> bool:
    """A count that fell together with its clock (or from a finished bar) is the next round, not a second writer."""
    last = live[-1]
    if all(bar.complete for bar in live) or update.done == 0:
        return True
    if update.elapsed_s is None or last.update.elapsed_s is None:
        return True
    return update.elapsed_s + 2 < last.update.elapsed_s
