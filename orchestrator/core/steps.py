"""What the built-in steps accept in `with:`, as data: names, types, and what they take from the steps before them.

serve, extract, train and evaluate hand unknown parameters on as flags of vLLM or speculators, so an unknown name is
not an error in itself. A name that is nearly a known one is: that is a misspelling, and would cost a 20-minute load.
The names of flags known here are only for telling these apart; newer flags pass. Flags that look too much like
another one go into `extra_args`.

The scripts themselves are remote_jobs/steps/<name>.py. Must not import plan.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from orchestrator.core.flags import TRAIN_FLAGS, VLLM_FLAGS
from orchestrator.core.schema import Strict, nearest, wrong

Text = Annotated[str, Field(min_length=1)]
Positive = Annotated[int, Field(ge=1, le=10**12)]
Count = Annotated[int, Field(ge=0, le=10**12)]
Port = Annotated[int, Field(ge=1, le=65535)]
Fraction = Annotated[float, Field(gt=0, le=1)]


def _token_count(value: Any) -> Any:
    """max_model_len as vLLM reads it: tokens, ``"32k"``, or auto / -1."""
    number = isinstance(value, int) and not isinstance(value, bool) and (value >= 1 or value == -1)
    text = isinstance(value, str) and re.fullmatch(r"auto|\d+(\.\d+)?[kKmMgG]?", value)
    if number or text:
        return value
    raise wrong(f"must be a number of tokens, not {value!r}", "write 8192, 32k or auto")


def _layer_ids(value: Any) -> Any:
    """Layer ids: id k is the input of layer k, so they run from 0 to num_hidden_layers."""
    if not isinstance(value, list) or not value:
        raise wrong(f"must be a list of layer ids, not {value!r}", "write [2, 30, 58, 61]")
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= 10_000:
            raise wrong(f"{item!r} is not a layer id", "ids are whole numbers from 0 to num_hidden_layers")
    if sorted(set(value)) != value:
        raise wrong(f"{value} must rise, each id once", f"write {sorted(set(value))}")
    return value


def _one_file(value: Any) -> Any:
    """A dataset is one file; several are joined first, so that row numbers and hashes mean one thing."""
    if isinstance(value, list):
        names = " ".join(str(item) for item in value[:3]) + (" ..." if len(value) > 3 else "")
        raise wrong(
            f"must be one file, not a list of {len(value)}",
            f"write {value[0]}"
            if len(value) == 1
            else f"join them in a step before: run: cat {names} > all.jsonl",
        )
    return value


Tokens = Annotated[int | str, BeforeValidator(_token_count)]
Dataset = Annotated[Text, BeforeValidator(_one_file)]
Layers = Annotated[list[int], BeforeValidator(_layer_ids)]


def _extra_args(value: Any) -> Any:
    """Flags as typed on a command line, each ``--name``, ``--name=value`` or ``--name`` followed by its value."""
    words = [value] if isinstance(value, str) else value
    if (
        isinstance(words, list)
        and all(isinstance(word, str) for word in words)
        and "".join(words[:1])[:2] == "--"
    ):
        return words
    raise wrong("must be a list of texts that starts with a flag", 'write ["--new-flag", "value"]')


Flags = Annotated[list[str], BeforeValidator(_extra_args)]
DType = Literal["auto", "half", "float16", "bfloat16", "float", "float32"]


class _Params(Strict):
    """Base: unknown names are judged by :func:`unknown_parameter`, not by pydantic."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)


class _VllmParams(_Params):
    model: Text | None = None
    tensor_parallel_size: Positive | None = None
    pipeline_parallel_size: Positive | None = None
    data_parallel_size: Positive | None = None
    gpu_memory_utilization: Fraction | None = None
    max_model_len: Tokens | None = None
    max_num_seqs: Positive | None = None
    max_num_batched_tokens: Positive | None = None
    dtype: DType | None = None
    enforce_eager: bool | None = None
    trust_remote_code: bool | None = None
    seed: int | None = None
    revision: Text | None = None
    extra_args: Flags | None = None


