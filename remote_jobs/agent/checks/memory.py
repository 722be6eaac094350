"""Check 3: do weights, KV cache and hidden-state cache fit the GPUs, and the loaders the host's memory and /dev/shm?

Estimates lean to the small side, so that `fail` means that vLLM would fail too; what is merely tight is `warn`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, List, Mapping, Optional

from remote_jobs.agent.checks import model
from remote_jobs.agent.checks.context import FAIL, GIB, OK, SKIP, VLLM_STEPS, WARN, Row, Step, gib, row, worst

MIB = 1024**2
DTYPE_BYTES = {"float32": 4.0, "float": 4.0, "bfloat16": 2.0, "float16": 2.0, "half": 2.0}
CONTEXT_BYTES = 1.0 * GIB
"""CUDA context, libraries and NCCL buffers of one worker: 0.6 to 1.5 GiB on H200."""
DEFAULT_UTILIZATION = 0.9
DEFAULT_BATCHED_TOKENS = 8192
DEFAULT_MAX_SEQS = 256
SHM_MIN_MIB, SHM_GOOD_MIB = 128, 1024
"""Docker's default /dev/shm of 64 MiB breaks NCCL and multi-process vLLM; a gibibyte is comfortable."""


@dataclass
class GpuMemory:
    """One GPU as far as memory goes, in bytes."""

    index: int
    total: int
    used: int


@dataclass
class HostMemory:
    """The host's memory in bytes; None where it cannot be read."""

    available: Optional[int] = None
    shm_total: Optional[int] = None
    shm_free: Optional[int] = None
    limit: Optional[int] = None
    """Of the control group, when lower than the machine."""


@dataclass
class Need:
    """What one GPU has to hold, in bytes."""

    weights: float
    kv_per_token: Optional[float]
    states_per_token: float
    activations: float
    max_model_len: int


def check(step: Step, shelf: model.Shelf, gpus: List[GpuMemory], host: HostMemory) -> Optional[Row]:
    """The verdict on one step that loads a model with vLLM; None for others."""
    if step.uses not in VLLM_STEPS:
        return None
    located = model.locate(step)
    if located is None or located.folder is None:
        return row(SKIP, "the model is not there yet: nothing to add up")
    config, problem, weights = shelf.get(located.folder)
    if config is None or not weights.shards:
        return row(SKIP, problem or "no weights to add up (see checkpoint)")
    found = parallel_rows(step, config, len(gpus))
    need = needed(step, config, weights)
    if step.gpus > 0 and gpus:
        found += gpu_rows(step, need, gpus[: step.gpus] if step.gpus <= len(gpus) else gpus)
    elif step.gpus > 0:
        found.append(row(SKIP, "GPU memory is unknown: nvidia-smi does not answer (see gpus)"))
    workers = tensor_parallel(step) * side_by_side(step)
    found += host_rows(need, host, workers, on_gpu=step.gpus > 0)
    text = "weights {} per GPU, {} of KV cache per 1000 tokens".format(
        gib(need.weights), gib(1000 * (need.kv_per_token or 0))
    )
    found.append(row(OK, text))
    return worst(found, text)


def tensor_parallel(step: Step) -> int:
    """Tensor-parallel size: the plan's, else the step's GPUs."""
    return int(step.number("tensor_parallel_size", max(1, step.gpus)))


