"""The same changes in site-packages themselves, for people who want them there: with backup, journal and revert.

The backup and a journal lie below `<root>/patch-backups/<set>`; revert restores a file only when it still is what the set
made of it, so that nobody's later work is thrown away. Standard library only.
"""

from __future__ import annotations

import json
import os
import shutil
from typing import Any

from remote_jobs.patches.judge import Judgement, patched_text
from remote_jobs.patches.sets import PatchError, PatchSet, file_sha256

BACKUPS = "patch-backups"
JOURNAL = "journal.json"


def apply(found: Judgement, root: str) -> list[str]:
    """Apply a set in place; returns the files changed.

    Raises:
        PatchError: an original drifted, or the set is broken; nothing is changed then.
        OSError: no right to write there.
    """
    item = found.patch_set
    # Everything is computed before the first byte is written.
    texts = {file.path: patched_text(found.root, file) for file in item.files}
    present = [path for path, _ in item.adds if os.path.exists(os.path.join(found.root, path))]
    if present:
        raise PatchError(f"{os.path.join(found.root, present[0])} exists already")
    folder = _folder(item.name, root)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    entries: list[dict[str, Any]] = []
    for file in item.files:
        backup = os.path.join(folder, file.sha256 + ".py")
        shutil.copy2(os.path.join(found.root, file.path), backup)
        entries.append(
            {"path": os.path.join(found.root, file.path), "backup": backup, "sha256": file.patched_sha256}
        )
    entries += [
        {"path": os.path.join(found.root, path), "backup": None, "sha256": file_sha256(source)}
        for path, source in item.adds
    ]
    _replace(
        os.path.join(folder, JOURNAL),
        json.dumps({"set": item.name, "sha256": item.sha256, "files": entries}, indent=2),
    )
    for file in item.files:
        _replace(os.path.join(found.root, file.path), texts[file.path])
    for path, source in item.adds:
        with open(source, encoding="utf-8", newline="") as stream:
            _replace(os.path.join(found.root, path), stream.read())
    return [entry["path"] for entry in entries]


def revert(name: str, root: str) -> list[str]:
    """Undo an in-place set; returns the files restored.

    Raises:
        PatchError: it was not applied here, or a file changed since; nothing is changed then.
    """
    folder = _folder(name, root)
    try:
        with open(os.path.join(folder, JOURNAL), encoding="utf-8") as stream:
            entries = json.load(stream)["files"]
    except FileNotFoundError:
        raise PatchError(f"patch set {name} was not applied in place from {root}") from None
    for entry in entries:
        if os.path.exists(entry["path"]) and file_sha256(entry["path"]) not in (
            entry["sha256"],
            _backup_sha256(entry),
        ):
            raise PatchError(
                "{} was changed after the patch".format(entry["path"]),
                "its original is kept in {}".format(entry["backup"]),
            )
    for entry in entries:
        if entry["backup"] is None:
            if os.path.exists(entry["path"]):
                os.unlink(entry["path"])
            continue
        with open(entry["backup"], encoding="utf-8", newline="") as stream:
            _replace(entry["path"], stream.read())
    shutil.rmtree(folder)
    return [entry["path"] for entry in entries]


def applied(item: PatchSet, root: str) -> bool:
    """True while a journal of this set lies under this root."""
    return os.path.isfile(os.path.join(_folder(item.name, root), JOURNAL))


def _backup_sha256(entry: dict[str, Any]) -> str:
    return file_sha256(entry["backup"]) if entry["backup"] else ""


def _folder(name: str, root: str) -> str:
    return os.path.join(os.path.abspath(os.path.expanduser(root)), BACKUPS, name)


def _replace(path: str, text: str) -> None:
    temporary = f"{path}.tmp.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8", newline="") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    if os.path.exists(path):
        shutil.copymode(path, temporary)
    os.replace(temporary, path)
