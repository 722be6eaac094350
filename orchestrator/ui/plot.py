"""A job's timeline as a picture, by matplotlib (the extra `plot`): attempts with their phases, bars, and GPU use.

Must not be imported before a picture is wanted: matplotlib takes half a second.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from orchestrator.core.timeline import Timeline, mean_utilisation, ticks
from orchestrator.ui.text import duration, one_line

PALETTE = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#76b7b2", "#edc948", "#ff9da7", "#9c755f", "#86bcb6", "#bab0ac")
STANDS_S = 90.0
STATES = {"failed": "#c0392b", "lost": "#7b241c", "stopped": "#7f8c8d", "succeeded": "#2e7d32", "running": "#1565c0"}


def draw(line: Timeline, path: Path) -> None:
    """Write the picture; the file's ending chooses the format.

    Raises:
        ImportError: matplotlib is not here. OSError: the file cannot be written. ValueError: no such format.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    gpus = line.gpus
    rows = max(1, len(line.lanes))
    height = 1.6 + 0.42 * rows + (0.6 + 0.22 * len(gpus) if gpus else 0)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "orch", "font.size": 9, "text.parse_math": False}):
        figure = Figure(figsize=(11, height), layout="constrained")
        if gpus:
            grid = figure.subplots(2, 1, sharex=True, height_ratios=[0.42 * rows + 0.8, 0.22 * len(gpus) + 0.4])
            top, bottom = grid[0], grid[1]
        else:
            top, bottom = figure.subplots(1, 1), None
        _attempts(top, line)
        if bottom is not None:
            _gpus(figure, bottom, line, gpus)
        last = bottom or top
        marks = ticks(line.start, line.end)
        last.set_xticks([_x(line, at) for at, _ in marks], [label for _, label in marks])
        last.set_xlim(0, _x(line, line.end))
        last.set_xlabel(f"since {line.start:%Y-%m-%d %H:%M:%S} UTC")
        figure.suptitle(f"{one_line(line.job)} on {one_line(line.host)}: {line.state}")
        # Without a date and a writer's version the same job gives the same file.
        metadata = {"Date": None} if path.suffix.lower() in {".svg", ".pdf"} else {}
        figure.savefig(path, dpi=120, metadata=metadata)


def _short(text: str) -> str:
    shown = one_line(text)
    return shown if len(shown) <= 24 else shown[:23] + "…"


def _x(line: Timeline, at: datetime) -> float:
    return (at - line.start).total_seconds()


def _attempts(axes: Any, line: Timeline) -> None:
    from matplotlib.patches import Patch

    colours = {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(line.phase_names)}
    for row, lane in enumerate(line.lanes):
        edge = STATES.get(lane.span.state, "#555555")
        axes.barh(row, lane.span.seconds, left=_x(line, lane.span.start), height=0.62, color="#eceff1", edgecolor=edge)
        for phase in lane.phases:
            axes.barh(
                row, phase.seconds, left=_x(line, phase.start), height=0.5, color=colours[phase.label],
                hatch="///" if phase.state == "failed" else None, linewidth=0,
            )  # fmt: skip
        words = [lane.span.state + (f": {lane.verdict}" if lane.verdict else ""), duration(lane.span.seconds)]
        full = [bar for bar in lane.bars if bar.get("total")]
        if full:
            words.append(f"{full[-1].get('done')}/{full[-1].get('total')}")
        axes.annotate(
            "  " + ", ".join(words), (_x(line, lane.span.end), row), va="center", fontsize=7, color=edge,
            annotation_clip=False, ha="right" if _x(line, lane.span.end) > 0.8 * _x(line, line.end) else "left",
            bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 0.5},
        )  # fmt: skip
    labels = [f"{_short(lane.step)} #{lane.attempt}" for lane in line.lanes]
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(max(len(labels), 1) - 0.5, -0.5)
    if colours:
        handles = [Patch(color=colour, label=_short(name).lstrip("_") or "-") for name, colour in colours.items()]
        axes.legend(handles=handles, fontsize=7, ncols=min(6, len(handles)), loc="lower left", bbox_to_anchor=(0, 1.0))


def _columns(line: Timeline) -> tuple[list[float], list[dict[int, float | None]]]:
    """Edges and values of the columns: a reading stands until the next one, but at most ``STANDS_S``; gaps stay gaps."""
    edges: list[float] = []
    columns: list[dict[int, float | None]] = []
    for reading in line.readings:
        x = _x(line, reading.at)
        if edges and x - edges[-1] > STANDS_S:
            edges.append(edges[-1] + STANDS_S)
            columns.append({})
        edges.append(x)
        columns.append({index: use for index, (use, _) in reading.gpus.items()})
    return [*edges, edges[-1] + STANDS_S], columns


def _gpus(figure: Any, axes: Any, line: Timeline, gpus: list[int]) -> None:
    if not line.readings:
        for lane in line.lanes:
            for index in lane.gpus:
                left = _x(line, lane.span.start)
                axes.barh(gpus.index(index), lane.span.seconds, left=left, height=0.8, color="#90a4ae")
        axes.set_ylabel("GPU held")
    else:
        edges, columns = _columns(line)
        nothing = float("nan")
        uses = [[use if (use := column.get(index)) is not None else nothing for column in columns] for index in gpus]
        mesh = axes.pcolormesh(
            edges, [index - 0.5 for index in range(len(gpus) + 1)], uses, vmin=0, vmax=100, cmap="viridis", rasterized=True
        )
        figure.colorbar(mesh, ax=axes, label="%", pad=0.01)
        mean = mean_utilisation(line)
        axes.set_ylabel("GPU" if mean is None else f"GPU use\nmean {mean:.0f}%")
    axes.set_yticks(range(len(gpus)), [str(index) for index in gpus])
    axes.set_ylim(len(gpus) - 0.5, -0.5)
