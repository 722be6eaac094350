"""vLLM 0.11 to 0.16: hidden states through the generator class of speculators 0.3.0 and 0.4.0, patched where needed.

That generator captures the OUTPUT of 0-based layer k, so our id k is its id k-1, and id 0 (the embeddings) is out of its
reach. Known good pairs: speculators 0.3.0 with vLLM 0.11; 0.3.0 or 0.4.0 with vLLM 0.12 - 0.16 and their patch set. Any
other pair is refused before the load.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from remote_jobs.agent import procs
from remote_jobs.patches import judge, probe
from remote_jobs.patches.activate import activate
from remote_jobs.patches.sets import PatchError, all_sets
from remote_jobs.steps import ending, vllm_limits
from remote_jobs.steps.extraction.backends import BackendConfig, Prompts, installed
from remote_jobs.steps.extraction.errors import ConfigError, StepError
from remote_jobs.steps.extraction.model import ModelFacts

SETS = {(0, 3, 0): "speculators-0.3.0-vllm-0.12-0.16", (0, 4, 0): "speculators-0.4.0-vllm-0.16"}
SCHEDULER = "vllm/v1/core/sched/scheduler.py::Scheduler"
FLAGS = {
    "tensor_parallel_size": int,
    "gpu_memory_utilization": float,
    "max_model_len": int,
    "max_num_batched_tokens": int,
}
ALWAYS_ON = ("enforce_eager", "trust_remote_code")
MAX_SEQUENCES = 32
BATCH_TOKENS = 8192
DTYPES = ("bfloat16", "float16")


def longest_prompt(model: ModelFacts, flags: dict[str, Any]) -> int:
    """Most tokens of a sample: the generator cuts longer ones silently, and one token is generated."""
    return min(model.max_tokens, int(flags.get("max_model_len") or model.max_tokens)) - 1


def check(config: BackendConfig) -> None:
    """Refuse pairs of versions, layer ids and flags that cannot work, before the load.

    Raises:
        ConfigError: names what was found and what to install or change.
    """
    versions = {name: probe.version_of(name) for name in ("vllm", "speculators")}
    have = installed("speculators")
    if versions["vllm"] is None or have not in SETS:
        raise ConfigError(
            f"backend vllm-legacy needs vLLM 0.11 - 0.16 with speculators 0.3.0 or 0.4.0 (found {_text(versions)})",
            hint="pip install --no-deps speculators==0.4.0, or a vLLM >= 0.20 and --backend vllm",
        )
    root = judge.package_root("vllm")
    try:
        new_scheduler = "block_size" in probe.signature(str(root), SCHEDULER).parameters
    except probe.Missing as error:
        raise ConfigError(f"vLLM {versions['vllm']} is not one that this backend knows: {error}") from error
    if new_scheduler or have == (0, 4, 0):
        _need_patches(SETS[have], versions)
    if 0 in config.layer_ids:
        raise ConfigError(
            "layer id 0 (the embeddings) is out of reach of speculators' generator",
            hint="leave it out of --layers",
        )
    for name, value in config.flags.items():
        if name in ALWAYS_ON and value is True:
            continue
        if name not in FLAGS:
            known = ", ".join("--" + flag.replace("_", "-") for flag in FLAGS)
            raise ConfigError(
                f"backend vllm-legacy has no option --{name.replace('_', '-')}", hint=f"it takes {known}"
            )
        try:
            FLAGS[name](value)
        except ValueError:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: a number is needed here") from None
    state_dtype(config)


def state_dtype(config: BackendConfig) -> str:
    """The checkpoint's own dtype: the generator cannot be told another."""
    if config.model.dtype not in DTYPES:
        raise ConfigError(
            f"the checkpoint is {config.model.dtype}; backend vllm-legacy keeps {' or '.join(DTYPES)}"
        )
    return config.model.dtype


