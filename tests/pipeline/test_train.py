"""train with real speculators on the CPU: resumed after kills and stops, every step once, bad states refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.pipeline.conftest import Host, write_rows

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900, func_only=True)]
LENGTHS = [24 + 5 * (index % 7) for index in range(30)]
FLAGS = ["--epochs", 2, "--total-seq-len", 96, "--optimizer", "adamw", "--lr", "1e-3", "--log-freq", 1]


@pytest.fixture(scope="module")
def inputs(module_host: Host, models: Path) -> Path:
    """Rows, their states (by transformers, float32: bf16 is 100 times slower without AVX512) and a vocabulary map."""
    host, folder = module_host, module_host.folder
    write_rows(folder / "rows.jsonl", LENGTHS)
    common = ["--model", models / "qwen3-tiny", "--dataset", folder / "rows.jsonl"]
    host.run(
        "extract",
        *common,
        "--layers",
        "2,4,5,8",
        "--backend",
        "transformers",
        "--dtype",
        "float32",
        "--output",
        "states",
    )
    host.run("vocab_map", *common, "--draft-vocab-size", 256, "--min-coverage", 0.1, "--output", "map")
    return folder


def arguments(inputs: Path, models: Path, output: Path) -> list[object]:
    where = ["--hidden-states", inputs / "states", "--vocab-map", inputs / "map", "--output", output]
    return ["--model", models / "qwen3-tiny", *where, *FLAGS]


def losses(output: Path) -> dict[int, float]:
    """Loss by step; each step must be there once."""
    found: dict[int, float] = {}
    for line in (output / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "train" in record:
            assert record["step"] not in found, f"step {record['step']} is there twice"
            found[record["step"]] = record["train"]["loss"]
    return found


@pytest.fixture(scope="module")
def whole(inputs: Path, models: Path, module_host: Host) -> Path:
    """A training that nobody disturbed."""
    ran = module_host.run("train", *arguments(inputs, models, inputs / "whole"))
    assert ran.marks("done", "done")
    return inputs / "whole"


def test_an_undisturbed_training(whole: Path) -> None:
    found = losses(whole)
    assert sorted(found) == list(range(len(found)))
    steps = list(found.values())
    assert sum(steps[-3:]) < sum(steps[:3]), "it learns something"
    assert {"config.json", "model.safetensors", "training_state.json", "complete.json"} <= set(
        os.listdir(whole / "draft")
    )
    assert (whole / "draft").resolve() == (whole / "checkpoints" / "1").resolve()
    config = json.loads((whole / "draft" / "config.json").read_text())
    assert config["draft_vocab_size"] == 256
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]


def test_running_it_again_trains_nothing(whole: Path, inputs: Path, models: Path, host: Host) -> None:
    ran = host.run("train", *arguments(inputs, models, whole))
    assert "All 2 epochs are there already" in ran.log


def test_stopped_once_and_killed_once(whole: Path, inputs: Path, models: Path, host: Host) -> None:
    """SIGTERM saves the very step; SIGKILL costs the steps since the last checkpoint. In the end every step is there once."""
    expected = losses(whole)
    args = arguments(inputs, models, host.folder / "train")
    output = host.folder / "train"
    ran = host.kill_when(lambda: recorded(output) >= 3, "train", *args, signum=signal.SIGTERM)
    assert ran.status == 143, ran.log[-3000:]
    state = json.loads(
        (host.folder / "train" / "checkpoints" / "interrupted" / "training_state.json").read_text()
    )
    assert state["global_step"] == state["local_step"] == len(losses(host.folder / "train"))
    half = len(expected) // 2 + 2
    ran = host.kill_when(lambda: recorded(output) >= half, "train", *args)
    assert f"Training from epoch 1, step {state['global_step']} to 2 epochs" in ran.log
    # The trainer has a session of its own; it must have ended with train.py all the same, or two would write here.
    ran = host.run("train", *args)
    assert "Resuming" in ran.log
    assert not list((host.folder / "train" / "checkpoints").glob("broken-*"))
    found = losses(host.folder / "train")
    assert sorted(found) == sorted(expected)
    # Checkpoints hold bf16 weights, so a resumed run is near, not equal.
    assert found[0] == pytest.approx(expected[0], rel=1e-4)
    assert sum(found.values()) == pytest.approx(sum(expected.values()), rel=0.05)
    assert list(found.values())[-1] == pytest.approx(list(expected.values())[-1], rel=0.15)


def recorded(output: Path) -> int:
    """Records in metrics.jsonl so far."""
    path = output / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_two_processes_stop_on_the_same_step_and_go_on(inputs: Path, models: Path, host: Host) -> None:
    """torchrun with two ranks (gloo): one signal, one checkpoint, no hang; then to the end."""
    args = [*arguments(inputs, models, host.folder / "train"), "--nproc-per-node", 2]
    ran = host.kill_when(lambda: recorded(host.folder / "train") >= 2, "train", *args, signum=signal.SIGTERM)
    assert ran.status == 143, ran.log[-3000:]
    assert (host.folder / "train" / "checkpoints" / "interrupted" / "complete.json").exists()
    ran = host.run("train", *args)
    found = losses(host.folder / "train")
    assert sorted(found) == list(range(len(found)))
    assert ran.marks("done", "done")


def test_a_kernel_that_does_not_compile_costs_no_training(
    inputs: Path, models: Path, host: Host, whole: Path
) -> None:
    """The fused loss is a Triton kernel, and there is no Triton for this device: said, then trained with the eager one."""
    output = host.folder / "train"
    args = [*arguments(inputs, models, output), "--loss-implementation", "fused", "--epochs", 1]
    ran = host.run("train", *args)
    assert "Note: the compiler refused speculators' training before the first step: " in ran.log
    assert "Note: training with the eager loss (--loss-implementation eager)" in ran.log
    assert losses(output)[0] == pytest.approx(losses(whole)[0], rel=1e-4)
    assert json.loads((output / "compiler.json").read_text())["way"] == 1, "a resumed training knows the way"


def test_another_number_of_processes_is_refused(whole: Path, inputs: Path, models: Path, host: Host) -> None:
    ran = host.run("train", *arguments(inputs, models, whole), "--nproc-per-node", 2, expect=2)
    assert "processes changed" in ran.last


def test_one_corrupt_sample_is_found_before_training(inputs: Path, models: Path, host: Host) -> None:
    """speculators warns and trains without it. Here: named, nothing trained, nothing lost."""
    shutil.copytree(inputs / "states", host.folder / "states")
    victim = host.folder / "states" / "hs_7.safetensors"
    victim.write_bytes(victim.read_bytes()[:1000])
    args = [*arguments(inputs, models, host.folder / "train"), "--hidden-states", host.folder / "states"]
    ran = host.run("train", *args, expect=1)
    assert (
        "Failed to load hidden states for sample 7: 1 of 30 sample files cannot be used (1 damaged, 0 missing"
        in ran.last
    )
    assert "run the extract step again" in ran.log
    assert len(list((host.folder / "states").glob("hs_*.safetensors"))) == 30


def test_states_without_the_last_layer_are_refused(inputs: Path, models: Path, host: Host) -> None:
    """Trained with the wrong last layer, a draft serves badly without any error."""
    shutil.copytree(inputs / "states", host.folder / "states")
    manifest = host.folder / "states" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["layer_ids"] = [2, 4, 5, 7]
    manifest.write_text(json.dumps(content))
    args = [*arguments(inputs, models, host.folder / "train"), "--hidden-states", host.folder / "states"]
    ran = host.run("train", *args, expect=2)
    assert "training also needs the last layer's output, id 8" in ran.last
    assert "layers: [2, 4, 5, 7, 8]" in ran.log


def test_a_stale_map_is_refused(inputs: Path, models: Path, host: Host) -> None:
    shutil.copytree(inputs / "map", host.folder / "map")
    facts = host.folder / "map" / "vocab_map.json"
    content = json.loads(facts.read_text())
    content["dataset_sha256"] = "0" * 64
    facts.write_text(json.dumps(content))
    args = [*arguments(inputs, models, host.folder / "train"), "--vocab-map", host.folder / "map"]
    assert "is stale" in host.run("train", *args, expect=2).last
