"""When torch's compiler or Triton refuses speculators' trainer before its first step: what failed, and what to try next.

Which pairs of torch, Triton and speculators compile cannot be known beforehand (speculators 0.9 on torch 2.11: Dynamo fails
while tracing the autotuner of the fused loss kernel). Nothing is lost before the first step, so training starts again by
the next way, which is slower but the same mathematics, and says so. The way found is kept in the output folder: a resumed
training goes on with it. Standard library only; the trainer's own process imports it too.
"""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from dataclasses import dataclass
from typing import Any

NAME = "compiler.json"
COMPILERS = ("/torch/_dynamo/", "/torch/_inductor/", "/triton/")
MODULES = ("torch._dynamo", "torch._inductor", "triton")
NOT_THEIRS = ("OutOfMemoryError", "AcceleratorError", "KeyboardInterrupt")


@dataclass(frozen=True)
class Way:
    """One way to run the trainer: flags that replace those given, and environment."""

    what: str
    flags: dict[str, str]
    env: dict[str, str]


WAYS = (
    Way("as asked", {}, {}),
    Way("with the eager loss (--loss-implementation eager)", {"--loss-implementation": "eager"}, {}),
    Way(
        "without torch.compile (TORCHDYNAMO_DISABLE=1, eager loss, sdpa attention)",
        {"--loss-implementation": "eager", "--draft-attn-impl": "sdpa"},
        {"TORCHDYNAMO_DISABLE": "1"},
    ),
)


def is_compiler_failure(error: BaseException) -> bool:
    """True when an exception, or what caused it, was raised by the compiler and not by what it compiled.

    Frames of torch._dynamo lie on every stack below compiled code, so only the innermost frame counts.
    """
    seen: BaseException | None = error
    while seen is not None:
        if type(seen).__name__ in NOT_THEIRS:
            return False
        frames = traceback.extract_tb(seen.__traceback__)
        innermost = frames[-1].filename.replace(os.sep, "/") if frames else ""
        if type(seen).__module__.startswith(MODULES) or any(part in innermost for part in COMPILERS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def note_failure(folder: str, error: BaseException) -> None:
    """In the trainer: leave word for train.py, which decides. Several ranks may write; the last one stays."""
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    _write(folder, {**_read(folder), "failed": text[:500]})


def way(folder: str) -> int:
    """Number of the way that this training uses."""
    found = _read(folder).get("way", 0)
    return found if isinstance(found, int) and 0 <= found < len(WAYS) else 0


def next_way(folder: str) -> str | None:
    """After a failed run: move on to the next way when the compiler was the reason and there is one.

    Returns:
        What failed, in one line; None when it was not the compiler or nothing is left to try.
    """
    record = _read(folder)
    failed = record.pop("failed", None)
    following = way(folder) + 1
    if not isinstance(failed, str) or following >= len(WAYS):
        return None
    errors = record.get("errors")
    _write(folder, {"way": following, "errors": [*(errors if isinstance(errors, list) else []), failed]})
    return failed


def forget_failure(folder: str) -> None:
    """Before a run: what a former one left must not be taken for this one's."""
    record = _read(folder)
    if record.pop("failed", None) is not None:
        _write(folder, record)


def changed(command: list[str], flags: dict[str, str]) -> list[str]:
    """A command line with these flags in place of those of the same name."""
    kept: list[str] = []
    words = iter(command)
    for word in words:
        name, equals, _ = word.partition("=")
        if name in flags:
            if not equals:
                next(words, None)
            continue
        kept.append(word)
    return kept + [part for item in flags.items() for part in item]


def _read(folder: str) -> dict[str, Any]:
    with (
        contextlib.suppress(OSError, ValueError),
        open(os.path.join(folder, NAME), encoding="utf-8") as stream,
    ):
        record = json.load(stream)
        if isinstance(record, dict):
            return record
    return {}


def _write(folder: str, record: dict[str, Any]) -> None:
    path = os.path.join(folder, NAME)
    temporary = f"{path}.tmp.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as stream:
        json.dump(record, stream)
    os.replace(temporary, path)
