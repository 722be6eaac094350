"""Time limits of vLLM raised to the load that is to be expected, and other settings every vLLM start of ours shares.

Must not import vllm or torch: it decides about the environment that they read when they are imported.
"""

from __future__ import annotations

import os

from remote_jobs.patches import judge, probe

SLOW_LOAD_BYTES_PER_S = 200e6
"""A slow network file system; a load is given three times what it would take there."""
LEAST_LIMIT_S = 1800
STARTUP_S = 900
PARALLEL_CONFIG = "vllm/config/parallel.py::ParallelConfig"


def load_limit_s(checkpoint_bytes: int) -> int:
    """Seconds that engine and collectives may wait for a load: three times a slow read, plus start-up and compilation.

    vLLM's own default is 600 s; a 600 GB checkpoint takes 20 minutes from a good disk.
    """
    return max(LEAST_LIMIT_S, int(3 * checkpoint_bytes / SLOW_LOAD_BYTES_PER_S) + STARTUP_S)


def checkpoint_bytes(folder: str) -> int:
    """Size of the weight files of a checkpoint folder; 0 for anything else (a hub id)."""
    if not os.path.isdir(folder):
        return 0
    names = [name for name in os.listdir(folder) if name.endswith((".safetensors", ".bin", ".pt", ".gguf"))]
    return sum(os.path.getsize(os.path.join(folder, name)) for name in names)


def limit_env(limit_s: int) -> dict[str, str]:
    """Environment variables of the limits; what the user set already wins."""
    wanted = {"VLLM_ENGINE_READY_TIMEOUT_S": str(limit_s), "VLLM_LOGGING_COLOR": "0"}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def limit_flags(limit_s: int) -> dict[str, str]:
    """VLLM flags of the limits, as far as the installed vLLM knows them: NCCL gives up after 600 s otherwise."""
    root = judge.package_root("vllm")
    try:
        known = probe.fields(root, PARALLEL_CONFIG) if root else []
    except (probe.Missing, SyntaxError):
        known = []
    return {"distributed_timeout_seconds": str(limit_s)} if "distributed_timeout_seconds" in known else {}


def is_cpu_build() -> bool:
    """True for vLLM's CPU build: vLLM itself decides its platform by this word in the version."""
    return "cpu" in (probe.version_of("vllm") or "")
