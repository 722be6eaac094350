"""What a job's state means for people and scripts: over or not, and the exit status of waiting for it."""

from __future__ import annotations

from remote_jobs.protocol import JOB_TERMINAL, JobState

OVER = frozenset({*JOB_TERMINAL, JobState.LOST.value})
"""States that `orch wait` does not wait in. A lost job may be taken up again by `orch retry`."""

_EXIT_STATUS = {"succeeded": 0, "failed": 1, "stopped": 1, "lost": 5}


def is_over(state: str) -> bool:
    """Whether nothing more will happen by itself."""
    return state in OVER


def exit_status(state: str) -> int:
    """Exit status of `orch wait` and `orch launch --watch`: 0, 1 (failed, stopped), 5 (lost, or not known)."""
    return _EXIT_STATUS.get(state, 5)
