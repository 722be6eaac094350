"""`orch merge` reads what a host sent: whatever that is, the answer is words and a status, at once."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.errors import OrchError
from orchestrator.services.merge import merge

ROWS = 4


def sample(ids: list[int], *, header: dict[str, Any] | None = None, size: int = 8) -> bytes:
    """A sample file of one layer, hidden size 2, float32."""
    tokens = len(ids)
    told = header or {
        "hidden_states": {"dtype": "F32", "shape": [tokens, 1, 2], "data_offsets": [0, tokens * size]},
        "token_ids": {"dtype": "I64", "shape": [tokens], "data_offsets": [tokens * size, tokens * (size + 8)]},
    }
    text = json.dumps(told).encode()
    return len(text).to_bytes(8, "little") + text + bytes(tokens * size) + struct.pack(f"<{tokens}q", *ids)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two sound ranges of four rows."""
    rows = [[7, row] for row in range(ROWS)]
    digest = hashlib.sha256()
    for ids in rows:
        digest.update(len(ids).to_bytes(8, "little") + struct.pack(f"<{len(ids)}i", *ids))
    whole = {
        "v": 1, "layer_ids": [3], "hidden_size": 2, "dtype": "float32", "prompts_sha256": digest.hexdigest(),
        "samples": {"expected": ROWS, "valid": 0}, "complete": False, "versions": {}, "verified": None,
    }  # fmt: skip
    (tmp_path / "manifest.json").write_text(json.dumps(whole))
    for index, first in ((1, 0), (2, 2)):
        part = {"range": {"index": index, "count": 2, "first": first, "end": first + 2, "rows": ROWS}}
        record = {**whole, **part, "complete": True, "versions": {"torch": str(index)}, "device": "cpu"}
        (tmp_path / f"range-{index}of2.json").write_text(json.dumps(record))
    for row, ids in enumerate(rows):
        (tmp_path / f"hs_{row}.safetensors").write_bytes(sample(ids))
    return tmp_path


def test_sound_ranges_are_joined_and_what_differs_is_said(folder: Path) -> None:
    said: list[str] = []
    assert merge(folder, say=said.append)["samples"] == ROWS
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["complete"] is True
    assert manifest["samples"] == {"expected": ROWS, "valid": ROWS}
    assert manifest["device"] == "cpu"
    assert said == ["orch: Note: the ranges were made with different torch: 1, 2"]
    assert not list(folder.glob("range-*"))


def edit(name: str, **changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        record = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**record, **changes}))

    return change


def write(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


HOSTILE: dict[str, Callable[[Path], object]] = {
    "endless": edit("manifest.json", samples={"expected": 10**15}),
    "negative": edit("manifest.json", samples={"expected": -1}),
    "no number": edit("manifest.json", samples={"expected": "4"}),
    "no list": edit("manifest.json", layer_ids=5),
    "null": write("manifest.json", b"null"),
    "deep": write("manifest.json", b"[" * 100_000),
    "large": write("manifest.json", b" " * (3 << 20) + b"{}"),
    "not text": write("manifest.json", b"\xff\xfe\x00"),
    "range of nothing": edit("range-1of2.json", range={}),
    "range of text": edit("range-1of2.json", range={"first": "0", "end": [], "rows": None}),
    "backwards": edit("range-1of2.json", range={"first": 0, "end": -3, "rows": 4}),
    "false proof": edit("range-1of2.json", verified={"samples": "many"}),
    "many ranges": lambda folder: (folder / "range-1of2.json").rename(folder / "range-1of999999.json"),
    "header bomb": write("hs_1.safetensors", (10**9).to_bytes(8, "little") + b"{" * 1000),
    "deep header": write("hs_1.safetensors", (60_000).to_bytes(8, "little") + b"[" * 60_000),
    "far offsets": write(
        "hs_1.safetensors",
        sample([7, 1], header={
            "hidden_states": {"dtype": "F32", "shape": [2, 1, 2], "data_offsets": [0, 16]},
            "token_ids": {"dtype": "I64", "shape": [2], "data_offsets": [10**30, 32]},
        }),
    ),
    "wide ids": write("hs_1.safetensors", sample([7, 2**40])),
    "other ids": write("hs_1.safetensors", sample([7, 9])),
    "a folder": lambda folder: ((folder / "hs_1.safetensors").unlink(), (folder / "hs_1.safetensors").mkdir()),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.timeout(60)
def test_nonsense_is_refused_in_words(case: str, folder: Path) -> None:
    HOSTILE[case](folder)
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(OrchError) as refused:
        merge(folder, say=lambda _: None)
    assert refused.value.exit_status in (1, 2)
    assert 0 < len(refused.value.message) < 2000
    assert sorted(path.name for path in folder.iterdir()) == before, "nothing is taken away"
