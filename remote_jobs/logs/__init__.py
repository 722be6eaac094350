"""Understanding logs: bars, phases, ETAs, stalls and failure verdicts. Standard library only; runs on both sides.

The stable surface is what this file exports; everything else may move. Names are loaded when first used: the
supervisor follows logs without ever loading a rule.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remote_jobs.logs.eta import Forecast, History, forecast
    from remote_jobs.logs.follow import Follower, Update
    from remote_jobs.logs.reader import LogReader, explain_bytes, iter_updates
    from remote_jobs.logs.rules.rule import FAILURE_CLASSES

__all__ = [
    "FAILURE_CLASSES",
    "Follower",
    "Forecast",
    "History",
    "LogReader",
    "Update",
    "explain_bytes",
    "forecast",
    "iter_updates",
]

_HOMES = {
    "FAILURE_CLASSES": "rules.rule",
    "Follower": "follow",
    "Forecast": "eta",
    "History": "eta",
    "LogReader": "reader",
    "Update": "follow",
    "explain_bytes": "reader",
    "forecast": "eta",
    "iter_updates": "reader",
}


def __getattr__(name: str) -> Any:
    """Load an exported name from its module (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError("module {!r} has no attribute {!r}".format(__name__, name))
    return getattr(import_module("{}.{}".format(__name__, _HOMES[name])), name)
