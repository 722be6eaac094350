"""Waiting for something to become true, with a deadline and a sentence: the suite's only synchronisation."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 4.0
"""Deadlines are bounds for a broken product, not measurements: a machine that others load must not fail a test."""


def wait_until(
    condition: Callable[[], T],
    sentence: str,
    *,
    within_s: float = 20.0,
    every_s: float = 0.02,
    seen: Callable[[], object] | None = None,
) -> T:
    """Return the first truthy value of ``condition``, asked every ``every_s``.

    Raises:
        AssertionError: ``within_s`` passed; says ``sentence`` (what should have become true) and what ``seen`` shows.
    """
    deadline = time.monotonic() + within_s * PATIENCE
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            shown = f"; seen at last: {seen()!r}" if seen else f"; the condition last gave {value!r}"
            raise AssertionError(f"after {within_s:g} s not true: {sentence}{shown}")
        time.sleep(every_s)
