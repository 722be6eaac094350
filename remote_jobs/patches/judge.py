"""Which patch sets suit this installation: judged by versions, hashes of the originals, and probes of real signatures.

Standard library only; imports no package it judges.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from remote_jobs.patches import diff, probe
from remote_jobs.patches.sets import PatchError, PatchSet, by_name, file_sha256

OVERLAYS = "overlays"
"""Folder under the root that holds the patched copies."""

SUITS = "suits"
APPLIED = "applied"  # in place: the files already are what the set makes of them
DRIFT = "drift"  # right version, other content: someone changed the original
UNSUITABLE = "unsuitable"


@dataclass(frozen=True)
class Judgement:
    """What a set is to this installation: a state, and the reason in words."""

    patch_set: PatchSet
    state: str
    why: str
    root: str = ""  # folder that holds the package (site-packages)
    misfits: Sequence[str] = ()


def package_root(package: str) -> str | None:
    """Folder that holds an installed top-level package or module, overlays left aside; None when it is not there."""
    path = [entry for entry in sys.path if OVERLAYS not in os.path.normpath(entry or ".").split(os.sep)]
    spec = importlib.machinery.PathFinder.find_spec(package, path)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return os.path.dirname(os.path.abspath(next(iter(spec.submodule_search_locations))))
    return os.path.dirname(os.path.abspath(str(spec.origin)))


def judge(item: PatchSet, root: str | None = None, version: str | None = None) -> Judgement:
    """Say whether a set suits what is installed. `root` and `version` stand in for the installation (tests, fixtures)."""
    partner_root = root
    if root is None:
        version = probe.version_of(item.package)
        root = package_root(item.package)
        partner_root = package_root(item.partner) if item.partner else root
    if root is None or version is None:
        return Judgement(item, UNSUITABLE, f"{item.package} is not installed")
    if partner_root is None:
        return Judgement(item, UNSUITABLE, f"{item.partner} is not installed")
    for each in item.requires:
        reason = probe.failing(partner_root, each)
        if reason is not None:
            return Judgement(item, UNSUITABLE, reason, root)
    if not item.files:
        return _with_calls(item, root, partner_root, "every probe holds")
    if not _same_release(version, item.version):
        return Judgement(
            item, UNSUITABLE, f"{item.package} is {version}, the set is for {item.version}", root
        )
    hashes = {file.path: _sha256(root, file.path) for file in item.files}
    if all(hashes[file.path] == file.patched_sha256 for file in item.files):
        return Judgement(item, APPLIED, "already applied in place", root)
    changed = [file.path for file in item.files if hashes[file.path] != file.sha256]
    if changed:
        seen = hashes[changed[0]]
        what = (
            "is missing"
            if seen is None
            else f"is not the file of {item.package} {version} (sha256 {seen[:12]}...)"
        )
        return Judgement(item, DRIFT, f"{os.path.join(root, changed[0])} {what}", root)
    return _with_calls(item, root, partner_root, "version, originals and every probe match")


def choose(sets: Sequence[PatchSet], wanted: str | Sequence[str] | None) -> list[Judgement]:
    """The sets to apply. `wanted`: "auto" (every set that suits), "none" or None, or names.

    Raises:
        PatchError: a set that was asked for by name does not suit; two sets change one file.
    """
    if wanted in (None, "none", []):
        return []
    if wanted == "auto":
        chosen = [found for found in map(judge, sets) if found.state == SUITS]
    else:
        names = [wanted] if isinstance(wanted, str) else list(wanted)
        chosen = []
        for name in names:
            found = judge(by_name(sets, name))
            if found.state == APPLIED:
                continue
            if found.state != SUITS:
                raise PatchError(
                    f"patch set {name} is refused: {found.why}",
                    "`patches: auto` takes only sets that suit; `orch patch check HOST` shows why each does or does not",
                )
            chosen.append(found)
    owner: dict[str, str] = {}
    for found in chosen:
        for file in found.patch_set.files:
            other = owner.setdefault(file.path, found.patch_set.name)
            if other != found.patch_set.name:
                raise PatchError(f"patch sets {other} and {found.patch_set.name} both change {file.path}")
    return chosen


def patched_text(root: str, file: Any) -> str:
    """The patched content of one file of a set.

    Raises:
        PatchError: the original has drifted, or the set is broken.
    """
    path = os.path.join(root, file.path)
    if _sha256(root, file.path) != file.sha256:
        raise PatchError(f"{path} is not the original this patch was made for")
    with open(path, encoding="utf-8", newline="") as stream:
        original = stream.read()
    with open(file.patch, encoding="utf-8", newline="") as stream:
        changes = stream.read()
    try:
        return diff.apply(original, changes)
    except diff.DiffError as error:
        raise PatchError(f"{file.patch} does not apply to {path}: {error}") from None


def misfits(item: PatchSet, root: str, partner_root: str) -> list[str]:
    """Calls in the patched files that would not fit the partner's signatures: sentences, empty when all fit."""
    found = []
    texts: dict[str, str] = {}
    by_path = {file.path: file for file in item.files}
    for each in item.calls:
        path = each["file"]
        if path not in texts:
            added = dict(item.adds)
            if path in by_path:
                texts[path] = patched_text(root, by_path[path])
            else:
                with open(added.get(path) or os.path.join(root, path), encoding="utf-8") as stream:
                    texts[path] = stream.read()
        made = probe.calls(texts[path], each["call"])
        if not made:
            found.append("{} makes no call of {}".format(path, each["call"]))
        try:
            wanted = probe.signature(partner_root, each["signature"])
        except probe.Missing as error:
            found.append("{}: {}".format(each["call"], error))
            continue
        for call in made:
            reason = probe.misfit(call, wanted)
            if reason is not None:
                found.append("{} in {}: {} ({})".format(each["call"], path, reason, each["signature"]))
    return found


def _with_calls(item: PatchSet, root: str, partner_root: str, why: str) -> Judgement:
    try:
        wrong = misfits(item, root, partner_root)
    except PatchError as error:
        return Judgement(item, DRIFT, str(error), root)
    if wrong:
        return Judgement(item, UNSUITABLE, wrong[0], root, wrong)
    return Judgement(item, SUITS, why, root)


def _same_release(installed: str, wanted: str) -> bool:
    """0.3.0 and 0.3.0+local are one release; hashes decide the rest."""
    return installed.split("+", maxsplit=1)[0] == wanted


def _sha256(root: str, path: str) -> str | None:
    full = os.path.join(root, path)
    return file_sha256(full) if os.path.isfile(full) else None
