"""A job's timeline as SVG text, drawn by hand so that a report needs neither matplotlib nor any other file. Pure."""

from __future__ import annotations

from datetime import datetime
from html import escape

from orchestrator.core.timeline import Span, Timeline, ticks
from orchestrator.ui.plot import PALETTE, STATES
from orchestrator.ui.text import duration, one_line

WIDTH, LEFT, RIGHT = 1000, 150, 20
ROW, GPU_ROW = 30, 14
MAX_CELLS = 400


def svg(line: Timeline) -> str:
    """The picture: attempts with phases, then one row a GPU, on one axis of time."""
    colours = {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(line.phase_names)}
    gpus = line.gpus
    top = 8
    axis = top + ROW * len(line.lanes) + (16 + GPU_ROW * len(gpus) if gpus else 0)
    parts = [_grid(line, top, axis)]
    for row, lane in enumerate(line.lanes):
        y = top + ROW * row
        edge = STATES.get(lane.span.state, "#777777")
        words = f"{lane.step} #{lane.attempt}: {lane.span.state}, {duration(lane.span.seconds)}"
        parts.append(_label(LEFT - 8, y + 17, f"{lane.step} #{lane.attempt}"))
        parts.append(
            f'<g>{_title(words + (f", {lane.verdict}" if lane.verdict else ""))}'
            f'<rect {_place(line, lane.span)} y="{y + 4}" height="{ROW - 10}" fill="#8884" stroke="{edge}" '
            f'stroke-width="1.5" rx="2"/></g>'
        )
        for phase in lane.phases:
            mark = ' fill-opacity="0.5"' if phase.state == "failed" else ""
            parts.append(
                f"<g>{_title(f'{phase.label}: {phase.state}, {duration(phase.seconds)}')}"
                f'<rect {_place(line, phase)} y="{y + 7}" height="{ROW - 16}" fill="{colours[phase.label]}"{mark}/></g>'
            )
    for row, index in enumerate(gpus):
        y = top + ROW * len(line.lanes) + 16 + GPU_ROW * row
        parts.append(_label(LEFT - 8, y + 10, f"GPU {index}"))
        parts.append(_gpu(line, index, y))
    height = axis + 24
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="timeline of {_text(line.job)}" '
        f'xmlns="http://www.w3.org/2000/svg" font-family="system-ui, sans-serif" font-size="12">{"".join(parts)}</svg>'
    )


def legend(line: Timeline) -> list[tuple[str, str]]:
    """(phase, colour) of the picture."""
    return [(one_line(name), PALETTE[i % len(PALETTE)]) for i, name in enumerate(line.phase_names)]


def _text(text: str) -> str:
    return escape(one_line(text))


def _title(text: str) -> str:
    return f"<title>{_text(text)}</title>"


def _label(x: float, y: float, text: str) -> str:
    shown = one_line(text)
    shown = shown if len(shown) <= 22 else shown[:21] + "…"
    return f'<text x="{x}" y="{y}" text-anchor="end" fill="currentColor">{escape(shown)}</text>'


def _x(line: Timeline, at: datetime) -> float:
    share = (at - line.start).total_seconds() / (line.end - line.start).total_seconds()
    return LEFT + (WIDTH - LEFT - RIGHT) * min(1.0, max(0.0, share))


def _place(line: Timeline, span: Span) -> str:
    x = _x(line, span.start)
    return f'x="{x:.1f}" width="{max(1.0, _x(line, span.end) - x):.1f}"'


def _grid(line: Timeline, top: int, axis: int) -> str:
    parts = []
    for at, label in ticks(line.start, line.end):
        x = _x(line, at)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{axis}" stroke="currentColor" opacity="0.15"/>')
        parts.append(f'<text x="{x:.1f}" y="{axis + 15}" text-anchor="middle" fill="currentColor">{escape(label)}</text>')
    return "".join(parts)


def _gpu(line: Timeline, index: int, y: int) -> str:
    """Held time as a frame, and inside it the utilisation by its opacity; many readings are averaged into few cells."""
    parts = [
        f'<rect {_place(line, lane.span)} y="{y}" height="{GPU_ROW - 3}" fill="#8883"/>'
        for lane in line.lanes
        if index in lane.gpus
    ]
    total = (line.end - line.start).total_seconds()
    cells: dict[int, list[float]] = {}
    for reading in line.readings:
        use = reading.gpus.get(index, (None, None))[0]
        if use is not None:
            place = int(MAX_CELLS * min(0.9999, max(0.0, (reading.at - line.start).total_seconds() / total)))
            cells.setdefault(place, []).append(use)
    room = WIDTH - LEFT - RIGHT
    places = sorted(cells)
    for number, place in enumerate(places):
        mean = sum(cells[place]) / len(cells[place])
        # A reading stands until the next one, but at most for ninety seconds: gaps stay gaps.
        following = places[number + 1] if number + 1 < len(places) else place + 1
        longest = max(1, round(MAX_CELLS * 90 / total))
        wide = room * min(following - place, longest) / MAX_CELLS
        parts.append(
            f'<rect x="{LEFT + room * place / MAX_CELLS:.1f}" width="{wide:.1f}" y="{y}" height="{GPU_ROW - 3}" '
            f'fill="#1565c0" fill-opacity="{0.08 + 0.92 * min(100.0, mean) / 100:.2f}"><title>GPU {index}: {mean:.0f}%</title></rect>'
        )
    return "".join(parts)
