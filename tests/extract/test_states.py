"""The states are right: same numbers as transformers gives, at the layer that the id means, alone or in a batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from remote_jobs.steps.extraction.verify import limit_at
from tests.extract.conftest import CONFIGS, NUM_LAYERS, Result, prompts, read_sample, write_rows

LAYERS = (0, 2, 5, NUM_LAYERS)
Run = Callable[..., Result]


def hf_states(folder: Path, ids: list[int]) -> tuple[list[torch.Tensor], Any]:
    """transformers' own answer for one prompt: inputs of the layers, then the output BEHIND the final norm."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
    return [states[0] for states in output.hidden_states], model.model.norm


@pytest.mark.parametrize("kind", CONFIGS)
def test_states_equal_transformers_at_every_layer_id(
    kind: str, models: dict[str, Path], dataset: Path, run_extract: Run
) -> None:
    result = run_extract(models[kind], dataset, "--max-num-batched-tokens", "300")

    assert result.status == 0
    rows = [json.loads(line) for line in dataset.read_text().splitlines()]
    assert sorted(result.files()) == list(range(len(rows)))
    for index in (0, 3, 7, len(rows) - 1):
        sample = read_sample(result.files()[index])
        assert sample["token_ids"].tolist() == rows[index]["input_ids"]
        assert sample["token_ids"].dtype == torch.int64
        assert sample["hidden_states"].shape == (len(rows[index]["input_ids"]), len(LAYERS), 64)
        expected, norm = hf_states(models[kind], rows[index]["input_ids"])
        for position, layer_id in enumerate(LAYERS[:-1]):
            torch.testing.assert_close(
                sample["hidden_states"][:, position], expected[layer_id], rtol=1e-4, atol=1e-4
            )
        last = sample["hidden_states"][:, -1]
        assert not torch.allclose(last, expected[-1], rtol=1e-2, atol=1e-2), (
            "id n must be before the final norm"
        )
        with torch.inference_mode():
            torch.testing.assert_close(norm(last), expected[-1], rtol=1e-4, atol=1e-4)


def test_batched_with_padding_equals_alone(
    models: dict[str, Path], dataset: Path, run_extract: Run, tmp_path: Path
) -> None:
    batched = run_extract(models["deepseek_v3"], dataset, "--max-num-seqs", "14", output=tmp_path / "batched")
    alone = run_extract(models["deepseek_v3"], dataset, "--max-num-seqs", "1", output=tmp_path / "alone")

    assert (batched.status, alone.status) == (0, 0)
    for index, path in batched.files().items():
        torch.testing.assert_close(
            read_sample(path)["hidden_states"],
            read_sample(alone.files()[index])["hidden_states"],
            rtol=1e-4,
            atol=1e-4,
        )


