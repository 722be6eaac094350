"""Is every value a number: the check that each sample passes before it is kept. numpy only; no torch.

By bits (IEEE 754: NaN and infinity, and only those, have all exponent bits set), in pieces that stay in the cache. torch's
`isfinite()` makes several temporary tensors of the sample's size: 30 times slower, and then this check, not the GPU, sets
the pace of an extraction.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

FORMATS = {
    "bfloat16": ("<u2", 0x7F80),
    "float16": ("<u2", 0x7C00),
    "float32": ("<u4", 0x7F800000),
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    "F32": ("<u4", 0x7F800000),
}
"""Dtype as torch and as safetensors name it -> unsigned integer of its size, its exponent bits."""
PIECE = 1 << 18


def all_finite(bits: npt.NDArray[Any], dtype: str) -> bool:
    """True when no value is NaN or infinite. `bits`: the values as unsigned integers of their size, one dimension."""
    mask = bits.dtype.type(FORMATS[dtype][1])
    return all(int((bits[at : at + PIECE] & mask).max()) != mask for at in range(0, bits.size, PIECE))


def tensor_is_finite(states: Any) -> bool:
    """True when a tensor, of any shape and on any device, holds finite values only."""
    import torch

    dtype = str(states.dtype).removeprefix("torch.")
    if states.device.type != "cpu" or dtype not in FORMATS:
        return bool(states.isfinite().all())
    same_size = torch.int32 if states.element_size() == 4 else torch.int16
    bits = states.detach().contiguous().view(same_size).numpy().reshape(-1)
    return all_finite(bits.view(FORMATS[dtype][0]), dtype)


def file_is_finite(path: str, name: str = "hidden_states") -> bool:
    """True when one tensor of a whole safetensors file holds finite values only; False also for a dtype not known here."""
    with open(path, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        entry = json.loads(stream.read(length))[name]
    if entry["dtype"] not in FORMATS:
        return False
    kind = np.dtype(FORMATS[entry["dtype"]][0])
    start, stop = entry["data_offsets"]
    if start == stop:
        return True
    bits = np.memmap(
        path, dtype=kind, mode="r", offset=8 + length + start, shape=((stop - start) // kind.itemsize,)
    )
    return all_finite(bits, entry["dtype"])