def open_backend(config: BackendConfig) -> LegacyBackend:
    """Start executor and workers.

    Raises:
        Exception: as vLLM raises it; no worker is left behind then.
    """
    limit_s = vllm_limits.load_limit_s(vllm_limits.checkpoint_bytes(config.model.folder))
    os.environ.update(vllm_limits.limit_env(limit_s))
    procs.become_subreaper()
    try:
        return LegacyBackend(config)
    except BaseException:
        # The class shuts its executor down in __del__ only: workers would keep the GPUs' memory.
        ending.end_everything()
        raise


class LegacyBackend:
    """speculators' VllmHiddenStatesGenerator behind our contract."""

    def __init__(self, config: BackendConfig) -> None:
        import torch
        from speculators.data_generation import VllmHiddenStatesGenerator

        self._torch = torch
        flags = {name: FLAGS[name](value) for name, value in config.flags.items() if name in FLAGS}
        self._batch_tokens = max(int(flags.pop("max_num_batched_tokens", BATCH_TOKENS)), config.longest + 1)
        flags.setdefault("max_model_len", config.longest + 1)
        # Before the patch (speculators 0.3.0 on vLLM 0.11) the budget is fixed at max(8192, max_model_len).
        self._batch_tokens = min(self._batch_tokens, max(BATCH_TOKENS, flags["max_model_len"]))
        self._layers = len(config.layer_ids)
        self._generator: Any = VllmHiddenStatesGenerator(
            model_path=config.model.folder, layer_ids=[layer - 1 for layer in config.layer_ids], **flags
        )

    def facts(self) -> dict[str, Any]:
        """Versions, and the patch sets in force."""
        names = ("vllm", "speculators", "torch", "transformers")
        return {
            "versions": {name: version for name in names if (version := probe.version_of(name))},
            "patch_set_sha256": os.environ.get("ORCH_PATCHES_SHA256"),
        }

    def states(self, prompts: Prompts) -> Iterator[tuple[int, Any]]:
        """Batches that fit the token budget whole: a prompt cut by chunked prefill loses its states without the patch.

        Raises:
            StepError: the generator returned another prompt's states, or not all layers.
        """
        batch: list[int] = []
        tokens = 0
        for index, prompt in enumerate(prompts):
            if batch and (tokens + len(prompt) > self._batch_tokens or len(batch) == MAX_SEQUENCES):
                yield from self._compute(prompts, batch)
                batch, tokens = [], 0
            batch.append(index)
            tokens += len(prompt)
        if batch:
            yield from self._compute(prompts, batch)

    def _compute(self, prompts: Prompts, batch: list[int]) -> Iterator[tuple[int, Any]]:
        results = self._generator.generate([prompts[index].tolist() for index in batch])
        if len(results) != len(batch):
            raise StepError(f"{len(batch)} prompts went in, states of {len(results)} came out")
        for index, result in zip(batch, results, strict=True):
            if result["input_ids"].tolist() != prompts[index].tolist():
                raise StepError(f"the generator returned the states of another prompt for prompt {index}")
            if len(result["hidden_states"]) != self._layers:
                raise StepError(
                    f"{self._layers} layers were asked for, {len(result['hidden_states'])} came out"
                )
            yield index, self._torch.stack(list(result["hidden_states"]), dim=1).contiguous()

    def close(self) -> None:
        """Shut the executor down and end whatever is left of it."""
        generator, self._generator = self._generator, None
        if generator is not None:
            generator.executor.shutdown()
            ending.end_everything()


def _need_patches(name: str, versions: dict[str, str | None]) -> None:
    """Put the pair's patch set in force.

    Raises:
        ConfigError: it does not suit this installation; says why.
    """
    try:
        active = activate()
    except PatchError as error:
        raise ConfigError(str(error), hint=error.hint) from error
    if name in active:
        return
    found = [judge.judge(item) for item in all_sets() if item.name == name]
    if found and found[0].state == judge.APPLIED:
        return
    why = found[0].why if found else "there is no such set in this release"
    raise ConfigError(
        f"{_text(versions)} need patch set {name}, which is not in force: {why}",
        hint="use `patches: auto`, and see `orch patch check HOST`",
    )


def _text(versions: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items())