class ServeParams(_VllmParams):
    """`uses: serve`: vllm serve, ready when a one-token request works."""

    host: Text | None = None
    port: Port | None = None
    output: Text | None = None
    ready_timeout_s: Count | None = None
    served_model_name: Text | None = None


class GenerateParams(_Params):
    """`uses: generate`: responses of the served model to every prompt of a dataset."""

    dataset: Dataset | None = None
    samples: Positive | None = None
    output: Text | None = None
    endpoint: Text | None = None
    model: Text | None = None
    concurrency: Positive | None = None
    max_tokens: Positive | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Fraction | None = None
    seed: int | None = None
    sampling_params: dict[str, Any] | None = None
    max_retries: Count | None = None
    request_timeout_s: Annotated[float, Field(gt=0)] | None = None


class VocabMapParams(_Params):
    """`uses: vocab_map`: the draft's vocabulary from token frequencies."""

    model: Text | None = None
    revision: Text | None = None
    dataset: Dataset | None = None
    output: Text | None = None
    draft_vocab_size: Positive | None = None
    min_coverage: Annotated[float, Field(ge=0, le=1)] | None = None


class ExtractParams(_VllmParams):
    """`uses: extract`: hidden states of chosen layers, one safetensors file per sample."""

    dataset: Dataset | None = None
    layers: Layers | None = None
    samples: Positive | None = None
    output: Text | None = None
    backend: Literal["auto", "vllm", "vllm-legacy", "transformers"] | None = None
    overwrite: bool | None = None
    min_free_gib: Annotated[float, Field(ge=0)] | None = None
    disk_wait_s: Annotated[float, Field(ge=0)] | None = None
    verify: Count | None = None
    verify_tolerance: Annotated[float, Field(gt=0)] | None = None
    batch_size: Positive | None = None
    device: Text | None = None


class TrainParams(_Params):
    """`uses: train`: speculators' EAGLE-3 training under torchrun."""

    model: Text | None = None
    revision: Text | None = None
    dataset: Dataset | None = None
    hidden_states: Text | None = None
    vocab_map: Text | None = None
    output: Text | None = None
    epochs: Positive | None = None
    max_steps: Positive | None = None
    lr: Annotated[float, Field(gt=0, le=100)] | None = None
    nproc_per_node: Positive | None = None
    total_seq_len: Positive | None = None
    draft_vocab_size: Positive | None = None
    num_layers: Positive | None = None
    ttt_steps: Positive | None = None
    checkpoint_freq: Annotated[float, Field(gt=0)] | None = None
    loss_implementation: Literal["fused", "eager"] | None = None
    compiler_fallback: bool | None = None
    log_freq: Positive | None = None
    seed: int | None = None
    trust_remote_code: bool | None = None
    extra_args: Flags | None = None


class EvaluateParams(_VllmParams):
    """`uses: evaluate`: acceptance length and speed-up of the draft against no draft."""

    draft: Text | None = None
    dataset: Dataset | None = None
    output: Text | None = None
    samples: Positive | None = None
    max_tokens: Positive | None = None
    num_speculative_tokens: Positive | None = None
    concurrency: Positive | None = None
    skip: Count | None = None


SYNONYMS: Mapping[str, str] = {
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "tensor_parallel": "tensor_parallel_size",
    "pipeline_parallel": "pipeline_parallel_size",
    "data_parallel": "data_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "gpu_mem_util": "gpu_memory_utilization",
    "gpu_util": "gpu_memory_utilization",
    "max_len": "max_model_len",
    "max_seq_len": "max_model_len",
    "context_length": "max_model_len",
    "model_path": "model",
    "model_name": "model",
    "model_name_or_path": "model",
    "data": "dataset",
    "prompts": "dataset",
    "input": "dataset",
    "output_dir": "output",
    "output_path": "output",
    "out": "output",
    "limit": "samples",
    "num_samples": "samples",
    "max_samples": "samples",
    "layer_ids": "layers",
    "eagle_aux_hidden_state_layer_ids": "layers",
    "learning_rate": "lr",
    "num_epochs": "epochs",
    "vocab_size": "draft_vocab_size",
    "disk_reserve_gib": "min_free_gib",
    "nproc": "nproc_per_node",
}
"""What people write when they mean a parameter; suggested where the step knows the right-hand name."""


