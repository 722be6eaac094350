"""`--deep`: a real model config is cut to a few layers, and the real step runs on it (the transformers backend here)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from remote_jobs.agent import procs
from remote_jobs.steps import preflight_deep
from tests.preflight.test_parts import KIMI
from tests.preflight.world import CONFIG

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "remote_jobs" / "steps" / "preflight_deep.py"


def deep(request: dict[str, Any], tmp: Path) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], input=json.dumps(request), capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "TMPDIR": str(tmp)},
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])["rows"][0], done


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "qwen"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 36, "rms_norm_eps": 1e-6}))
    return folder


def request(model: Path, **params: Any) -> dict[str, Any]:
    given = {
        "model": str(model),
        "layers": [2, 18, 33, 36],
        "dataset": "x.jsonl",
        "backend": "transformers",
        **params,
    }
    return {"step": "e", "uses": "extract", "params": given, "gpus": 0, "workdir": "/"}


def test_the_cut_keeps_one_dense_layer_and_every_list_in_step() -> None:
    config = {**CONFIG, "num_hidden_layers": 61, "layer_types": ["full_attention"] * 61, "first_k_dense_replace": 3,
              "mlp_only_layers": [0, 40], "num_nextn_predict_layers": 1, "max_window_layers": 61}  # fmt: skip
    whole, text = preflight_deep.cut_config(config)
    assert whole is text
    assert text["num_hidden_layers"] == 4
    assert len(text["layer_types"]) == 4
    assert text["first_k_dense_replace"] == 1
    assert text["mlp_only_layers"] == [0]
    assert text["num_nextn_predict_layers"] == 0
    assert config["num_hidden_layers"] == 61, "the caller's config is left alone"


def test_the_language_part_of_a_multimodal_config_is_cut() -> None:
    whole, text = preflight_deep.cut_config(KIMI)
    assert whole["text_config"] is text
    assert whole["text_config"]["num_hidden_layers"] == 4
    assert whole["architectures"] == KIMI["architectures"]


@pytest.mark.parametrize(
    ("wanted", "layers", "expected"),
    [
        ([2, 30, 58, 61], 4, [1, 2, 3, 4]),
        ([61], 4, [4]),
        (None, 4, [1, 2, 3, 4]),
        ([1, 2, 3, 4, 5, 6], 2, [0, 1, 2]),
    ],
)
def test_as_many_layer_ids_as_the_plan_has(
    wanted: list[int] | None, layers: int, expected: list[int]
) -> None:
    assert preflight_deep.cut_layers(wanted, layers) == expected


def test_the_real_step_runs_on_the_cut_model(model: Path, tmp_path: Path) -> None:
    row, done = deep(request(model), tmp_path)
    assert row["verdict"] == "ok", (row, done.stderr[-2000:])
    assert "cut to 4 layers" in row["found"]
    assert "extraction of 4 samples" in row["found"]


def test_what_the_real_step_would_die_of_is_the_finding_and_nothing_is_left(
    model: Path, tmp_path: Path
) -> None:
    row, _ = deep(request(model, backend="vllm", max_model_len=512), tmp_path)
    assert row["verdict"] == "fail"
    assert "the vllm backend needs vLLM in this Python" in row["found"]
    left = [
        p
        for p in procs.table().values()
        if str(tmp_path) in procs.command_line(p.pid) and p.state not in "ZX"
    ]
    assert left == []
    assert not list(tmp_path.glob("orch-deep-*"))


def test_a_model_that_is_not_here_is_left_out(tmp_path: Path) -> None:
    row, _ = deep(request(tmp_path / "nowhere"), tmp_path)
    assert row["verdict"] == "skip"
