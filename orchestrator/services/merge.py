"""The fetched ranges of a split extraction as one output; the rules are those of the merge on a host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.core.errors import Incomplete, LocalError, UsageError
from remote_jobs.steps.extraction.errors import StepError
from remote_jobs.steps.extraction.merge import merge as join


def merge(folder: Path, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Check and join what lies in a folder; ``{"folder", "samples", "prompts_sha256"}``.

    Raises:
        UsageError: no ranges, or ranges that do not belong together. Incomplete: something is missing or damaged.
        LocalError: the folder cannot be read or written.
    """
    try:
        whole = join(str(folder), say=lambda line: say(f"orch: {line}"))
    except StepError as error:
        kind = UsageError if error.exit_status == UsageError.exit_status else Incomplete
        raise kind(str(error), error.hint or None) from error
    except OSError as error:
        raise LocalError(
            f"{folder} cannot be merged: {error.strerror or error}", "look at its permissions"
        ) from error
    samples = whole["samples"]["valid"]
    return {"folder": str(folder), "samples": samples, "prompts_sha256": whole["prompts_sha256"]}
