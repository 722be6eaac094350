"""The demo's model is a real checkpoint in 64 shards, and its checker believes nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load, save_file

from remote_jobs.steps import extract
from remote_jobs.steps.demo import check_states, make_model
from remote_jobs.steps.extraction.model import read_model


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small edition of the demo's model and prompts."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # two threads spin against other tests for such small products
    small = {
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 48,
    }
    for key, value in {**small, "vocab_size": 1024}.items():
        monkeypatch.setitem(make_model.CONFIG, key, value)
    monkeypatch.setattr(make_model, "VOCAB_SIZE", 1024)
    monkeypatch.setattr(sys, "argv", ["make_model.py", str(tmp_path), "--seconds", "0"])
    make_model.main()
    return tmp_path


def extracted(work: Path) -> Path:
    flags = {"model": "model", "dataset": "prompts.jsonl", "output": "states"}
    argv = [word for name, path in flags.items() for word in (f"--{name}", str(work / path))]
    assert extract.main([*argv, "--layers", "2,12,21,24", "--backend", "transformers"]) == 0
    return work / "states"


def check(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    monkeypatch.setattr(
        sys, "argv", ["check", str(work / "model"), str(work / "prompts.jsonl"), str(work / "states")]
    )
    status = check_states.main()
    return status, json.loads(capsys.readouterr().out)


def test_the_model_is_a_checkpoint_of_64_shards_with_a_tokenizer(work: Path) -> None:
    facts = read_model(str(work / "model"))
    assert len(facts.shards) == 64
    assert facts.tokenizer_sha256
    rows = [json.loads(line) for line in (work / "prompts.jsonl").read_text().splitlines()]
    assert len(rows) >= 64
    assert max(max(row["input_ids"]) for row in rows) < 1024


def test_good_states_pass_the_check(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    extracted(work)
    status, report = check(work, monkeypatch, capsys)
    assert (status, report["problems"]) == (0, [])
    assert report["files"] == report["prompts"]
    assert report["recomputed"] == 8
    assert report["worst_relative_difference"] < 1e-4


def test_bad_states_do_not(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states = extracted(work)
    shifted = load((states / "hs_0.safetensors").read_bytes())
    shifted["hidden_states"] = shifted["hidden_states"].roll(1, dims=1).contiguous()
    save_file(shifted, states / "hs_0.safetensors")
    (states / "hs_5.safetensors").unlink()
    (states / "hs_7.safetensors").write_bytes((states / "hs_6.safetensors").read_bytes())

    status, report = check(work, monkeypatch, capsys)

    assert status == 1
    problems = "; ".join(report["problems"])
    assert "no file for prompt 5" in problems
    assert "file 7 holds the tokens of another prompt" in problems
    assert "file 0 differs from a fresh forward pass by" in problems
