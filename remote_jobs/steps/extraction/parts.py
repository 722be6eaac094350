"""A split extraction: which rows a range has, and how its record is named. Standard library only.

`--range 2/4` is the second of four ranges. The ranges of one split share the output folder: each writes the samples of
its own rows under the names that one run would give them, and `range-2of4.json` beside them. So there is nothing to
copy at the end, a range that starts again keeps what is there, and another split goes on from the same files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

PART_NAME = re.compile(r"range-([1-9]\d{0,5})of([1-9]\d{0,5})\.json")


@dataclass(frozen=True)
class Part:
    """Range `index` of `count`, both counted from 1."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """Read `2/4`.

        Raises:
            ValueError: it is no such pair, or the index is not in 1..count.
        """
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise ValueError(f"{text!r} is not a range: write I/N with I from 1 to N, as in 2/4")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.index}of{self.count}"

    @property
    def file_name(self) -> str:
        """Name of the range's record in the output folder."""
        return f"range-{self}.json"

    def bounds(self, tokens: Sequence[int]) -> tuple[int, int]:
        """First row and the row behind the last.

        A row belongs to the range in which the middle of its tokens lies, so that ranges take about as long as each
        other whatever the order of the rows, and every row has exactly one. With fewer rows than ranges some are empty.

        Args:
            tokens: length of every row of the whole dataset.
        """
        total, before = sum(tokens), 0
        first = end = 0
        for length in tokens:
            middle = (2 * before + length) * self.count
            first += middle < 2 * total * (self.index - 1)
            end += middle < 2 * total * self.index
            before += length
        return first, end
