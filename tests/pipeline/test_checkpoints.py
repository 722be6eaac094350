"""Which checkpoint a resumed training starts from, whatever a kill left in the folder. No torch needed."""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path

import pytest

from remote_jobs.steps import checkpoints


def save(folder: Path, epoch: int, local_step: int, global_step: int, *, ours: bool = True) -> Path:
    """A whole checkpoint as speculators writes it (tiny)."""
    folder.mkdir(parents=True)
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    (folder / "config.json").write_text("{}")
    with zipfile.ZipFile(folder / "optimizer_state_dict.pt", "w") as archive:
        archive.writestr("data", "x" * 100)
    state = {"epoch": epoch, "local_step": local_step, "global_step": global_step}
    (folder / checkpoints.STATE).write_text(json.dumps(state))
    if ours:
        checkpoints.mark_complete(folder)
    return folder


def recovered(path: Path) -> tuple[str, int] | None:
    best, _ = checkpoints.recover(path)
    return None if best is None else (best.path.name, best.global_step)


def test_nothing_there(tmp_path: Path) -> None:
    assert recovered(tmp_path / "none") is None
    assert recovered(tmp_path) is None


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("damage", ["model.safetensors", "optimizer_state_dict.pt", checkpoints.STATE])
def test_a_cut_checkpoint_is_passed_over_and_kept_aside(tmp_path: Path, damage: str, *, ours: bool) -> None:
    save(tmp_path / "0", 0, 0, 10)
    broken = save(tmp_path / "1", 1, 4, 14, ours=ours)
    content = (broken / damage).read_bytes()
    (broken / damage).write_bytes(content[: len(content) // 2])
    assert recovered(tmp_path) == ("0", 10)
    assert (tmp_path / "broken-1" / damage).exists()


def test_a_kill_while_overwriting_brings_the_former_version_back(tmp_path: Path) -> None:
    save(tmp_path / f"{checkpoints.PREVIOUS}0", 0, 5, 5)
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "model.safetensors").write_bytes(b"half")
    assert recovered(tmp_path) == ("0", 5)
    assert not list(tmp_path.glob(f"{checkpoints.PREVIOUS}*"))


def test_a_kill_before_the_former_version_was_removed_keeps_the_new_one(tmp_path: Path) -> None:
    save(tmp_path / f"{checkpoints.PREVIOUS}0", 0, 5, 5)
    save(tmp_path / "0", 0, 0, 10)
    assert recovered(tmp_path) == ("0", 10)
    assert not list(tmp_path.glob(f"{checkpoints.PREVIOUS}*"))


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """speculators never picks `interrupted/` up by itself, and renamed it would skip the rest of the epoch."""
    save(tmp_path / "0", 0, 0, 10)
    save(tmp_path / "1", 1, 3, 13)
    save(tmp_path / "interrupted", 1, 6, 16)
    assert recovered(tmp_path) == ("1", 16)
    assert json.loads((tmp_path / "1" / checkpoints.STATE).read_text())["local_step"] == 6
    assert not (tmp_path / "interrupted").exists()


def test_an_old_interrupted_run_does_not_take_training_back(tmp_path: Path) -> None:
    save(tmp_path / "interrupted", 0, 6, 6)
    save(tmp_path / "0", 0, 0, 10)
    assert recovered(tmp_path) == ("0", 10)
    assert not (tmp_path / "interrupted").exists()


def test_an_epochs_end_is_further_than_any_step_of_it(tmp_path: Path) -> None:
    early = checkpoints.read(save(tmp_path / "0", 0, 9, 9))
    end = checkpoints.read(save(tmp_path / "1", 0, 0, 10))
    assert early is not None
    assert end is not None
    assert early.position < end.position
