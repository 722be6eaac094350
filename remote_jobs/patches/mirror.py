"""The patched copy of a package for one job: put first on PYTHONPATH, site-packages stay as they are.

A partial package on PYTHONPATH would hide the rest of the real one, so the overlay holds the whole tree: real
directories, symbolic links to unchanged files, real files only where patched. Its folder is named by a hash of the sets
and of the originals; it is built under a temporary name and renamed, so two jobs may build it at once.
Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from remote_jobs.patches.judge import OVERLAYS, Judgement, package_root, patched_text
from remote_jobs.patches.sets import PatchError, combined_sha256, file_sha256

RECORD = "overlay.json"
SHA256_ENV = "ORCH_PATCHES_SHA256"
SETS_ENV = "ORCH_PATCHES"
PROBE_TIMEOUT_S = 60.0

_WORKER = """
import hashlib, json, multiprocessing, os, sys
from importlib.machinery import PathFinder

def seen(paths):
    found = {}
    for path in paths:
        spec = PathFinder.find_spec(path.split("/")[0].removesuffix(".py") if hasattr(str, "removesuffix") else path.split("/")[0].replace(".py", ""))
        if spec is None:
            found[path] = None
            continue
        top = os.path.dirname(next(iter(spec.submodule_search_locations))) if spec.submodule_search_locations else os.path.dirname(spec.origin)
        full = os.path.join(top, path)
        found[path] = [full, hashlib.sha256(open(full, "rb").read()).hexdigest()] if os.path.isfile(full) else None
    return found

def work(paths, queue):
    queue.put(seen(paths))

if __name__ == "__main__":
    paths = json.loads(sys.argv[1])
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    child = context.Process(target=work, args=(paths, queue))
    child.start()
    spawned = queue.get()
    child.join()
    print(json.dumps({"main": seen(paths), "worker": spawned}))
"""


def build(chosen: Sequence[Judgement], root: str) -> str | None:
    """Build the overlay of the chosen sets below `<root>/overlays`, or find it there; None when there is nothing to do.

    Raises:
        PatchError: an original drifted, or a diff does not apply.
        OSError: the disk.
    """
    if not chosen:
        return None
    parent = os.path.join(os.path.abspath(os.path.expanduser(root)), OVERLAYS)
    target = os.path.join(parent, _key(chosen))
    if os.path.isfile(os.path.join(target, RECORD)):
        return target
    os.makedirs(parent, mode=0o700, exist_ok=True)
    temporary = f"{target}.tmp.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        record = _fill(chosen, temporary)
        with open(os.path.join(temporary, RECORD), "w", encoding="utf-8") as stream:
            json.dump(record, stream, indent=2)
            stream.flush()
            os.fsync(stream.fileno())
        try:
            os.rename(temporary, target)
        except OSError:
            # Somebody was quicker: a whole overlay has its record, since it only comes by rename.
            if not os.path.isfile(os.path.join(target, RECORD)):
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def environment(chosen: Sequence[Judgement], overlay: str | None, environ: dict[str, str]) -> dict[str, str]:
    """Variables that make a process and all its children use the overlay, and that say so to whoever records it."""
    if overlay is None:
        return {}
    former = [
        entry
        for entry in environ.get("PYTHONPATH", "").split(os.pathsep)
        if entry and OVERLAYS not in entry.split(os.sep)
    ]
    return {
        "PYTHONPATH": os.pathsep.join([overlay, *former]),
        SHA256_ENV: str(combined_sha256([found.patch_set for found in chosen])),
        SETS_ENV: ",".join(
            "{}@{}".format(found.patch_set.name, found.patch_set.sha256[:12]) for found in chosen
        ),
    }


def prove(chosen: Sequence[Judgement], overlay: str) -> list[str]:
    """Show that the overlay took effect: a fresh interpreter and a worker spawned by it must both find the patched files.

    Returns:
        What is wrong, as sentences; empty when everything is in effect.
    """
    expected = {file.path: file.patched_sha256 for found in chosen for file in found.patch_set.files}
    expected.update({path: file_sha256(source) for found in chosen for path, source in found.patch_set.adds})
    env = {**os.environ, **environment(chosen, overlay, dict(os.environ))}
    # The worker module has to be a file: spawn re-imports the main module.
    script = os.path.join(overlay, "orch_overlay_probe.py")
    if not os.path.isfile(script):
        temporary = f"{script}.{os.getpid()}"
        with open(temporary, "w", encoding="utf-8") as stream:
            stream.write(_WORKER)
        os.replace(temporary, script)
    done = subprocess.run(
        [sys.executable, script, json.dumps(sorted(expected))],
        env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_TIMEOUT_S,
    )  # fmt: skip
    if done.returncode != 0:
        return [
            "the probe of {} failed: {}".format(
                overlay, done.stderr.decode("utf-8", "replace").strip()[-400:]
            )
        ]
    wrong = []
    for process, found in json.loads(done.stdout.decode()).items():
        for path, sha256 in expected.items():
            seen = found.get(path)
            if seen is None or seen[1] != sha256 or not seen[0].startswith(overlay + os.sep):
                wrong.append(f"in the {process} process {path} is {seen and seen[0]}, not the patched file")
    return wrong


def _key(chosen: Sequence[Judgement]) -> str:
    """Hash over sets, and the place and originals of the packages: another installation gets another overlay."""
    digest = hashlib.sha256(str(combined_sha256([found.patch_set for found in chosen])).encode())
    for package in _packages(chosen):
        root = package_root(package)
        info = os.stat(os.path.join(str(root), package))
        digest.update(f"{package}\0{root}\0{info.st_mtime_ns}\n".encode())
    digest.update(sys.version.encode())
    return digest.hexdigest()[:20]


def _packages(chosen: Sequence[Judgement]) -> list[str]:
    return sorted({package for found in chosen for package in found.patch_set.packages})


def _fill(chosen: Sequence[Judgement], overlay: str) -> dict[str, Any]:
    os.makedirs(overlay, mode=0o700)
    for package in _packages(chosen):
        root = package_root(package)
        if root is None:
            raise PatchError(f"{package} is not installed")
        _mirror(os.path.join(root, package), os.path.join(overlay, package))
    for found in chosen:
        for file in found.patch_set.files:
            text = patched_text(found.root, file)
            path = os.path.join(overlay, file.path)
            os.unlink(path)
            _write(path, text)
            if file_sha256(path) != file.patched_sha256:
                raise PatchError(f"patch set {found.patch_set.name} is broken: {file.path} came out wrong")
        for added, source in found.patch_set.adds:
            path = os.path.join(overlay, added)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            shutil.copyfile(source, path)
    return {
        "sets": [{"name": found.patch_set.name, "sha256": found.patch_set.sha256} for found in chosen],
        "sha256": combined_sha256([found.patch_set for found in chosen]),
    }


def _mirror(source: str, target: str) -> None:
    """Copy a tree as real directories with links to the files; compiled caches are left out."""
    for folder, names, files in os.walk(source, followlinks=True):
        names[:] = [name for name in names if name != "__pycache__"]
        there = os.path.join(target, os.path.relpath(folder, source)) if folder != source else target
        os.makedirs(there, exist_ok=True)
        for name in files:
            with contextlib.suppress(FileExistsError):
                os.symlink(os.path.join(folder, name), os.path.join(there, name))


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8", newline="") as stream:
        stream.write(text)
