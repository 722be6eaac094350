"""What orch says about a failed extract: the class, and that the last line is the cause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from remote_jobs.logs import explain_bytes
from tests.extract.conftest import Result, poison, prompts, save_model, write_rows

Run = Callable[..., Result]


def explained(result: Result) -> dict[str, Any]:
    return explain_bytes(result.log.encode(), result.status)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model("qwen3", tmp_path / "model", torch.float32)


def cut_shard(model: Path) -> None:
    shard = sorted(model.glob("*.safetensors"))[2]
    shard.write_bytes(shard.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("rows", "flags", "break_model", "failure_class"),
    [
        (["{"], (), None, "data_corrupt"),
        ([{"input_ids": [512]}], (), None, "data_corrupt"),
        ([{"input_ids": [5] * 300}], (), None, "data_corrupt"),
        ([], (), None, "data_corrupt"),
        (None, ("--layers", "2,7"), None, "config"),
        (None, ("--no-such-flag", "1"), None, "config"),
        (None, ("--model", "/no/such/model"), None, "config"),
        (None, ("--dataset", "/no/such/file.jsonl"), None, "missing_file"),
        (None, (), cut_shard, "data_corrupt"),
        (None, (), lambda model: min(model.glob("*.safetensors")).unlink(), "data_corrupt"),
        (None, (), lambda model: poison(model, "model.layers.1.mlp.down_proj.weight"), "numerical"),
        (None, ("--min-free-gib", "1000000", "--disk-wait-s", "0"), None, "disk_full"),
        (None, ("--verify", "2", "--verify-tolerance", "0", "--dtype", "bfloat16"), None, "numerical"),
    ],
    ids=[
        "cut row", "token id", "too long", "no rows", "layers", "flag", "no model", "no dataset", "cut shard", "no shard", "nan",
        "disk", "verify",
    ],
)  # fmt: skip
def test_a_failure_is_classed(
    rows: list[Any] | None,
    flags: tuple[str, ...],
    break_model: Callable[[Path], None] | None,
    failure_class: str,
    model: Path,
    run_extract: Run,
    tmp_path: Path,
) -> None:
    if break_model:
        break_model(model)
    dataset = write_rows(tmp_path / "rows.jsonl", list(prompts(6)) if rows is None else rows)
    result = run_extract(model, dataset, *flags)

    failure = explained(result)["failure"]
    assert result.status != 0
    assert failure["class"] == failure_class
    assert failure["root_cause"]["text"] == result.last_line


def test_a_healthy_run_has_no_failure_and_all_its_phases(
    model: Path, run_extract: Run, tmp_path: Path
) -> None:
    dataset = write_rows(tmp_path / "rows.jsonl", list(prompts(40)))
    result = run_extract(model, dataset, "--verify", "3", "--batch-size", "1")
    record = explained(result)

    assert record["failure"] is None
    assert record["waiting_for_input"] is None
    assert [(phase["name"], phase["state"]) for phase in record["phases"]] == [
        ("load_config", "done"),
        ("load_weights", "done"),
        ("extract", "done"),
        ("verify", "done"),
    ]
    shards = len(list(model.glob("*.safetensors")))
    assert [(bar["label"], bar["done"], bar["total"]) for bar in record["bars"]] == [
        ("Loading safetensors checkpoint shards", shards, shards),
        ("Extracting hidden states", 40, 40),
        ("Verifying against a fresh forward pass", 3, 3),
    ]
