"""Safetensors headers without the data: what is in a shard, and whether the file is whole.

Format (huggingface/safetensors): 8 bytes little-endian header length, a JSON header of {name: {dtype, shape,
data_offsets: [begin, end]}}, then the data; the file ends exactly at the largest end.  Standard library only.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Tuple

MAX_HEADER_BYTES = 100_000_000
"""The library's own limit."""
DTYPE_BYTES: Dict[str, float] = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F4": 0.5,
}  # fmt: skip
FLOATING = frozenset({"F64", "F32", "BF16", "F16"})
LFS_START = b"version https://git-lfs.github.com/spec/"


@dataclass
class Shard:
    """One file. `fault` is None when it is whole; `numel` counts elements by dtype."""

    path: str
    size: int = 0
    fault: Optional[str] = None
    fix: str = ""
    tensors: List[str] = field(default_factory=list)
    numel: Dict[str, int] = field(default_factory=dict)
    data_bytes: int = 0


def read_shard(path: str) -> Shard:
    """Read one header and compare the file's size with it. Never raises: what is wrong is `fault`."""
    shard = Shard(path)
    name = os.path.basename(path)
    again = "fetch {} again".format(name)
    try:
        with open(path, "rb") as file:
            shard.size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            wrong = _wrong_start(start, shard.size)
            if wrong is not None:
                shard.fault, shard.fix = "{}: {}".format(name, wrong), again
                if "LFS" in wrong:
                    shard.fix = "run `git lfs pull` in {}".format(os.path.dirname(path))
                return shard
            length = int.from_bytes(start, "little")
            raw = file.read(length)
    except FileNotFoundError:
        target = os.readlink(path) if os.path.islink(path) else None
        what = "a link to {}, which is not there".format(target) if target else "missing"
        shard.fault, shard.fix = "{} is {}".format(name, what), again
        return shard
    except OSError as exc:
        shard.fault, shard.fix = (
            "{} cannot be read: {}".format(name, exc.strerror),
            "check its permissions and disk",
        )
        return shard
    if len(raw) < length:
        text = "{} is truncated inside its header: {} bytes, the header alone is {}"
        shard.fault, shard.fix = text.format(name, shard.size, 8 + length), again
        return shard
    try:
        _take_header(shard, raw)
    except (ValueError, KeyError, TypeError, IndexError) as exc:
        shard.fault, shard.fix = "{} has a damaged header ({})".format(name, str(exc)[:80]), again
        return shard
    wanted = 8 + length + shard.data_bytes
    if shard.size != wanted:
        how = "truncated" if shard.size < wanted else "too long"
        text = "{} is {}: {} bytes, its header says {}"
        shard.fault, shard.fix = text.format(name, how, shard.size, wanted), again
    return shard


def _wrong_start(start: bytes, size: int) -> Optional[str]:
    if size == 0:
        return "empty (0 bytes)"
    if LFS_START.startswith(start) and start:
        return "a Git LFS pointer of {} bytes, not the weights".format(size)
    if len(start) < 8:
        return "only {} bytes long".format(size)
    length = int.from_bytes(start, "little")
    if start.lstrip()[:1] in (b"<", b"{"):
        return "no safetensors file: it begins with {!r} (a saved error page?)".format(start)
    if length > MAX_HEADER_BYTES or length < 2:
        return "no safetensors file: its header would be {} bytes long".format(length)
    return None


def _take_header(shard: Shard, raw: bytes) -> None:
    header: Dict[str, Any] = json.loads(raw.decode("utf-8"))
    spans: List[Tuple[int, int]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        count = 1
        for extent in entry["shape"]:
            count *= int(extent)
        dtype = str(entry["dtype"])
        bytes_each = DTYPE_BYTES.get(dtype)
        if bytes_each is not None and int(count * bytes_each) != end - begin:
            raise ValueError("{}: {} elements of {} in {} bytes".format(name, count, dtype, end - begin))
        shard.numel[dtype] = shard.numel.get(dtype, 0) + count
        shard.tensors.append(name)
        spans.append((int(begin), int(end)))
    position = 0
    for begin, end in sorted(spans):
        if begin != position or end < begin:
            raise ValueError("a gap or overlap at byte {}".format(begin))
        position = end
    shard.data_bytes = position


def is_lfs_pointer(path: str) -> bool:
    """True for any small file that is a Git LFS pointer."""
    try:
        with open(path, "rb") as file:
            return file.read(len(LFS_START)) == LFS_START
    except OSError:
        return False
