"""Prompts of the generate and evaluate steps: JSONL or JSON in the shapes people have, read into conversations.

Known shapes of a row: {"messages": [{"role", "content"}]}, {"conversations": [{"from", "value"}]} (ShareGPT), and plain
{"prompt" | "instruction" | "question" | "text": "..."}. Assistant turns of the source are dropped: they are generated
anew by the target, which is the point. Must not import torch.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from remote_jobs.steps.extraction.errors import DatasetError

ROLES = {"user": "user", "human": "user", "system": "system", "developer": "system"}
ANSWERS = frozenset({"assistant", "gpt", "model", "bot", "chatgpt"})
TEXT_KEYS = ("prompt", "instruction", "question", "query", "text")
SHOWN_ERRORS = 10


class RowError(Exception):
    """What is wrong with one row."""


@dataclass(frozen=True)
class Prompt:
    """One conversation to answer. `turns`: system and user messages in order, at least one of them a user's."""

    id: str
    line: int
    turns: tuple[dict[str, str], ...]


def read_prompts(path: str, samples: int | None = None) -> list[Prompt]:
    """Read and check prompts, all of them before the first request.

    Args:
        path: a .jsonl file (one object a line) or a .json file (a list of objects).
        samples: the first so many rows only; None reads all.

    Raises:
        DatasetError: names file, line and what is wrong, up to ten rows; or there are fewer rows than `samples`.
        OSError: the file cannot be read.
    """
    prompts: list[Prompt] = []
    errors: list[str] = []
    seen: dict[str, int] = {}
    for line, row in _rows(path):
        if samples is not None and len(prompts) + len(errors) >= samples:
            break
        try:
            if isinstance(row, RowError):
                raise row
            prompt = _prompt(row, line)
            _once(seen, prompt)
            prompts.append(prompt)
        except RowError as error:
            errors.append(f"{path} line {line}: {error}")
            if len(errors) >= SHOWN_ERRORS:
                break
    if errors:
        raise DatasetError(errors[0], hint="\n".join(errors[1:]))
    if not prompts:
        raise DatasetError(
            f"{path} has no rows", hint='one JSON object a line: {"id": "p1", "prompt": "..."}'
        )
    if samples is not None and len(prompts) < samples:
        raise DatasetError(
            f"{path} has {len(prompts)} rows, {samples} were asked for",
            hint=f"set samples to {len(prompts)} or less",
        )
    return prompts


def _once(seen: dict[str, int], prompt: Prompt) -> None:
    if seen.setdefault(prompt.id, prompt.line) != prompt.line:
        raise RowError(f"id {prompt.id!r} was already used on line {seen[prompt.id]}")


def _rows(path: str) -> Any:
    """(line, object or the RowError of reading it) of every row."""
    with open(path, "rb") as stream:
        if path.endswith(".json"):
            try:
                rows = json.load(stream)
            except ValueError as error:
                raise DatasetError(f"{path} is not valid JSON: {error}") from None
            if not isinstance(rows, list):
                raise DatasetError(f"{path} must hold a list of objects")
            yield from enumerate(rows, start=1)
            return
        for line, raw in enumerate(stream, start=1):
            if not raw.strip():
                continue
            try:
                yield line, json.loads(raw.decode("utf-8-sig" if line == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                yield line, RowError(f"not UTF-8 text (byte {error.start})")
            except json.JSONDecodeError as error:
                yield line, RowError(f"not valid JSON ({error.msg} at column {error.colno})")


def _prompt(row: Any, line: int) -> Prompt:
    if not isinstance(row, dict):
        raise RowError(f"a JSON object is needed, this is {type(row).__name__}")
    turns = tuple(_turns(row))
    if not any(turn["role"] == "user" for turn in turns):
        seen = ", ".join(map(str, list(row)[:6])) or "none"
        raise RowError(f"no user message (keys: {seen})")
    names = (str(row[key]) for key in ("id", "uuid", "prompt_id") if isinstance(row.get(key), (str, int)))
    return Prompt(next(filter(None, names), None) or _content_id(turns), line, turns)


def _turns(row: dict[str, Any]) -> Any:
    """System and user messages of a row.

    Raises:
        RowError: a message that cannot be read.
    """
    messages = next((row[key] for key in ("messages", "conversations", "conversation") if row.get(key)), None)
    if messages is None and isinstance(row.get("prompt"), list):
        messages = row["prompt"]
    if messages is None:
        text = next(
            (row[key] for key in TEXT_KEYS if isinstance(row.get(key), str) and row[key].strip()), None
        )
        if text is not None:
            system = row.get("system")
            if isinstance(system, str) and system:
                yield {"role": "system", "content": system}
            yield {"role": "user", "content": text}
        return
    if not isinstance(messages, list):
        raise RowError("messages must be a list")
    for position, message in enumerate(messages):
        if not isinstance(message, dict):
            raise RowError(f"message {position} is no object")
        role = str(message.get("role") or message.get("from") or "")
        content = message.get("content", message.get("value"))
        if role in ANSWERS:
            continue
        if role not in ROLES:
            raise RowError(f"message {position} has the role {role!r}: system, user and assistant are known")
        if not isinstance(content, str):
            raise RowError(f"message {position} has no text content (images and tools are not supported)")
        if content:
            yield {"role": ROLES[role], "content": content}


def _content_id(turns: tuple[dict[str, str], ...]) -> str:
    """Id of a row without one: from its content, so that another order or another limit changes nothing."""
    return "sha-" + hashlib.sha256(json.dumps(turns, sort_keys=True).encode()).hexdigest()[:20]
