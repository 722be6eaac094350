"""The ranges of a split step as parts of one step: which line stands where, and what the step's own line says. Pure.

On the host a range is a step like any other and the plan's step is the one that joins them, last. People read it the
other way round: the step, and under it its ranges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.ui.job import current_attempt, current_bar

Json = Mapping[str, Any]

MANY = 8
"""Lines for the ranges of one step: with more ranges, those in trouble come first, and those that are well are counted."""
_IN_TROUBLE = ("failed", "lost", "retry_wait", "gated", "stopping", "stopped")
_FOREMOST = ("running", "stopping", "retry_wait", "gated", "lost", "failed", "stopped", "queued")


@dataclass(frozen=True)
class Row:
    """One line of a job: a step, a range below its step (``depth`` 1), or a split step with a ``summary``."""

    step: Json
    name: str
    depth: int = 0
    summary: str = ""


def rows(steps: Sequence[Json]) -> list[Row]:
    """The steps of a job in the order in which people read them."""
    groups: dict[str, list[Json]] = {}
    for step in steps:
        if step.get("part"):
            groups.setdefault(str(step["part"]["of"]), []).append(step)
    joining = {str(step["name"]): step for step in steps if not step.get("part")}
    found: list[Row] = []
    for step in steps:
        name, part = str(step["name"]), step.get("part")
        if not part:
            if name not in groups:
                found.append(Row(step, name))
            continue
        name = str(part["of"])
        if groups[name][0] is step:
            found.append(_head(name, joining.get(name), groups[name]))
            found.extend(Row(one, _range_name(one), depth=1) for one in _shown(groups[name]))
    return found


def _range_name(step: Json) -> str:
    return f"{step['part']['index']}/{step['part']['count']}"


def _shown(ranges: Sequence[Json]) -> list[Json]:
    if len(ranges) <= MANY:
        return list(ranges)
    order = [*_IN_TROUBLE, "running"]
    telling = [step for step in ranges if step.get("state") in order]
    telling = sorted(telling, key=lambda step: order.index(str(step["state"])))[:MANY]
    return sorted(telling, key=lambda step: int(step["part"]["index"]))


def _head(name: str, joining: Json | None, ranges: Sequence[Json]) -> Row:
    states = Counter(str(step.get("state")) for step in ranges)
    state = next((state for state in _FOREMOST if states[state]), "succeeded")
    step: Json = {"name": name, "state": state, "attempts": []}
    if state == "succeeded" and joining is not None:
        step = joining
    counts = ", ".join(f"{number} {state}" for state, number in states.most_common())
    summary = f"{len(ranges)} range{'' if len(ranges) == 1 else 's'}: {counts}"
    done, total = _progress(ranges)
    if total:
        summary += f", {done}/{total} {100 * done // total}%"
    return Row(step, name, summary=summary)


def _progress(ranges: Sequence[Json]) -> tuple[int, int]:
    """(done, total) of all ranges together; (0, 0) while one of them has not said how much it has to do."""
    done = total = 0
    for step in ranges:
        bar = current_bar(current_attempt(step))
        if bar is None or not bar.get("total"):
            return 0, 0
        done, total = done + int(bar.get("done") or 0), total + int(bar["total"])
    return done, total
