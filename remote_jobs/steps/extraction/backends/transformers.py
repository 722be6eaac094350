"""Reference backend: transformers on CPU or one GPU, for small models and for checking what the other backends wrote."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from typing import Any

from remote_jobs.steps.extraction.backends import BackendConfig, Prompts
from remote_jobs.steps.extraction.errors import CheckpointError, ConfigError
from remote_jobs.steps.extraction.model import ModelFacts

DTYPES = ("bfloat16", "float16", "float32")
BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}
BATCH_SAMPLES = {"cpu": 16, "cuda": 64}
HARMLESS = {"enforce_eager": (True,), "tensor_parallel_size": ("1",), "pipeline_parallel_size": ("1",)}
"""vLLM flags that this backend fulfils as it is, with the values that it does."""
KNOWN = ("batch_size", "device", "dtype", "max_model_len", "max_num_batched_tokens", "max_num_seqs")
IGNORED = ("gpu_memory_utilization", "seed")
"""vLLM flags without meaning here: torch takes the memory it needs (a retry after an OOM sets the first), nothing is drawn."""
UNITS = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
"""vLLM's way to write token counts: 32k is 32000, 32K is 32768."""


def longest_prompt(model: ModelFacts, flags: dict[str, Any]) -> int:
    """Most tokens of a sample: what the positions allow, or a smaller --max-model-len."""
    text = str(flags.get("max_model_len", "auto"))
    if text in {"auto", "-1"}:
        return model.max_tokens
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", text)
    limit = round(float(match[1]) * UNITS[match[2]]) if match else 0
    if limit < 1:
        raise ConfigError(f"--max-model-len {text}: a number of tokens is needed, as in 8192 or 32k")
    return min(model.max_tokens, limit)


def check(config: BackendConfig) -> None:
    """Refuse flags and models that this backend cannot do.

    Raises:
        ConfigError: names the flag or what is missing.
    """
    for name, value in config.flags.items():
        flag = "--" + name.replace("_", "-")
        if name in HARMLESS:
            if value not in HARMLESS[name]:
                raise ConfigError(
                    f"the transformers backend runs in one process, eagerly: {flag} {value} needs backend vllm"
                )
        elif name in IGNORED:
            config.progress.say(f"Note: {flag} has no effect on the transformers backend")
        elif name not in KNOWN:
            raise ConfigError(
                f"the transformers backend has no option {flag}",
                hint=f"remove {flag}, or use --backend vllm if it is vLLM's",
            )
    for name in ("batch_size", "max_num_batched_tokens", "max_num_seqs"):
        _positive(config.flags, name, 1)
    state_dtype(config)
    if not config.model.shards:
        raise CheckpointError(
            f"{config.model.folder} holds no safetensors weights (model.safetensors or an index)"
        )


def state_dtype(config: BackendConfig) -> str:
    """`--dtype`, or the dtype that the checkpoint's configuration names."""
    dtype = str(config.flags.get("dtype", "auto"))
    if dtype == "auto":
        dtype = config.model.dtype
    dtype = {"half": "float16", "float": "float32"}.get(dtype, dtype)
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: the transformers backend computes in {', '.join(DTYPES)}")
    return dtype


def open_backend(config: BackendConfig) -> TransformersBackend:
    """Import torch and load the model.

    Raises:
        ConfigError: no torch or transformers, or no such device.
        CheckpointError: damaged weights.
    """
    # OpenMP's threads spin at their barriers; with other work on the same cores that made a forward pass five times
    # slower (measured: 5 s instead of 1 s, 2 cores, load 5). Read by the runtime when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"the transformers backend needs torch and transformers in this Python: {error}",
            hint="pip install torch transformers",
        ) from error
    from remote_jobs.steps.extraction.checkpoint import load_model

    device = str(config.flags.get("device", "auto"))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device {device}: torch sees no GPU here")
    if device == "cpu":
        torch.set_num_threads(cpu_threads())
    model = load_model(
        config.model,
        getattr(torch, state_dtype(config)),
        device,
        config.progress,
        trust_remote_code=config.trust_remote_code,
    )
    return TransformersBackend(config, model, device)


