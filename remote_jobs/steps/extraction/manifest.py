"""manifest.json: what the states in a folder are, and the guard against mixing two kinds in one folder.

Off-by-one layer ids, another dtype or other prompts train a draft that serves badly without any error, so a run that
would add different states to a folder is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from remote_jobs.steps.extraction.dataset import Row, prompts_sha256
from remote_jobs.steps.extraction.errors import CheckpointError, ConfigError
from remote_jobs.steps.extraction.merge import MANIFEST_NAME
from remote_jobs.steps.extraction.model import ModelFacts
from remote_jobs.steps.extraction.parts import Part
from remote_jobs.steps.extraction.progress import utc_now
from remote_jobs.steps.extraction.sample_file import write_atomically
from remote_jobs.steps.extraction.samples import sample_files

INDEX_NAME = "samples.jsonl"
VERSION = 1
CONVENTION = "input of layer k (layers count from 0); k = num_hidden_layers is the output of the last layer, before the final norm"


def new_manifest(
    *,
    model: ModelFacts,
    layer_ids: Sequence[int],
    dtype: str,
    backend: str,
    dataset: str,
    rows: Sequence[Row],
) -> dict[str, Any]:
    """The manifest of a run that has not written anything yet."""
    now = utc_now()
    return {
        "v": VERSION,
        "model": model.name,
        "model_sha256": model.fingerprint,
        "revision": model.revision,
        "tokenizer_sha256": model.tokenizer_sha256,
        "layer_ids": list(layer_ids),
        "layer_id_convention": CONVENTION,
        "num_hidden_layers": model.num_hidden_layers,
        "hidden_size": model.hidden_size,
        "dtype": dtype,
        "backend": backend,
        "versions": {},
        "patch_set_sha256": None,
        "dataset": dataset,
        "prompts_sha256": prompts_sha256(rows),
        "samples": {"expected": len(rows), "valid": 0},
        "tokens": sum(len(row.token_ids) for row in rows),
        "complete": False,
        "verified": None,
        "created_at": now,
        "updated_at": now,
    }


def read_manifest(folder: str) -> dict[str, Any] | None:
    """The manifest of a folder; None when there is none.

    Raises:
        CheckpointError: it is there and cannot be read.
    """
    path = os.path.join(folder, MANIFEST_NAME)
    hint = "use another --output, or --overwrite to start this folder again"
    try:
        with open(path, encoding="utf-8") as stream:
            manifest = json.load(stream)
    except FileNotFoundError:
        return None
    except (ValueError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", hint=hint) from None
    version = manifest.get("v") if isinstance(manifest, dict) else None
    if version != VERSION:
        raise CheckpointError(f"{path} has version {version!r}, this program reads {VERSION}", hint=hint)
    return manifest


def write_manifest(folder: str, manifest: dict[str, Any], part: Part | None = None) -> None:
    """Replace the manifest, or the record of one range, atomically."""
    manifest["updated_at"] = utc_now()
    name = MANIFEST_NAME if part is None else part.file_name
    write_atomically(os.path.join(folder, name), json.dumps(manifest, indent=2).encode() + b"\n")


def record_of_range(
    whole: dict[str, Any], rows: Sequence[Row], part: Part, first: int, end: int
) -> dict[str, Any]:
    """What the manifest is for a whole run, for one range: the same facts, the counts of its own rows, and which."""
    mine = rows[first:end]
    return {
        **whole,
        "range": {"index": part.index, "count": part.count, "first": first, "end": end, "rows": len(rows)},
        "samples": {"expected": len(mine), "valid": 0},
        "tokens": sum(len(row.token_ids) for row in mine),
        "complete": False,
        "verified": None,
    }


def write_index(folder: str, rows: Sequence[Row]) -> None:
    """Write samples.jsonl: which row, id and length stand behind each file."""
    lines = [
        json.dumps(
            {
                "row": row.index,
                "id": row.id,
                "file": f"hs_{row.index}.safetensors",
                "num_tokens": len(row.token_ids),
            }
        )
        for row in rows
    ]
    write_atomically(os.path.join(folder, INDEX_NAME), ("\n".join(lines) + "\n").encode())


def check_resumable(
    folder: str, old: dict[str, Any] | None, new: dict[str, Any], rows: Sequence[Row]
) -> None:
    """Refuse to add states to a folder that holds states of another kind. `rows`: all rows of the dataset that were read.

    Raises:
        ConfigError: names every difference.
    """
    advice = "use another --output, or --overwrite to throw the old files away"
    if old is None:
        strangers = sample_files(folder)
        if strangers:
            raise ConfigError(
                f"{folder} holds {len(strangers)} sample files and no {MANIFEST_NAME}: whose are they?",
                hint=advice,
            )
        return
    differences = differing(old, new, rows)
    if differences:
        raise ConfigError(f"{folder} belongs to another extraction: " + "; ".join(differences), hint=advice)


def differing(old: dict[str, Any], new: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    """What keeps two runs from sharing a folder, as sentences. Another number of samples is fine, other prompts are not."""
    found = []
    for key, words in (
        ("layer_ids", "layer ids"),
        ("layer_id_convention", "layer id convention"),
        ("num_hidden_layers", "number of layers"),
        ("hidden_size", "hidden size"),
        ("dtype", "dtype"),
    ):
        if old.get(key) != new[key]:
            found.append(f"{words} {_text(new[key])} asked for, {_text(old.get(key))} found")
    if old.get("model_sha256") != new["model_sha256"]:
        found.append(f"the model has changed (was {old.get('model')}, now {new['model']})")
    if old.get("tokenizer_sha256") != new["tokenizer_sha256"]:
        found.append("the tokenizer has changed")
    common = int(old.get("samples", {}).get("expected", 0))
    if common > len(rows):
        found.append(f"the dataset had at least {common} rows, now {len(rows)}")
    elif prompts_sha256(rows[:common]) != old.get("prompts_sha256"):
        found.append(f"the prompts of the first {common} rows have changed (dataset {old.get('dataset')})")
    return found


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
