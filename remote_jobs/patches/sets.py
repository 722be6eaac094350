"""What a patch set is, and where sets are found. Reads set.json, refuses what it does not understand.

set.json:
    name, summary
    package, version     distribution whose files change; exact version (a hint for nightlies: hashes decide)
    partner, partners    the other package and the versions the set was proved with, for people
    requires             probes (probe.py) that must hold, or the set does not suit
    files                [{path, sha256, patch, patched_sha256}]: path below site-packages, patch a unified diff beside it
    adds                 [{path, source}]: new files, importable from the overlay
    calls                [{file, call, signature}]: calls in patched files that must fit the partner's real signature
    changes              [{what, why, upstream?}]
Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BUILT_IN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data")
DESCRIPTION = "set.json"
USER_SETS_ENV = "ORCH_PATCH_DIRS"
"""Folders of people's own sets, separated as in PATH."""


class PatchError(Exception):
    """A set cannot be read or used; `hint` says what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class PatchedFile:
    """One file that changes. `path` is relative to site-packages."""

    path: str
    sha256: str
    patch: str  # absolute path of the unified diff
    patched_sha256: str


@dataclass(frozen=True)
class PatchSet:
    """A patch set as read from its folder; `sha256` covers every file of it."""

    name: str
    summary: str
    folder: str
    package: str
    version: str
    partner: str
    partners: tuple[str, ...]
    requires: tuple[dict[str, Any], ...]
    files: tuple[PatchedFile, ...]
    adds: tuple[tuple[str, str], ...]  # (path below the overlay, absolute source)
    calls: tuple[dict[str, str], ...]
    changes: tuple[dict[str, Any], ...]
    sha256: str

    @property
    def packages(self) -> tuple[str, ...]:
        """Top-level packages whose files change."""
        return tuple(sorted({file.path.split("/")[0] for file in self.files}))


def load_set(folder: str) -> PatchSet:
    """Read one set.

    Raises:
        PatchError: set.json is missing, not JSON, or lacks something; a diff or added file is missing.
    """
    path = os.path.join(folder, DESCRIPTION)
    try:
        with open(path, encoding="utf-8") as stream:
            raw = json.load(stream)
    except FileNotFoundError:
        raise PatchError(f"{folder} has no {DESCRIPTION}: not a patch set") from None
    except ValueError as error:
        raise PatchError(f"{path} is not valid JSON: {error}") from None
    try:
        files = tuple(
            PatchedFile(
                _relative(path, item["path"]),
                item["sha256"],
                os.path.join(folder, item["patch"]),
                item["patched_sha256"],
            )
            for item in raw.get("files", [])
        )
        adds = tuple(
            (_relative(path, item["path"]), os.path.join(folder, item["source"]))
            for item in raw.get("adds", [])
        )
        found = PatchSet(
            name=raw["name"],
            summary=raw["summary"],
            folder=folder,
            package=raw["package"],
            version=raw["version"],
            partner=raw.get("partner", ""),
            partners=tuple(raw.get("partners", ())),
            requires=tuple(raw.get("requires", ())),
            files=files,
            adds=adds,
            calls=tuple(raw.get("calls", ())),
            changes=tuple(raw["changes"]),
            sha256=_folder_sha256(folder),
        )
    except (KeyError, TypeError) as error:
        raise PatchError(f"{path} lacks or misuses {error}") from None
    missing = [
        name for name in [f.patch for f in files] + [source for _, source in adds] if not os.path.isfile(name)
    ]
    if missing:
        raise PatchError(f"{path} names {missing[0]}, which is not there")
    if not found.files and not found.adds:
        raise PatchError(f"{path} changes nothing: it has neither files nor adds")
    return found


def all_sets(extra: Sequence[str] = ()) -> list[PatchSet]:
    """Built-in sets, then people's own ones from `extra` and $ORCH_PATCH_DIRS; a name may occur once only."""
    folders = [BUILT_IN, *extra, *filter(None, os.environ.get(USER_SETS_ENV, "").split(os.pathsep))]
    found: dict[str, PatchSet] = {}
    for parent in folders:
        if not os.path.isdir(parent):
            raise PatchError(f"no such folder of patch sets: {parent}")
        for name in sorted(os.listdir(parent)):
            folder = os.path.join(parent, name)
            if not os.path.isfile(os.path.join(folder, DESCRIPTION)):
                continue
            item = load_set(folder)
            former = found.get(item.name)
            if former is not None and former.folder != item.folder:
                raise PatchError(f"two patch sets are called {item.name}: {former.folder} and {folder}")
            found[item.name] = item
    return list(found.values())


def by_name(sets: Sequence[PatchSet], name: str) -> PatchSet:
    """The set of that name.

    Raises:
        PatchError: names the sets there are.
    """
    for item in sets:
        if item.name == name:
            return item
    raise PatchError(f"no patch set {name!r}", "there are: " + ", ".join(sorted(item.name for item in sets)))


def combined_sha256(sets: Sequence[PatchSet]) -> str | None:
    """One hash for several sets, independent of their order; None for none."""
    if not sets:
        return None
    return hashlib.sha256("\n".join(sorted(item.sha256 for item in sets)).encode()).hexdigest()


def file_sha256(path: str) -> str:
    """Hash of a file's bytes."""
    with open(path, "rb") as stream:
        return hashlib.sha256(stream.read()).hexdigest()


def _relative(description: str, path: str) -> str:
    if os.path.isabs(path) or ".." in path.split("/") or not path.endswith(".py"):
        raise PatchError(f"{description}: {path!r} must be a .py file below site-packages")
    return path


def _folder_sha256(folder: str) -> str:
    digest = hashlib.sha256()
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            digest.update(f"{name}\0{file_sha256(path)}\n".encode())
    return digest.hexdigest()