def side_by_side(step: Step) -> int:
    """Ranges of a split step that load the model at the same time: as many as the host's GPUs hold."""
    there = step.job.spec.host_gpus
    return min(step.spec.split, max(1, there // step.gpus)) if step.gpus > 0 and there else step.spec.split


def parallel_rows(step: Step, config: model.ModelConfig, there: int) -> List[Row]:
    """Sizes that cannot work whatever the memory."""
    tp, pp = tensor_parallel(step), int(step.number("pipeline_parallel_size", 1))
    dp = int(step.number("data_parallel_size", 1))
    found = []
    if step.gpus > 0 and tp * pp * dp > step.gpus:
        text = "tensor_parallel_size {} x pipeline_parallel_size {} x data_parallel_size {} needs {} GPUs, the step has {}"
        found.append(row(FAIL, text.format(tp, pp, dp, tp * pp * dp, step.gpus),
                         "set `gpus: {}`, or lower tensor_parallel_size to {}".format(
                             tp * pp * dp, max(1, step.gpus // (pp * dp)))))  # fmt: skip
    if there and step.gpus > there:
        found.append(row(FAIL, "the step asks for {} GPUs, the host has {}".format(step.gpus, there),
                         "lower `gpus` and tensor_parallel_size to {}".format(there)))  # fmt: skip
    if config.heads and config.heads % tp:
        fits = [str(n) for n in (1, 2, 4, 8, 16) if config.heads % n == 0]
        found.append(row(FAIL, "{} attention heads cannot be split over tensor_parallel_size {}".format(config.heads, tp),
                         "use tensor_parallel_size {}".format(", ".join(fits))))  # fmt: skip
    return found


def needed(step: Step, config: model.ModelConfig, weights: model.Weights) -> Need:
    """What a GPU has to hold, from headers, config and parameters."""
    tp, pp = tensor_parallel(step), int(step.number("pipeline_parallel_size", 1))
    chosen = str(step.params.get("dtype") or "auto")
    own = DTYPE_BYTES.get(config.dtype, 2.0)
    width = DTYPE_BYTES.get(chosen, min(own, 2.0) if config.dtype == "float32" and step.gpus else own)
    total = weights.bytes_as(width)
    if step.params.get("quantization") == "fp8" and not config.quantization:
        total /= 2  # quantized while it loads
    cache = str(step.params.get("kv_cache_dtype") or "auto")
    cache_bytes = 1.0 if "fp8" in cache or cache == "int8" else min(width, 2.0) if step.gpus else width
    kv = config.kv_bytes_per_token(tp, cache_bytes)
    layers = step.params.get("layers")
    states = 0.0
    if step.uses == "extract" and config.hidden:
        # The connector keeps the chosen layers' states per token beside the KV cache until they are written.
        states = (len(layers) if isinstance(layers, list) else 4) * config.hidden * 2.0
    length = int(step.number("max_model_len", config.max_positions or 4096))
    batched = int(step.number("max_num_batched_tokens", DEFAULT_BATCHED_TOKENS))
    logits = step.number("max_num_seqs", DEFAULT_MAX_SEQS) * (config.vocab or 0) * 4.0 / tp
    activations = batched * (config.hidden or 0) * 2.0 * 6 + logits
    return Need(total / (tp * pp), None if kv is None else kv / pp, states, activations, length)


def gpu_rows(step: Step, need: Need, gpus: List[GpuMemory]) -> List[Row]:
    """Weights and one longest sequence against what vLLM would take of each GPU."""
    utilization = step.number("gpu_memory_utilization", DEFAULT_UTILIZATION)
    smallest = min(gpus, key=lambda g: g.total)
    found = []
    tp = tensor_parallel(step)
    budget = smallest.total * utilization
    for gpu in gpus:
        free = gpu.total - gpu.used
        if free < gpu.total * utilization:
            most = max(0.0, int(100 * free / gpu.total) / 100 - 0.01)
            text = "gpu {}: {} of {} are free, gpu_memory_utilization {:g} asks for {}"
            found.append(row(FAIL if gpu.used > 0.02 * gpu.total else WARN,
                             text.format(gpu.index, gib(free), gib(gpu.total), utilization, gib(gpu.total * utilization)),
                             "free the GPU (`orch gpus`), or set gpu_memory_utilization to {:.2f}".format(most)))  # fmt: skip
            break
    if need.weights + CONTEXT_BYTES > budget:
        more = next(
            (n for n in (2, 4, 8, 16, 32) if n > tp and need.weights * tp / n + CONTEXT_BYTES < budget), None
        )
        text = "weights take {} per GPU at tensor_parallel_size {}; {:g} of {} is {}"
        fix = "use a quantized checkpoint or larger GPUs"
        if (need.weights + CONTEXT_BYTES) / smallest.total < 0.97:
            needed_share = (need.weights + 2 * CONTEXT_BYTES) / smallest.total
            fix = "raise gpu_memory_utilization to {:.2f}".format(min(0.98, needed_share + 0.02))
        elif more:
            fix = "set tensor_parallel_size: {}".format(more)
        found.append(
            row(FAIL, text.format(gib(need.weights), tp, utilization, gib(smallest.total), gib(budget)), fix)
        )
        return found
    if need.kv_per_token is None:
        return found
    left = budget - need.weights - CONTEXT_BYTES
    one = (need.kv_per_token + need.states_per_token) * need.max_model_len
    fits = int(max(0.0, left - need.activations) / (need.kv_per_token + need.states_per_token))
    if one > left:
        text = "one sequence of max_model_len {} needs {} of cache, {} are left beside the weights"
        found.append(row(FAIL, text.format(need.max_model_len, gib(one), gib(left)),
                         "set max_model_len to {} or less, or raise gpu_memory_utilization or tensor_parallel_size".format(
                             _round_down(fits))))  # fmt: skip
    elif one > left - need.activations:
        text = "tight: one sequence of max_model_len {} needs {} of {} left, activations about {}"
        found.append(row(WARN, text.format(need.max_model_len, gib(one), gib(left), gib(need.activations)),
                         "lower max_model_len to {} or max_num_batched_tokens".format(_round_down(fits))))  # fmt: skip
    return found


def _round_down(tokens: int) -> int:
    return max(1, tokens // 1024 * 1024 or tokens)


def host_rows(need: Need, host: HostMemory, workers: int, *, on_gpu: bool) -> List[Row]:
    """Host memory for the loaders (or, on a CPU host, for the model itself) and /dev/shm for their messages."""
    found = []
    available = host.available
    if available is not None and host.limit is not None:
        available = min(available, host.limit)
    wanted = workers * 2.0 * GIB if on_gpu else need.weights * max(1, workers) * 1.1
    if available is not None and available < wanted:
        limited = (
            " (limit of the control group)" if host.limit is not None and host.limit == available else ""
        )
        text = "{} of memory are available{}, {} loaders need about {}"
        hard = not on_gpu or available < wanted / 2
        found.append(row(FAIL if hard else WARN, text.format(gib(available), limited, workers, gib(wanted)),
                         "free memory on the host" + ("" if on_gpu else " or use a smaller model")))  # fmt: skip
    if workers > 1 and host.shm_total is not None:
        if host.shm_total < SHM_MIN_MIB * MIB:
            found.append(row(FAIL, "shared memory (/dev/shm) is only {}: NCCL and the workers' queues do not fit".format(gib(host.shm_total)),
                             "start the container with --shm-size=16g, or `mount -o remount,size=16G /dev/shm`"))  # fmt: skip
        elif (host.shm_free or 0) < SHM_GOOD_MIB * MIB:
            found.append(row(WARN, "shared memory (/dev/shm) has {} free".format(gib(host.shm_free or 0)),
                             "remove old files from /dev/shm (`ls -la /dev/shm`), or enlarge it"))  # fmt: skip
    return found


# ---------------------------------------------------------------------------------------------------------- the edge


def from_document(document: Optional[Mapping[str, Any]]) -> List[GpuMemory]:
    """GPUs with known memory out of the JSON of `orch gpus`.

    What somebody's work holds is the gate's business and gone before the start: only a clean GPU's use (display,
    driver) is counted.
    """
    found = []
    for gpu in (document or {}).get("gpus") or []:
        if gpu.get("memory_total_mib"):
            used = (gpu.get("memory_used_mib") or 0) if gpu.get("clean") else 0
            found.append(GpuMemory(gpu.get("index") or 0, gpu["memory_total_mib"] * MIB, used * MIB))
    return found


def read_host() -> HostMemory:
    """Memory, control group limit and /dev/shm of this host."""
    host = HostMemory()
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    host.available = int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    host.limit = _cgroup_left()
    try:
        stat = os.statvfs("/dev/shm")  # noqa: S108 - measured, not written
        host.shm_total, host.shm_free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    except OSError:
        pass
    return host


def _cgroup_left(root: str = "/sys/fs/cgroup") -> Optional[int]:
    """What the control group leaves: its limit less its use without page cache, None when unlimited."""
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            with open(os.path.join(root, limit_name), encoding="ascii") as file:
                limit = file.read().strip()
            with open(os.path.join(root, used_name), encoding="ascii") as file:
                used = int(file.read())
        except (OSError, ValueError):
            continue
        if limit.isdigit() and int(limit) < 1 << 60:
            return max(0, int(limit) - used + _reclaimable(os.path.join(root, os.path.dirname(limit_name))))
    return None


def _reclaimable(folder: str) -> int:
    try:
        with open(os.path.join(folder, "memory.stat"), encoding="ascii") as file:
            fields = dict(line.split() for line in file if len(line.split()) == 2)
    except (OSError, ValueError):
        return 0
    return int(fields.get("inactive_file") or fields.get("total_inactive_file") or 0)
