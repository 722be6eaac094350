"""What the live view is drawn for: the size of the terminal, and what the person at the keyboard chose.

Also the few signs that differ where a terminal has no Unicode. Without colour every sign still says the same: colour is
never the only carrier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.text import Text

from orchestrator.ui.changes import Change

WIDE = 100
"""From this width on a bar also shows its rate, and its drawing is longer."""


@dataclass
class Screen:
    """Size of the terminal and choices."""

    width: int = 80
    height: int = 24
    chosen: str | None = None
    processes: bool = False
    gpus: bool = True
    log: bool = False
    help: bool = False
    unicode: bool = True
    question: str | None = None
    message: str | None = None
    recent: list[Change] = field(default_factory=list)


def gauge(share: float, cells: int, style: str, screen: Screen) -> Text:
    """A drawing of ``cells`` columns, filled from the left by ``share`` (0 to 1)."""
    share = max(0.0, min(1.0, share))
    full = min(cells, round(cells * share))
    if share < 1.0:
        full = min(full, cells - 1)  # full means done
    filled, empty = ("━", "─") if screen.unicode else ("#", ".")
    return Text.assemble((filled * full, style), (empty * (cells - full), "bright_black"))


def crop(line: Text, width: int, *, unicode: bool = True) -> Text:
    """One line of at most ``width`` columns; what is cut is marked."""
    if line.cell_len <= width:
        return line
    line = line.copy()
    mark = "…" if unicode else "~"
    line.truncate(max(0, width - 1), overflow="crop")
    return line.append(mark)


Line = Text | Callable[[], Text]
"""A line, or what draws it once it is known to be in sight: of 200 jobs a screen shows 40."""


def _drawn(line: Line) -> Text:
    return line if isinstance(line, Text) else line()


def fit(lines: list[Text], room: int) -> list[Text]:
    """At most ``room`` lines; what does not fit is counted, not lost silently."""
    return window(lines, room, range(0))


def window(lines: Sequence[Line], room: int, focus: range) -> list[Text]:
    """``room`` lines out of more, with those of ``focus`` (its beginning, when it is longer) among them.

    The first and the last line shown count what is not.
    """
    if len(lines) <= room:
        return [_drawn(line) for line in lines]
    inner = max(1, room - 2)
    start = 0
    if len(focus):
        middle = focus.start - max(0, inner - len(focus)) // 2
        start = max(0, min(middle, len(lines) - inner))
    if start <= 1:  # the top is in sight
        start, shown = 0, room - 1
    elif start + inner >= len(lines) - 1:
        shown = room - 1
        start = len(lines) - shown
    else:
        shown = inner
    found = [_drawn(line) for line in lines[start : start + shown]]
    if start:
        found.insert(0, Text(f"  ... {start} more lines above (up, down)", "bright_black"))
    below = len(lines) - start - shown
    if below:
        found.append(Text(f"  ... {below} more lines below", "bright_black"))
    return found
