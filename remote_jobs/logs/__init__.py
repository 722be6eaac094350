"""Understanding logs: bars, phases, ETAs, stalls and failure verdicts. Standard library only; runs on both sides.

The stable surface is what this file exports; everything else may move.
"""

from __future__ import annotations

from remote_jobs.logs.eta import Forecast, History, forecast
from remote_jobs.logs.follow import Follower, Update
from remote_jobs.logs.reader import LogReader, explain_bytes, iter_updates
from remote_jobs.logs.rules.rule import FAILURE_CLASSES

__all__ = ["FAILURE_CLASSES", "Follower", "Forecast", "History", "LogReader", "Update", "explain_bytes", "forecast", "iter_updates"]
