"""The prompts of an extraction: JSONL rows `{id?, input_ids, loss_mask?}`, checked to the last row before the load.

A bad row found after a 20-minute load costs 20 minutes, so everything that a row can have wrong is found here.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from remote_jobs.steps.extraction.errors import DatasetError

SHOWN_ERRORS = 10


@dataclass(frozen=True)
class Row:
    """One prompt. `index` counts the rows from 0, `line` the lines of the file from 1. `token_ids`: int32 [seq]."""

    index: int
    line: int
    id: str | None
    token_ids: npt.NDArray[np.int32]

    def named(self) -> str:
        """How messages speak of this sample."""
        return (
            f"sample {self.index}"
            + (f" (id {self.id!r})" if self.id is not None else "")
            + f", line {self.line}"
        )


def read_dataset(path: str, *, vocab_size: int, max_tokens: int, samples: int | None = None) -> list[Row]:
    """Read and check the rows of a JSONL dataset.

    Args:
        path: the file.
        vocab_size: every token id must be below it.
        max_tokens: longest sample that the model (and backend) takes.
        samples: stop after this many rows; None reads all.

    Raises:
        DatasetError: names the file, the line and what is wrong; up to ten bad rows are listed.
        OSError: the file cannot be read.
    """
    if os.path.isdir(path):
        raise DatasetError(
            f"{path} is a folder, not a JSONL file",
            hint="extract reads JSONL rows {id?, input_ids, loss_mask}; point --dataset at the file that `generate` wrote",
        )
    rows: list[Row] = []
    errors: list[str] = []
    lines_of_ids: dict[str, int] = {}
    with open(path, "rb") as stream:
        for line, raw in enumerate(stream, start=1):
            if samples is not None and len(rows) + len(errors) >= samples:
                break
            if not raw.strip():
                continue
            try:
                row = _parse_row(raw, len(rows), line, vocab_size=vocab_size, max_tokens=max_tokens)
                if row.id is not None:
                    _check_unique(row.id, line, lines_of_ids)
                rows.append(row)
            except _BadRowError as error:
                errors.append(f"{path} line {line}: {error}")
                if len(errors) >= SHOWN_ERRORS:
                    break
    if errors:
        more = f" (first of {len(errors)} bad rows listed above)" if len(errors) > 1 else ""
        raise DatasetError(errors[0] + more, hint="\n".join(errors[1:]))
    if not rows:
        raise DatasetError(
            f"{path} has no rows",
            hint='one JSON object a line: {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}',
        )
    return rows


class _BadRowError(Exception):
    """One row cannot be used; the text goes behind file and line."""


def _check_unique(name: str, line: int, lines_of_ids: dict[str, int]) -> None:
    first = lines_of_ids.setdefault(name, line)
    if first != line:
        raise _BadRowError(f"id {name!r} was already used on line {first}")


def _parse_row(raw: bytes, index: int, line: int, *, vocab_size: int, max_tokens: int) -> Row:
    """Check one line; _BadRowError says what is wrong with it."""
    try:
        text = raw.rstrip(b"\r\n").decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise _BadRowError(
            f"not UTF-8 text (byte {error.start}: {raw[error.start : error.start + 1]!r})"
        ) from None
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise _BadRowError(
            f"not valid JSON ({error.msg} at column {error.colno}): the row is cut or damaged"
        ) from None
    except RecursionError:
        raise _BadRowError("not valid JSON (nested too deeply)") from None
    if not isinstance(record, dict):
        raise _BadRowError(f"a JSON object is needed, this is {_kind(record)}")
    if "input_ids" not in record:
        seen = ", ".join(list(map(str, record))[:6]) or "none"
        raise _BadRowError(f"has no input_ids (keys: {seen}); `generate` writes them")
    token_ids = _token_ids(record["input_ids"], vocab_size)
    if len(token_ids) > max_tokens:
        raise _BadRowError(f"has {len(token_ids)} tokens, longer than the model's limit of {max_tokens}")
    mask = record.get("loss_mask")
    if mask is not None:
        if not isinstance(mask, list) or any(value not in {0, 1} for value in mask):
            raise _BadRowError("loss_mask must be a list of 0 and 1")
        if len(mask) != len(token_ids):
            raise _BadRowError(f"loss_mask has {len(mask)} entries for {len(token_ids)} input_ids")
    name = record.get("id")
    return Row(index, line, None if name is None else str(name), token_ids)


def _token_ids(value: Any, vocab_size: int) -> npt.NDArray[np.int32]:
    if not isinstance(value, list):
        raise _BadRowError(f"input_ids must be a list of token ids, this is {_kind(value)}")
    if not value:
        raise _BadRowError("input_ids is empty")
    for position, token in enumerate(value):
        if type(token) is not int:  # bool is an int for isinstance, and no token id
            raise _BadRowError(f"input_ids[{position}] is {_kind(token)}, not a token id")
        if not 0 <= token < vocab_size:
            raise _BadRowError(
                f"input_ids[{position}] = {token} is out of range: the model's vocab_size is {vocab_size} "
                "(were the prompts made with another tokenizer?)"
            )
    return np.asarray(value, dtype=np.int32)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {
        bool: "true/false",
        int: "a number",
        float: "a fraction",
        str: "a text",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)


def prompts_sha256(rows: Sequence[Row]) -> str:
    """Hash over the token ids of the rows, in order: the identity of what was asked, whatever the file's formatting."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(len(row.token_ids).to_bytes(8, "little"))
        digest.update(row.token_ids.astype("<i4").tobytes())
    return digest.hexdigest()
