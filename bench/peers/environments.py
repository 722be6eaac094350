"""Virtual environments of the peers, made on demand under the user's cache folder; none of them is a dependency of ours."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path


class NotInstallable(Exception):
    """A peer cannot be had on this machine; the message says why."""


def cache() -> Path:
    """Folder of the environments (``ORCH_BENCH_CACHE``, else ``~/.cache/orch-bench``)."""
    return Path(os.environ.get("ORCH_BENCH_CACHE") or Path.home() / ".cache" / "orch-bench")


def interpreter(name: str, requirements: tuple[str, ...]) -> Path:
    """Python of an environment that holds exactly these requirements.

    Raises:
        NotInstallable: pip failed; the message is its last line.
    """
    base = str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())
    wanted = hashlib.sha256("\n".join([base, *requirements]).encode()).hexdigest()
    folder = cache() / name
    stamp = folder / ".complete"
    python = folder / "bin" / "python"
    if stamp.exists() and stamp.read_text() == wanted and python.exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    print(f"   making an environment for {', '.join(requirements)}", flush=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", *requirements]
    for argv in ([base, "-m", "venv", folder], pip):
        done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode:
            lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
            raise NotInstallable(f"pip: {lines[-1] if lines else done.returncode}")
    stamp.write_text(wanted)
    return python


def command(name: str, package: str) -> str:
    """Path of a program of the system.

    Raises:
        NotInstallable: it is not there; the message names the Debian package.
    """
    found = shutil.which(name)
    if not found:
        raise NotInstallable(f"no {name} on this machine (Debian: {package})")
    return found
