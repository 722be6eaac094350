"""Check 6: the dataset's rows can be read, fit the model, and the layer ids exist. Found here in seconds, not after the load."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Tuple

from remote_jobs.agent.checks import model
from remote_jobs.agent.checks.context import FAIL, OK, SKIP, WARN, Row, Step, row, worst

SCAN_S = 8.0
"""Longest reading of one dataset; a larger one is judged by its beginning, and the row says so."""
PROMPT_KEYS = ("prompt", "messages", "conversations", "text", "instruction", "input_ids", "question", "turns")
_SHOWN = 3


@dataclass
class Scan:
    """What one pass over a JSONL file found. Lines count from 1, lengths in tokens."""

    rows: int = 0
    tokens: int = 0
    longest: int = 0
    longest_line: int = 0
    largest_id: int = -1
    largest_line: int = 0
    bad: List[str] = field(default_factory=list)
    bad_count: int = 0
    bytes_read: int = 0
    size: int = 0

    @property
    def complete(self) -> bool:
        """The whole file was read."""
        return self.bytes_read >= self.size

    @property
    def estimated_tokens(self) -> int:
        """Tokens of the whole file, extrapolated where only its beginning was read."""
        return (
            self.tokens
            if self.complete or not self.bytes_read
            else int(self.tokens * self.size / self.bytes_read)
        )

    @property
    def estimated_rows(self) -> int:
        """Rows of the whole file, likewise."""
        return (
            self.rows
            if self.complete or not self.bytes_read
            else int(self.rows * self.size / self.bytes_read)
        )


def scan(
    path: str, samples: Optional[int] = None, *, tokenized: bool = True, limit_s: float = SCAN_S
) -> Scan:
    """Read a JSONL dataset.

    Raises:
        OSError: it cannot be opened.
    """
    found = Scan(size=os.stat(path).st_size)
    deadline = time.monotonic() + limit_s
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            found.bytes_read += len(line)
            if line.strip():
                _take(found, number, line, tokenized=tokenized)
                if samples is not None and found.rows + found.bad_count >= samples:
                    found.size = found.bytes_read
                    break
            if number % 64 == 0 and time.monotonic() > deadline:
                break
    return found


def _take(found: Scan, number: int, line: bytes, *, tokenized: bool) -> None:
    try:
        record = json.loads(line.decode("utf-8"))
        problem = _judge_row(found, number, record, tokenized=tokenized)
    except ValueError as exc:
        problem = "not valid JSON ({})".format(str(exc)[:60])
    if problem:
        found.bad_count += 1
        if len(found.bad) < _SHOWN:
            found.bad.append("line {}: {}".format(number, problem))
    else:
        found.rows += 1


def _judge_row(found: Scan, number: int, record: Any, *, tokenized: bool) -> str:
    if not isinstance(record, dict):
        return "not a JSON object"
    ids = record.get("input_ids")
    if ids is None:
        if tokenized:
            return "no input_ids (keys: {})".format(", ".join(list(map(str, record))[:5]) or "none")
        return (
            ""
            if any(key in record for key in PROMPT_KEYS)
            else "none of {}".format(", ".join(PROMPT_KEYS[:4]))
        )
    if not isinstance(ids, list) or not ids:
        return "input_ids is not a list of token ids" if ids != [] else "input_ids is empty"
    if not all(type(token) is int for token in ids):
        return "input_ids holds something that is no token id"
    lowest, highest = min(ids), max(ids)
    if lowest < 0:
        return "token id {}".format(lowest)
    mask = record.get("loss_mask")
    if mask is not None and (not isinstance(mask, list) or len(mask) != len(ids)):
        return "loss_mask has not as many entries as input_ids ({})".format(len(ids))
    found.tokens += len(ids)
    if len(ids) > found.longest:
        found.longest, found.longest_line = len(ids), number
    if highest > found.largest_id:
        found.largest_id, found.largest_line = highest, number
    return ""


class Scans:
    """Reads each dataset once: disk and data need the same pass."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: Dict[Tuple[str, Optional[int], bool], threading.Lock] = {}
        self._done: Dict[Tuple[str, Optional[int], bool], Scan] = {}

    def get(self, path: str, samples: Optional[int], *, tokenized: bool) -> Scan:
        """The scan of a dataset.

        Raises:
            OSError: it cannot be read.
        """
        key = (path, samples, tokenized)
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._done:
                self._done[key] = scan(path, samples, tokenized=tokenized)
            return self._done[key]


