"""Ranges of one extraction in one folder give what one run gives, and the merge proves it before it says so."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remote_jobs.steps.extraction.parts import Part
from tests.extract.conftest import EXTRACT, Result, arguments, prompts, read_sample, write_rows

Run = Callable[..., Result]
TIMES = ("created_at", "updated_at")


def without_times(manifest: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in manifest.items() if key not in TIMES}


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60), st.integers(1, 12))
def test_ranges_are_every_row_once_and_about_as_long_as_each_other(tokens: list[int], count: int) -> None:
    bounds = [Part(index, count).bounds(tokens) for index in range(1, count + 1)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == len(tokens)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(bounds))
    fair = sum(tokens) / count
    assert all(sum(tokens[first:end]) <= fair + max(tokens) for first, end in bounds)


def test_ranges_at_once_then_merge_give_what_one_run_gives(
    models: dict[str, Path], dataset: Path, run_extract: Run, tmp_path: Path
) -> None:
    model, whole = models["qwen3"], tmp_path / "whole"
    one = run_extract(model, dataset, "--verify", "2", output=whole)
    folder = tmp_path / "in ranges"
    ranges = [
        subprocess.Popen(
            [sys.executable, str(EXTRACT), *arguments(model, dataset, folder), "--verify", "1", "--range", f"{index}/3"],
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in (1, 2, 3)
    ]
    logs = [process.communicate(timeout=240)[1] for process in ranges]
    assert [process.returncode for process in ranges] == [0, 0, 0], logs
    assert not json.loads((folder / "manifest.json").read_text())["complete"], "only the merge says so"

    merged = run_extract(model, dataset, "--merge", "3", output=folder)

    assert merged.status == 0, merged.log
    assert ("merge", "done") in merged.phases()
    assert set(merged.files()) == set(one.files()) == set(range(14))
    for row, path in one.files().items():
        mine, theirs = read_sample(merged.files()[row]), read_sample(path)
        assert torch.equal(mine["token_ids"], theirs["token_ids"])
        assert mine["hidden_states"].dtype == theirs["hidden_states"].dtype
        torch.testing.assert_close(mine["hidden_states"], theirs["hidden_states"], rtol=1e-4, atol=1e-5)
    first, second = without_times(merged.manifest()), without_times(one.manifest())
    assert first.pop("verified")["samples"] == 3
    assert second.pop("verified")["samples"] == 2
    assert first == second
    assert (folder / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()
    left = {path.name for path in folder.iterdir() if not path.name.startswith(".extract.lock")}
    assert left == {path.name for path in whole.iterdir() if not path.name.startswith(".extract.lock")}
    assert run_extract(model, dataset, "--range", "1/2", output=folder).status == 0
    again = run_extract(model, dataset, output=folder)
    assert "14 valid files are there, 0 to do" in again.log, "a whole run takes the folder over"
    assert not list(folder.glob("range-*"))
    assert run_extract(model, dataset, "--merge", "3", output=folder).status == 0, "merging twice changes nothing"


@pytest.fixture
def ranges(models: dict[str, Path], dataset: Path, run_extract: Run, tmp_path: Path) -> Path:
    """A folder with both ranges of two done."""
    folder = tmp_path / "ranges"
    for index in (1, 2):
        assert run_extract(models["llama"], dataset, "--range", f"{index}/2", output=folder).status == 0
    return folder


def test_the_merge_refuses_gaps_overlaps_and_strangers(
    models: dict[str, Path], dataset: Path, run_extract: Run, ranges: Path, tmp_path: Path
) -> None:
    model = models["llama"]

    def merge_of(change: Callable[[Path], object], count: str = "2") -> Result:
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(ranges, folder)
        change(folder)
        result = run_extract(model, dataset, "--merge", count, output=folder)
        assert result.status != 0, result.log
        assert not json.loads((folder / "manifest.json").read_text())["complete"]
        return result

    def edit(name: str, **changes: Any) -> Callable[[Path], object]:
        def change(folder: Path) -> None:
            record = json.loads((folder / name).read_text())
            for key, value in changes.items():
                record[key] = {**record[key], **value} if isinstance(value, dict) else value
            (folder / name).write_text(json.dumps(record))

        return change

    assert "row 3 is missing" in merge_of(lambda f: (f / "hs_3.safetensors").unlink()).last_line
    assert "lacks 1 range of 2: 2/2" in merge_of(lambda f: (f / "range-2of2.json").unlink()).last_line
    assert "no record of a range" in merge_of(lambda _: None, count="3").last_line
    end = json.loads((ranges / "range-1of2.json").read_text())["range"]["end"]
    gap = merge_of(edit("range-2of2.json", range={"first": end + 1}))
    assert f"rows {end} to {end} are in no range" in gap.last_line
    overlap = merge_of(edit("range-2of2.json", range={"first": end - 1}))
    assert f"rows {end - 1} to {end - 1} are in two ranges" in overlap.last_line
    assert "its dtype differs" in merge_of(edit("range-2of2.json", dtype="bfloat16")).last_line
    assert "its model differs" in merge_of(edit("range-2of2.json", model_sha256="x")).last_line
    assert "did not finish: 2/2" in merge_of(edit("range-2of2.json", complete=False)).last_line
    short = merge_of(lambda f: (f / "hs_5.safetensors").write_bytes((f / "hs_5.safetensors").read_bytes()[:-1]))
    assert "row 5: it has" in short.last_line
    swapped = merge_of(lambda f: shutil.copyfile(f / "hs_0.safetensors", f / "hs_1.safetensors"))
    assert "hold other token ids than the prompts" in swapped.last_line


def test_another_split_goes_on_from_what_is_there_and_other_data_is_refused(
    models: dict[str, Path], dataset: Path, run_extract: Run, ranges: Path, tmp_path: Path
) -> None:
    model = models["llama"]
    (ranges / "hs_13.safetensors").unlink()
    (ranges / "hs_13.safetensors.tmp.99999").write_bytes(b"half a file")
    (ranges / "hs_0.safetensors.tmp.99999").write_bytes(b"a neighbour is at work on this one")
    last = run_extract(model, dataset, "--range", "3/3", output=ranges)
    assert "1 to do" in last.log, last.log
    assert not (ranges / "hs_13.safetensors.tmp.99999").exists()
    assert (ranges / "hs_0.safetensors.tmp.99999").exists()
    for index in ("1/3", "2/3"):
        assert "0 to do" in run_extract(model, dataset, "--range", index, output=ranges).log
    other = write_rows(tmp_path / "other.jsonl", list(prompts(14, seed=9)))
    refused = run_extract(model, other, "--range", "1/3", output=ranges)
    assert refused.status == 2
    assert "belongs to another extraction" in refused.last_line
    assert run_extract(model, dataset, "--merge", "3", output=ranges).status == 0
    assert not list(ranges.glob("range-*")), "the records of the split given up are gone as well"

    taken_over = run_extract(model, other, "--range", "1/2", "--overwrite", output=ranges)
    assert taken_over.status == 0, taken_over.log
    second = run_extract(model, other, "--range", "2/2", "--overwrite", output=ranges)
    assert second.status == 0, second.log
    assert run_extract(model, other, "--merge", "2", output=ranges).status == 0, "the second kept the first one's work"


def test_the_range_comes_from_an_array_too_and_nonsense_is_refused(
    models: dict[str, Path], run_extract: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = write_rows(tmp_path / "few.jsonl", list(prompts(2)))
    monkeypatch.setenv("ORCH_SPLIT_COUNT", "5")
    for index in range(1, 6):
        monkeypatch.setenv("ORCH_SPLIT_INDEX", str(index))
        assert run_extract(models["llama"], few, "--verify", "1").status == 0, "an empty range is no failure"
    monkeypatch.setenv("ORCH_SPLIT_INDEX", "6")
    wrong = run_extract(models["llama"], few)
    assert wrong.status == 2
    assert "ORCH_SPLIT_INDEX=6" in wrong.last_line
    monkeypatch.setenv("ORCH_SPLIT_INDEX", "1")
    assert run_extract(models["llama"], few, "--merge", "5").status == 0
