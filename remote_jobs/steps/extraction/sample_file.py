"""The bytes of one sample file, and files whose name always stands for a whole file. Standard library only.

Kept apart from samples.py because the merge of a split run reads the same files on machines without numpy.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass

MAX_HEADER_BYTES = 100 * 1000 * 1000
"""Limit of the safetensors format for its header."""
MAX_SAMPLE_HEADER_BYTES = 1 << 20
"""A sample has two tensors: its header has a few hundred bytes, and a host that sends more means no good."""
SAFETENSORS_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


class DamagedSampleError(Exception):
    """A file that is no whole sample; the text says why, for `FILE: ...`."""


@dataclass(frozen=True)
class SampleFile:
    """What a sample file holds, the states apart. `token_ids`: int64 little-endian, as stored."""

    dtype: str  # as safetensors names it: BF16, F16, F32
    shape: tuple[int, ...]  # of hidden_states: tokens, layers, hidden size
    token_ids: bytes


def read_sample_file(path: str) -> SampleFile:
    """Read header and token ids and check that they fit the file's size, so that ten thousand files take seconds.

    Raises:
        DamagedSampleError: it is cut, damaged or no sample.
        OSError: it cannot be read; FileNotFoundError when it is not there.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(MAX_SAMPLE_HEADER_BYTES, size):
            raise DamagedSampleError("its header is damaged")
        try:
            header = json.loads(stream.read(length))
            states, ids = header["hidden_states"], header["token_ids"]
            end = max(entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__")
            if size != 8 + length + end:
                raise DamagedSampleError(f"it has {size} bytes, its header says {8 + length + end}")
            start, stop = ids["data_offsets"]
            stream.seek(8 + length + start)
            token_ids = stream.read(stop - start)
            if (
                ids["dtype"] != "I64"
                or states["shape"][:1] != ids["shape"]
                or len(token_ids) != 8 * ids["shape"][0]
            ):
                raise DamagedSampleError("hidden_states and token_ids do not fit together")
            return SampleFile(states["dtype"], tuple(states["shape"]), token_ids)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise DamagedSampleError(f"its header is damaged ({error})") from None


def write_atomically(path: str, data: bytes, *, sync_folder: bool = True) -> None:
    """Write a file so that its name always stands for a whole file: temporary name, fsync, rename, fsync of the folder.

    `sync_folder=False` leaves the last to the caller, who does it once for many files.

    Raises:
        OSError: the disk is full or fails; the temporary file is removed, a former file stays.
    """
    temporary = f"{path}.tmp.{os.getpid()}"
    try:
        with open(temporary, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if sync_folder:
        fsync_folder(os.path.dirname(path) or ".")


def fsync_folder(folder: str) -> None:
    """Make renames in a folder durable. Windows, where a laptop may merge, has no such thing."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
