"""Figures of a running attempt (loss, tokens/s, samples/s) as one line: newest value and a sparkline. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from rich.text import Text

from orchestrator.core.metrics import is_number
from orchestrator.ui.screen import WIDE, Screen

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-=+*#@"
ORDER = ("loss", "val loss", "samples/s", "tokens/s", "output tokens/s", "prompt tokens/s")


def sparkline(values: Sequence[float], cells: int, *, unicode: bool = True) -> str:
    """The newest values as at most ``cells`` signs, lowest to highest; what is no number is a gap.

    With more values than cells each sign is the mean of its share, so that noise does not hide the trend.
    """
    signs = BLOCKS if unicode else ASCII
    count = len(values)
    if count > cells:
        edges = [round(index * count / cells) for index in range(cells + 1)]
        groups = [values[start:end] for start, end in pairwise(edges)]
        values = [_mean(group) for group in groups]
    numbers = [value for value in values if is_number(value)]
    if not numbers:
        return ""
    low, high = min(numbers), max(numbers)
    span = high - low
    top = len(signs) - 1
    return "".join(
        " " if not is_number(value) else signs[round(top * (value - low) / span) if span > 0 else top // 2]
        for value in values
    )


def _mean(values: Sequence[float]) -> float:
    numbers = [value for value in values if is_number(value)]
    return sum(numbers) / len(numbers) if numbers else float("nan")


def figures_line(metrics: Mapping[str, Sequence[float]], room: int, screen: Screen) -> Text | None:
    """``loss 0.153 ▇▅▃▂▁   output tokens/s 138 ▂▄█``: as many as ``room`` columns take; None when there is none."""
    cells = 16 if screen.width >= WIDE else 8
    line = Text("")
    for name in sorted(metrics, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER)):
        values = metrics[name]
        if not values or not any(values):
            continue
        piece = Text.assemble((f"{name} ", "bright_black"), _value(values[-1]))
        if len(values) > 1:
            piece.append(" ").append(sparkline(values, cells, unicode=screen.unicode), "magenta")
        gap = 3 if line.plain else 0
        if line.cell_len + gap + piece.cell_len > room:
            continue
        line.append(" " * gap).append_text(piece)
    return line if line.plain else None


def _value(value: float) -> Text:
    if not is_number(value):
        return Text(str(value), "bold red")
    if value != 0 and abs(value) < 0.001:
        return Text(f"{value:.2e}")
    return Text(f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}")
