"""The release: what travels to the host, named by the hash of its content, and the words that install and start it.

One exec does everything: find Python and the release, start the agent; if the release is missing, a small loader
takes it over the same channel, checks it, renames it into place and becomes the agent.  So a second connection
uploads nothing, and a first one costs one more round trip.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import io
import re
import shlex
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable

ENTRY = "import sys\n\nfrom remote_jobs.agent.main import main\n\nsys.exit(main())\n"
_SKIPPED_FOLDERS = {"__pycache__", ".mypy_cache", ".ruff_cache", "tests"}
_SKIPPED_SUFFIXES = (".pyc", ".pyo", ".so", ".tmp")


@dataclass(frozen=True)
class Release:
    """A built release: ``hash`` names its folder, ``digest`` is the sha256 of ``archive`` (tar.gz)."""

    hash: str
    digest: str
    archive: bytes


def _files(folder: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
    for item in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if item.is_dir():
            if item.name not in _SKIPPED_FOLDERS:
                yield from _files(item, f"{prefix}{item.name}/")
        elif not item.name.endswith(_SKIPPED_SUFFIXES) and not item.name.startswith("."):
            yield prefix + item.name, item.read_bytes()


@functools.cache
def build() -> Release:
    """The release of this installation; the same bytes give the same hash on every machine."""
    files = [("__main__.py", ENTRY.encode()), *_files(resources.files("remote_jobs"), "remote_jobs/")]
    content = hashlib.sha256()
    for name, data in files:
        content.update(f"{name}\0{len(data)}\0".encode() + data)
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o600
            archive.addfile(info, io.BytesIO(data))
    packed = gzip.compress(raw.getvalue(), compresslevel=6, mtime=0)
    return Release(content.hexdigest()[:16], hashlib.sha256(packed).hexdigest(), packed)


LOADER = r"""
import hashlib, io, json, os, shutil, sys, tarfile, tempfile, time
root, name, digest = sys.argv[2:5]
def say(**what):
    os.write(1, (json.dumps(what) + "\n").encode())
def take(size):
    data = bytearray()
    while len(data) < size:
        chunk = os.read(0, min(65536, size - len(data)))
        if not chunk:
            sys.exit(0)
        data += chunk
    return bytes(data)
def sync(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
os.umask(0o77)
base = os.path.join(root, "releases")
home = os.path.join(base, name)
tmp = None
try:
    os.makedirs(base, exist_ok=True)
    for old in os.listdir(base):
        path = os.path.join(base, old)
        if old.startswith(".tmp-") and time.time() - os.stat(path).st_mtime > 86400:
            shutil.rmtree(path, ignore_errors=True)
    tmp = tempfile.mkdtemp(prefix=".tmp-" + name + "-", dir=base)
    say(need="release", hash=name)
    size = b""
    while not size.endswith(b"\n"):
        size += take(1)
    data = take(int(size))
    if hashlib.sha256(data).hexdigest() != digest:
        raise ValueError("the release arrived damaged")
    written = []
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        for member in archive.getmembers():
            target = os.path.normpath(os.path.join(tmp, member.name))
            if not member.isfile() or not target.startswith(tmp + os.sep):
                raise ValueError("unexpected member " + member.name)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "wb") as file:
                file.write(archive.extractfile(member).read())
            written.append(target)
    for target in written:
        sync(target)
    with open(os.path.join(tmp, ".complete"), "w") as file:
        file.write(sys.executable)
        file.flush()
        os.fsync(file.fileno())
    if os.path.isdir(home) and not os.path.exists(os.path.join(home, ".complete")):
        shutil.rmtree(home, ignore_errors=True)
    try:
        os.rename(tmp, home)
        sync(base)
    except OSError:
        if not os.path.exists(os.path.join(home, ".complete")):
            raise
        shutil.rmtree(tmp, ignore_errors=True)
except (OSError, ValueError) as exc:
    if tmp:
        shutil.rmtree(tmp, ignore_errors=True)
    full = getattr(exc, "errno", None) in (28, 122)
    say(error="disk_full" if full else "io", seen=str(exc))
    sys.exit(1)
say(installed=name)
os.execv(sys.executable, [sys.executable, "-I", "-S", home, "agent", "--root", root, "--release", name])
"""
"""Runs on the host (Python 3.8, standard library): takes the release from stdin, then becomes the agent.

Two loaders may race: each has a folder of its own, the first rename wins, and both start the winner.
"""

OTHER_PYTHONS = "python python3.13 python3.12 python3.11 python3.10 python3.9 python3.8"
BECOME_LOADER = "import sys,base64,zlib;exec(zlib.decompress(base64.b64decode(sys.argv[1])))"
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]*")


def assign(name: str, path: str) -> str:
    """Statements for sh that put a path into a variable; a leading ~ becomes the host's HOME, all else is literal.

    Written so that any login shell (csh, fish) can carry them inside single quotes: unusual characters go through
    printf's octal escapes, hence no quote, newline, exclamation mark or double backslash appears.  The x keeps
    trailing newlines, which $() would strip.
    """
    home, rest = ('"$HOME"', path[1:]) if path == "~" or path.startswith("~/") else ("", path)
    if _PLAIN.fullmatch(rest):
        return f"{name}={home}{rest}"
    coded = "".join(
        chr(byte) if byte < 128 and _PLAIN.fullmatch(chr(byte)) and byte != ord("%") else f"\\0{byte:03o}"
        for byte in rest.encode("utf-8", "surrogateescape")
    )
    return f'{name}=$(printf "%bx" "{coded}"); {name}={home}"${{{name}%x}}"'


def bootstrap(release: Release, root: str, agent_python: str | None) -> str:
    r"""The one command line that starts the agent on a host, whatever the login shell is.

    The first JSON object on stdout is the agent's hello, {"need": "release"} (send `<length>\n<archive>`), or
    {"error": "no_python" | "disk_full" | "io", "seen": ...}. An empty line comes first, so that a login that prints
    without a final newline does not swallow it.
    """
    loader = base64.b64encode(zlib.compress(LOADER.encode("utf-8"), 9)).decode("ascii")
    arguments = f'"$R" {release.hash} {release.digest}'
    version = "import sys;print(sys.version_info[0]*100+sys.version_info[1])"
    script = "; ".join(
        [
            "echo",
            assign("R", root),
            assign("A", agent_python or ""),
            f'D="$R/releases/{release.hash}"',
            # Once installed, the release remembers its interpreter: no search, one interpreter start less.
            'if [ -f "$D/.complete" ]; then IFS= read -r P < "$D/.complete"; [ -n "$A" ] && P=$(command -v "$A")',
            f'[ -x "$P" ] && exec "$P" -I -S "$D" agent --root "$R" --release {release.hash}; fi',
            "S=",
            'for p in "${A:-python3}" ' + ("" if agent_python else OTHER_PYTHONS),
            f'do v=$("$p" -c "{version}" 2>/dev/null </dev/null)',
            f'case "$v" in 3??) [ "$v" -ge 308 ] && exec "$p" -I -S -c "{BECOME_LOADER}" {loader} {arguments}',
            'v=${v#3}; S="$S $p is 3.${v#0}," ;; 2??) S="$S $p is 2," ;; esac; done',
            r'printf "{\"error\":\"no_python\",\"seen\":\"%s\"}\n" '
            + (
                '"${S:-nothing where agent_python points}"' if agent_python else '"${S:-nothing on the PATH}"'
            ),
            "exit 3",
        ]
    )
    return "exec /bin/sh -c " + shlex.quote(script)
