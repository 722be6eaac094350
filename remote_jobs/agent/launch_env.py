"""What a launch exports beyond the plan: raised load timers and the overlay of patched packages.

Standard library only.
"""

from __future__ import annotations

from typing import Dict, Mapping

from remote_jobs import protocol
from remote_jobs.agent.jobdir import JobDir, Layout

ENGINE_READY = "VLLM_ENGINE_READY_TIMEOUT_S"
NCCL_HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
LEAST_EXPORT_S = 7200
"""What a launch exports at least; the preflight asks for more when the load is predicted to take longer."""
# The programs' own limits kill a healthy 26-minute load (vLLM's engine-ready limit is 600 s, NCCL's heartbeat 480 s).
_LOAD_TIMERS: Mapping[str, str] = {
    ENGINE_READY: str(LEAST_EXPORT_S),
    NCCL_HEARTBEAT: str(LEAST_EXPORT_S),
    "VLLM_RPC_TIMEOUT": "600000",
}
LOADERS = frozenset({"serve", "extract", "train", "evaluate"})
"""Built-in steps that load a model."""


def timer_exports(step: protocol.StepSpec) -> Dict[str, str]:
    """Timer variables of a step that loads a model: generous ones, or those that the preflight reckoned.

    The plan's own `env:` wins over them.
    """
    return {**(_LOAD_TIMERS if step.uses in LOADERS else {}), **step.exports}


def overlay_env(
    step: protocol.StepSpec, spec: protocol.JobSpec, job: JobDir, layout: Layout, env: Mapping[str, str]
) -> Dict[str, str]:
    """PYTHONPATH and ORCH_PATCHES of the step's patch sets; empty without any.

    Raises:
        ValueError: a set was asked for by name and does not fit this host; the text says why.
    """
    if step.patches is None:
        return {}
    if step.patches in ("none", []):
        return {"ORCH_PATCHES": "none"}  # said aloud: a built-in step would else apply the sets that suit by itself
    from remote_jobs.patches import overlay

    return overlay.for_step(step, spec, job.path, layout.root, env)
