"""The host of this group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.retries.box import Box
from tests.support.host_side import pythons


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    """A host with idle GPUs; agent and supervisors run on the oldest Python there is."""
    with Box(tmp_path, next(iter(pythons().values()))) as found:
        yield found
