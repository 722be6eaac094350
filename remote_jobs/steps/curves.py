"""Loss and accuracy curves of a training, from metrics.jsonl: a small chart in the log, a PNG where matplotlib is."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from remote_jobs.steps.extraction.progress import Progress

WIDTH, HEIGHT = 72, 8
BLOCKS = " ▁▂▃▄▅▆▇█"


def read(path: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(training records, validation records) in order; damaged lines are left out."""
    training: list[dict[str, Any]] = []
    validation: list[dict[str, Any]] = []
    if os.path.exists(path):
        with open(path, encoding="utf-8") as stream:
            for line in stream:
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                (training if "train" in record else validation).append(record)
    return training, validation


def draw(metrics: str, png: str, progress: Progress) -> None:
    """Print the loss as a chart, and write the PNG."""
    training, validation = read(metrics)
    losses = [record["train"]["loss"] for record in training if "loss" in record["train"]]
    if len(losses) < 2:
        return
    progress.say(f"Training loss over {len(losses)} steps: {losses[0]:.4g} -> {losses[-1]:.4g}")
    for line in chart(losses):
        progress.say(line)
    for record in validation:
        values = record.get("val") or {}
        shown = ", ".join(
            f"{name}={value:.4g}" for name, value in values.items() if "loss" in name or "acc" in name
        )
        progress.say(f"Validation after epoch {record.get('epoch', 0) + 1}: {shown}")
    if write_png(training, validation, png):
        progress.say(f"Curves: {png}")


def chart(values: Sequence[float], width: int = WIDTH, height: int = HEIGHT) -> list[str]:
    """A bar chart of means in text; one column stands for several values where there are more than columns."""
    columns = min(width, len(values))
    means = []
    for column in range(columns):
        part = values[column * len(values) // columns : (column + 1) * len(values) // columns]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    rows = []
    for row in range(height, 0, -1):
        cells = ""
        for mean in means:
            filled = (mean - low) / span * height - (row - 1)
            cells += BLOCKS[max(0, min(8, round(filled * 8)))]
        label = f"{low + span * row / height:9.3g}"
        rows.append(f"{label} |{cells}")
    return rows


def write_png(training: Sequence[dict[str, Any]], validation: Sequence[dict[str, Any]], path: str) -> bool:
    """Write loss and accuracies as a picture; False without matplotlib."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError:
        return False
    figure, (upper, lower) = plt.subplots(2, 1, sharex=True, figsize=(9, 7))
    names = sorted({name for record in training for name in record["train"]})
    for name in names:
        axes = upper if name.startswith("loss") else lower if "acc" in name else None
        if axes is not None:
            points = [
                (record["step"], record["train"][name]) for record in training if name in record["train"]
            ]
            axes.plot(*zip(*points, strict=True), label=name, linewidth=1)
    for record in validation:
        for name, value in (record.get("val") or {}).items():
            if name == "loss_epoch":
                upper.plot(record["step"], value, "ko", markersize=4)
    upper.set_ylabel("loss")
    lower.set_ylabel("accuracy")
    lower.set_xlabel("step")
    for axes in (upper, lower):
        if axes.lines:
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
