"""Sample files: one safetensors file per dataset row, complete or not there.

`hs_<row>.safetensors` (the name speculators' trainer looks for) holds `hidden_states` [seq, L, H] in the model's dtype and
`token_ids` int64 [seq]. A file is written under a temporary name in the same folder, fsynced and renamed, so a name that
exists is a whole file; it is still checked (size, shape, token ids) before it counts, since disks and people do things.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from remote_jobs.steps.extraction.dataset import Row
from remote_jobs.steps.extraction.errors import ConfigError, NumericalError
from remote_jobs.steps.extraction.finite import file_is_finite, tensor_is_finite
from remote_jobs.steps.extraction.parts import Part
from remote_jobs.steps.extraction.sample_file import (
    SAFETENSORS_DTYPES,
    DamagedSampleError,
    fsync_folder,
    read_sample_file,
    write_atomically,
)

SAMPLE_NAME = re.compile(r"hs_(\d+)\.safetensors")
TEMPORARY_NAME = re.compile(
    r"(hs_\d+\.safetensors|manifest\.json|samples\.jsonl|range-\d+of\d+\.json)\.tmp\.\d+"
)
LOCK_NAME = ".extract.lock"
SCRATCH_NAME = ".scratch"
SHARERS = "ranges of a split"
WRITER_THREADS = 8
WRITES_IN_FLIGHT = 32
LOOK_EVERY_S = 0.2
IN_MEMORY_BYTES = 2 * 1024**3
"""Writes on their way: fsync waits for the disk, so several at once are what fills it; states still in memory are
bounded in bytes too (one sample of a 7168-wide model has 117 MB)."""


@dataclass(frozen=True)
class Shape:
    """What every sample file of a run must look like: L layers, hidden size H, dtype of the states."""

    num_layers: int
    hidden_size: int
    dtype: str  # bfloat16 | float16 | float32

    def sample_bytes(self, num_tokens: int) -> int:
        """Size of a sample's file in bytes, header apart (states plus int64 token ids)."""
        width = 4 if self.dtype == "float32" else 2
        return num_tokens * (self.num_layers * self.hidden_size * width + 8)


def sample_path(folder: str, index: int) -> str:
    """Path of the sample file of dataset row `index`."""
    return os.path.join(folder, f"hs_{index}.safetensors")


# ------------------------------------------------------------------------------------------------------------ checking


def why_invalid(path: str, token_ids: npt.NDArray[np.int32] | None, shape: Shape | None) -> str | None:
    """Say what is wrong with a sample file; None when it is whole and belongs to these token ids."""
    try:
        sample = read_sample_file(path)
    except FileNotFoundError:
        return "it is not there"
    except DamagedSampleError as error:
        return str(error)
    found = np.frombuffer(sample.token_ids, dtype="<i8")
    if shape is not None:
        wanted = (
            SAFETENSORS_DTYPES.get(shape.dtype, shape.dtype),
            (len(found), shape.num_layers, shape.hidden_size),
        )
        if (sample.dtype, sample.shape) != wanted:
            return f"its states are {sample.dtype} {list(sample.shape)}, not {wanted[0]} {list(wanted[1])}"
    if token_ids is not None and not np.array_equal(found, token_ids):
        return "its token ids are those of another prompt"
    return None


def valid_samples(folder: str, rows: Sequence[Row], shape: Shape) -> tuple[set[int], dict[str, str]]:
    """Indices of the rows whose file is valid, and the reasons why other existing files are not (path -> reason)."""
    valid: set[int] = set()
    damaged: dict[str, str] = {}
    for row in rows:
        path = sample_path(folder, row.index)
        if not os.path.exists(path):
            continue
        reason = why_invalid(path, row.token_ids, shape)
        if reason is None:
            valid.add(row.index)
        else:
            damaged[path] = reason
    return valid, damaged


def sample_files(folder: str) -> list[str]:
    """Paths of all files named like samples in a folder."""
    return [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if SAMPLE_NAME.fullmatch(name)]


# ------------------------------------------------------------------------------------------------------- output folder


@contextlib.contextmanager
def output_folder(path: str, part: Part | None = None) -> Iterator[str]:
    """Make and lock the output folder, and clear what a killed run left; yields its absolute path.

    A whole run has the folder for itself; the ranges of a split share it, each range once. The locks are POSIX record
    locks: they end with this process and, unlike flock, are not inherited by engine processes that may outlive it.

    Raises:
        ConfigError: another extract writes to this folder.
        OSError: the folder cannot be made or written.
    """
    folder = os.path.abspath(os.path.expanduser(path))
    os.makedirs(folder, exist_ok=True)
    with contextlib.ExitStack() as locks:
        if part is None:
            locks.enter_context(_locked(folder, LOCK_NAME, str(os.getpid())))
            clear_leftovers(folder)
        else:
            locks.enter_context(_locked(folder, LOCK_NAME, SHARERS, shared=True))
            locks.enter_context(_locked(folder, f"{LOCK_NAME}.{part}", str(os.getpid())))
        scratch = scratch_folder(folder, part)
        shutil.rmtree(scratch, ignore_errors=True)
        os.makedirs(scratch, exist_ok=True)
        try:
            yield folder
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def scratch_folder(folder: str, part: Part | None) -> str:
    """Where a run keeps what is not finished."""
    return os.path.join(folder, SCRATCH_NAME if part is None else f"{SCRATCH_NAME}-{part}")


