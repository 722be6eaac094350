"""The small models and prompts of tests/extract, for the ranges of one extraction."""

from __future__ import annotations

from tests.extract.conftest import dataset, models, one_thread, run_extract

__all__ = ["dataset", "models", "one_thread", "run_extract"]