class TransformersBackend:
    """A loaded model and the hooks that catch the inputs of its layers."""

    def __init__(self, config: BackendConfig, model: Any, device: str) -> None:
        kind = device.split(":", maxsplit=1)[0]
        self._layer_ids = config.layer_ids
        self._model = model
        self._device = device
        self._batch_tokens = _positive(config.flags, "max_num_batched_tokens", BATCH_TOKENS.get(kind, 2048))
        samples = _positive(config.flags, "max_num_seqs", BATCH_SAMPLES.get(kind, 16))
        self._batch_samples = min(samples, _positive(config.flags, "batch_size", samples))
        self._decoder, self._layers = find_layers(model, config.model.num_hidden_layers)

    def facts(self) -> dict[str, Any]:
        """Versions of what computed the states."""
        import safetensors
        import torch
        import transformers

        return {
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "safetensors": safetensors.__version__,
            },
            # No set touches transformers; which were in force is said all the same.
            "patch_set_sha256": os.environ.get("ORCH_PATCHES_SHA256"),
            "device": torch.cuda.get_device_name(self._device) if self._device != "cpu" else "cpu",
        }

    def states(self, prompts: Prompts) -> Iterator[tuple[int, Any]]:
        """Longest prompts first (memory errors show at once), batched by padded tokens; see Backend.states."""
        for batch in plan_batches([len(ids) for ids in prompts], self._batch_tokens, self._batch_samples):
            caught = self._forward([prompts[index] for index in batch])
            for position, index in enumerate(batch):
                length = len(prompts[index])
                yield index, _stack([states[position, :length] for states in caught])

    def all_layers(self, prompt: Any) -> Any:
        """States at every layer id 0..n of one prompt, [n + 1, seq, H], caught another way than `states` does.

        transformers' own `output_hidden_states` gives the inputs of the layers (its last entry is behind the final norm,
        so that one is caught at the norm's door).
        """
        import torch

        last: list[Any] = []
        norm = getattr(self._decoder, "norm", None) or getattr(self._decoder, "final_layernorm", None)
        if norm is None:
            hook = self._layers[-1].register_forward_hook(lambda _m, _a, output: last.append(_first(output)))
        else:
            hook = norm.register_forward_pre_hook(lambda _m, args: last.append(args[0]))
        try:
            ids = torch.as_tensor(prompt, dtype=torch.long, device=self._device)[None]
            with torch.inference_mode():
                output = self._decoder(input_ids=ids, use_cache=False, output_hidden_states=True)
        finally:
            hook.remove()
        return torch.stack([states[0] for states in (*output.hidden_states[:-1], last[-1])]).cpu()

    def close(self) -> None:
        """Drop the model."""
        self._model = self._decoder = self._layers = None

    def _forward(self, prompts: list[Any]) -> list[Any]:
        """One padded forward pass; returns the states [batch, padded, H] per layer id.

        Padding is on the right: attention is causal, so no real token ever sees it, and positions count from 0.
        """
        import torch

        longest = max(map(len, prompts))
        ids = torch.zeros((len(prompts), longest), dtype=torch.long)
        mask = torch.zeros((len(prompts), longest), dtype=torch.long)
        for position, prompt in enumerate(prompts):
            ids[position, : len(prompt)] = torch.as_tensor(prompt, dtype=torch.long)
            mask[position, : len(prompt)] = 1
        caught: dict[int, Any] = {}
        hooks = [self._hook(layer_id, caught) for layer_id in self._layer_ids]
        try:
            with torch.inference_mode():
                self._decoder(
                    input_ids=ids.to(self._device), attention_mask=mask.to(self._device), use_cache=False
                )
        finally:
            for hook in hooks:
                hook.remove()
        return [caught[layer_id] for layer_id in self._layer_ids]

    def _hook(self, layer_id: int, caught: dict[int, Any]) -> Any:
        """Catch the input of layer `layer_id`, or the last layer's output. detach: layers may add in place afterwards."""
        if layer_id == len(self._layers):
            return self._layers[-1].register_forward_hook(
                lambda _module, _args, output: caught.__setitem__(layer_id, _first(output).detach().clone())
            )
        return self._layers[layer_id].register_forward_pre_hook(
            lambda _module, args, kwargs: caught.__setitem__(
                layer_id, (args[0] if args else kwargs["hidden_states"]).detach().clone()
            ),
            with_kwargs=True,
        )


def find_layers(model: Any, num_hidden_layers: int) -> tuple[Any, Any]:
    """The text decoder of a model and its list of layers.

    Raises:
        ConfigError: no list of that many layers in it.
    """
    from torch.nn import ModuleList

    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    candidates = [decoder] if decoder is not None else []
    candidates += [module for _, module in model.named_modules()]
    for module in candidates:
        for name in ("layers", "h", "blocks"):
            layers = getattr(module, name, None)
            if isinstance(layers, ModuleList) and len(layers) == num_hidden_layers:
                return module, layers
    raise ConfigError(
        f"{type(model).__name__} has no list of {num_hidden_layers} layers that states could be taken from"
    )


def plan_batches(lengths: list[int], max_tokens: int, max_samples: int) -> list[list[int]]:
    """Batches of indices, longest first; longest x members <= max_tokens, but never empty for one long sample."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        batch = batches[-1] if batches else None
        if batch and len(batch) < max_samples and lengths[batch[0]] * (len(batch) + 1) <= max_tokens:
            batch.append(index)
        else:
            batches.append([index])
    return batches


def cpu_threads() -> int:
    """Threads for torch on CPU: OMP_NUM_THREADS, else the cores this process may use (affinity and cgroup quota)."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    cores = len(os.sched_getaffinity(0))
    quota = _cgroup_cores()
    return max(1, min(cores, quota or cores, 16))


def _cgroup_cores() -> int | None:
    """Whole cores of a container's CPU quota (cgroup v2); None without one."""
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as stream:
            quota, period = stream.read().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return None


def _positive(flags: dict[str, Any], name: str, default: int) -> int:
    value = flags.get(name, default)
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1 or isinstance(value, bool):
        raise ConfigError(f"--{name.replace('_', '-')} {value}: a whole number above 0 is needed")
    return number


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _stack(per_layer: list[Any]) -> Any:
    """L tensors [seq, H] -> [seq, L, H] in main memory."""
    import torch

    return torch.stack(per_layer, dim=1).cpu()
