"""Going on without a GPU that failed, where the plan allows it: `retry: {gpu_hardware: {fewer_gpus: {min: 4}}}`.

Which GPU failed is what nvidia-smi and the kernel log say, else what the log names (PCI address, uuid, or the worker
that died).  How far a step may shrink: `tensor_parallel_size` only to a divisor of itself, since what a model's heads
divide by is divisible by every divisor of it; `pipeline_parallel_size` stays; replicas (`data_parallel_size`), training
processes (`nproc_per_node`) and the GPUs of a `run` step may be any number from `min` up.

Pure: no I/O, no clock.  Standard library only.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from remote_jobs.agent import smi_run
from remote_jobs.protocol import StepSpec

CLASS, KEY = "gpu_hardware", "fewer_gpus"
GPUS, WITHOUT = "gpus", "without_gpus"
"""What such a change holds besides parameters: how many GPUs the step claims now, and which ones never again."""
RESIZED = (GPUS, WITHOUT, "tensor_parallel_size", "data_parallel_size", "nproc_per_node")

_BUS = re.compile(r"(?:PCI:|GPU )\(?([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}(?:\.[0-9A-Fa-f])?)")
_UUID = re.compile(r"GPU-[0-9a-fA-F]{8}-[0-9a-fA-F-]{4,27}")
_WORKER = re.compile(r"\bWorker_TP(\d+)\b|\[rank(\d+)\]|\b(?:Vllm)?Worker rank=(\d+)")

Row = Mapping[str, Any]


def least(step: StepSpec) -> Optional[int]:
    """The fewest GPUs that the plan lets this step go on with; None when it may not leave any out."""
    block = step.retry.get(CLASS)
    rule = block.get(KEY) if isinstance(block, dict) else None
    return int(rule.get("min", 1)) if isinstance(rule, dict) else None


def applied(step: StepSpec, changes: Mapping[str, Any]) -> StepSpec:
    """The step with the number of GPUs that it may claim now."""
    return dataclasses.replace(step, gpus=int(changes[GPUS])) if GPUS in changes else step


def is_left_out(row: Row, without: Sequence[str]) -> bool:
    """Whether a GPU ({index, uuid}) is one of those never to be claimed again."""
    return row.get("uuid") in without or str(row.get("index")) in without


def label(row: Row) -> str:
    """For people: `gpu 2 (GPU-4f...)`."""
    return "gpu {}{}".format(row.get("index"), " ({})".format(row["uuid"]) if row.get("uuid") else "")


def suspects(verdict: Mapping[str, Any], survey: Mapping[str, Sequence[Row]], claimed: Optional[Sequence[int]]) -> List[Dict[str, Any]]:
    """The GPUs that failed an attempt: [{index, uuid, bus_id, why}], empty when nothing names one.

    Args:
        verdict: explain's failure object.
        survey: gate.survey, taken after the end of the attempt.
        claimed: indices that the attempt held; None: all.
    """
    mine = [dict(row) for row in survey.get("faulty") or () if claimed is None or row.get("index") in claimed]
    if mine:
        return mine
    healthy = [row for row in survey.get("healthy") or () if claimed is None or row.get("index") in claimed]
    root = str((verdict.get("root_cause") or {}).get("text") or "")
    others = [str(item) for item in verdict.get("evidence") or ()]
    for text in (root, *others):
        buses, uuids = _BUS.findall(text), set(_UUID.findall(text))
        found = [
            row for row in healthy
            if row.get("uuid") in uuids or any(smi_run.same_gpu(bus, row.get("bus_id")) for bus in buses)
        ]  # fmt: skip
        if found:
            return [{**row, "why": "named by: {}".format(text.strip()[:160])} for row in found]
    worker = _WORKER.search(root)
    if worker is not None and claimed is not None:
        rank = int(next(group for group in worker.groups() if group is not None))
        found = [row for row in healthy if rank < len(claimed) and row.get("index") == claimed[rank]]
        return [{**row, "why": "most likely: its worker died first ({})".format(worker.group(0))} for row in found]
    return []


def change(
    step: StepSpec, params: Mapping[str, Any], survey: Mapping[str, Sequence[Row]], without: Sequence[str]
) -> Tuple[Dict[str, Any], str]:
    """(changes, why) that let the step go on without its faulty GPUs; ({}, why) when it cannot.

    Args:
        step: as it runs now (``gpus`` may have been lowered before).
        params: the parameters that it ran with.
        survey: {"healthy", "faulty"}; faulty are those to leave out from now on.
        without: keys of GPUs left out before.
    """
    minimum = least(step)
    faulty = [row for row in survey.get("faulty") or () if not is_left_out(row, without)]
    if minimum is None:
        return {}, "the plan does not allow fewer GPUs (retry: {{{}: {{{}: {{min: N}}}}}})".format(CLASS, KEY)
    if not faulty:
        return {}, "which GPU failed is not known, so none can be left out"
    gone = [*without, *(str(row.get("uuid") or row.get("index")) for row in faulty)]
    healthy = [row for row in survey.get("healthy") or () if not is_left_out(row, gone)]
    size = resized(step, params, len(healthy), minimum)
    if size is None and len(healthy) < minimum:
        return {}, "{} healthy GPU(s) are left, the plan allows no fewer than {}".format(len(healthy), minimum)
    if size is None:
        text = "no divisor of tensor_parallel_size {} gives {} to {} GPUs"
        return {}, text.format(params.get("tensor_parallel_size") or 1, minimum, len(healthy))
    names = "; ".join("{}: {}".format(label(row), row.get("why") or "faulty") for row in faulty)
    return {WITHOUT: gone, **size}, "without {}".format(names)


def resized(step: StepSpec, params: Mapping[str, Any], available: int, minimum: int) -> Optional[Dict[str, Any]]:
    """Parameters (and `gpus`) with which the step fits on ``available`` GPUs; {} when it fits as it is, None never.

    Of several sizes that fit, the one with the most GPUs is taken, then the one with the larger tensor_parallel_size.
    """
    if available >= step.gpus:
        return {}
    if step.uses == "train" or step.uses is None:
        if available < max(1, minimum):
            return None
        own = {"nproc_per_node": available} if params.get("nproc_per_node") else {}
        return {GPUS: available, **own}
    tensor, pipeline, data = (
        int(params.get(name) or 1) for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    )
    if tensor * pipeline * data <= available:  # it claimed more than it uses
        return {GPUS: available} if available >= minimum else None
    sizes = [
        (t * pipeline * d, t, d)
        for t in range(1, tensor + 1) if tensor % t == 0
        for d in range(1, data + 1)
        if minimum <= t * pipeline * d <= available
    ]  # fmt: skip
    if not sizes:
        return None
    gpus, t, d = max(sizes)
    found: Dict[str, Any] = {GPUS: gpus}
    if t != tensor:
        found["tensor_parallel_size"] = t
    if d != data:
        found["data_parallel_size"] = d
    return found
