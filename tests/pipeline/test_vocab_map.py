"""vocab_map: the right tokens kept, coverage checked, stale maps found, and a large file read as a stream."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from remote_jobs.steps.extraction.errors import ConfigError
from remote_jobs.steps.extraction.model import read_model
from remote_jobs.steps.vocab_map import check_map, file_sha256
from tests.support.memory import measured, peak_mib

SCRIPT = Path(__file__).parents[2] / "remote_jobs" / "steps" / "vocab_map.py"
SPECIAL = [0, 1, 2, 299]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint's small files; vocab_map needs no weights."""
    return make_model(tmp_path / "model", 300)


def make_model(folder: Path, vocabulary: int) -> Path:
    folder.mkdir()
    config = {
        "vocab_size": vocabulary,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
    }
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [2]}))
    added = [{"id": 0, "content": "<a>"}, {"id": 1, "content": "<b>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    decoder = {"added_tokens_decoder": {"299": {"content": "<late>"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(decoder))
    return folder


def command(model: Path, dataset: Path, *arguments: object) -> list[str]:
    words = [
        sys.executable,
        SCRIPT,
        "--model",
        model,
        "--dataset",
        dataset,
        "--output",
        dataset.parent / "map",
        *arguments,
    ]
    return [str(word) for word in words]


def run(model: Path, dataset: Path, *arguments: object, expect: int = 0) -> str:
    done = subprocess.run(command(model, dataset, *arguments), capture_output=True, text=True, check=False)
    assert done.returncode == expect, done.stderr
    return done.stderr


def write(path: Path, *rows: tuple[list[int], list[int]]) -> Path:
    path.write_text("".join(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n" for ids, mask in rows))
    return path


def test_what_is_kept_is_what_speculators_would_keep(model: Path, tmp_path: Path) -> None:
    """Most frequent first, ties by lower id, only learned tokens count, special ones always stay."""
    rng = random.Random(1)
    data = [
        ([min(298, int(rng.paretovariate(0.6)) + 3) for _ in range(50)], [0] * 10 + [1] * 40)
        for _ in range(40)
    ]
    dataset = write(tmp_path / "rows.jsonl", *data)
    said = run(model, dataset, "--draft-vocab-size", 40, "--min-coverage", 0.5)
    d2t, t2d = np.load(tmp_path / "map" / "d2t.npy"), np.load(tmp_path / "map" / "t2d.npy")
    counted = Counter(token for ids, _ in data for token in ids[10:])
    best = sorted((t for t in range(300) if t not in SPECIAL), key=lambda token: (-counted[token], token))[
        :36
    ]
    kept = sorted([*SPECIAL, *best])
    assert (d2t + np.arange(40)).tolist() == kept
    assert np.flatnonzero(t2d).tolist() == kept
    assert (d2t.dtype, t2d.dtype, t2d.shape) == (np.int64, np.bool_, (300,))
    facts = json.loads((tmp_path / "map" / "vocab_map.json").read_text())
    assert facts["coverage"] == pytest.approx(sum(counted[t] for t in kept) / sum(counted.values()))
    assert f"coverage {facts['coverage']:.4%}" in said


def test_too_little_coverage_says_what_would_do(model: Path, tmp_path: Path) -> None:
    dataset = write(tmp_path / "rows.jsonl", (list(range(100, 200)), [1] * 100))
    said = run(model, dataset, "--draft-vocab-size", 54, "--min-coverage", 0.9, expect=1)
    assert "StepError: coverage 0.5000 is below --min-coverage 0.9" in said
    assert "--draft-vocab-size 94 would reach it" in said
    run(model, dataset, "--draft-vocab-size", 94, "--min-coverage", 0.9)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"input_ids": [5, 300]}', "line 1: token id 300 is out of range"),
        ('{"input_ids": [5, -1]}', "line 1: token id -1 is out of range"),
        ('{"input_ids": [5, 6], "loss_mask": [1]}', "line 1: 2 input_ids, 1 entries in loss_mask"),
        ('{"input_ids": [5, 6', "line 1 cannot be read"),
        ('{"text": "x"}', "line 1 cannot be read: KeyError: 'input_ids'"),
        ("", "has no rows"),
        ('{"input_ids": [5, 6], "loss_mask": [0, 0]}', "no token has loss_mask 1"),
    ],
)
def test_bad_rows(model: Path, tmp_path: Path, row: str, said: str) -> None:
    (tmp_path / "rows.jsonl").write_text(row)
    assert said in run(model, tmp_path / "rows.jsonl", expect=1)
    assert not (tmp_path / "map" / "vocab_map.json").exists()


def test_a_stale_or_damaged_map_is_refused(model: Path, tmp_path: Path) -> None:
    dataset = write(tmp_path / "rows.jsonl", ([5, 6, 7], [1, 1, 1]))
    run(model, dataset, "--draft-vocab-size", 20)
    facts = read_model(str(model))
    folder = str(tmp_path / "map")
    assert check_map(folder, dataset_sha256=file_sha256(str(dataset)), model=facts)["draft_vocab_size"] == 20
    write(dataset, ([5, 6, 8], [1, 1, 1]))
    with pytest.raises(ConfigError, match="is stale"):
        check_map(folder, dataset_sha256=file_sha256(str(dataset)), model=facts)
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="another tokenizer"):
        check_map(folder, dataset_sha256=None, model=read_model(str(model)))
    (tmp_path / "map" / "t2d.npy").write_bytes(b"cut")
    with pytest.raises(ConfigError, match="not the file that"):
        check_map(folder, dataset_sha256=None, model=facts)


def test_two_million_tokens_in_a_second_and_little_memory(tmp_path: Path) -> None:
    """The real size (21 M tokens of 163,840) is ten times this; time and memory must not depend on more than that."""
    model = make_model(tmp_path / "large", 163_840)
    dataset = tmp_path / "rows.jsonl"
    rng = np.random.default_rng(0)
    with dataset.open("w") as stream:
        for _ in range(1000):
            ids = np.minimum(rng.zipf(1.3, 2100), 163_000).tolist()
            stream.write(json.dumps({"input_ids": ids, "loss_mask": [0] * 100 + [1] * 2000}) + "\n")
    started = time.monotonic()
    argv = measured(tmp_path / "peak", command(model, dataset, "--draft-vocab-size", 32_000))
    subprocess.run(argv, capture_output=True, check=True)
    assert time.monotonic() - started < 15
    assert peak_mib(tmp_path / "peak") < 400
