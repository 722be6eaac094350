"""The end of a split extraction: the ranges' files become the output of one run. Standard library only.

The samples lie under their final names already, so nothing is copied. What is proven: the ranges are of one
extraction, they follow each other from the first row to the last, every row's file is whole, and the token ids of all
files in order give the hash of the prompts. No dataset and no model is needed, so `orch merge` does the same on a
laptop with what was fetched from several hosts.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remote_jobs.steps.extraction.errors import CheckpointError, ConfigError, IncompleteError
from remote_jobs.steps.extraction.parts import PART_NAME, Part
from remote_jobs.steps.extraction.sample_file import (
    SAFETENSORS_DTYPES,
    DamagedSampleError,
    read_sample_file,
    write_atomically,
)

MANIFEST_NAME = "manifest.json"
IDENTITY = {
    "v": "version of the manifest",
    "layer_ids": "layer ids",
    "layer_id_convention": "layer id convention",
    "num_hidden_layers": "number of layers",
    "hidden_size": "hidden size",
    "dtype": "dtype",
    "model_sha256": "model",
    "tokenizer_sha256": "tokenizer",
    "prompts_sha256": "prompts",
}
"""What all ranges of one extraction have in common, and how messages call it."""
_OF_A_RUN = frozenset(
    {
        "versions",
        "samples",
        "tokens",
        "complete",
        "verified",
        "range",
        "created_at",
        "updated_at",
        "dataset",
        "model",
    }
)
"""Keys of a range's record that the whole manifest has of its own, or gets from all records."""
SHOWN = 10
MAX_RECORD_BYTES = 1 << 20


