"""Rows of figures and the one table that they are printed in. Medians, the limit, and the peer of the same run."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Row:
    """One figure.

    Attributes:
        ours: what was measured, one value per repetition.
        limit: the most (or, with ``at_least``, the least) that was promised, in the same unit.
        peer: the same question asked of plain OpenSSH (or ``peer_name``) in the same run.
    """

    section: str
    what: str
    unit: str
    ours: Sequence[float]
    limit: float | None = None
    limit_text: str = ""
    peer: Sequence[float] = ()
    peer_name: str = ""
    at_least: bool = False

    @property
    def median(self) -> float:
        return statistics.median(self.ours)

    @property
    def holds(self) -> bool | None:
        """Whether the limit is kept; None without a limit."""
        if self.limit is None:
            return None
        return self.median >= self.limit if self.at_least else self.median <= self.limit

    def cells(self) -> list[str]:
        """The row as text."""
        low, high = min(self.ours), max(self.ours)
        spread = f"{low:.3g}..{high:.3g} ({len(self.ours)})" if len(self.ours) > 1 else "(1)"
        peer = statistics.median(self.peer) if self.peer else None
        ratio = f"{self.median / peer:.2f} x" if peer else ""
        limit = self.limit_text or ("" if self.limit is None else f"{'>=' if self.at_least else '<='} {self.limit:.3g}")
        verdict = {True: "ok", False: "MISSED", None: ""}[self.holds]
        peer_text = f"{peer:.3g} {self.peer_name}" if peer is not None else ""
        return [self.section, self.what, f"{self.median:.3g} {self.unit}", spread, limit, verdict, peer_text, ratio]


@dataclass
class Table:
    """Cells that are no rows of figures, with the data behind them."""

    section: str
    head: list[str]
    cells: list[list[str]]
    notes: list[str]
    data: Any


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Cells as columns of text."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


HEAD = ["section", "what", "median", "min..max (n)", "limit", "", "peer, same run", "ratio"]


@dataclass
class Report:
    """Collects rows; sections say what they are doing as they go."""

    rows: list[Row] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    took_s: dict[str, int] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Take a figure and show it at once."""
        self.rows.append(row)
        print("   " + " | ".join(cell for cell in row.cells()[1:] if cell), flush=True)

    def show(
        self, section: str, head: Sequence[str], cells: Sequence[Sequence[str]], notes: Sequence[str], data: Any
    ) -> None:
        """Take a table of its own shape; ``data`` is what it was made from."""
        self.tables.append(Table(section, list(head), [list(row) for row in cells], list(notes), data))

    def say(self, text: str) -> None:
        """A line about what is going on."""
        print(text, flush=True)

    def table(self) -> str:
        """All rows, aligned, then the tables of another shape."""
        parts = [aligned([HEAD, *(row.cells() for row in self.rows)])] if self.rows else []
        parts += [
            f"{table.section}\n{aligned([table.head, *table.cells])}\n" + "".join(f"  {note}\n" for note in table.notes)
            for table in self.tables
        ]
        return "\n\n".join(parts)

    def machine(self) -> dict[str, object]:
        """Where and on what this was measured."""
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        return {
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "commit": commit.stdout.strip(),
            "python": platform.python_version(),
            "kernel": platform.release(),
            "cpus": os.cpu_count(),
            "load_1m": round(os.getloadavg()[0], 2),
        }

    def save(self, path: Path, section: str | None = None) -> None:
        """Write rows, tables and machine as JSON; with ``section`` only those of that section."""
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [row for row in self.rows if section in (None, row.section)]
        record = {
            "machine": self.machine(),
            "took_s": self.took_s if section is None else self.took_s.get(section),
            "rows": [{**asdict(row), "median": row.median, "cells": row.cells()} for row in rows],
            "tables": [asdict(table) for table in self.tables if section in (None, table.section)],
        }
        path.write_text(json.dumps(record, indent=1) + "\n")
