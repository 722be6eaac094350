"""The wheel: holds what is needed and nothing else, and runs from a clean environment on every Python promised.

Nothing is fetched here: dependencies are those of the environment that runs the tests, and where another interpreter
has none, what needs none must run (`orch --help`, and the log reader that travels to hosts). `make wheel` installs it
with its dependencies, from the package index, on every interpreter found.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
LOG = PROJECT / "tests" / "data" / "logs"
PROMISED = ("3.11", "3.12", "3.13", "3.14")
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


def interpreters() -> dict[str, str]:
    """Promised versions of Python on this machine: on the PATH, or of pyenv."""
    found = {HERE: sys._base_executable}  # type: ignore[attr-defined]
    for version in PROMISED:
        places = [
            shutil.which(f"python{version}"),
            *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")),
        ]
        for place in places:
            if place and "shims" not in place:
                found.setdefault(version, place)
    return found


def run(*argv: object, **environment: str) -> str:
    """Standard output of a command that must succeed, far from the sources."""
    env = {
        "PATH": os.environ["PATH"],
        "HOME": "/nonexistent",
        "LANG": "C.UTF-8",
        "COLUMNS": "120",
        **environment,
    }
    done = subprocess.run(
        [*map(str, argv)],
        capture_output=True,
        text=True,
        env=env,
        cwd="/",
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, f"{argv}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        PROJECT,
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        folder,
    )
    [path] = folder.glob("*.whl")
    return path


def environment(python: str, folder: Path, wheel: Path) -> Path:
    """A clean environment with the wheel alone; its bin folder."""
    run(python, "-m", "venv", "--without-pip", folder)
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        folder / "bin" / "python",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        wheel,
    )
    return folder / "bin"


def test_what_is_in_it(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"orchestrator", "remote_jobs"}
    assert not [name for name in names if re.search(r"__pycache__|\.pyc$|/tests/|\.log$|\.tmp", name)]
    assert {
        "remote_jobs/protocol.py",
        "remote_jobs/agent/supervisor.py",
        "remote_jobs/steps/extract.py",
        "orchestrator/cli/main.py",
    } <= set(names)
    data = {
        path.relative_to(PROJECT).as_posix()
        for path in (PROJECT / "remote_jobs/patches/data").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert data <= set(names)


def test_from_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    """The commands work, and what travels to the host is byte for byte what the sources would send."""
    bin_ = environment(sys._base_executable, tmp_path / "env", wheel)  # type: ignore[attr-defined]
    site = Path(run(bin_ / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    assert run(bin_ / "python", "-c", "import orchestrator; print(orchestrator.__path__[0])").startswith(
        str(tmp_path)
    )
    assert "Usage: orch" in run(bin_ / "orch", "--help")
    assert run(bin_ / "orch", "--version").startswith("orch 0.")
    log = next(LOG.rglob("*.log"))
    answer = json.loads(run(bin_ / "orch", "explain", log, "--exit-status", "1", "--json"))
    assert answer["schema"] == 1
    build = "from orchestrator.hosts.release import build; print(build().hash)"
    assert run(bin_ / "python", "-c", build) == run(sys.executable, "-c", build, PYTHONPATH=str(PROJECT))


@pytest.mark.parametrize("version", sorted(interpreters()))
def test_on_every_python_that_is_here(wheel: Path, tmp_path: Path, version: str) -> None:
    bin_ = environment(interpreters()[version], tmp_path / "env", wheel)
    assert f"Python {version}." in run(bin_ / "python", "--version")
    assert "Usage: orch" in run(bin_ / "orch", "--help")
    site = run(bin_ / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    run(
        bin_ / "python",
        "-W",
        "error",
        "-m",
        "compileall",
        "-q",
        "-f",
        f"{site}/orchestrator",
        f"{site}/remote_jobs",
    )
    log = next(LOG.rglob("*.log"))
    mine = run(bin_ / "python", "-m", "remote_jobs.logs", log, "--exit-status", "1")
    assert mine == run(
        sys.executable, "-m", "remote_jobs.logs", log, "--exit-status", "1", PYTHONPATH=str(PROJECT)
    )
