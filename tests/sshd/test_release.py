"""The release and the words that start it: deterministic, installed once, and quoted for any path and login shell."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.hosts import release
from tests.support.host_side import pythons

SHELLS = [
    path for name in ("sh", "dash", "bash", "zsh", "fish", "tcsh", "csh") if (path := shutil.which(name))
]
"""Login shells of this machine: sshd runs `$SHELL -c COMMAND`."""


def start(
    command: str, *, shell: str = "/bin/sh", home: Path | None = None, path: str | None = None
) -> subprocess.Popen[bytes]:
    """Run a bootstrap as sshd would, in a login's environment."""
    environment = {"PATH": path or os.environ["PATH"], "HOME": str(home or Path.home()), "LANG": "C.UTF-8"}
    return subprocess.Popen(
        [shell, "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        cwd="/",
    )


def talk(command: str, **options: object) -> tuple[list[dict[str, object]], str]:
    """Objects that a bootstrap prints until the agent's hello or its own end; feeds the release when asked."""
    seen: list[dict[str, object]] = []
    with start(command, **options) as process:  # type: ignore[arg-type]
        assert process.stdin
        assert process.stdout
        assert process.stderr
        for line in process.stdout:
            if not line.startswith(b"{"):
                continue
            seen.append(json.loads(line))
            if "need" in seen[-1]:
                built = release.build()
                process.stdin.write(f"{len(built.archive)}\n".encode() + built.archive)
                process.stdin.flush()
            if "hello" in seen[-1]:
                break
        process.stdin.close()
        process.wait(timeout=20)
        return seen, process.stderr.read().decode()


def kinds(objects: list[dict[str, object]]) -> list[str]:
    """The telling key of each object."""
    return [next(key for key in ("need", "installed", "hello", "error") if key in item) for item in objects]


def test_the_same_sources_give_the_same_bytes() -> None:
    """Another process, another time, another hash seed: the same release."""
    code = (
        "from orchestrator.hosts.release import build; b = build(); print(b.hash, b.digest, len(b.archive))"
    )
    built = release.build.__wrapped__()  # as the sources are now, whatever was read earlier
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "TZ": f"UTC+{seed}"}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
        )
        assert done.stdout.split() == [built.hash, built.digest, str(len(built.archive))]


def test_the_archive_holds_scripts_and_no_rubbish() -> None:
    """Only regular files, no caches; the entry point and the schema are there."""
    with tarfile.open(fileobj=BytesIO(release.build().archive)) as archive:
        members = archive.getmembers()
    names = {member.name for member in members}
    assert {"__main__.py", "remote_jobs/protocol.py", "remote_jobs/agent/main.py"} <= names
    assert all(member.isfile() and member.mtime == 0 and member.uid == 0 for member in members)
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_installed_once_then_started_directly(tmp_path: Path) -> None:
    """The first start asks for the release, the second one does not, and remembers the interpreter."""
    root = tmp_path / "root"
    command = release.bootstrap(release.build(), str(root), None)
    first, _ = talk(command)
    assert kinds(first) == ["need", "installed", "hello"]
    second, _ = talk(command)
    assert kinds(second) == ["hello"]
    assert second[0]["hello"]["release"] == release.build().hash  # type: ignore[index]
    installed = root / "releases" / release.build().hash
    assert Path((installed / ".complete").read_text()).is_file()
    assert [entry.name for entry in (root / "releases").iterdir()] == [installed.name]
    assert (root / "releases").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("shell", SHELLS)
def test_any_login_shell_can_carry_it(shell: str, tmp_path: Path) -> None:
    """Also with a root that needs every kind of care."""
    root = tmp_path / 'it\'s "a" $HOME `root` \\ !x\n* é\n'
    objects, stderr = talk(release.bootstrap(release.build(), str(root), None), shell=shell)
    assert kinds(objects) == ["need", "installed", "hello"], (objects, stderr)
    assert objects[-1]["hello"]["root"] == str(root)  # type: ignore[index]


@pytest.mark.parametrize(("version", "python"), pythons().items())
def test_the_oldest_python_can_load_it(version: str, python: str, tmp_path: Path) -> None:
    """The interpreter that the inventory names is used, for loader and agent."""
    objects, stderr = talk(release.bootstrap(release.build(), str(tmp_path / "root"), python))
    assert kinds(objects) == ["need", "installed", "hello"], (objects, stderr)
    assert str(objects[-1]["hello"]["python"]).startswith(version)  # type: ignore[index]


