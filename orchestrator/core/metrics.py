"""Figures that training and serving programs print (loss, tokens/s, samples/s), as short series for a sparkline.

Why this file exists: a bar says how far a job is, these say whether it does well.  They are read from the piece of log
that a watcher gets anyway, so the host does nothing for them.  Pure; forms are those of vLLM, speculators,
transformers' Trainer, Megatron and of plain `loss 0.12` lines.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator

POINTS = 240
"""Newest values kept of each series; more than any sparkline has cells."""
_MAX_LINE_BYTES = 8192
_NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|nan|inf)"
_IS = rf"['\"]?\s*[:=]?\s*['\"]?(?P<value>{_NUMBER})(?!\w)"
_RATE = rf"(?P<value>{_NUMBER})\s*"


def _rate(unit: str, names: str) -> re.Pattern[str]:
    """`tokens/s: 12`, `train_tokens_per_second=12` or `12 tokens/s`."""
    name = rf"(?<![\w.])(?:[a-z]+[/_])?(?:{unit}/s(?:ec)?|{names})(?:/gpu)?"
    return re.compile(
        rf"{name}['\"]?\s*[:=]\s*['\"]?(?P<value>{_NUMBER})(?!\w)"
        rf"|(?<![\w.])(?P<other>{_NUMBER})\s*{unit}/s(?:ec)?(?!\w|['\"]?\s*[:=])",
        re.IGNORECASE,
    )


_FORMS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("val loss", re.compile(rf"(?<![\w./-])(?:val|valid|validation|eval|test)[/_ ]loss(?:_epoch)?{_IS}", re.IGNORECASE)),
    ("loss", re.compile(rf"(?<![\w./-])(?:train[/_ ]|training |lm |avg |step )?loss{_IS}", re.IGNORECASE)),
    ("prompt tokens/s", re.compile(rf"prompt throughput: {_RATE}tok|speed input: {_RATE.replace('value', 'other')}tok")),
    ("output tokens/s", re.compile(rf"generation throughput: {_RATE}tok|toks/s, output: {_RATE.replace('value', 'other')}tok")),
    ("tokens/s", _rate("tok(?:en)?s?", "tokens_per_s(?:ec(?:ond)?)?|tps")),
    ("samples/s", _rate("samples?", "samples_per_s(?:ec(?:ond)?)?")),
)  # fmt: skip
_NEEDLES = ("loss", "tok", "tps", "amples")


class Metrics:
    """Series by name, fed with a log's bytes in any pieces."""

    def __init__(self) -> None:
        self.series: dict[str, deque[float]] = {}
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the log. A line counts once its end has come."""
        lines = re.split(rb"[\r\n]", self._rest + data)
        self._rest = lines.pop()[-_MAX_LINE_BYTES:]
        for line in lines:
            for name, value in values(line[:_MAX_LINE_BYTES].decode("utf-8", "replace")):
                self.series.setdefault(name, deque(maxlen=POINTS)).append(value)

    def skip(self) -> None:
        """Bytes were left out here: what was unfinished stays so."""
        self._rest = b""

    def snapshot(self) -> dict[str, tuple[float, ...]]:
        """The series as they are now."""
        return {name: tuple(points) for name, points in self.series.items()}


def values(line: str) -> Iterator[tuple[str, float]]:
    """(series, value) of every figure in one line; each series at most once."""
    lowered = line.lower()
    if not any(needle in lowered for needle in _NEEDLES):
        return
    special = False
    for name, form in _FORMS:
        if name == "tokens/s" and special:
            continue  # its parts have series of their own
        found = form.search(line)
        if found is None:
            continue
        groups = found.groupdict()
        text = groups.get("value") or groups.get("other") or ""
        try:
            value = float(text.replace(",", ""))
        except ValueError:
            continue
        special = special or name.endswith(" tokens/s")
        yield name, value


def is_number(value: float) -> bool:
    """False for nan and infinities."""
    return math.isfinite(value)
