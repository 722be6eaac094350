"""The release: what travels to the host, named by the hash of its content, and the words that install and start it.

One exec does everything: find Python and the release, start the agent; if the release is missing, a small loader
takes it over the same channel, checks it, renames it into place and becomes the agent.  So a second connection
uploads nothing, and a first one costs one more round trip.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import shlex
import tarfile
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
import hashlib, io, json, os, shutil, sys, tarfile
root, name, digest = sys.argv[1:4]
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
os.umask(0o77)
base = os.path.join(root, "releases")
home = os.path.join(base, name)
tmp = os.path.join(base, ".tmp-%s-%d" % (name, os.getpid()))
try:
    os.makedirs(base, exist_ok=True)
    say(need="release", hash=name)
    size = b""
    while not size.endswith(b"\n"):
        size += take(1)
    data = take(int(size))
    if hashlib.sha256(data).hexdigest() != digest:
        raise ValueError("the release arrived damaged")
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        for member in archive.getmembers():
            target = os.path.normpath(os.path.join(tmp, member.name))
            if not member.isfile() or not target.startswith(tmp + os.sep):
                raise ValueError("unexpected member " + member.name)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "wb") as file:
                file.write(archive.extractfile(member).read())
                file.flush()
                os.fsync(file.fileno())
    with open(os.path.join(tmp, ".complete"), "w") as file:
        file.write(sys.executable)
        file.flush()
        os.fsync(file.fileno())
    if os.path.isdir(home) and not os.path.exists(os.path.join(home, ".complete")):
        shutil.rmtree(home, ignore_errors=True)
    try:
        os.rename(tmp, home)
    except OSError:
        if not os.path.exists(os.path.join(home, ".complete")):
            raise
        shutil.rmtree(tmp, ignore_errors=True)
except (OSError, ValueError) as exc:
    shutil.rmtree(tmp, ignore_errors=True)
    full = getattr(exc, "errno", None) in (28, 122)
    say(error="disk_full" if full else "io", seen=str(exc))
    sys.exit(1)
say(installed=name)
os.execv(sys.executable, [sys.executable, "-I", "-S", home, "agent", "--root", root, "--release", name])
"""


def shell_path(path: str) -> str:
    """A path as one word for a POSIX shell; a leading ~ becomes the remote HOME, everything else is literal."""
    if path == "~":
        return '"$HOME"'
    return '"$HOME"/' + shlex.quote(path[2:]) if path.startswith("~/") else shlex.quote(path)


def bootstrap(release: Release, root: str, agent_python: str | None) -> str:
    """The one command line that starts the agent on a host, whatever the login shell is.

    Its first line of JSON on stdout is the agent's hello, {"need": "release"} (send `<length>\\n<archive>`), or
    {"error": "no_python" | "disk_full" | "io", "seen": ...}.
    """
    pythons = shell_path(agent_python) if agent_python else "python3 python python3.13 python3.12 python3.11 python3.10 python3.9 python3.8"
    script = f"""
R={shell_path(root)}; D="$R/releases/{release.hash}"
if [ -f "$D/.complete" ]; then
P={'$(cat "$D/.complete")' if agent_python is None else f"$(command -v {shell_path(agent_python)})"}
[ -x "$P" ] && exec "$P" -I -S "$D" agent --root "$R" --release {release.hash}
fi
S=
for p in {pythons}; do
v=$("$p" -c 'import sys; print("%d.%d" % sys.version_info[:2] if sys.version_info >= (3, 8) else "old " + sys.version.split()[0])' 2>/dev/null) || continue
case "$v" in old*) S="$S $p is ${{v#old }};";; 3.*) exec "$p" -I -S -c {shlex.quote(LOADER)} "$R" {release.hash} {release.digest};; esac
done
printf '{{"error":"no_python","seen":"%s"}}\\n' "$(printf %s "${{S:-none found on the PATH}}" | tr -d '"\\\\')"
exit 3
"""
    return "exec /bin/sh -c " + shlex.quote(script)