def test_a_tilde_is_the_hosts_home(tmp_path: Path) -> None:
    """Not the laptop's."""
    objects, _ = talk(release.bootstrap(release.build(), "~/.orch estrator", None), home=tmp_path)
    assert objects[-1]["hello"]["root"] == str(tmp_path / ".orch estrator")  # type: ignore[index]


def test_no_python_says_what_was_seen(tmp_path: Path) -> None:
    """Too old, missing, and too old but with a newer one beside it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    command = release.bootstrap(release.build(), str(tmp_path / "root"), None)
    (objects, _) = talk(command, path=str(folder))
    assert objects == [{"error": "no_python", "seen": "nothing on the PATH"}]
    for name, number in (("python", 207), ("python3", 306)):
        (folder / name).write_text(f"#!/bin/sh\necho {number}\n")
        (folder / name).chmod(0o755)
    (objects, _) = talk(command, path=str(folder))
    assert objects == [{"error": "no_python", "seen": " python3 is 3.6, python is 2,"}]
    (folder / "python3.11").symlink_to(sys._base_executable)  # type: ignore[attr-defined]
    (objects, stderr) = talk(command, path=str(folder))
    assert kinds(objects) == ["need", "installed", "hello"], stderr


def test_racing_installations_leave_one_release(tmp_path: Path) -> None:
    """Several first connections at once: all get an agent, one folder remains."""
    root = tmp_path / "root"
    built = release.build()
    running = [start(release.bootstrap(built, str(root), None)) for _ in range(3)]
    try:
        for process in running:
            assert process.stdin
            assert process.stdout
            line = b""
            while not line.startswith(b"{"):
                line = process.stdout.readline()
            assert b"need" in line
        for process in running:
            assert process.stdin
            process.stdin.write(f"{len(built.archive)}\n".encode() + built.archive)
            process.stdin.flush()
        for process in running:
            assert process.stdout
            lines = [process.stdout.readline(), process.stdout.readline()]
            assert b'"installed"' in lines[0]
            assert b'"hello"' in lines[1]
        assert [entry.name for entry in (root / "releases").iterdir()] == [built.hash]
    finally:
        for process in running:
            process.stdin.close()  # type: ignore[union-attr]
            process.wait(timeout=20)
            process.stdout.close()  # type: ignore[union-attr]
            process.stderr.close()  # type: ignore[union-attr]


def test_a_cut_upload_leaves_nothing_that_counts(tmp_path: Path) -> None:
    """The link drops in the middle: the next start asks again; damage on the way is refused."""
    root = tmp_path / "root"
    built = release.build()
    command = release.bootstrap(built, str(root), None)
    with start(command) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(f"{len(built.archive)}\n".encode() + built.archive[:1000])
        process.stdin.close()
        process.wait(timeout=20)
    assert not (root / "releases" / built.hash).exists()
    with start(command) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(f"{len(built.archive)}\n".encode() + b"x" + built.archive[1:])
        process.stdin.close()
        out = process.stdout.read()
    assert b"damaged" in out
    assert kinds(talk(command)[0]) == ["need", "installed", "hello"]


def test_a_root_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    """A file stands where the root should be."""
    (tmp_path / "file").write_text("")
    objects, _ = talk(release.bootstrap(release.build(), str(tmp_path / "file" / "root"), None))
    assert kinds(objects) == ["error"]
    assert "file" in str(objects[0]["seen"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), min_size=1))
def test_every_path_survives_a_real_shell(path: str) -> None:
    """`assign` inside single quotes gives the variable exactly the path (a leading ~ aside)."""
    statements = release.assign("R", path)
    assert not set("'\n!") & set(statements)
    assert "\\\\" not in statements
    done = subprocess.run(
        ["/bin/sh", "-c", f'{statements}; printf "%s" "$R"'],
        capture_output=True,
        check=True,
        env={"HOME": "/home/me", "PATH": "/usr/bin:/bin"},
    )
    expected = "/home/me" + path[1:] if path == "~" or path.startswith("~/") else path
    assert done.stdout == expected.encode()