def dataset_path(step: Step) -> Optional[str]:
    """The step's dataset as a path, None when it names none."""
    value = step.params.get("dataset")
    if isinstance(value, list) and value:
        value = value[0]
    return step.path(value) if isinstance(value, str) and value else None


def samples_of(step: Step) -> Optional[int]:
    """How many rows the step takes, None for all."""
    value = step.params.get("samples")
    return value if isinstance(value, int) and value > 0 else None


def check(step: Step, shelf: model.Shelf, scans: Scans) -> Optional[Row]:
    """The verdict on one step's data; None for steps without a model and a dataset."""
    if step.uses not in ("serve", "generate", "vocab_map", "extract", "train", "evaluate"):
        return None
    found: List[Row] = []
    config = None
    located = model.locate(step)
    if located is not None and located.folder is not None:
        config, _, _ = shelf.get(located.folder)
    found += layer_rows(step, config)
    found += length_rows(step, config)
    path = dataset_path(step)
    if path is not None:
        found += _dataset(step, path, config, scans)
    if not found:
        return None if path is None else row(OK, "{} can be read".format(path))
    return worst(found, "")


def layer_rows(step: Step, config: Optional[model.ModelConfig]) -> List[Row]:
    """Layer ids rise and lie in 0..num_hidden_layers; id k is the input of layer k."""
    layers = step.params.get("layers")
    if not isinstance(layers, list) or not layers:
        return []
    if sorted(set(layers)) != layers:
        return [
            row(
                FAIL,
                "layers {} must rise, each id once".format(layers),
                "write {}".format(sorted(set(layers))),
            )
        ]
    if config is not None and config.layers is not None and (layers[-1] > config.layers or layers[0] < 0):
        n = config.layers
        default = sorted({k for k in (2, n // 2, n - 3, n) if 0 < k <= n})
        text = "layer id {} is outside 0..{} (the model has {} layers)"
        return [
            row(
                FAIL,
                text.format(layers[-1] if layers[-1] > n else layers[0], n, n),
                "for example layers: {}".format(default),
            )
        ]
    return []


def length_rows(step: Step, config: Optional[model.ModelConfig]) -> List[Row]:
    """max_model_len against what the model was made for: vLLM refuses more."""
    if config is None or config.max_positions is None or "max_model_len" not in step.params:
        return []
    asked = int(step.number("max_model_len", 0))
    if asked > config.max_positions and step.env("VLLM_ALLOW_LONG_MAX_MODEL_LEN") != "1":
        text = "max_model_len {} is greater than the model's {} (max_position_embeddings with rope scaling)"
        return [
            row(
                FAIL,
                text.format(asked, config.max_positions),
                "set max_model_len to {} or less".format(config.max_positions),
            )
        ]
    return []


def _dataset(step: Step, path: str, config: Optional[model.ModelConfig], scans: Scans) -> List[Row]:
    given = step.params.get("dataset")
    if not os.path.exists(path):
        return [_absent(step, path, str(given[0] if isinstance(given, list) else given))]
    if os.path.isdir(path):
        return _folder(step, path)
    if not path.endswith((".jsonl", ".json", ".ndjson")):
        return [row(SKIP, "{} is no JSONL file: left to the step".format(path))]
    tokenized = step.uses in ("extract", "vocab_map", "train")
    try:
        found = scans.get(path, samples_of(step), tokenized=tokenized)
    except OSError as exc:
        return [row(FAIL, "{} cannot be read: {}".format(path, exc.strerror), "check its permissions")]
    limit = None
    if step.uses == "extract":
        limit = int(step.number("max_model_len", (config.max_positions if config else None) or 0)) or None
    return rows_of(path, found, limit, config.vocab if config else None, samples_of(step))


def rows_of(
    path: str, found: Scan, max_model_len: Optional[int], vocab: Optional[int], samples: Optional[int]
) -> List[Row]:
    """Verdicts from a scan alone."""
    name = os.path.basename(path)
    rows: List[Row] = []
    if found.bad_count:
        text = "{}: {} of {} rows cannot be used: {}"
        rows.append(row(FAIL, text.format(path, found.bad_count, found.bad_count + found.rows, "; ".join(found.bad)),
                        "repair or remove these lines of {}".format(name)))  # fmt: skip
    elif not found.rows:
        rows.append(row(FAIL, "{} has no rows".format(path), "one JSON object a line; see what made it"))
    if max_model_len is not None and found.longest > max_model_len - 1:
        text = "{} line {} has {} tokens, max_model_len {} takes at most {}"
        rows.append(row(FAIL, text.format(path, found.longest_line, found.longest, max_model_len, max_model_len - 1),
                        "set max_model_len to at least {}, or drop the long rows".format(found.longest + 1)))  # fmt: skip
    if vocab is not None and found.largest_id >= vocab:
        text = "{} line {} holds token id {}, the model's vocabulary ends at {}"
        rows.append(row(FAIL, text.format(path, found.largest_line, found.largest_id, vocab - 1),
                        "tokenize the dataset with this model's tokenizer"))  # fmt: skip
    if samples is not None and found.complete and not found.bad_count and 0 < found.rows < samples:
        rows.append(row(WARN, "{} has {} rows, samples asks for {}".format(path, found.rows, samples),
                        "lower samples to {}, or make more rows".format(found.rows)))  # fmt: skip
    if not rows:
        part = "" if found.complete else " (the first {} of it were read)".format(_share(found))
        tokens = (
            ", {} tokens, longest {}".format(found.estimated_tokens, found.longest) if found.tokens else ""
        )
        rows.append(row(OK, "{}: {} rows{}{}".format(path, found.estimated_rows, tokens, part)))
    return rows


def _share(found: Scan) -> str:
    return "{:.0f} %".format(100.0 * found.bytes_read / max(1, found.size))


def _absent(step: Step, path: str, given: str) -> Row:
    maker = step.maker_of(path)
    if maker:
        return row(SKIP, "{} is made by step {}".format(path, maker))
    if step.shipped(given):
        return row(SKIP, "{} is uploaded at the launch".format(given))
    if given in (step.job.facts.get("laptop_files") or ()):
        return row(FAIL, "{} is not on the host, but beside the plan on this laptop".format(path),
                   "add `files: [{}]` to step {}, and write {{files}}/{}".format(given, step.name, os.path.basename(given)))  # fmt: skip
    if (
        step.uses in ("generate", "evaluate", "train")
        and not given.startswith((".", "/", "~"))
        and "." not in os.path.basename(given)
    ):
        return row(SKIP, "{} is no file here: taken as the name of a dataset".format(given))
    return row(
        FAIL,
        "no such dataset on the host: {}".format(path),
        "correct `dataset`; relative paths are under workdir",
    )


def _folder(step: Step, path: str) -> List[Row]:
    """A Hugging Face dataset folder, or one of JSONL files."""
    try:
        names = os.listdir(path)
    except OSError as exc:
        return [row(FAIL, "{} cannot be listed: {}".format(path, exc.strerror), "check its permissions")]
    if not names:
        return [row(FAIL, "{} is empty".format(path), "correct `dataset`")]
    if step.uses == "extract":
        inside = next((n for n in sorted(names) if n.endswith(".jsonl")), None)
        fix = "set dataset: {}".format(os.path.join(path, inside)) if inside else "give a JSONL file"
        return [row(FAIL, "{} is a folder, extract reads a JSONL file".format(path), fix)]
    arrow = [name for name in names if name.endswith(".arrow")]
    if arrow and not {"dataset_info.json", "state.json"} & set(names):
        return [
            row(
                WARN,
                "{} holds *.arrow without dataset_info.json or state.json".format(path),
                "make the dataset again",
            )
        ]
    return [row(OK, "{}: a folder of {} files".format(path, len(names)))]
