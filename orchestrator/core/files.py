"""The plan's own `files:`: which local files they mean, and under which name they land in <job>/files on the host."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from orchestrator.core.schema import nearest

MAX_FILES = 5000
SKIPPED_FOLDERS = frozenset({"__pycache__", ".git", ".venv", ".mypy_cache", ".pytest_cache", ".ruff_cache"})


@dataclass(frozen=True)
class LocalFile:
    """A file on the laptop; ``name`` is its path below <job>/files, with forward slashes."""

    path: Path
    name: str


class BadEntry(ValueError):
    """An entry of `files:` that cannot be used: (message, hint)."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def expand(entry: str, base: Path) -> list[LocalFile]:
    """The files that one entry means: a file, a folder with all below it, or a pattern. Relative to ``base``.

    Raises:
        BadEntry: nothing there, not readable, or not an ordinary file.
    """
    if not entry.strip():
        raise BadEntry("an empty entry", "write the path of a file, relative to the plan")
    try:
        path = base / Path(entry).expanduser()
        if path.exists():
            paths = [path]
        elif any(character in entry for character in "*?["):
            paths = [Path(found) for found in sorted(glob.glob(str(path), recursive=True))]
            paths = [found for found in paths if found.is_file()]
        else:
            paths = []
        files = [file for found in paths for file in _below(found)]
    except (OSError, ValueError, RuntimeError) as error:  # too long, loops, no such user in ~user
        raise BadEntry(f"{entry!r} cannot be read: {error}") from None
    if paths and not files:
        raise BadEntry(f"the folder {entry!r} holds no files")
    if not files:
        raise BadEntry(f"there is no {entry!r} in {base}", _near(path))
    if len(files) > MAX_FILES:
        raise BadEntry(
            f"{entry!r} holds {len(files)} files", f"at most {MAX_FILES}; put data on the host by itself"
        )
    return files


def collisions(files: Iterable[LocalFile]) -> Iterator[tuple[LocalFile, LocalFile]]:
    """Pairs of different local files that would land under the same name."""
    seen: dict[str, LocalFile] = {}
    for file in files:
        other = seen.setdefault(file.name, file)
        if os.path.realpath(other.path) != os.path.realpath(file.path):
            yield other, file


def _below(path: Path) -> Iterator[LocalFile]:
    if path.is_dir():
        for folder, folders, names in os.walk(path, onerror=_refuse):
            folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS)
            for name in sorted(names):
                file = Path(folder) / name
                if not name.endswith(".pyc"):
                    yield _ordinary(file, (Path(path.resolve().name) / file.relative_to(path)).as_posix())
        return
    yield _ordinary(path, path.name)


def _refuse(error: OSError) -> NoReturn:
    """A folder that cannot be read is no empty one."""
    raise error


def _ordinary(path: Path, name: str) -> LocalFile:
    if not stat.S_ISREG(path.stat().st_mode):
        raise BadEntry(f"{path} is not an ordinary file")
    if not os.access(path, os.R_OK):
        raise BadEntry(f"{path} is not readable", f"chmod u+r {path}")
    return LocalFile(path, name)


def _near(path: Path) -> str | None:
    try:
        names = sorted(entry.name for entry in path.parent.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return f"there is no folder {path.parent}"
    except OSError as error:
        return f"{path.parent} cannot be read: {error.strerror}"
    alike = nearest(path.name, names, cutoff=0.7)
    return f"did you mean {alike!r}?" if alike else None
