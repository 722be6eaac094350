"""A hostile host must not write anywhere but into the folder that `orch fetch` was given."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.answers import check_answer
from orchestrator.core.errors import ProtocolError
from orchestrator.services.local_paths import Destination, UnsafeName, open_part, safe_parts
from tests.security.evil_host import NAME
from tests.support.laptop import Answer, Laptop

NUMBERS = itertools.count()


def entry(path: Any, **more: Any) -> dict[str, Any]:
    return {"root": "out", "path": path, "absolute": f"/w{next(NUMBERS)}/{path}", "size": 8, "mtime_ns": 1, "kind": "file", **more}


def fetch(evil: Laptop, entries: object, *, size: int = 8, mode: str = "") -> Answer:
    evil.environment |= {"ORCH_EVIL_ENTRIES": json.dumps(entries), "ORCH_EVIL_SIZE": str(size), "ORCH_EVIL": mode}
    return evil.run("fetch", NAME, "dest", "--json")


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder but for the laptop's own records."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and "orch-home" not in path.parts
    }


HOSTILE = {
    "parent": entry("../../escaped"),
    "deep-parent": entry("a/../../../escaped"),
    "absolute": entry("/escaped"),
    "root-is-absolute": entry("escaped", root="/../.."),
    "root-is-parent": entry("escaped", root="../.."),
    "job-parent": entry("../../escaped", root="job"),
    "empty": entry(""),
    "dot": entry("."),
    "nul": entry("a\0b"),
    "long": entry("x" * 300),
    "surrogate": entry("\ud800"),
    "through-a-link": entry("link/escaped"),
    "onto-a-link": entry("linkfile"),
    "hard-link-of-a-part": entry("hard"),
    "fifo-as-part": entry("fifo"),
    "workdir-trick": entry("x", absolute="/nowhere/../../../escaped"),
}


def test_hostile_names_stay_in_the_folder(evil: Laptop) -> None:
    outside = evil.folder / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    dest = evil.folder / "dest" / "out"
    dest.mkdir(parents=True)
    (dest / "link").symlink_to(outside)
    (dest / "linkfile").symlink_to(outside / "kept")
    os.link(outside / "kept", dest / "hard.part")
    os.mkfifo(dest / "fifo.part")
    before = tree(evil.folder)
    answer = fetch(evil, [*HOSTILE.values(), entry("fine")])
    after = tree(evil.folder)
    changed = {path for path in {*before, *after} if before.get(path) != after.get(path)}
    assert all(path.startswith("dest/") for path in changed), answer
    assert (outside / "kept").read_text() == "kept"
    assert list(outside.iterdir()) == [outside / "kept"]
    assert answer.status == 1
    assert "bug in orch" not in answer.err, answer
    # Each is named with its reason, none is the end of the others; `digest` is refused for the last one too.
    assert len(answer.json["skipped"]) == len(HOSTILE) + 2
    assert answer.json["fetched"] == []


MALFORMED = {
    "not-a-list": 7,
    "not-objects": [1, "x", None],
    "no-size": [{"root": "out", "path": "a", "absolute": "/w/a", "kind": "file"}],
    "size-text": [entry("a", size="many")],
    "size-negative": [entry("a", size=-5)],
    "size-huge": [entry("a", size=10**30)],
    "time-huge": [entry("a", mtime_ns=10**40)],
    "path-object": [entry({"x": 1})],
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_listing_is_refused_in_words(name: str) -> None:
    with pytest.raises(ProtocolError, match="box: its answer to list makes no sense"):
        check_answer("box", "list", {"entries": MALFORMED[name]})


def test_a_malformed_listing_is_an_answer_not_a_crash(evil: Laptop) -> None:
    answer = fetch(evil, MALFORMED["size-text"])
    assert (answer.status, answer.json["error"]["code"]) == (3, "protocol")
    assert answer.one_screen


def test_more_bytes_than_asked_for_are_refused(evil: Laptop) -> None:
    answer = fetch(evil, [entry("a")], mode="fat-get")
    assert answer.status == 1
    assert not list((evil.folder / "dest").rglob("a"))


def test_names_that_fold_together_are_one_name(tmp_path: Path) -> None:
    """Where the file system folds case, a second name of the same file is refused instead of overwriting the first."""
    place = Destination(tmp_path / "dest")
    place._sees_case = False
    place.place("out/Model.bin")
    for name in ("out/model.bin", "OUT/MODEL.BIN"):
        with pytest.raises(UnsafeName, match="same name"):
            place.place(name)
    place.place("caf\u00e9")
    with pytest.raises(UnsafeName, match="same name"):
        place.place("cafe\u0301")


@pytest.mark.parametrize("name", ["CON", "nul.txt", "com1", "COM\u00b9.log", "LPT9", "CONIN$", "aux .x", "a:stream", "a\\b", "x.", "x "])
def test_windows_devices_and_streams(name: str) -> None:
    with pytest.raises(UnsafeName):
        safe_parts(name, windows=True)


def test_a_partial_file_is_never_a_link_or_a_device(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "soft").symlink_to(tmp_path / "kept")
    os.link(tmp_path / "kept", tmp_path / "hard")
    os.mkfifo(tmp_path / "fifo")
    for name in ("soft", "hard", "fifo"):
        for append in (True, False):
            with pytest.raises(OSError, match=r"link|Too many levels"):
                open_part(tmp_path / name, append=append)
    assert (tmp_path / "kept").read_text() == "kept"
