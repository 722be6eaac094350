"""Names that a host gave, as paths below one folder of this laptop. A hostile host must not write anywhere else.

Refused: absolute names, `..`, names that this file system cannot hold, names that Windows reserves (on Windows), names
that differ only in case where the file system does not tell them apart, and anything behind a link in the folder.
Files are always new ones, renamed into place: never a link, a device, an executable or somebody else's file.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
import unicodedata
from pathlib import Path

_RESERVED = re.compile(r"(?i)^(con|prn|aux|nul|conin\$|conout\$|com[0-9¹²³]|lpt[0-9¹²³]) *(\..*)?$")
_WINDOWS = sys.platform == "win32"
MAX_COMPONENT_BYTES = 255


class UnsafeName(ValueError):
    """A name that cannot or must not become a path here; the message says why."""


def safe_parts(name: str, *, windows: bool = _WINDOWS) -> tuple[str, ...]:
    """Components of a relative name from a host.

    Raises:
        UnsafeName: it would lead elsewhere, or cannot be a file name here.
    """
    if not name or "\0" in name:
        raise UnsafeName("it is empty or holds a NUL")
    if name.startswith("/"):
        raise UnsafeName("it is absolute")
    parts = name.split("/")
    for part in parts:
        if part in {"", ".", ".."}:
            raise UnsafeName(f"it holds the component {part!r}")
        try:
            size = len(os.fsencode(part)) if not windows else len(part.encode("utf-16-le", "surrogatepass"))
        except UnicodeEncodeError as error:
            raise UnsafeName("it holds a character that no file name has here") from error
        if size > MAX_COMPONENT_BYTES:
            raise UnsafeName("a component is too long")
        if windows:
            if any(char in '<>:"\\|?*' or ord(char) < 32 for char in part):
                raise UnsafeName("it holds a character that Windows does not allow")
            if part.endswith((" ", ".")) or _RESERVED.match(part):
                raise UnsafeName("Windows reserves this name")
    return tuple(parts)


class Destination:
    """One folder that files from a host go into.

    Args:
        folder: made when missing.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder.resolve()
        self._sees_case = _sees_case(self.folder)
        self._taken: dict[str, str] = {}

    def place(self, name: str) -> Path:
        """Path for a name; its folders are made.

        Raises:
            UnsafeName: unsafe, or another name of this run has the same path here.
            OSError: a folder cannot be made.
        """
        parts = safe_parts(name)
        key = "/".join(parts)
        if not self._sees_case:
            key = unicodedata.normalize("NFC", key).casefold()
        if self._taken.setdefault(key, name) != name:
            raise UnsafeName(f"here it is the same name as {self._taken[key]}")
        path = self.folder
        for index, part in enumerate(parts):
            path = path / part
            if path.is_symlink():
                raise UnsafeName(f"{path} is a link on this laptop, and links are not followed")
            if index < len(parts) - 1:
                path.mkdir(exist_ok=True)
        if not path.parent.resolve().is_relative_to(self.folder):
            raise UnsafeName("it leads out of the folder")
        if path.is_dir():
            raise UnsafeName("a folder of this name is there")
        return path


def _sees_case(folder: Path) -> bool:
    """True where `a` and `A` are two files."""
    probe = folder / f".orch-case-{os.getpid()}a"
    try:
        probe.touch()
        return not probe.with_name(probe.name.upper()).exists()
    except OSError:
        return True
    finally:
        probe.unlink(missing_ok=True)


def open_part(path: Path, *, append: bool) -> int:
    """Descriptor of a partial file; never through a link of either kind, never a device.

    Raises:
        OSError: it cannot be opened like that.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EEXIST, f"{path.name} is a link or no regular file", str(path))
    if not append:
        os.ftruncate(descriptor, 0)
    return descriptor