@dataclass(frozen=True)
class Builtin:
    """A built-in step.

    Attributes:
        params: model of its `with:`.
        flags: names of flags known to pass through; empty: none pass.
        takes: parameter -> (built-in step upstream, path inside its output): what it gets when the plan is silent.
        required: parameters without which it cannot start, once those of ``takes`` and the model are filled in.
        on_gpu: it computes on GPUs, where the host has some.
    """

    params: type[_Params]
    flags: frozenset[str] = frozenset()
    takes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    on_gpu: bool = True

    def names(self) -> list[str]:
        """The step's own parameters."""
        return list(self.params.model_fields)


_RESPONSES = ("generate", "responses.jsonl")

BUILTIN: Mapping[str, Builtin] = {
    "serve": Builtin(ServeParams, VLLM_FLAGS, required=("model",)),
    "generate": Builtin(GenerateParams, required=("dataset",), on_gpu=False),
    "vocab_map": Builtin(
        VocabMapParams, takes={"dataset": _RESPONSES}, required=("model", "dataset"), on_gpu=False
    ),
    "extract": Builtin(
        ExtractParams, VLLM_FLAGS, takes={"dataset": _RESPONSES}, required=("model", "dataset")
    ),
    "train": Builtin(TrainParams, TRAIN_FLAGS, required=("model",)),
    "evaluate": Builtin(EvaluateParams, VLLM_FLAGS, required=("model",)),
}
"""Inputs that a script finds by itself in the outputs of the steps it needs are in neither ``takes`` nor ``required``."""
INHERITS_MODEL = frozenset({"vocab_map", "extract", "train", "evaluate"})
"""Steps that work on the model of the serve step upstream (or the plan's only model) when they name none."""


def unknown_parameter(uses: str, key: str) -> tuple[str, str] | None:
    """Judge a `with:` name that is not one of the step's own.

    Returns:
        None when it passes through as a flag, else (message, hint).
    """
    step = BUILTIN[uses]
    own, flags = step.names(), step.flags
    meant = SYNONYMS.get(key)
    if key in flags:
        return None
    listing = f"allowed: {', '.join(own)}" + (", and flags in snake case" if flags else "")
    snake = key.lstrip("-").replace("-", "_").lower()
    if snake != key and (snake in own or snake in flags):
        return f"unknown parameter {key!r}", f"did you mean {snake!r}?"
    if meant in own:
        return f"unknown parameter {key!r}", f"did you mean {meant!r}? {listing}"
    if not flags:
        alike = nearest(key, own)
        return f"unknown parameter {key!r}", f"did you mean {alike!r}? {listing}" if alike else listing
    if not re.fullmatch(r"[a-z][a-z0-9_]*", key):
        return f"{key!r} is not a parameter", f"flags are written in snake case, without dashes; {listing}"
    alike = _misspelt(key, own) or _misspelt(key, sorted(flags))
    if alike:
        exact = f"--{key.replace('_', '-')}"
        return (
            f"unknown parameter {key!r}",
            f"did you mean {alike!r}? A real flag goes in extra_args: [{exact}, ...]",
        )
    return None


def _misspelt(key: str, names: list[str]) -> str | None:
    """The known name that ``key`` is probably a slip of: same letters, or one or two slips in a long name."""
    letters = key.replace("_", "")
    for name in names:
        if name.replace("_", "") == letters or name.rstrip("s") == key.rstrip("s"):
            return name
    found = difflib.get_close_matches(key, names, n=1, cutoff=0.87 if len(key) > 5 else 0.8)
    return found[0] if found else None
