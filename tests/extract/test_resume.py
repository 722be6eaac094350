"""Nothing good is lost and nothing bad is kept: kills, signals, damaged files, changed inputs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from remote_jobs.logs import explain_bytes
from tests.extract.conftest import Result, prompts, read_sample, save_model, write_rows

Run = Callable[..., Result]
Start = Callable[..., tuple[subprocess.Popen[str], Path]]
DEADLINE_S = 60.0


def wait_for_files(process: subprocess.Popen[str], folder: Path, number: int) -> None:
    """Wait until so many samples are complete while the process still runs."""
    deadline = time.monotonic() + DEADLINE_S
    while len(list(folder.glob("hs_*.safetensors"))) < number:
        assert process.poll() is None, f"ended early: {process.communicate()[1][-2000:]}"
        assert time.monotonic() < deadline, f"no {number} files in {folder} within {DEADLINE_S} s"
        time.sleep(0.01)


@pytest.fixture
def many(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "many.jsonl", list(prompts(600, longest=200)))


def test_sigkill_half_way_then_resume_makes_only_what_is_missing(
    models: dict[str, Path], many: Path, start_extract: Start, run_extract: Run
) -> None:
    process, folder = start_extract(models["qwen3"], many, "--max-num-seqs", "1")
    wait_for_files(process, folder, 20)
    process.send_signal(signal.SIGKILL)
    log = process.communicate(timeout=DEADLINE_S)[1]
    assert process.returncode == -signal.SIGKILL
    assert explain_bytes(log.encode(), process.returncode)["failure"]["class"] == "killed"
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("hs_*.safetensors")}
    assert 20 <= len(before) < 600
    (folder / "hs_590.safetensors.tmp.99999").write_bytes(b"half a file")

    result = run_extract(models["qwen3"], many, "--verify", "3")

    assert result.status == 0
    assert f"{len(before)} valid files are there, {600 - len(before)} to do" in result.log
    assert len(result.files()) == 600
    after = {path.name: path.stat().st_mtime_ns for path in result.files().values()}
    assert {name: after[name] for name in before} == before
    assert not list(folder.glob("*.tmp.*"))
    assert f"{len(before)}/600" in result.log, "the bar starts at what was there"


def test_a_second_run_is_refused_and_sigterm_finishes_the_file_in_hand(
    models: dict[str, Path], many: Path, start_extract: Start, run_extract: Run
) -> None:
    process, folder = start_extract(models["qwen3"], many, "--max-num-seqs", "1")
    wait_for_files(process, folder, 3)
    second = run_extract(models["qwen3"], many)
    assert second.status == 2
    assert second.last_line == f"ConfigError: another extract (pid {process.pid}) is writing to {folder}"

    process.send_signal(signal.SIGTERM)
    log = process.communicate(timeout=DEADLINE_S)[1]
    assert process.returncode == 143
    assert "extract: stopped by SIGTERM" in log.rstrip().rsplit("\n", 1)[-1]
    assert not list(folder.glob("*.tmp.*"))
    assert len(list(folder.glob("hs_*.safetensors"))) < 600


def test_a_finished_folder_is_done_without_loading(
    models: dict[str, Path], dataset: Path, run_extract: Run
) -> None:
    run_extract(models["qwen3"], dataset)
    again = run_extract(models["qwen3"], dataset)
    assert again.status == 0
    assert ("load_weights", "start") not in again.phases()
    assert again.manifest()["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: b"\xff" * len(data),
        lambda data: data + b"x",
        lambda data: data[:9] + b"#" + data[10:],
    ],
    ids=["one byte short", "half", "empty", "garbage", "one byte more", "header"],
)
def test_a_damaged_file_is_made_again(
    damage: Callable[[bytes], bytes], models: dict[str, Path], dataset: Path, run_extract: Run
) -> None:
    first = run_extract(models["llama"], dataset)
    good = read_sample(first.files()[4])["hidden_states"]
    first.files()[4].write_bytes(damage(first.files()[4].read_bytes()))

    again = run_extract(models["llama"], dataset)

    assert again.status == 0
    assert "hs_4.safetensors is made again: " in again.log
    assert "13 valid files are there, 1 to do" in again.log
    torch.testing.assert_close(read_sample(again.files()[4])["hidden_states"], good, rtol=1e-4, atol=1e-4)


def test_a_file_of_another_prompt_is_made_again(
    models: dict[str, Path], dataset: Path, run_extract: Run
) -> None:
    first = run_extract(models["llama"], dataset)
    os.replace(first.files()[2], first.folder / "hs_4.safetensors")
    again = run_extract(models["llama"], dataset)
    assert again.status == 0
    assert "hs_4.safetensors is made again: its token ids are those of another prompt" in again.log
    rows = [json.loads(line) for line in dataset.read_text().splitlines()]
    for index, path in again.files().items():
        assert read_sample(path)["token_ids"].tolist() == rows[index]["input_ids"]


def test_changed_inputs_are_refused(
    models: dict[str, Path], bf16_model: Path, dataset: Path, run_extract: Run, tmp_path: Path
) -> None:
    first = run_extract(models["qwen3"], dataset)
    untouched = {
        path: path.read_bytes()
        for path in first.folder.glob("*")
        if path.is_file() and not path.name.startswith(".")
    }
    other_rows = write_rows(
        tmp_path / "other.jsonl", [*prompts(5), *[{**row, "id": None} for row in prompts(9, seed=5)]]
    )
    fewer_rows = write_rows(tmp_path / "fewer.jsonl", list(prompts(5)))

    for model, rows, flags, words in [
        (models["qwen3"], dataset, ("--layers", "1,2,5,6"), "layer ids 1,2,5,6 asked for, 0,2,5,6 found"),
        (models["llama"], dataset, (), "the model has changed"),
        (models["qwen3"], dataset, ("--dtype", "bfloat16"), "dtype bfloat16 asked for, float32 found"),
        (models["qwen3"], other_rows, (), "the prompts of the first 14 rows have changed"),
        (models["qwen3"], fewer_rows, (), "the dataset had at least 14 rows, now 5"),
    ]:
        result = run_extract(model, rows, *flags)
        assert result.status == 2
        assert words in result.last_line
        assert "--overwrite" in result.log
    for path, data in untouched.items():
        assert path.read_bytes() == data


def test_other_weights_in_the_same_folder_are_noticed(
    dataset: Path, run_extract: Run, tmp_path: Path
) -> None:
    model = save_model("llama", tmp_path / "model", torch.float32)
    run_extract(model, dataset)
    shard = next(model.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(data)
    assert "the model has changed" in run_extract(model, dataset).last_line


def test_overwrite_starts_again(models: dict[str, Path], dataset: Path, run_extract: Run) -> None:
    run_extract(models["qwen3"], dataset)
    again = run_extract(models["qwen3"], dataset, "--layers", "1,2", "--overwrite")
    assert again.status == 0
    assert {read_sample(path)["hidden_states"].shape[1] for path in again.files().values()} == {2}


def test_files_without_a_manifest_are_not_taken_over(
    models: dict[str, Path], dataset: Path, run_extract: Run
) -> None:
    first = run_extract(models["qwen3"], dataset)
    (first.folder / "manifest.json").unlink()
    again = run_extract(models["qwen3"], dataset)
    assert again.status == 2
    assert "holds 14 sample files and no manifest.json" in again.last_line


def test_a_grown_dataset_extends_the_folder(
    models: dict[str, Path], run_extract: Run, tmp_path: Path
) -> None:
    rows = list(prompts(9))
    assert run_extract(models["llama"], write_rows(tmp_path / "rows.jsonl", list(rows[:6]))).status == 0
    more = run_extract(models["llama"], write_rows(tmp_path / "rows.jsonl", list(rows)))
    assert more.status == 0
    assert "6 valid files are there, 3 to do" in more.log
    assert more.manifest()["samples"] == {"expected": 9, "valid": 9}
