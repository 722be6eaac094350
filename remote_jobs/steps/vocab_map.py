"""The vocab_map step: which target tokens the draft may propose, chosen by how often the target really produces them.

    python vocab_map.py --model FOLDER --dataset responses.jsonl --draft-vocab-size 32000 [--min-coverage 0.95]

Writes `d2t.npy` (int64 [draft]: target id minus draft id), `t2d.npy` (bool [target]), and `vocab_map.json` with the
coverage and the hashes of what they were made from, so that train refuses a stale map. The arrays are speculators' own
format (--d2t-path, --t2d-path). Counted are the tokens with loss_mask 1; special tokens are always kept. The rows are
read as a stream: memory is that of one row and one counter per token of the vocabulary.
"""

from __future__ import annotations

import os
import sys

if __package__ in {None, ""}:  # started as a script: its own folder must not shadow libraries
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import argparse
import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from remote_jobs.steps import entry
from remote_jobs.steps.extraction.errors import ConfigError, DatasetError, StepError
from remote_jobs.steps.extraction.model import ModelFacts, read_model
from remote_jobs.steps.extraction.progress import Progress, utc_now
from remote_jobs.steps.extraction.sample_file import write_atomically

D2T, T2D, FACTS = "d2t.npy", "t2d.npy", "vocab_map.json"
VERSION = 1
DEFAULT_DRAFT_VOCAB_SIZE = 32000
DEFAULT_MIN_COVERAGE = 0.9
SAY_EVERY_ROWS = 2000