@contextlib.contextmanager
def _locked(folder: str, name: str, owner: str, *, shared: bool = False) -> Iterator[None]:
    """Hold a lock file of the folder; ``owner`` is what another run is told."""
    lock = os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.lockf(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in {errno.EACCES, errno.EAGAIN}:
                found = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
                whose = found if found == SHARERS else f"pid {found}"
                raise ConfigError(f"another extract ({whose}) is writing to {folder}") from None
            # No locks on this file system (some NFS mounts): the supervisor already runs one attempt at a time.
        os.ftruncate(lock, 0)
        os.pwrite(lock, owner.encode(), 0)
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def one_at_a_time(folder: str) -> Iterator[None]:
    """For the moments in which ranges read and write what they share: waits until no other is inside."""
    lock = os.open(os.path.join(folder, f"{LOCK_NAME}.shared"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: they write the same bytes
            fcntl.lockf(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def clear_leftovers(folder: str, rows: range | None = None) -> None:
    """Remove temporary files and scratch folders of runs that died. Only under the folder's lock.

    ``rows``: only the temporary samples of these rows, for a range whose neighbours are at work.
    """
    for name in os.listdir(folder):
        found = TEMPORARY_NAME.fullmatch(name)
        row = SAMPLE_NAME.fullmatch(found[1]) if found else None
        if found and (rows is None or (row and int(row[1]) in rows)):
            os.unlink(os.path.join(folder, name))
        elif rows is None and (name == SCRATCH_NAME or name.startswith(f"{SCRATCH_NAME}-")):
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


# ------------------------------------------------------------------------------------------------------------- writing


def check_finite(states: Any, row: Row, layer_ids: Sequence[int]) -> None:
    """Refuse NaN and infinity in states, a tensor [seq, L, H].

    Raises:
        NumericalError: names the sample, the first layer and token, and the counts.
    """
    finite = states.isfinite()
    if bool(finite.all()):
        return
    bad = ~finite
    layer = int(bad.any(dim=2).any(dim=0).nonzero()[0])
    token = int(bad[:, layer].any(dim=1).nonzero()[0])
    nan = int(states.isnan().sum())
    raise NumericalError(
        f"non-finite values in the hidden states of {row.named()}: {nan} NaN, {int(bad.sum()) - nan} infinite, "
        f"first at layer id {layer_ids[layer]}, token {token}",
        hint="files written so far are kept; a damaged checkpoint or a dtype with too little range (float16) is the usual cause",
    )


def write_sample(path: str, states: Any, row: Row, layer_ids: Sequence[int]) -> None:
    """Check and store one sample. `states`: tensor [seq, L, H], or the path of a file that a backend already wrote.

    The file itself is durable on return; its name is after an fsync of the folder, which the caller does for many at once.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import save

    if isinstance(states, str):
        reason = why_invalid(states, row.token_ids, None)
        if reason is not None:
            raise NumericalError(f"the engine's file for {row.named()} cannot be used: {reason} ({states})")
        if not file_is_finite(states):
            with safe_open(states, framework="pt") as stream:
                check_finite(stream.get_tensor("hidden_states"), row, layer_ids)
        _adopt(states, path)
        return
    if states.shape[0] != len(row.token_ids):
        raise NumericalError(
            f"{row.named()}: {len(row.token_ids)} tokens went in, states of {states.shape[0]} came out"
        )
    if not tensor_is_finite(states):
        check_finite(states, row, layer_ids)
    token_ids = torch.from_numpy(row.token_ids.astype(np.int64))
    # Our own write, not save_file: its errors hide errno, and the file has to be fsynced before the rename.
    content = save({"hidden_states": states.contiguous(), "token_ids": token_ids})
    write_atomically(path, content, sync_folder=False)


def _adopt(source: str, path: str) -> None:
    """Take over a finished file: rename on one file system, else copy under a temporary name and rename."""
    temporary = f"{path}.tmp.{os.getpid()}"
    try:
        try:
            os.rename(source, temporary)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            shutil.copyfile(source, temporary)
            os.unlink(source)
        os.chmod(temporary, 0o600)
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


class SampleWriter:
    """Writes samples in a few threads, so that neither checks nor fsync hold up the device; bounded, errors are not lost."""

    def __init__(self, folder: str, layer_ids: Sequence[int]) -> None:
        self._folder = folder
        self._layer_ids = tuple(layer_ids)
        self._pool = ThreadPoolExecutor(WRITER_THREADS, thread_name_prefix="sample-writer")
        self._pending: dict[Future[None], tuple[Row, int]] = {}
        self._looked_at = 0.0

    def submit(self, row: Row, states: Any) -> list[Row]:
        """Queue one sample; returns the rows finished meanwhile. Raises what a former write raised."""
        held = 0 if isinstance(states, str) else states.numel() * states.element_size()
        done = self.finished() if time.monotonic() - self._looked_at >= LOOK_EVERY_S else []
        while self._pending and (
            len(self._pending) >= WRITES_IN_FLIGHT
            or sum(size for _, size in self._pending.values()) + held > IN_MEMORY_BYTES
        ):
            wait(self._pending, return_when=FIRST_COMPLETED)
            done += self.finished()
        path = sample_path(self._folder, row.index)
        future = self._pool.submit(write_sample, path, states, row, self._layer_ids)
        self._pending[future] = (row, held)
        return done

    def finished(self) -> list[Row]:
        """Rows whose file is complete and durable since the last call; raises the first error of a write."""
        self._looked_at = time.monotonic()
        done = [future for future in self._pending if future.done()]
        rows = [self._pending.pop(future)[0] for future in done]
        if done:
            fsync_folder(self._folder)
        for future in done:
            future.result()
        return rows

    def drain(self) -> list[Row]:
        """Wait for all writes; returns the rows finished, raises the first error."""
        wait(self._pending)
        return self.finished()

    def close(self) -> None:
        """Let running writes finish, drop the threads. Never raises for a failed write."""
        self._pool.shutdown(wait=True)
