"""Runs of numbers as people and Slurm write them. Pure; standard library only."""

from __future__ import annotations

from typing import List, Sequence


def spans(numbers: Sequence[int]) -> List[str]:
    """Ascending numbers as ``["1-3", "5"]``, which is also what `sbatch --array` takes."""
    found: List[List[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ["{}-{}".format(*span) if span[0] < span[1] else str(span[0]) for span in found]
