"""Cells run side by side: nearly all of a cell's time is waiting, and each has a stage of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

SIDE_BY_SIDE = 6


class Cells:
    """Starts every selected cell at the first question and hands out the results one by one."""

    def __init__(self, items: list[pytest.Item], folder: Path) -> None:
        self._items = [item for item in items if item.get_closest_marker("cell")]
        self._folder = folder
        self._pool = ThreadPoolExecutor(SIDE_BY_SIDE, thread_name_prefix="cell")
        self._played: dict[str, Future[Any]] = {}

    def result(self, nodeid: str) -> Any:
        """What the cell's ``play(folder)`` returned; its failure is raised here."""
        if not self._played:
            for number, item in enumerate(self._items):
                play: Callable[[Path], Any] = item.callspec.params["cell"].play  # type: ignore[attr-defined]
                self._played[item.nodeid] = self._pool.submit(play, self._folder / f"{number:03d}")
        return self._played[nodeid].result()

    def close(self) -> None:
        """Let running cells end; drop those that nobody asked for."""
        self._pool.shutdown(wait=True, cancel_futures=True)


@pytest.fixture(scope="session")
def cells(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cells]:
    """The cells of this run (those selected by -k or by name)."""
    found = Cells(request.session.items, tmp_path_factory.mktemp("cells"))
    yield found
    found.close()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cell: a cell of the fault matrix, played side by side with others")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A cell may wait for its turn; its own waits have their own, shorter limits."""
    for item in items:
        if item.get_closest_marker("cell"):
            item.add_marker(pytest.mark.timeout(400))
