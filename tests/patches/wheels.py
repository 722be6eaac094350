"""Real wheels as folders of Python files, downloaded once into the cache that outlives a run."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.vllm_env.build import cache_dir

PLATFORMS = (
    "manylinux_2_31_x86_64",
    "manylinux_2_28_x86_64",
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
    "any",
)


def unpacked(distribution: str, version: str) -> Path:
    """Folder with the wheel's .py files, as in site-packages; binaries are left out."""
    target = cache_dir() / "wheels" / f"{distribution}-{version}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        argv += ["--python-version", "3.12", "--disable-pip-version-check"]
        for platform in PLATFORMS:
            argv += ["--platform", platform]
        subprocess.run([*argv, f"{distribution}=={version}", "--dest", temporary], check=True)
        [wheel] = Path(temporary).glob("*.whl")
        folder = Path(temporary) / "files"
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(".py"):
                    archive.extract(name, folder)
        if not target.exists():
            shutil.move(folder, target)
    return target


def installation(folder: Path, *wheels: Path) -> Path:
    """A site-packages of links to the packages of several wheels."""
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in wheels:
        for package in wheel.iterdir():
            (folder / package.name).symlink_to(package)
    return folder
