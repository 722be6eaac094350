"""The kernel tells of changes: what wakes a long poll, and when polling has to take over."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from pathlib import Path

import pytest

from remote_jobs.agent.changes import ENTRIES, RENAMED_INTO, WRITTEN, Changes


def _woken(changes: Changes) -> bool:
    readable, _, _ = select.select([changes.fd], [], [], 5.0)
    changes.take()
    return bool(readable)


def _quiet(changes: Changes) -> bool:
    return not select.select([changes.fd], [], [], 0.0)[0]


def _replace(folder: Path, name: str) -> None:
    (folder / ".tmp").write_text("{}")
    (folder / ".tmp").replace(folder / name)


CHANGES: dict[str, tuple[int, Callable[[Path], object]]] = {
    "a record is replaced by rename": (RENAMED_INTO, lambda path: _replace(path, "state.json")),
    "a job's folder appears": (ENTRIES, lambda path: (path / "job-1").mkdir()),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_wakes_the_waiting_agent(what: str, tmp_path: Path) -> None:
    mask, change = CHANGES[what]
    changes = Changes(usable=True)
    assert changes.watch({str(tmp_path): mask})
    assert _quiet(changes)
    change(tmp_path)
    assert _woken(changes), what


def test_a_temporary_file_before_the_rename_wakes_nobody(tmp_path: Path) -> None:
    changes = Changes(usable=True)
    assert changes.watch({str(tmp_path): RENAMED_INTO})
    (tmp_path / ".tmp").write_text("{}")
    assert _quiet(changes)


def test_a_log_that_was_rotated_is_watched_again_under_its_name(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("1\n")
    changes = Changes(usable=True)
    assert changes.watch({str(log): WRITTEN})
    log.rename(tmp_path / "log.1")
    log.write_text("")
    assert _woken(changes)
    assert changes.watch({str(log): WRITTEN})
    changes.take()
    with log.open("a") as file:
        file.write("2\n")
    assert _woken(changes)


def test_what_is_no_longer_asked_for_wakes_nobody(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    changes = Changes(usable=True)
    assert changes.watch({str(tmp_path / name): RENAMED_INTO for name in "ab"})
    assert changes.watch({str(tmp_path / "b"): RENAMED_INTO})
    changes.take()
    _replace(tmp_path / "a", "state.json")
    assert _quiet(changes)


def test_a_path_that_does_not_exist_or_a_network_file_system_is_polled(tmp_path: Path) -> None:
    assert not Changes(usable=True).watch({str(tmp_path / "nothing"): RENAMED_INTO})
    assert not Changes(usable=False).watch({str(tmp_path): RENAMED_INTO})
    assert not Changes(usable=True).watch(
        {os.path.join(tmp_path, str(n)): RENAMED_INTO for n in range(10_000)}
    )