def merge(
    folder: str, count: int | None = None, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Make one manifest of the ranges in a folder and take their records away; returns the manifest.

    A folder that is complete already is checked again and stays as it is.

    Args:
        folder: with manifest.json, samples.jsonl, the samples and a record of every range.
        count: number of ranges; None takes what the records say.
        say: hears what people should know.

    Raises:
        ConfigError: no split extraction, ranges of different extractions, ranges that leave rows out or overlap.
        IncompleteError: samples are missing or damaged. CheckpointError: a manifest cannot be read.
    """
    whole = _read(os.path.join(folder, MANIFEST_NAME))
    expected: int = whole["samples"]["expected"]
    records = _records(folder, count)
    if records:
        _same_extraction(whole, records)
        _without_gaps(records, expected)
    elif not whole.get("complete"):
        raise ConfigError(
            f"{folder} holds no record of a range (range-1of4.json ...)",
            hint="merge takes the output folder of an extraction that was split; fetch the files of every range first",
        )
    _check_samples(folder, whole, expected)
    if records:
        _join(whole, records, say)
        whole["samples"]["valid"], whole["complete"] = expected, True
        whole["updated_at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        write_atomically(os.path.join(folder, MANIFEST_NAME), json.dumps(whole, indent=2).encode() + b"\n")
    forget_ranges(folder)
    return whole


def all_ended(folder: str, count: int) -> bool:
    """True when each of so many ranges has a record that says it is complete: then a merge is due.

    Raises:
        CheckpointError: a record cannot be read.
    """
    try:
        records = _records(folder, count)
    except (ConfigError, IncompleteError):
        return False
    return bool(records) and all(record.get("complete") for _, record in records)


def forget_ranges(folder: str) -> None:
    """Take the records of ranges away once the manifest speaks for all rows."""
    for name in os.listdir(folder):
        if PART_NAME.fullmatch(name):
            with contextlib.suppress(FileNotFoundError):  # where files cannot be locked another range may be at it
                os.unlink(os.path.join(folder, name))


def _read(path: str) -> dict[str, Any]:
    """A manifest or a range's record. It may come from a host that nobody vouches for: its shape is checked here."""
    try:
        with open(path, "rb") as stream:
            record = json.loads(stream.read(MAX_RECORD_BYTES))
        if not _sound(record):
            raise CheckpointError(f"{path} cannot be read: it holds values of the wrong type")
    except FileNotFoundError:
        raise ConfigError(
            f"there is no {path}", hint="merge takes the output folder of an extraction that was split"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from None
    return dict(record)


def _sound(record: Any) -> bool:
    """True when what is counted, compared and joined is of the right type; a missing key is a KeyError."""
    counts = [record["samples"]["expected"], record["hidden_size"]]
    if "range" in record:
        counts += [record["range"][key] for key in ("first", "end", "rows")]
    figures = []
    if record.get("verified"):
        figures = [record["verified"][key] for key in ("samples", "worst_relative_difference", "tolerance")]
    return (
        all(type(count) is int and count >= 0 for count in counts)
        and all(isinstance(figure, (int, float)) for figure in figures)
        and isinstance(record["layer_ids"], list)
        and isinstance(record.get("versions") or {}, dict)
        and all(isinstance(record[key], str) for key in ("prompts_sha256", "dtype"))
    )


def _records(folder: str, count: int | None) -> list[tuple[Part, dict[str, Any]]]:
    """The records of one split's ranges, in order. Those of an earlier, other split are no use any more."""
    found: dict[int, list[Part]] = {}
    for name in os.listdir(folder):
        match = PART_NAME.fullmatch(name)
        if match:
            found.setdefault(int(match[2]), []).append(Part(int(match[1]), int(match[2])))
    if count is None and len(found) > 1:
        whole = [number for number, parts in found.items() if len(parts) == number]
        if len(whole) != 1:
            splits = ", ".join(f"{len(parts)} of {number} ranges" for number, parts in sorted(found.items()))
            raise ConfigError(
                f"{folder} holds records of several splits: {splits}",
                hint="remove the range-*.json of the splits that were given up",
            )
        count = whole[0]
    parts = found.get(count, []) if count is not None else next(iter(found.values()), [])
    missing = sorted(set(range(1, (parts[0].count if parts else 0) + 1)) - {part.index for part in parts})
    if missing:
        names = ", ".join(f"{index}/{parts[0].count}" for index in missing[:SHOWN])
        raise IncompleteError(f"{folder} lacks {_ranges(len(missing))} of {parts[0].count}: {names}")
    return [
        (part, _read(os.path.join(folder, part.file_name))) for part in sorted(parts, key=lambda p: p.index)
    ]


def _ranges(number: int) -> str:
    return f"{number} range{'s' if number > 1 else ''}"


def _same_extraction(whole: Mapping[str, Any], records: Sequence[tuple[Part, Mapping[str, Any]]]) -> None:
    for part, record in records:
        wrong = [words for key, words in IDENTITY.items() if record.get(key) != whole.get(key)]
        if record.get("range", {}).get("rows") != whole["samples"]["expected"]:
            wrong.append("number of rows")
        if wrong:
            raise ConfigError(
                f"range {part.index}/{part.count} is of another extraction: its {', '.join(wrong)} "
                f"{'differ' if len(wrong) > 1 else 'differs'} from {MANIFEST_NAME}",
                hint="run every range with the same model, dataset, layers and samples",
            )


def _without_gaps(records: Sequence[tuple[Part, Mapping[str, Any]]], expected: int) -> None:
    """The ranges must follow each other from row 0 to the last, each row once, each range complete."""
    row = 0
    for part, record in records:
        first, end = record["range"]["first"], record["range"]["end"]
        if end < first:
            raise ConfigError(f"range {part.index}/{part.count} ends at row {end}, before its first, {first}")
        if first != row:
            what = "are in no range" if first > row else "are in two ranges"
            raise ConfigError(
                f"rows {min(row, first)} to {max(row, first) - 1} {what} (range {part.index}/{part.count})"
            )
        row = end
    if row != expected:
        raise ConfigError(f"the ranges end at row {row} of {expected}")
    unfinished = [f"{part.index}/{part.count}" for part, record in records if not record.get("complete")]
    if unfinished:
        raise IncompleteError(f"{_ranges(len(unfinished))} did not finish: {', '.join(unfinished[:SHOWN])}")


def _check_samples(folder: str, whole: Mapping[str, Any], expected: int) -> None:
    """Every row's file is whole and of the right shape, and all token ids in order are the prompts."""
    there = set(os.listdir(folder))
    if expected > len(there):  # no loop over what a manifest merely claims
        rows = (row for row in itertools.count() if f"hs_{row}.safetensors" not in there)
        names = ", ".join(str(row) for row in itertools.islice(rows, SHOWN))
        raise IncompleteError(
            f"{folder} lacks samples of {expected}: row {names} is missing, and more may be"
        )
    dtype = SAFETENSORS_DTYPES.get(whole["dtype"], whole["dtype"])
    shape = (len(whole["layer_ids"]), whole["hidden_size"])
    digest, bad = hashlib.sha256(), []
    for row in range(expected):
        try:
            sample = read_sample_file(os.path.join(folder, f"hs_{row}.safetensors"))
            digest.update(_as_hashed(sample.token_ids))
        except FileNotFoundError:
            bad.append(f"row {row} is missing")
        except OverflowError:
            bad.append(f"row {row}: its token ids are out of range")
        except DamagedSampleError as error:
            bad.append(f"row {row}: {error}")
        else:
            if (sample.dtype, sample.shape[1:]) != (dtype, shape):
                bad.append(f"row {row}: its states are {sample.dtype} {list(sample.shape)}")
    if bad:
        more = f" and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        raise IncompleteError(
            f"{len(bad)} of {expected} samples cannot be used: {'; '.join(bad[:SHOWN])}{more}"
        )
    if digest.hexdigest() != whole["prompts_sha256"]:
        raise ConfigError(
            f"the samples in {folder} hold other token ids than the prompts of {MANIFEST_NAME}",
            hint="a range was made from another dataset: run it again with the same one",
        )


def _as_hashed(token_ids: bytes) -> bytes:
    """One sample's part of `prompts_sha256`: its length (8 bytes) and its ids as int32, little-endian.

    Raises:
        OverflowError: an id that no int32 holds.
    """
    ids = array.array("q", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    short = array.array("i", ids)
    if sys.byteorder == "big":
        short.byteswap()
    return len(ids).to_bytes(8, "little") + short.tobytes()


def _join(
    whole: dict[str, Any], records: Sequence[tuple[Part, Mapping[str, Any]]], say: Callable[[str], None]
) -> None:
    """What made the samples, from the ranges' records into the one manifest; a range that found all of its samples
    there says nothing about their making.
    """
    versions: dict[str, list[str]] = {}
    facts: dict[str, list[Any]] = {}
    proofs = [record["verified"] for _, record in records if record.get("verified")]
    for _, record in records:
        for name, version in (record.get("versions") or {}).items():
            _add(versions, name, version)
        for key, value in record.items():
            if key not in IDENTITY and key not in _OF_A_RUN and value is not None:
                _add(facts, key, value)
    for name, values in [*versions.items(), *facts.items()]:
        if len(values) > 1:
            say(f"Note: the ranges were made with different {name}: {', '.join(map(str, values))}")
    whole.update({key: values[0] for key, values in facts.items()})
    whole["versions"] = {name: values[0] for name, values in versions.items()}
    if proofs:
        whole["verified"] = {
            "samples": sum(proof["samples"] for proof in proofs),
            "worst_relative_difference": max(proof["worst_relative_difference"] for proof in proofs),
            "tolerance": max(proof["tolerance"] for proof in proofs),
        }


def _add(found: dict[str, list[Any]], key: str, value: Any) -> None:
    if value not in found.setdefault(key, []):
        found[key].append(value)
