"""Which step waits for which: the graph of `needs`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter


def upstream(needs: Mapping[str, Sequence[str]], name: str) -> list[str]:
    """Every step that ``name`` waits for, directly or not, the nearest first. Safe on graphs with cycles."""
    found: list[str] = []
    queue = list(needs.get(name, ()))
    while queue:
        step = queue.pop(0)
        if step not in found and step != name:
            found.append(step)
            queue.extend(needs.get(step, ()))
    return found


def find_cycle(needs: Mapping[str, Sequence[str]]) -> list[str] | None:
    """One cycle as ``[a, b, a]`` (a waits for b, b waits for a), or None."""
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        cycle: list[str] = list(reversed(error.args[1]))
        start = cycle.index(
            min(cycle[:-1], key=list(needs).index)
        )  # begin at the step that stands first in the plan
        return [*cycle[start:-1], *cycle[:start], cycle[start]]
    return None
