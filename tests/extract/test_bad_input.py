"""Bad input costs a second and one clear line, never a load, a traceback or a good file."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extract.conftest import EXTRACT, Result, arguments, poison, prompts, save_model, write_rows

Run = Callable[..., Result]
GOOD = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}

BAD_ROWS: list[tuple[Any, str]] = [
    (
        '{"input_ids": [1, 2',
        "not valid JSON (Expecting ',' delimiter at column 20): the row is cut or damaged",
    ),
    ("[1, 2, 3]", "a JSON object is needed, this is a list"),
    ("null", "a JSON object is needed, this is null"),
    ({"text": "hello"}, "has no input_ids (keys: text)"),
    ({"input_ids": "1 2 3"}, "input_ids must be a list of token ids, this is a text"),
    ({"input_ids": []}, "input_ids is empty"),
    ({"input_ids": [1, None]}, "input_ids[1] is null, not a token id"),
    ({"input_ids": [1, 2.5]}, "input_ids[1] is a fraction, not a token id"),
    ({"input_ids": [1, True]}, "input_ids[1] is true/false, not a token id"),
    ({"input_ids": [[1, 2]]}, "input_ids[0] is a list, not a token id"),
    ({"input_ids": [0, 511, 512]}, "input_ids[2] = 512 is out of range: the model's vocab_size is 512"),
    ({"input_ids": [-1]}, "input_ids[0] = -1 is out of range"),
    ({"input_ids": [5] * 257}, "has 257 tokens, longer than the model's limit of 256"),
    ({"input_ids": [1, 2], "loss_mask": [1]}, "loss_mask has 1 entries for 2 input_ids"),
    ({"input_ids": [1, 2], "loss_mask": [1, 7]}, "loss_mask must be a list of 0 and 1"),
    ({"input_ids": [1], "loss_mask": "1"}, "loss_mask must be a list of 0 and 1"),
    ({"id": "same", "input_ids": [1]}, "id 'same' was already used on line 1"),
]


@pytest.mark.parametrize(("row", "words"), BAD_ROWS, ids=[words[:30] for _, words in BAD_ROWS])
def test_a_bad_row_is_named_by_line(
    row: Any, words: str, models: dict[str, Path], run_extract: Run, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "bad.jsonl", [{"id": "same", **GOOD}, "", row, GOOD])
    result = run_extract(models["qwen3"], path)
    assert result.status == 1
    assert result.last_line.startswith(f"DatasetError: {path} line 3: {words}")
    assert ("load_weights", "start") not in result.phases()


def test_bytes_that_are_no_text(models: dict[str, Path], run_extract: Run, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe\x00\n")
    assert (
        f"DatasetError: {path} line 2: not UTF-8 text (byte 0" in run_extract(models["qwen3"], path).last_line
    )


def test_many_bad_rows_are_listed_up_to_ten(
    models: dict[str, Path], run_extract: Run, tmp_path: Path
) -> None:
    result = run_extract(models["qwen3"], write_rows(tmp_path / "bad.jsonl", [GOOD] + ["{"] * 30))
    assert " line 2: " in result.last_line
    assert " line 11: " in result.log
    assert " line 12: " not in result.log


def test_an_empty_dataset(models: dict[str, Path], run_extract: Run, tmp_path: Path) -> None:
    result = run_extract(models["qwen3"], write_rows(tmp_path / "empty.jsonl", ["", " "]))
    assert (result.status, result.last_line) == (1, f"DatasetError: {tmp_path}/empty.jsonl has no rows")


def test_no_dataset(models: dict[str, Path], run_extract: Run, tmp_path: Path) -> None:
    result = run_extract(models["qwen3"], tmp_path / "none.jsonl")
    assert (result.status, result.last_line) == (
        1,
        f"FileNotFoundError: [Errno 2] No such file or directory: '{tmp_path}/none.jsonl'",
    )
    assert "is a folder, not a JSONL file" in run_extract(models["qwen3"], tmp_path).last_line


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (
            "2,7",
            "layer id 7 is outside 0..6 (the model has 6 layers; id k is the input of layer k, 6 the last one's output)",
        ),
        ("-1,2", "layer id -1 is outside 0..6"),
        ("5,2", "must be ascending, each id once"),
        ("2,2", "must be ascending, each id once"),
        ("[]", "--layers is empty"),
    ],
)
def test_layer_ids(layers: str, words: str, models: dict[str, Path], dataset: Path, run_extract: Run) -> None:
    result = run_extract(models["qwen3"], dataset, f"--layers={layers}")
    assert result.status == 2
    assert words in result.last_line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--kv-cache-dtype", "fp8"), "the transformers backend has no option --kv-cache-dtype"),
        (("--tensor-parallel-size", "8"), "--tensor-parallel-size 8 needs backend vllm"),
        (("--no-enforce-eager",), "--enforce-eager False needs backend vllm"),
        (("--max-num-seqs", "0"), "--max-num-seqs 0: a whole number above 0 is needed"),
        (("--dtype", "fp8"), "--dtype fp8: the transformers backend computes in bfloat16, float16, float32"),
        (("--max-model-len", "0.02k"), "tokens, longer than the model's limit of 20"),
        (
            ("--max-model-len", "many"),
            "--max-model-len many: a number of tokens is needed, as in 8192 or 32k",
        ),
        (("stray",), "unexpected argument 'stray'"),
        (("--hf-overrides", '{"a": 1}'), "the transformers backend has no option --hf-overrides"),
    ],
)
def test_flags_that_cannot_work(
    flags: tuple[str, ...], words: str, models: dict[str, Path], dataset: Path, run_extract: Run
) -> None:
    result = run_extract(models["qwen3"], dataset, *flags)
    assert result.status in {1, 2}
    assert words in result.last_line


def test_flags_that_change_nothing_pass(models: dict[str, Path], dataset: Path, run_extract: Run) -> None:
    flags = (
        "--enforce-eager",
        "--tensor-parallel-size",
        "1",
        "--gpu-memory-utilization",
        "0.85",
        "--batch-size",
        "2",
    )
    result = run_extract(models["qwen3"], dataset, *flags)
    assert result.status == 0
    assert "--gpu-memory-utilization has no effect on the transformers backend" in result.log


@pytest.mark.parametrize(
    "flags", [("--samples", "0"), ("--layers", "a,b"), ("--backend", "tgi"), ("--verify", "-3")]
)
def test_wrong_usage_exits_2(
    flags: tuple[str, ...], models: dict[str, Path], dataset: Path, run_extract: Run
) -> None:
    with pytest.raises(SystemExit) as raised:
        run_extract(models["qwen3"], dataset, *flags)
    assert raised.value.code == 2


class TestCheckpoint:
    """Damage that vLLM needs a minute to find is found before anything is loaded."""

    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        return save_model("qwen3", tmp_path / "model", torch.float32)

    def shard(self, model: Path) -> Path:
        return sorted(model.glob("*.safetensors"))[2]

    def test_truncated_shard(self, model: Path, dataset: Path, run_extract: Run) -> None:
        shard = self.shard(model)
        shard.write_bytes(shard.read_bytes()[:-100])
        result = run_extract(model, dataset)
        assert result.last_line.startswith(
            f"CheckpointError: {shard}: incomplete metadata, file not fully covered"
        )
        assert ("load_weights", "start") not in result.phases()

    def test_missing_shard(self, model: Path, dataset: Path, run_extract: Run) -> None:
        shard = self.shard(model)
        shard.unlink()
        result = run_extract(model, dataset)
        assert (
            result.last_line
            == f"CheckpointError: Weight files referenced in index but missing: {{'{shard.name}'}}"
        )

    def test_lfs_pointer(self, model: Path, dataset: Path, run_extract: Run) -> None:
        self.shard(model).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        assert "git-lfs pointer" in run_extract(model, dataset).last_line

    def test_missing_weight(self, model: Path, dataset: Path, run_extract: Run) -> None:
        """Every file is whole, and one tensor is in none of them: without a check it would be random."""
        from safetensors.torch import load_file, save_file

        name = "model.layers.3.self_attn.q_proj.weight"
        index_path = model / "model.safetensors.index.json"
        index = json.loads(index_path.read_text())
        shard = model / index["weight_map"].pop(name)
        index_path.write_text(json.dumps(index))
        save_file({key: value for key, value in load_file(shard).items() if key != name}, shard)
        result = run_extract(model, dataset)
        assert result.status == 1
        assert (
            result.last_line
            == f"CheckpointError: Following weights were not initialized from checkpoint: {name}"
        )

    def test_no_model(self, dataset: Path, run_extract: Run, tmp_path: Path) -> None:
        result = run_extract(tmp_path / "nowhere", dataset)
        assert (result.status, result.last_line) == (
            2,
            f"ConfigError: no such model folder: {tmp_path}/nowhere",
        )
        (tmp_path / "bare").mkdir()
        assert "has no config.json" in run_extract(tmp_path / "bare", dataset).last_line

    def test_unknown_architecture(self, model: Path, dataset: Path, run_extract: Run) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "model_type": "never_heard_of"}))
        result = run_extract(model, dataset)
        assert result.status == 2
        assert "ConfigError: transformers cannot build" in result.last_line

    def test_nan_in_the_weights_names_sample_and_layer(
        self, model: Path, dataset: Path, run_extract: Run
    ) -> None:
        poison(model, "model.layers.3.mlp.down_proj.weight")
        result = run_extract(model, dataset)
        assert result.status == 1
        assert result.last_line.startswith(
            "NumericalError: non-finite values in the hidden states of sample "
        )
        assert "first at layer id 5, token 0" in result.last_line
        assert not result.files()


DISK_SCRIPT = """
mount -t tmpfs -o size="$SIZE" tmpfs "$1" || exit 99
shift; copy=$1; shift
"$@"; status=$?
cp -a "$OUTPUT"/. "$copy"/
exit $status
"""


def on_small_disk(size: str, model: Path, dataset: Path, tmp_path: Path, *flags: str) -> Result:
    """Run the step on a small tmpfs in a mount namespace of its own, which ends with it."""
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    copy.mkdir(exist_ok=True)
    command = [sys.executable, str(EXTRACT), *arguments(model, dataset, disk), *flags]
    done = subprocess.run(
        [
            "unshare",
            "--mount",
            "--map-root-user",
            "sh",
            "-c",
            DISK_SCRIPT,
            "sh",
            str(disk),
            str(copy),
            *command,
        ],
        env={"OUTPUT": str(disk), "SIZE": size, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    return Result(done.returncode, done.stderr, copy)


def test_a_full_disk_keeps_every_whole_file(
    models: dict[str, Path], dataset: Path, tmp_path: Path, run_extract: Run
) -> None:
    flags = ("--min-free-gib", "0", "--max-num-seqs", "1", "--disk-wait-s", "0")
    result = on_small_disk("300k", models["qwen3"], dataset, tmp_path, *flags)
    assert result.status == 1
    assert result.last_line.startswith("OSError: [Errno 28] No space left on device")
    assert "what is written is whole and kept" in result.log
    assert 0 < len(result.files()) < 14
    assert not list(result.folder.glob("*.tmp.*"))
    kept = len(result.files())
    again = run_extract(models["qwen3"], dataset, output=result.folder)
    assert again.status == 0
    assert f"{kept} valid files are there, {14 - kept} to do" in again.log


def test_a_write_that_fails_for_want_of_room_leaves_the_former_file(tmp_path: Path) -> None:
    """The kernel's own ENOSPC, without the budget before it."""
    code = (
        "import os, sys\n"
        "from remote_jobs.steps.extraction.samples import write_atomically\n"
        "os.chdir(sys.argv[1])\n"
        "write_atomically('hs_0.safetensors', b'good')\n"
        "try:\n    write_atomically('hs_0.safetensors', b'x' * 10**6)\n"
        "except OSError as error:\n    print(error.errno, sorted(os.listdir('.')), open('hs_0.safetensors').read())\n"
    )
    script = 'mount -t tmpfs -o size=100k tmpfs "$1" && "$2" -c "$3" "$1"'
    done = subprocess.run(
        [
            "unshare",
            "--mount",
            "--map-root-user",
            "sh",
            "-c",
            script,
            "sh",
            str(tmp_path),
            sys.executable,
            code,
        ],
        cwd=EXTRACT.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "28 ['hs_0.safetensors'] good\n", done.stderr


def test_a_full_disk_pauses_until_room_is_made(
    models: dict[str, Path], dataset: Path, tmp_path: Path, run_extract: Run
) -> None:
    """The reserve is above what is free: no file is written; when the demand goes, the run goes on."""
    from remote_jobs.steps.extraction.disk import DiskBudget, free_bytes
    from remote_jobs.steps.extraction.progress import Progress

    said: list[str] = []
    paused = threading.Event()

    class Spoken(Progress):
        def say(self, text: str) -> None:
            said.append(text)
            paused.set()

    budget = DiskBudget(str(tmp_path), free_bytes(str(tmp_path)) + 10**9, 3.0, Spoken(), lambda: None)
    waiting = threading.Thread(target=budget.wait_for, args=(1000,))
    waiting.start()
    assert paused.wait(20)
    assert "Disk: paused" in said[0]
    budget._reserve_bytes = 0
    waiting.join(20)
    assert not waiting.is_alive()
    assert "room was made" in said[-1]


def test_a_pause_ends_with_enospc(models: dict[str, Path], dataset: Path, run_extract: Run) -> None:
    result = run_extract(models["qwen3"], dataset, "--min-free-gib", "1000000", "--disk-wait-s", "0.1")
    assert result.status == 1
    assert "The run will pause when it is full" in result.log
    assert "Disk: paused" in result.log
    assert result.last_line.startswith("OSError: [Errno 28] No space left on device")


def test_prompts_file_of_ten_thousand_rows_is_checked_quickly(
    models: dict[str, Path], run_extract: Run, tmp_path: Path
) -> None:
    rows: list[Any] = [{"input_ids": [7] * 200, "loss_mask": [1] * 200} for _ in range(10_000)]
    result = run_extract(models["qwen3"], write_rows(tmp_path / "rows.jsonl", [*rows, *prompts(1), "{"]))
    assert " line 10002: " in result.last_line
