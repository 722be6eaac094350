"""A job's timeline as text: one line an attempt, its phases below, GPU use at the end. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from orchestrator.core.timeline import Reading, Span, Timeline, mean_utilisation
from orchestrator.ui.job import Moment, state_style
from orchestrator.ui.text import cell_width, clock_time, duration, one_line

FULL, PART, FAILED = "█", "▓", "░"
_LEVELS = " ▁▂▃▄▅▆▇█"


def timeline_lines(line: Timeline, moment: Moment, width: int = 100) -> list[Text]:
    """Lines of at most ``width`` columns (at least 40 for the bars' part)."""
    rows: list[tuple[str, str, str, str]] = []  # label, bar, style, remark
    labels = [f"{lane.step} #{lane.attempt}" for lane in line.lanes]
    phases = [f"  {phase.label}" for lane in line.lanes for phase in lane.phases]
    gpus = [f"GPU {index}" for index in line.gpus]
    left = min(28, max([8, *(cell_width(text) for text in (*labels, *phases, *gpus))]))
    room = max(40, width - left - 32)
    for lane, label in zip(line.lanes, labels, strict=True):
        bar = _bar(line, lane.span, room, FAILED if lane.span.state in {"failed", "lost"} else FULL)
        remark = f"{duration(lane.span.seconds)} {lane.span.state}" + (f", {lane.verdict}" if lane.verdict else "")
        rows.append((label, bar, state_style(lane.span.state), remark))
        rows.extend(
            (f"  {phase.label}", _bar(line, phase, room, PART), "dim", duration(phase.seconds))
            for phase in lane.phases
            if phase.seconds >= 1
        )
    rows.extend((f"GPU {index}", _use(line, line.readings, index, room), "cyan", "") for index in line.gpus)
    head = Text(f"{one_line(line.job)}  {line.state}  on {one_line(line.host)}", "bold")
    start, end = (clock_time(at, moment.now, moment.zone) for at in (line.start, line.end))
    axis = f"{'':<{left}}  {start}{end:>{max(1, room - len(start))}}"
    lines = [head, Text(axis, "dim")]
    for label, bar, style, remark in rows:
        name = one_line(label) if not label.startswith(" ") else "  " + one_line(label)
        shown = name if cell_width(name) <= left else name[: left - 1] + "…"
        pad = " " * max(0, left - cell_width(shown))
        lines.append(Text.assemble(shown + pad + "  ", (bar, style), "  ", one_line(remark)))
    mean = mean_utilisation(line)
    if mean is not None:
        lines.append(Text(f"Mean GPU utilisation while held: {mean:.0f}% of {len(line.readings)} readings.", "dim"))
    return lines


def _columns(line: Timeline, span: Span, room: int) -> tuple[int, int]:
    total = (line.end - line.start).total_seconds()
    first = int(room * (span.start - line.start).total_seconds() / total)
    last = int(room * (span.end - line.start).total_seconds() / total)
    first = min(first, room - 1)
    return first, max(first + 1, min(last, room))


def _bar(line: Timeline, span: Span, room: int, mark: str) -> str:
    first, last = _columns(line, span, room)
    return " " * first + mark * (last - first) + " " * (room - last)


def _use(line: Timeline, readings: Sequence[Reading], index: int, room: int) -> str:
    """Utilisation over time, or where the GPU was held when nothing was read."""
    total = (line.end - line.start).total_seconds()
    cells: list[list[float]] = [[] for _ in range(room)]
    for reading in readings:
        use = reading.gpus.get(index, (None, None))[0]
        place = int(room * (reading.at - line.start).total_seconds() / total)
        if use is not None and 0 <= place < room:
            cells[place].append(use)
    held = [False] * room
    for lane in line.lanes:
        if index in lane.gpus:
            first, last = _columns(line, lane.span, room)
            held[first:last] = [True] * (last - first)
    if not any(cells):
        return "".join("·" if here else " " for here in held)
    shown, last_use = [], None
    for cell, here in zip(cells, held, strict=True):
        last_use = sum(cell) / len(cell) if cell else last_use if here else None
        shown.append(" " if last_use is None else _LEVELS[min(8, int(last_use / 100 * 8 + 0.5))])
    return "".join(shown)
