"""known_hosts files, read the way OpenSSH reads them: hashed names, lists, wildcards, negation, markers, ports.

Why own code: paramiko's reader dies on ``@revoked`` and ``@cert-authority`` lines, never matches wildcards, and stops
at the first entry; fabric loads no file at all and accepts any key.  Format: sshd(8), SSH_KNOWN_HOSTS FILE FORMAT.

Must not import fabric or paramiko; a key here is (type name, wire blob).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from orchestrator.core.errors import LocalError

MAX_FILE_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Entry:
    """One line. ``hosts`` is the raw first field; ``marker`` is "", "@revoked" or "@cert-authority"."""

    hosts: str
    key_type: str
    blob: bytes
    marker: str = ""
    path: str = ""
    line: int = 0

    def matches(self, name: str) -> bool:
        """Does this line speak about ``name`` (lower case; ``[host]:port`` for other ports than 22)?"""
        return (
            _hashed_match(self.hosts, name) if self.hosts.startswith("|1|") else _list_match(self.hosts, name)
        )

    @property
    def place(self) -> str:
        """``file:line``, for messages."""
        return f"{self.path}:{self.line}"


class Trust(Enum):
    """What the files say about a key that a host shows."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    REVOKED = "revoked"


@dataclass(frozen=True)
class Verdict:
    """Trust, and the lines it rests on."""

    trust: Trust
    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True)
class HostNames:
    """The names under which a host's key may be filed: ``main``, and ``bare`` (same host without its port)."""

    main: str
    bare: str | None = None

    @classmethod
    def of(cls, hostname: str, port: int, alias: str | None = None) -> HostNames:
        """As OpenSSH: HostKeyAlias alone if set; else [host]:port with the plain name as a second chance."""
        if alias:
            return cls(alias.lower())
        host = hostname.lower()
        return cls(host) if port == 22 else cls(f"[{host}]:{port}", host)


