"""The check for NaN and infinity by bits says what torch's isfinite says, for every dtype and place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from remote_jobs.steps.extraction.finite import PIECE, file_is_finite, tensor_is_finite

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bad_value_anywhere_is_found(dtype: torch.dtype, tmp_path: Path) -> None:
    shape = (PIECE // 128 + 3, 2, 64)  # a little more than one piece
    good = torch.randn(shape, dtype=torch.float32).to(dtype)
    good.view(-1)[:4] = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min, 0.0, -0.0]).to(dtype)
    path = str(tmp_path / "sample.safetensors")
    for place in (None, 0, PIECE - 1, PIECE, good.numel() - 1):
        for value in (float("nan"), float("inf"), float("-inf")):
            states = good.clone()
            if place is not None:
                states.view(-1)[place] = value
            save_file({"hidden_states": states, "token_ids": torch.arange(shape[0])}, path)
            expected = bool(states.isfinite().all())
            assert expected == (place is None)
            assert tensor_is_finite(states) == file_is_finite(path) == expected
            assert tensor_is_finite(states.transpose(0, 1)) == expected
