"""The prompts of an extraction: JSONL rows `{id?, input_ids, loss_mask?}`, checked to the last row before the load.

A bad row found after a 20-minute load costs 20 minutes, so everything that a row can have wrong is found here.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence

import numpy as np
import numpy.typing as npt

from remote_jobs.steps.extraction.errors import DatasetError

SHOWN_ERRORS = 10


@dataclass(frozen=True)
class Row:
    """One prompt. `index` counts the rows from 0, `line` the lines of the file from 1. `token_ids`: int32 [seq]."""

    index: int
    line: int
    id: Optional[str]
    token_ids: npt.NDArray[np.int32]

    def named(self) -> str:
        """How messages speak of this sample."""
        return f"sample {self.index}" + (f" (id {self.id!r})" if self.id is not None else "") + f", line {self.line}"


def read_dataset(path: str, *, vocab_size: int, max_tokens: int, samples: Optional[int] = None) -> List[Row]:
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
    rows: List[Row] = []
    errors: List[str] = []
    lines_of_ids: Dict[str, int] = {}
    with open(path, "rb") as stream:
        for line, raw in enumerate(stream, start=1):
            if samples is not None and len(rows) + len(errors) >= samples:
                break
            if not raw.strip():
                continue
            try:
                row = _parse_row(raw, len(rows), line, vocab_size=vocab_size, max_tokens=max_tokens)
                if row.id is not None and lines_of_ids.setdefault(row.id, line) != line:
                    raise ValueError(f"id {row.id!r} was already used on line {lines_of_ids[row.id]}")
                rows.append(row)
            except ValueError as error:
                errors.append(f"{path} line {line}: {error}")
                if len(errors) >= SHOWN_ERRORS:
                    break
    if errors:
        more = f" (first of {len(errors)} bad rows listed above)" if len(errors) > 1 else ""
        raise DatasetError(errors[0] + more, hint="\n".join(errors[1:]))
    if not rows:
        raise DatasetError(f"{path} has no rows", hint="one JSON object a line: {\"input_ids\": [1, 2, 3], \"loss_mask\": [0, 1, 1]}")
    return rows


def _parse_row(raw: bytes, index: int, line: int, *, vocab_size: int, max_tokens: int) -> Row:
    """Check one line; ValueError says what is wrong with it."""
    try:
        text = raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start}: {raw[error.start : error.start + 1]!r})") from None
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg} at column {error.colno}): the row is cut or damaged") from None
    except RecursionError:
        raise ValueError("not valid JSON (nested too deeply)") from None
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object is needed, this is {_kind(record)}")
    if "input_ids" not in record:
        seen = ", ".join(list(map(str, record))[:6]) or "none"
        raise ValueError(f"has no input_ids (keys: {seen}); `generate` writes them")
    token_ids = _token_ids(record["input_ids"], vocab_size)
    if len(token_ids) > max_tokens:
        raise ValueError(f"has {len(token_ids)} tokens, longer than the model's limit of {max_tokens}")
    mask = record.get("loss_mask")
    if mask is not None:
        if not isinstance(mask, list) or any(value not in {0, 1} for value in mask):
            raise ValueError("loss_mask must be a list of 0 and 1")
        if len(mask) != len(token_ids):
            raise ValueError(f"loss_mask has {len(mask)} entries for {len(token_ids)} input_ids")
    name = record.get("id")
    return Row(index, line, None if name is None else str(name), token_ids)


def _token_ids(value: Any, vocab_size: int) -> npt.NDArray[np.int32]:
    if not isinstance(value, list):
        raise ValueError(f"input_ids must be a list of token ids, this is {_kind(value)}")
    if not value:
        raise ValueError("input_ids is empty")
    for position, token in enumerate(value):
        if type(token) is not int:  # bool is an int for isinstance, and no token id
            raise ValueError(f"input_ids[{position}] is {_kind(token)}, not a token id")
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"input_ids[{position}] = {token} is out of range: the model's vocab_size is {vocab_size} "
                "(were the prompts made with another tokenizer?)"
            )
    return np.asarray(value, dtype=np.int32)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "true/false", int: "a number", float: "a fraction", str: "a text", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def prompts_sha256(rows: Sequence[Row]) -> str:
    """Hash over the token ids of the rows, in order: the identity of what was asked, whatever the file's formatting."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(len(row.token_ids).to_bytes(8, "little"))
        digest.update(row.token_ids.astype("<i4").tobytes())
    return digest.hexdigest()
