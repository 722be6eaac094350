"""Checkpoints of speculators' trainer on the disk: which are whole, and which one a resumed run has to start from.

Layout (speculators 0.9): `<save_path>/<epoch>/` with model.safetensors, optimizer_state_dict.pt, scheduler_state_dict.pt,
training_state.json {epoch, local_step, global_step}; local_step 0 means the epoch's end. `interrupted/` is what a stop
signal saved. Beside them, ours: `complete.json` inside a whole checkpoint (sizes of its files), `previous-<epoch>/` while
a newer one of that epoch is being written, `finished.json` when training ended by itself. Must not import torch.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from remote_jobs.steps.extraction.errors import CheckpointError
from remote_jobs.steps.extraction.model import check_shard
from remote_jobs.steps.extraction.sample_file import fsync_folder

COMPLETE = "complete.json"
FINISHED = "finished.json"
PREVIOUS = "previous-"
BROKEN = "broken-"
INTERRUPTED = "interrupted"
STATE = "training_state.json"
LOCK = ".trainer.lock"
"""Held by the trainer for its life: it may outlive train.py while it saves."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint and the position it was saved at."""

    path: Path
    epoch: int
    local_step: int  # steps done in this epoch; 0: all of them
    global_step: int

    @property
    def position(self) -> tuple[int, float]:
        """Orders checkpoints by progress."""
        return (self.epoch, float("inf") if self.local_step == 0 else self.local_step)


def hold_lock(save_path: Path, wait_s: float) -> int | None:
    """Take the trainer's lock; returns its descriptor, or None when another trainer held it all the time.

    A POSIX record lock: it ends with its process and is not inherited by loaders and workers.
    """
    save_path.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(save_path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                return None
            time.sleep(0.1)


def mark_complete(folder: Path) -> None:
    """Write complete.json: the last act of saving, after everything in the folder is on the disk."""
    sizes = {}
    for path in sorted(folder.iterdir()):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            sizes[path.name] = path.stat().st_size
    marker = folder / COMPLETE
    temporary = folder / f"{COMPLETE}.tmp"
    temporary.write_text(json.dumps({"files": sizes}))
    temporary.replace(marker)
    fsync_folder(str(folder))


def why_incomplete(folder: Path) -> str | None:
    """Say what is missing of a checkpoint; None when it is whole."""
    marker = folder / COMPLETE
    if marker.exists():
        try:
            sizes = json.loads(marker.read_text())["files"]
        except (ValueError, KeyError):
            return f"{COMPLETE} is damaged"
        for name, size in sizes.items():
            path = folder / name
            if not path.exists() or path.stat().st_size != size:
                return f"{name} is missing or has another size"
        return None
    # Saved without us: judged by its files.
    try:
        check_shard(str(folder / "model.safetensors"))
        json.loads((folder / "config.json").read_text())
        if not zipfile.is_zipfile(folder / "optimizer_state_dict.pt"):
            return "optimizer_state_dict.pt is cut"
        json.loads((folder / STATE).read_text())
    except (OSError, ValueError, CheckpointError) as error:
        return str(error)
    return None


def read(folder: Path) -> Checkpoint | None:
    """The checkpoint in a folder, or None when it is not whole or does not know its position."""
    if not folder.is_dir() or folder.is_symlink() or why_incomplete(folder) is not None:
        return None
    try:
        state = json.loads((folder / STATE).read_text())
        return Checkpoint(folder, int(state["epoch"]), int(state["local_step"]), int(state["global_step"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def epochs(save_path: Path) -> list[Path]:
    """Folders named by an epoch, ascending."""
    if not save_path.is_dir():
        return []
    found = [
        path
        for path in save_path.iterdir()
        if path.name.isdigit() and path.is_dir() and not path.is_symlink()
    ]
    return sorted(found, key=lambda path: int(path.name))


def recover(save_path: Path) -> tuple[Checkpoint | None, list[str]]:
    """Make the folder such that speculators resumes from the last whole checkpoint; returns it, and what was done.

    Nothing is deleted that could be of use: a broken checkpoint is moved aside as `broken-<epoch>`.
    """
    notes: list[str] = []
    if not save_path.is_dir():
        return None, notes
    for former in sorted(save_path.glob(f"{PREVIOUS}*")):
        name = former.name[len(PREVIOUS) :]
        newer = save_path / name
        if read(newer) is not None or read(former) is None:
            shutil.rmtree(former)
            continue
        shutil.rmtree(newer, ignore_errors=True)
        former.rename(newer)
        notes.append(f"a kill cut the saving of checkpoint {name}: its former version is back")
    for folder in epochs(save_path):
        if read(folder) is None:
            aside = save_path / f"{BROKEN}{folder.name}"
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            notes.append(
                f"checkpoint {folder.name} is not whole ({why_incomplete(aside)}): moved to {aside.name}"
            )
    found = [checkpoint for checkpoint in map(read, epochs(save_path)) if checkpoint is not None]
    best = max(found, key=lambda checkpoint: checkpoint.position, default=None)
    stopped = read(save_path / INTERRUPTED)
    if stopped is not None and (best is None or stopped.position > best.position):
        target = save_path / str(stopped.epoch)
        shutil.rmtree(target, ignore_errors=True)
        stopped.path.rename(target)
        best = Checkpoint(target, stopped.epoch, stopped.local_step, stopped.global_step)
        notes.append(
            f"going on from the interrupted run's checkpoint: epoch {best.epoch + 1}, step {best.global_step}"
        )
    elif (save_path / INTERRUPTED).is_dir():
        shutil.rmtree(save_path / INTERRUPTED)
    return best, notes
