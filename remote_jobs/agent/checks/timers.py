"""Check 5: limits that would kill a healthy load, and the exports that the launch applies instead.

A load of 600 GB takes 20 minutes from a good disk; vLLM gives its engine 600 s, NCCL's watchdog 480 s.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, Dict, List, Optional, Tuple

from remote_jobs.agent import history
from remote_jobs.agent.checks import model
from remote_jobs.agent.checks.context import FAIL, OK, SKIP, WARN, Row, Step, gib, row, worst
from remote_jobs.agent.launch_env import ENGINE_READY, LEAST_EXPORT_S, LOADERS, NCCL_HEARTBEAT

DEFAULTS_S: Dict[str, float] = {ENGINE_READY: 600.0, NCCL_HEARTBEAT: 480.0}
"""Limits when nobody sets them (vLLM envs.py; torch ProcessGroupNCCL.hpp)."""
MARGIN = 3.0
"""A shared disk is often three times slower than the few megabytes just measured."""
STARTUP_S = 120.0
"""Imports, profiling, compilation and graph capture of a first start: 30 to 134 s on H200."""
PROBE_BYTES = 4 * 1024 * 1024
PROBE_SHARDS = 2
SLOWEST_BYTES_PER_S = 1e6
_NEWEST = 50


def check(step: Step, shelf: model.Shelf) -> Optional[Row]:
    """The verdict on one loading step's limits, with `exports`; None for steps that load nothing."""
    if step.uses not in LOADERS:
        return None
    located = model.locate(step)
    if located is None or located.folder is None:
        return row(
            SKIP, "the model is not there yet: its load time is unknown", exports=exports_for(0.0, step)
        )
    _, _, weights = shelf.get(located.folder)
    speed = read_speed([s.path for s in weights.shards if not s.fault and s.size])
    past = past_load_s(step)
    predicted, how = predict(weights.total_bytes, speed, past)
    return judge(step, predicted, how, shard_s=_shard_s(weights, speed))


def predict(total_bytes: int, bytes_per_s: Optional[float], past_s: Optional[float]) -> Tuple[float, str]:
    """Seconds until the engine is ready, and how that was reckoned. The slower of measurement and history counts."""
    parts = []
    load_s = 0.0
    if bytes_per_s:
        load_s = total_bytes / max(SLOWEST_BYTES_PER_S, bytes_per_s)
        parts.append("{} at {}/s".format(gib(total_bytes), gib(bytes_per_s)))
    if past_s is not None:
        load_s = max(load_s, past_s)
        parts.append("{:.0f} s in an earlier run".format(past_s))
    return load_s + STARTUP_S, ", ".join(parts) or "no shard could be read"


def exports_for(predicted_s: float, step: Step) -> Dict[str, str]:
    """Variables that the launch sets; the plan's own `env:` is never overridden."""
    wanted = int(max(LEAST_EXPORT_S, MARGIN * predicted_s))
    return {name: str(wanted) for name in DEFAULTS_S if step.own_env(name) is None}


def judge(step: Step, predicted_s: float, how: str, *, shard_s: float) -> Row:
    """Decide from numbers and the plan alone."""
    found: List[Row] = []
    exports = exports_for(predicted_s, step)
    needed = "the load is expected to take {} ({})".format(_clock(predicted_s), how)
    for name in DEFAULTS_S:
        own = step.own_env(name)
        limit = _number(own)
        if limit is not None and limit < predicted_s:
            found.append(row(FAIL, "{}={} in the plan, but {}".format(name, own, needed),
                             "remove {} from `env:`, or set it to {:.0f}".format(name, MARGIN * predicted_s)))  # fmt: skip
    limits = (
        ("timeout_s", step.spec.timeout_s),
        ("service.timeout_s", (step.spec.service or {}).get("timeout_s")),
        ("distributed_timeout_seconds", step.params.get("distributed_timeout_seconds")),
    )
    for name, value in limits:
        limit = _number(value)
        if limit is not None and limit < predicted_s:
            found.append(row(FAIL, "{} is {:g} s, but {}".format(name, limit, needed),
                             "set {} to at least {:.0f}".format(name, MARGIN * predicted_s)))  # fmt: skip
    silence = max(120.0, 5 * shard_s)
    hang = step.spec.hang_s
    if hang and hang < silence:
        text = (
            "hang_s is {:g} s, but a healthy load may be silent for {:.0f} s ({:.0f} s a shard, compilation)"
        )
        found.append(row(WARN if hang >= shard_s else FAIL, text.format(hang, silence, shard_s),
                         "set hang_s to at least {:.0f}, or leave it out".format(silence)))  # fmt: skip
    told = ["{}={}".format(name, value) for name, value in exports.items()]
    lowest = min(DEFAULTS_S.values())
    why = (
        "longer than the default limit of {:g} s".format(lowest)
        if predicted_s > lowest
        else "within the default limits"
    )
    text = "{}, {}".format(needed, why) + ("; the launch sets {}".format(", ".join(told)) if told else "")
    found.append(row(OK, text))
    return {**worst(found, text), "exports": exports, "predicted_load_s": round(predicted_s, 1)}


def _clock(seconds: float) -> str:
    return "{:.0f} s".format(seconds) if seconds < 180 else "{:.0f} min".format(seconds / 60)


def _number(value: Any) -> Optional[float]:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _shard_s(weights: model.Weights, speed: Optional[float]) -> float:
    largest = max((s.size for s in weights.shards), default=0)
    return largest / max(SLOWEST_BYTES_PER_S, speed) if speed else 0.0


# ---------------------------------------------------------------------------------------------------------- the edge


def read_speed(paths: List[str], limit_s: float = 1.0) -> Optional[float]:
    """Bytes per second of reading a few megabytes from the middle of two shards, past the page cache where possible."""
    read = 0
    began = time.monotonic()
    for path in sorted(paths, key=lambda p: hash(p) % 997)[:PROBE_SHARDS]:
        with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            start = max(0, (size - PROBE_BYTES) // 2)
            with contextlib.suppress(OSError, AttributeError):
                os.posix_fadvise(file.fileno(), start, PROBE_BYTES, os.POSIX_FADV_DONTNEED)
            file.seek(start)
            while read < PROBE_BYTES * PROBE_SHARDS and time.monotonic() - began < limit_s:
                chunk = file.read(1024 * 1024)
                if not chunk:
                    break
                read += len(chunk)
    took = time.monotonic() - began
    return read / max(took, 1e-6) if read else None


def past_load_s(step: Step) -> Optional[float]:
    """Longest load of this model in the newest runs that this host remembers; None when it knows none."""
    wanted = str(step.spec.params.get("model"))
    took = [
        phases["load_weights"]
        for phases in (
            r.get("phases") for r in history.read(step.job.layout) if str(r.get("model")) == wanted
        )
        if isinstance(phases, dict) and isinstance(phases.get("load_weights"), (int, float))
    ]
    return float(max(took[-_NEWEST:])) if took else None
