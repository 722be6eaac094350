"""`--shuffle SEED`: the suite in another order, files and tests within them, so that no test leans on another's leavings.

The same seed gives the same order, in every worker of pytest-xdist too; `make orders` takes the clock's.
"""

from __future__ import annotations

import random
from itertools import groupby

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run files, and tests within them, in a random order")


def _seed(config: pytest.Config) -> int | None:
    seed: int | None = config.getoption("--shuffle")
    return seed


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = _seed(config)
    return None if seed is None else f"shuffled: --shuffle {seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = _seed(config)
    if seed is None:
        return
    order = random.Random(seed)
    files = [list(group) for _, group in groupby(items, key=lambda item: item.path)]
    for group in files:
        order.shuffle(group)
    order.shuffle(files)
    items[:] = [item for group in files for item in group]
