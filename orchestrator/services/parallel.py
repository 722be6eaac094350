"""Ask several hosts the same thing at once, in threads that Ctrl-C does not have to wait for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def in_parallel(names: Sequence[str], ask: Callable[[str], T]) -> list[T]:
    """Results in the order of ``names``. The first exception of any is raised at once."""
    if len(names) == 1:
        return [ask(names[0])]
    results: queue.Queue[tuple[int, T | None, BaseException | None]] = queue.Queue()

    def work(index: int, name: str) -> None:
        try:
            results.put((index, ask(name), None))
        except BaseException as error:  # raised below, in the caller's thread
            results.put((index, None, error))

    for index, name in enumerate(names):
        threading.Thread(target=work, args=(index, name), name=f"ask-{name}", daemon=True).start()
    found: dict[int, T] = {}
    for _ in names:
        index, result, error = results.get()
        if error is not None:
            raise error
        found[index] = result  # type: ignore[assignment]  # None only beside an error
    return [found[index] for index in range(len(names))]
