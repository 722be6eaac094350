"""What every step's `main` shares: errors as one line, stop signals as an exit status, outputs of earlier steps found.

Must not import torch or vllm.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import re
from collections.abc import Callable
from typing import Any

from remote_jobs.patches.activate import activate
from remote_jobs.patches.sets import PatchError
from remote_jobs.steps.extraction.errors import ConfigError, StepError
from remote_jobs.steps.extraction.progress import Progress
from remote_jobs.steps.extraction.stop import Interrupted

NEEDS_PATTERN = re.compile(r"ORCH_NEEDS_\w+_OUTPUT")


def run(name: str, work: Callable[[Progress], int | None]) -> int:
    """Run a step's work; returns the exit status. The last line printed says why it failed."""
    progress = Progress()
    try:
        return work(progress) or 0
    except Interrupted as interrupted:
        progress.say(f"{name}: {interrupted}; what is written is kept, the next run goes on from there")
        return interrupted.exit_status
    except StepError as error:
        if error.hint:
            progress.say(error.hint)
        progress.say(f"{type(error).__name__}: {error}")
        return error.exit_status
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            progress.say(
                f"{name}: the disk is full; what is written is whole and kept, the next run goes on from there"
            )
        progress.say(f"{type(error).__name__}: {error}")
        return 1


def put_patches_in_force(progress: Progress) -> None:
    """Overlay the verified patch sets that this environment needs, and say which.

    Raises:
        ConfigError: a set that was asked for does not fit.
    """
    try:
        names = activate()
    except PatchError as error:
        raise ConfigError(str(error), hint=error.hint) from error
    if names:
        progress.say(f"Patch sets in force: {', '.join(names)}")


def default_output(name: str) -> str:
    """`$ORCH_OUTPUT`, else a folder called like the step in the current one."""
    return os.environ.get("ORCH_OUTPUT") or name


def needed_outputs() -> list[str]:
    """Output folders of the steps that this one needs, as the supervisor names them."""
    return [os.environ[name] for name in sorted(os.environ) if NEEDS_PATTERN.fullmatch(name)]


def needed(filename: str, flag: str, given: str | None = None) -> str:
    """Path of an input: as given, else the one file or folder of that name in the outputs of the needed steps.

    Raises:
        ConfigError: nothing was given and no needed step has it, or several do.
    """
    if given:
        return os.path.expanduser(given)
    found = [
        path
        for folder in needed_outputs()
        for path in [os.path.join(folder, filename)]
        if os.path.exists(path)
    ]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(
            f"several needed steps have a {filename}: {', '.join(found)}", hint=f"say which one: {flag} PATH"
        )
    folders = ", ".join(needed_outputs()) or "no needed step"
    raise ConfigError(f"{flag} is not given and {filename} is not in {folders}", hint=f"give {flag} PATH")


def read_json(path: str) -> Any:
    """A JSON file of our own.

    Raises:
        StepError: damaged; FileNotFoundError when it is not there.
    """
    with open(path, encoding="utf-8") as stream:
        try:
            return json.load(stream)
        except ValueError as error:
            raise StepError(
                f"{path} is not valid JSON: {error}", hint="remove it and run the step that writes it"
            ) from None


def remove(*paths: str) -> None:
    """Unlink files that may not exist."""
    for pattern in paths:
        for path in glob.glob(pattern) if "*" in pattern else [pattern]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