def test_shared_prefixes_and_a_sample_at_the_limit(
    models: dict[str, Path], run_extract: Run, tmp_path: Path
) -> None:
    prefix = [7, 9, 11] * 66
    rows = [{"input_ids": prefix + [token] * 58, "loss_mask": [1] * 256} for token in (1, 2, 3)]
    result = run_extract(models["llama"], write_rows(tmp_path / "long.jsonl", list(rows)))

    assert result.status == 0
    samples = [read_sample(result.files()[index])["hidden_states"] for index in range(3)]
    torch.testing.assert_close(samples[0][:198], samples[2][:198], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(samples[0][198:, 1], samples[2][198:, 1])


def test_the_checkpoints_own_dtype_is_kept(bf16_model: Path, dataset: Path, run_extract: Run) -> None:
    result = run_extract(bf16_model, dataset, "--verify", "5")

    assert result.status == 0
    assert read_sample(result.files()[2])["hidden_states"].dtype == torch.bfloat16
    manifest = result.manifest()
    assert manifest["dtype"] == "bfloat16"
    assert manifest["verified"]["samples"] == 5
    assert manifest["verified"]["worst_relative_difference"] < 0.02


def test_the_manifest_says_what_the_states_are(
    models: dict[str, Path], dataset: Path, run_extract: Run
) -> None:
    manifest = run_extract(models["qwen3"], dataset).manifest()

    assert manifest["layer_ids"] == [0, 2, 5, 6]
    assert manifest["layer_id_convention"].startswith("input of layer k")
    assert (manifest["num_hidden_layers"], manifest["hidden_size"]) == (6, 64)
    assert manifest["samples"] == {"expected": 14, "valid": 14}
    assert manifest["complete"] is True
    assert manifest["versions"]["torch"] == torch.__version__
    assert {
        "model",
        "revision",
        "model_sha256",
        "tokenizer_sha256",
        "prompts_sha256",
        "patch_set_sha256",
    } <= set(manifest)


def test_ids_of_rows_are_in_the_index(models: dict[str, Path], dataset: Path, run_extract: Run) -> None:
    folder = run_extract(models["qwen3"], dataset).folder
    records = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert records[3] == {
        "row": 3,
        "id": "p3_gen0",
        "file": "hs_3.safetensors",
        "num_tokens": records[3]["num_tokens"],
    }


@pytest.mark.parametrize(
    ("kind", "layer_id", "taken"), [("qwen3", 2, 3), ("deepseek_v3", 2, 1), ("deepseek_v3", 5, 4)]
)
def test_verify_finds_states_of_the_wrong_layer(
    kind: str, layer_id: int, taken: int, models: dict[str, Path], dataset: Path, run_extract: Run
) -> None:
    """The silent classic: the right numbers, captured one layer off; also behind experts, where numbers may differ."""
    result = run_extract(models[kind], dataset)
    sample = read_sample(result.files()[13])
    states, _ = hf_states(models[kind], sample["token_ids"].tolist())
    sample["hidden_states"][:, LAYERS.index(layer_id)] = states[taken]
    save_file(sample, result.files()[13])

    again = run_extract(models[kind], dataset, "--verify", "3")
    assert again.status == 1
    words = (
        f"VerificationError: sample 13 (id 'p13_gen0'), line 14: the states stored for layer id {layer_id} "
    )
    assert again.last_line.startswith(words)
    assert f"are those of layer id {taken} " in again.last_line


def test_verify_finds_wrong_numbers(models: dict[str, Path], dataset: Path, run_extract: Run) -> None:
    result = run_extract(models["qwen3"], dataset)
    sample = read_sample(result.files()[13])
    sample["hidden_states"] = sample["hidden_states"] * 1.01
    save_file(sample, result.files()[13])

    again = run_extract(models["qwen3"], dataset, "--verify", "2")
    assert again.status == 1
    assert "differs from a fresh forward pass by 0.0" in again.last_line


def test_the_limit_is_that_of_rounding_at_each_depth(
    models: dict[str, Path], dataset: Path, run_extract: Run
) -> None:
    """bf16: what lies within rounding of a deep layer is found where the layer is shallow."""
    flags = ("--dtype", "bfloat16")
    result = run_extract(models["qwen3"], dataset, *flags)
    proof = run_extract(models["qwen3"], dataset, *flags, "--verify", "3").manifest()["verified"]
    limits = [proof["by_layer"][str(k)]["limit"] for k in LAYERS]
    assert limits == sorted(limits)
    assert 0.02 < limit_at(2, "bfloat16") < 0.03
    assert 0.1 < limit_at(33, "bfloat16") < 0.12
    assert all(seen["worst"] <= seen["limit"] / 2 for seen in proof["by_layer"].values()), proof
    scale = 1 + (limits[LAYERS.index(2)] + limits[-1]) / 2
    for layer_id, status in ((LAYERS[-1], 0), (2, 1)):
        sample = read_sample(result.files()[13])
        sample["hidden_states"][:, LAYERS.index(layer_id)] *= scale
        save_file(sample, result.files()[13])
        again = run_extract(models["qwen3"], dataset, *flags, "--verify", "3")
        assert again.status == status, again.log[-2000:]
    assert "layer id 2 differs from a fresh forward pass by 0.0" in again.last_line


def test_default_layers_are_eagle3s(models: dict[str, Path], dataset: Path, tmp_path: Path) -> None:
    from remote_jobs.steps import extract
    from remote_jobs.steps.extraction.model import default_layer_ids

    assert default_layer_ids(61) == (2, 30, 58, 61)
    assert default_layer_ids(36) == (2, 18, 33, 36)
    flags = [
        "--model",
        str(models["qwen3"]),
        "--dataset",
        str(dataset),
        "--output",
        str(tmp_path / "o"),
        "--backend",
        "transformers",
    ]
    assert extract.main([*flags, "--samples", "2"]) == 0
    assert json.loads((tmp_path / "o/manifest.json").read_text())["layer_ids"] == [2, 3, 6]


def test_only_the_first_samples(models: dict[str, Path], dataset: Path, run_extract: Run) -> None:
    assert sorted(run_extract(models["llama"], dataset, "--samples", "5").files()) == [0, 1, 2, 3, 4]
    more = run_extract(models["llama"], dataset, "--samples", "9")
    assert sorted(more.files()) == list(range(9))
    assert "5 valid files are there, 4 to do" in more.log


def test_rows_without_id_or_mask_are_fine(models: dict[str, Path], run_extract: Run, tmp_path: Path) -> None:
    rows = [{"input_ids": row["input_ids"]} for row in prompts(3)]
    assert run_extract(models["llama"], write_rows(tmp_path / "plain.jsonl", list(rows))).status == 0
