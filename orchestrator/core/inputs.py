"""What a built-in step gets when the plan does not say: the model of the server, the output of a step before it,
sizes and GPUs. Pure functions of a plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from orchestrator.core.graph import upstream
from orchestrator.core.steps import BUILTIN, INHERITS_MODEL

if TYPE_CHECKING:
    from orchestrator.core.plan import Plan, Step

_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
_HINTS = {
    "model": "add with: {model: PATH}",
    "dataset": "add with: {dataset: PATH}, or need a generate step",
}


def filled_params(plan: Plan, step: Step) -> dict[str, Any]:
    """A step's `with:` with what the plan leaves unsaid: dataset, model, tensor_parallel_size, extra_args as flags."""
    params = dict(step.params)
    if step.uses is None or step.uses not in BUILTIN:
        return params
    builtin = BUILTIN[step.uses]
    before = [plan.step(name) for name in upstream(plan.needs, step.name)]
    for name, (uses, path) in builtin.takes.items():
        source = next((other for other in before if other.uses == uses), None)
        if name not in params and source is not None:
            params[name] = f"{{steps.{source.name}.output}}/{path}"
    if step.uses in INHERITS_MODEL:
        _inherit_model(plan, step, before, params)
    params.update(_as_flags(params.pop("extra_args", [])))
    return params


def _inherit_model(plan: Plan, step: Step, before: list[Step], params: dict[str, Any]) -> None:
    server = next((other for other in before if other.uses == "serve"), None)
    if "model" not in params:
        named = {str(other.params["model"]) for other in plan.steps if other.uses and "model" in other.params}
        if server is not None and "model" in server.params:
            params["model"] = server.params["model"]
        elif len(named) == 1:
            params["model"] = named.pop()
    same = server is not None and params.get("model") == server.params.get("model")
    if same and server is not None and step.uses in {"extract", "train", "evaluate"}:
        if "trust_remote_code" in server.params:
            params.setdefault("trust_remote_code", server.params["trust_remote_code"])
        if step.uses != "train" and _computes_with_vllm(step) and "tensor_parallel_size" in server.params:
            params.setdefault("tensor_parallel_size", step.gpus or server.params["tensor_parallel_size"])
    if step.gpus and step.uses in {"extract", "evaluate"} and _computes_with_vllm(step):
        rest = int(params.get("pipeline_parallel_size", 1)) * int(params.get("data_parallel_size", 1))
        params.setdefault("tensor_parallel_size", max(1, step.gpus // rest))


def _computes_with_vllm(step: Step) -> bool:
    return step.params.get("backend") != "transformers"


def _as_flags(words: list[str]) -> dict[str, Any]:
    """``["--a", "1", "--b"]`` as ``{"a": "1", "b": True}``, the form in which parameters travel."""
    flags: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            flags[name] = value if equals else True
        elif flags.get(name) is True:
            flags[name] = word
        else:
            flags[name] = f"{flags[name]} {word}"
    return flags


def missing_inputs(plan: Plan) -> Iterator[tuple[Step, str, str | None]]:
    """(step, parameter, hint) for each parameter that a built-in step cannot do without and nothing gives it."""
    for step in plan.steps:
        if step.uses in BUILTIN:
            params = filled_params(plan, step)
            for name in BUILTIN[str(step.uses)].required:
                if name not in params:
                    yield step, name, _HINTS.get(name)


def gpus_for(step: Step, params: dict[str, Any], host_gpus: int | None) -> int:
    """GPUs that a step claims: as stated, else what its parameters imply where the host has GPUs.

    Args:
        step: the step.
        params: its filled parameters.
        host_gpus: GPUs of the host; None when the inventory does not say.
    """
    if step.gpus is not None:
        return step.gpus
    if step.uses is None or step.uses not in BUILTIN or not BUILTIN[step.uses].on_gpu or host_gpus == 0:
        return 0
    if step.uses == "train":
        return int(params.get("nproc_per_node") or host_gpus or 1) * step.nodes  # torchrun counts on each node
    if not _computes_with_vllm(step):
        return 1 if params.get("device") != "cpu" else 0
    product = 1
    for name in _PARALLEL:
        product *= int(params.get(name) or 1)
    return product