class KnownHosts:
    """The lines of several files, in order."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = tuple(entries)

    @classmethod
    def load(cls, paths: Iterable[str]) -> KnownHosts:
        """Read the files that exist; unreadable lines are ignored, as ssh does.

        Raises:
            LocalError: a file exists but cannot be read: going on would turn "known" into "unknown".
        """
        entries: list[Entry] = []
        for path in paths:
            try:
                with open(path, "rb") as file:
                    data = file.read(MAX_FILE_BYTES)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise LocalError(f"cannot read the known_hosts file {path}: {error.strerror}") from error
            entries += parse(data.decode("utf-8", "replace"), path)
        return cls(entries)

    def about(self, names: HostNames, marker: str = "") -> list[Entry]:
        """Lines with this marker about the main name."""
        return [entry for entry in self.entries if entry.marker == marker and entry.matches(names.main)]

    def check(self, names: HostNames, key_type: str, blob: bytes) -> Verdict:
        """Judge the key that a host shows.

        CHANGED also when only keys of other types are known: our own preference for the known types means that the
        host no longer has any of them.
        """
        either = [name for name in (names.main, names.bare) if name]
        revoked = [
            e
            for e in self.entries
            if e.marker == "@revoked" and e.blob == blob and any(map(e.matches, either))
        ]
        if revoked:
            return Verdict(Trust.REVOKED, tuple(revoked))
        known = self.about(names)
        same = [entry for entry in known if (entry.key_type, entry.blob) == (key_type, blob)]
        if not same and names.bare and not known:
            bare = HostNames(names.bare)
            same = [entry for entry in self.about(bare) if (entry.key_type, entry.blob) == (key_type, blob)]
        if same:
            return Verdict(Trust.KNOWN, tuple(same))
        return Verdict(Trust.CHANGED, tuple(known)) if known else Verdict(Trust.UNKNOWN)

    def key_types(self, names: HostNames) -> list[str]:
        """Key types known for the host, in file order: ask for these first, so that a second, unknown key of the
        same host gives no false alarm.
        """
        known = self.about(names) or (self.about(HostNames(names.bare)) if names.bare else [])
        return list(dict.fromkeys(entry.key_type for entry in known))

    def authorities(self, names: HostNames) -> list[Entry]:
        """@cert-authority lines that may vouch for the host."""
        lines = self.about(names, "@cert-authority")
        return lines or (self.about(HostNames(names.bare), "@cert-authority") if names.bare else [])


def parse(text: str, path: str = "") -> list[Entry]:
    """Entries of a file's text; comments, empty and malformed lines are skipped."""
    entries = []
    for number, line in enumerate(text.split("\n"), 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        marker = fields.pop(0) if fields[0].startswith("@") else ""
        if len(fields) < 3 or marker not in ("", "@revoked", "@cert-authority"):
            continue
        try:
            blob = base64.b64decode(fields[2], validate=True)
        except (binascii.Error, ValueError):
            continue
        if blob_type(blob) == fields[1]:
            entries.append(Entry(fields[0], fields[1], blob, marker, path, number))
    return entries


def blob_type(blob: bytes) -> str:
    """The type name at the start of a key's wire form, or "" if it is no key (RFC 4253, 6.6)."""
    length = int.from_bytes(blob[:4], "big")
    name = blob[4 : 4 + length]
    return name.decode("ascii", "replace") if 0 < length == len(name) < 100 else ""


def fingerprint(blob: bytes) -> str:
    """``SHA256:...`` as ssh prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode("ascii").rstrip("=")


def _hashed_match(field: str, name: str) -> bool:
    try:
        _, _, salt, digest = field.split("|")
        found = hmac.new(base64.b64decode(salt), name.encode("utf-8"), hashlib.sha1).digest()
        return hmac.compare_digest(found, base64.b64decode(digest))
    except (ValueError, binascii.Error):
        return False


def _list_match(field: str, name: str) -> bool:
    matched = False
    for pattern in field.lower().split(","):
        if pattern_match(pattern.removeprefix("!"), name):
            if pattern.startswith("!"):
                return False
            matched = True
    return matched


def pattern_match(pattern: str, name: str) -> bool:
    """Only * and ? are special; brackets are part of ``[host]:port``."""
    regex = "".join({"*": ".*", "?": "."}.get(char, re.escape(char)) for char in pattern)
    return re.fullmatch(regex, name, re.DOTALL) is not None


def hash_name(name: str) -> str:
    """``|1|salt|hash`` of a host name, with a fresh salt."""
    salt = os.urandom(20)
    digest = hmac.new(salt, name.encode("utf-8"), hashlib.sha1).digest()
    return "|1|" + base64.b64encode(salt).decode("ascii") + "|" + base64.b64encode(digest).decode("ascii")


def append(path: str, names: HostNames, key_type: str, blob: bytes, *, hashed: bool = False) -> str:
    """Add a key to a known_hosts file, its name hashed if asked or if the file has hashed names; returns the line.

    The file is created 0600 in a 0700 folder; one write, so that a parallel ssh never sees half a line.

    Raises:
        LocalError: the file cannot be written.
    """
    file = Path(path)
    try:
        if file.exists() and not file.is_file():
            raise LocalError(f"cannot remember a host key in {path}: it is not a regular file")
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        before = file.read_bytes() if file.exists() else b""
        hashed = hashed or any(
            entry.hosts.startswith("|1|") for entry in parse(before.decode("utf-8", "replace"))
        )
        name = hash_name(names.main) if hashed else names.main
        line = f"{name} {key_type} {base64.b64encode(blob).decode('ascii')}\n"
        glue = "\n" if before and not before.endswith(b"\n") else ""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(handle, (glue + line).encode("utf-8"))
        finally:
            os.close(handle)
    except OSError as error:
        raise LocalError(f"cannot write the known_hosts file {path}: {error.strerror or error}") from error
    return line