@dataclass(frozen=True)
class Counts:
    """How often each target token was produced, int64 [target_vocab_size], and the hash of the file that says so."""

    frequency: npt.NDArray[np.int64]
    rows: int
    dataset_sha256: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run the step; returns the exit status. The last line printed says why it failed."""
    return entry.run("vocab_map", lambda progress: make(_parse(argv), progress))


def make(args: argparse.Namespace, progress: Progress) -> int:
    """Count, choose, check the coverage, write."""
    folder = os.path.abspath(os.path.expanduser(args.output))
    os.makedirs(folder, exist_ok=True)
    with progress.phase("load_config"):
        model = read_model(args.model, args.revision)
        dataset = entry.needed("responses.jsonl", "--dataset", args.dataset)
        size = args.draft_vocab_size or min(DEFAULT_DRAFT_VOCAB_SIZE, model.vocab_size)
        if not 0 < size <= model.vocab_size:
            raise ConfigError(
                f"--draft-vocab-size {size}: the target has {model.vocab_size} tokens",
                hint="give a smaller number",
            )
        special = special_tokens(model)
        if len(special) > size:
            raise ConfigError(
                f"--draft-vocab-size {size} is less than the {len(special)} special tokens of the target"
            )
    with progress.phase("count"):
        counts = count_tokens(dataset, model.vocab_size, progress)
    kept = choose(counts.frequency, size, special)
    total = int(counts.frequency.sum())
    coverage = float(counts.frequency[kept].sum() / total) if total else 0.0
    progress.say(
        f"{counts.rows} rows, {total} generated tokens, {int((counts.frequency > 0).sum())} different ones. "
        f"Draft vocabulary {size} of {model.vocab_size}: coverage {coverage:.4%}, {len(special)} special tokens kept."
    )
    if not total:
        raise DatasetError(f"{dataset}: no token has loss_mask 1, so there is nothing to count")
    if coverage < args.min_coverage:
        needed = smallest_size(counts.frequency, args.min_coverage, special)
        raise StepError(
            f"coverage {coverage:.4f} is below --min-coverage {args.min_coverage}",
            hint=f"--draft-vocab-size {needed} would reach it; or lower --min-coverage",
        )
    d2t, t2d = mapping(kept, model.vocab_size)
    arrays = {D2T: _npy(d2t), T2D: _npy(t2d)}
    facts = {
        "v": VERSION,
        "model": model.name,
        "tokenizer_sha256": model.tokenizer_sha256,
        "target_vocab_size": model.vocab_size,
        "draft_vocab_size": size,
        "special_tokens": len(special),
        "coverage": coverage,
        "tokens": total,
        "rows": counts.rows,
        "dataset": dataset,
        "dataset_sha256": counts.dataset_sha256,
        "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in arrays.items()},
        "created_at": utc_now(),
    }
    # The facts go last and name the arrays by hash: a map cut off by a kill is never taken for whole.
    entry.remove(os.path.join(folder, FACTS))
    for name, data in arrays.items():
        write_atomically(os.path.join(folder, name), data)
    write_atomically(os.path.join(folder, FACTS), json.dumps(facts, indent=2).encode() + b"\n")
    progress.mark("done", "done", coverage=round(coverage, 6), draft_vocab_size=size)
    return 0


def count_tokens(path: str, vocab_size: int, progress: Progress) -> Counts:
    """Count the tokens with loss_mask 1 of a JSONL dataset; a row without a mask counts whole.

    Raises:
        DatasetError: a damaged row, or a token id outside the vocabulary.
        OSError: the file cannot be read.
    """
    frequency = np.zeros(vocab_size, dtype=np.int64)
    digest = hashlib.sha256()
    rows = 0
    with open(path, "rb", buffering=1 << 20) as stream:
        for line, raw in enumerate(stream, start=1):
            digest.update(raw)
            if not raw.strip():
                continue
            try:
                row = json.loads(raw)
                ids = np.asarray(row["input_ids"], dtype=np.int64)
                mask = row.get("loss_mask")
                if mask is not None:
                    chosen = np.asarray(mask, dtype=bool)
                    if chosen.shape != ids.shape:
                        raise DatasetError(
                            f"{path} line {line}: {len(ids)} input_ids, {len(chosen)} entries in loss_mask"
                        )
                    ids = ids[chosen]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DatasetError(
                    f"{path} line {line} cannot be read: {type(error).__name__}: {error}"
                ) from None
            if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
                wrong = int(ids.max() if ids.max() >= vocab_size else ids.min())
                raise DatasetError(
                    f"{path} line {line}: token id {wrong} is out of range: the model's vocab_size is {vocab_size} "
                    "(were the rows made with another tokenizer?)"
                )
            unique, times = np.unique(ids, return_counts=True)
            frequency[unique] += times
            rows += 1
            if rows % SAY_EVERY_ROWS == 0:
                progress.mark("count", "progress", done=rows)
    if not rows:
        raise DatasetError(f"{path} has no rows")
    return Counts(frequency, rows, digest.hexdigest())


def choose(frequency: npt.NDArray[np.int64], size: int, special: Sequence[int]) -> npt.NDArray[np.int64]:
    """Target ids to keep, ascending: special ones, then the most frequent; ties and unseen ones by lower id."""
    order = np.lexsort((np.arange(len(frequency)), -frequency))
    forced = np.zeros(len(frequency), dtype=bool)
    forced[list(special)] = True
    rest = order[~forced[order]][: size - int(forced.sum())]
    return np.sort(np.concatenate([np.flatnonzero(forced), rest])).astype(np.int64)


def smallest_size(frequency: npt.NDArray[np.int64], coverage: float, special: Sequence[int]) -> int:
    """Draft vocabulary that reaches a coverage."""
    forced = np.zeros(len(frequency), dtype=bool)
    forced[list(special)] = True
    covered = np.concatenate([[frequency[forced].sum()], np.sort(frequency[~forced])[::-1]]).cumsum()
    return int(np.searchsorted(covered, coverage * frequency.sum())) + int(forced.sum())


def mapping(
    kept: npt.NDArray[np.int64], vocab_size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """(d2t, t2d) as speculators and vLLM read them: d2t[i] = kept[i] - i, t2d[t] = t is kept."""
    t2d = np.zeros(vocab_size, dtype=bool)
    t2d[kept] = True
    return kept - np.arange(len(kept), dtype=np.int64), t2d


def special_tokens(model: ModelFacts) -> list[int]:
    """Ids that must never leave the draft's vocabulary: the tokenizer's special and added tokens, bos, eos and pad."""
    found: set[int] = set()
    for name, keys in (
        ("tokenizer.json", ("added_tokens",)),
        ("tokenizer_config.json", ("added_tokens_decoder",)),
    ):
        content = _json_or_empty(os.path.join(model.folder, name)).get(keys[0]) or []
        if isinstance(content, dict):
            found.update(int(key) for key in content if str(key).isdigit())
        else:
            found.update(
                item["id"] for item in content if isinstance(item, dict) and isinstance(item.get("id"), int)
            )
    for source in (model.config, _json_or_empty(os.path.join(model.folder, "generation_config.json"))):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = source.get(key)
            found.update(
                item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)
            )
    return sorted(token for token in found if 0 <= token < model.vocab_size)


def check_map(folder: str, *, dataset_sha256: str | None, model: ModelFacts) -> dict[str, Any]:
    """The facts of a map, after checking that it is whole and belongs to this model and dataset (train asks).

    Raises:
        ConfigError: stale, of another model, or damaged; the hint says to run vocab_map again.
    """
    again = "run the vocab_map step again"
    try:
        facts = entry.read_json(os.path.join(folder, FACTS))
    except FileNotFoundError:
        raise ConfigError(f"{folder} has no {FACTS}: no whole vocabulary map", hint=again) from None
    for name, sha256 in facts["sha256"].items():
        path = os.path.join(folder, name)
        if not os.path.exists(path) or file_sha256(path) != sha256:
            raise ConfigError(f"{path} is not the file that {FACTS} describes", hint=again)
    if facts["target_vocab_size"] != model.vocab_size or facts["tokenizer_sha256"] != model.tokenizer_sha256:
        raise ConfigError(
            f"the vocabulary map in {folder} is for another tokenizer ({facts['model']})", hint=again
        )
    if dataset_sha256 is not None and facts["dataset_sha256"] != dataset_sha256:
        raise ConfigError(
            f"the vocabulary map in {folder} is stale: {facts['dataset']} has changed since", hint=again
        )
    return dict(facts)


def file_sha256(path: str) -> str:
    """Hash of a file, read in pieces."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _json_or_empty(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as stream:
            content = json.load(stream)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _npy(array: npt.NDArray[Any]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="vocab_map",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model", required=True, help="the target's checkpoint folder, or a repository id of the hub"
    )
    parser.add_argument("--revision")
    parser.add_argument(
        "--dataset", help="rows with input_ids and loss_mask (default: what the needed generate step wrote)"
    )
    parser.add_argument("--output", default=entry.default_output("vocab_map"), help="folder of the map")
    parser.add_argument(
        "--draft-vocab-size",
        type=int,
        help=f"default: {DEFAULT_DRAFT_VOCAB_SIZE}, or the target's if smaller",
    )
    parser.add_argument(
        "--min-coverage", type=float, default=DEFAULT_MIN_COVERAGE, help="fail below this share (0..1)"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
