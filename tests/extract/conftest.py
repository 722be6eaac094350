"""Small random models and prompts; `run_extract` runs the step in this process, `start_extract` as people do."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, Qwen3Config

from remote_jobs.steps import extract

EXTRACT = Path(extract.__file__)
VOCAB_SIZE = 512
NUM_LAYERS = 6
MAX_TOKENS = 256
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_TOKENS,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: Qwen3Config(**COMMON, head_dim=16),
    "llama": lambda: LlamaConfig(**COMMON),
    # Latent attention and routed experts behind one dense layer, as DeepSeek and Kimi have them.
    "deepseek_v3": lambda: DeepseekV3Config(
        **{**COMMON, "num_key_value_heads": 4},
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
    ),
}


@dataclass
class Result:
    """What a run of the step left: exit status, what it printed, its folder."""

    status: int
    log: str
    folder: Path

    @property
    def last_line(self) -> str:
        return self.log.rstrip("\n").rsplit("\n", 1)[-1]

    def files(self) -> dict[int, Path]:
        """Sample files by dataset row."""
        return {int(path.stem.removeprefix("hs_")): path for path in self.folder.glob("hs_*.safetensors")}

    def manifest(self) -> dict[str, Any]:
        return json.loads((self.folder / "manifest.json").read_text())

    def phases(self) -> list[tuple[str, str]]:
        """(phase, state) of every marker line, in order."""
        lines = [line for line in self.log.split("\n") if line.startswith("::orch ")]
        records = [json.loads(line.removeprefix("::orch ")) for line in lines]
        return [(record["phase"], record["state"]) for record in records]


def save_model(kind: str, folder: Path, dtype: torch.dtype) -> Path:
    """Random weights with a spread wide enough that neighbouring layers differ clearly."""
    torch.manual_seed(1)
    config = CONFIGS[kind]()
    config.initializer_range = 0.1
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    model.save_pretrained(folder, max_shard_size="200KB")
    return folder


def write_rows(path: Path, rows: list[dict[str, Any] | str]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def prompts(number: int, seed: int = 0, longest: int = 120) -> list[dict[str, Any]]:
    """Rows as `generate` writes them, of very different lengths."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for index in range(number):
        length = rng.choice([1, 3, rng.randint(5, longest)])
        ids = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
        rows.append({"id": f"p{index}_gen0", "input_ids": ids, "loss_mask": [0] + [1] * (length - 1)})
    return rows


def read_sample(path: Path) -> dict[str, torch.Tensor]:
    """Tensors of a sample file, in memory of their own (mapped ones would die with a file that a test damages)."""
    return load(path.read_bytes())


def poison(folder: Path, name: str) -> None:
    """Put one NaN into a weight of a checkpoint."""
    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        if name in tensors:
            tensors[name].view(-1)[0] = float("nan")
            save_file(tensors, shard, metadata={"format": "pt"})
            return
    raise AssertionError(f"no weight {name} in {folder}")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """For products this small two threads only spin against other tests."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """float32 checkpoints by kind, so that comparisons can be tight."""
    root = tmp_path_factory.mktemp("models")
    return {kind: save_model(kind, root / kind, torch.float32) for kind in CONFIGS}


@pytest.fixture(scope="session")
def bf16_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3", tmp_path_factory.mktemp("models") / "qwen3 bf16", torch.bfloat16)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "prompts.jsonl", list(prompts(14)))


@pytest.fixture
def run_extract(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run the step in this process (torch is loaded once for all tests)."""

    def run(model: Path, dataset: Path, *flags: str, output: Path = tmp_path / "out put") -> Result:
        capfd.readouterr()
        status = extract.main([*arguments(model, dataset, output), *flags])
        return Result(status, capfd.readouterr().err, output)

    return run


def arguments(model: Path, dataset: Path, output: Path) -> list[str]:
    return [
        "--model",
        str(model),
        "--dataset",
        str(dataset),
        "--output",
        str(output),
        "--layers",
        "0,2,5,6",
        "--backend",
        "transformers",
    ]


@pytest.fixture
def start_extract(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], Path]]]:
    """Start the step as a process of its own; ended with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(model: Path, dataset: Path, *flags: str) -> tuple[subprocess.Popen[str], Path]:
        output = tmp_path / "out put"
        command = [sys.executable, str(EXTRACT), *arguments(model, dataset, output), *flags]
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path))
        return started[-1], output

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
