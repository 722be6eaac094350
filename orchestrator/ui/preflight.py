"""`orch preflight` for people: one line a finding, what to do under it. Pure functions of the checks' rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from orchestrator.ui.text import duration, one_line

Row = Mapping[str, Any]
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


def preflight_lines(checks: Sequence[Row]) -> list[Text]:
    """Lines of all rows, those of the whole host first, and a last line with the count.

    Args:
        checks: rows of the design's preflight JSON, in the order they came.
    """
    if not checks:
        return [Text("nothing to check: no step of this plan needs a model, data, a GPU or a port")]
    places = [_place(row) for row in checks]
    width = max(map(len, places))
    lines: list[Text] = []
    for row, place in zip(checks, places, strict=True):
        verdict = str(row["verdict"])
        line = Text.assemble(
            (verdict.ljust(4), _STYLES.get(verdict, "")),
            f"  {place.ljust(width)}  {one_line(str(row['found']))}",
        )
        if verdict in {"warn", "fail"} or (row.get("took_s") or 0) >= 1:
            line.append(f"  ({duration(row.get('took_s'))})", style="dim")
        lines.append(line)
        if row.get("fix") and verdict in {"warn", "fail"}:
            lines.append(
                Text(
                    f"      {' ' * width}  -> {one_line(str(row['fix']))}",
                    style=_STYLES[verdict].replace("bold ", ""),
                )
            )
    lines.append(_count(checks))
    return lines


def _place(row: Row) -> str:
    step = row.get("step")
    return f"{one_line(str(step))} {row['name']}" if step else str(row["name"])


def _count(checks: Sequence[Row]) -> Text:
    fails = sum(row["verdict"] == "fail" for row in checks)
    warns = sum(row["verdict"] == "warn" for row in checks)
    told = f", {warns} warning{'s' if warns != 1 else ''}" if warns else ""
    if fails:
        return Text(f"{fails} of {len(checks)} checks fail{told}: nothing is started", style="bold red")
    return Text(
        f"ready: {len(checks)} check{'s' if len(checks) != 1 else ''}, none fails{told}", style="green"
    )
