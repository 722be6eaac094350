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

from orchestrator.core.schema import Strict, Texts, nearest, wrong

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


Tokens = Annotated[int | str, BeforeValidator(_token_count)]
Layers = Annotated[list[int], BeforeValidator(_layer_ids)]
Flags = Annotated[Texts, Field()]
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

    port: Port | None = None
    host: Text | None = None
    served_model_name: Texts | None = None


class GenerateParams(_Params):
    """`uses: generate`: responses of the served model to every prompt of a dataset."""

    model: Text | None = None
    dataset: Texts | None = None
    output: Text | None = None
    endpoint: Text | None = None
    samples: Positive | None = None
    concurrency: Positive | None = None
    max_tokens: Positive | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Fraction | None = None
    top_k: int | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    sampling_params: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Text | None = None
    system_prompt: Text | None = None
    split: Text | None = None
    subset: Text | None = None
    seed: int | None = None
    max_retries: Count | None = None
    max_errors: Count | None = None
    request_timeout_s: Positive | None = None
    trust_remote_code: bool | None = None
    engine: Literal["builtin", "speculators"] | None = None


class VocabMapParams(_Params):
    """`uses: vocab_map`: the draft's vocabulary from token frequencies."""

    model: Text | None = None
    dataset: Texts | None = None
    output: Text | None = None
    draft_vocab_size: Positive | None = None
    target_vocab_size: Positive | None = None
    min_coverage: Fraction | None = None
    token_freq_path: Text | None = None
    samples: Positive | None = None
    trust_remote_code: bool | None = None


class ExtractParams(_VllmParams):
    """`uses: extract`: hidden states of chosen layers, one safetensors file per sample."""

    dataset: Texts | None = None
    layers: Layers | None = None
    output: Text | None = None
    backend: Literal["vllm", "vllm-legacy", "transformers"] | None = None
    samples: Positive | None = None
    verify: Count | None = None
    batch_size: Positive | None = None
    min_free_gib: Annotated[float, Field(ge=0)] | None = None
    device: Text | None = None


class TrainParams(_Params):
    """`uses: train`: speculators' EAGLE-3 training under torchrun."""

    model: Text | None = None
    hidden_states: Text | None = None
    dataset: Texts | None = None
    vocab_map: Text | None = None
    output: Text | None = None
    layers: Layers | None = None
    epochs: Positive | None = None
    max_steps: Positive | None = None
    lr: Annotated[float, Field(gt=0, le=100)] | None = None
    nproc_per_node: Positive | None = None
    total_seq_len: Positive | None = None
    draft_vocab_size: Positive | None = None
    num_layers: Positive | None = None
    ttt_steps: Positive | None = None
    checkpoint_freq: Annotated[float, Field(gt=0)] | None = None
    log_freq: Positive | None = None
    seed: int | None = None
    device: Text | None = None
    trust_remote_code: bool | None = None
    extra_args: Flags | None = None


class EvaluateParams(_VllmParams):
    """`uses: evaluate`: acceptance length and speed-up of the draft against no draft."""

    draft: Text | None = None
    dataset: Texts | None = None
    output: Text | None = None
    samples: Positive | None = None
    max_tokens: Positive | None = None
    num_speculative_tokens: Positive | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    concurrency: Positive | None = None
    port: Port | None = None


_VLLM_FLAGS = frozenset(
    """
    additional_config aggregate_engine_logging all2all_backend allow_credentials allowed_headers
    allowed_local_media_path allowed_methods allowed_origins api_key api_server_count async_scheduling
    attention_backend attention_config block_size calculate_kv_scales chat_template chat_template_content_format
    code_revision compilation_config config config_format convert cp_kv_cache_interleave_size cpu_offload_gb
    cpu_offload_params cudagraph_capture_sizes cudagraph_metrics data_parallel_address data_parallel_backend
    data_parallel_external_lb data_parallel_hybrid_lb data_parallel_rank data_parallel_rpc_port
    data_parallel_size_local data_parallel_start_rank decode_context_parallel_size
    default_chat_template_kwargs disable_access_log_for_endpoints disable_cascade_attn
    disable_chunked_mm_input disable_custom_all_reduce disable_fastapi_docs disable_hybrid_kv_cache_manager
    disable_log_requests disable_log_stats disable_mm_preprocessor_cache disable_sliding_window
    disable_uvicorn_access_log distributed_executor_backend distributed_timeout_seconds download_dir
    enable_auto_tool_choice enable_chunked_prefill enable_dbo enable_eplb enable_expert_parallel
    enable_flashinfer_autotune enable_force_include_usage enable_log_deltas enable_log_outputs
    enable_log_requests enable_lora enable_mfu_metrics enable_mm_embeds enable_prefix_caching
    enable_prompt_embeds enable_prompt_tokens_details enable_request_id_headers enable_return_routed_experts
    enable_scale_out enable_server_load_tracking enable_sleep_mode enable_ssl_refresh
    enable_tokenizer_info_endpoint eplb_config expert_placement_strategy
    exclude_tools_when_tool_choice_none fully_sharded_loras generation_config gdn_prefill_backend
    guided_decoding_backend h11_max_header_count h11_max_incomplete_event_size headless hf_config_path
    hf_overrides hf_token ignore_patterns interleave_mm_strings io_processor_plugin kernel_config
    kv_cache_dtype kv_cache_dtype_skip_layers kv_cache_memory kv_cache_memory_bytes kv_cache_metrics
    kv_events_config kv_offloading_backend kv_offloading_size kv_sharing_fast_prefill kv_transfer_config
    limit_mm_per_prompt linear_backend load_format log_config_file log_error_stack logits_processors
    logprobs_mode long_prefill_token_threshold lora_dtype lora_modules lora_target_modules
    mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_ssm_cache_dtype master_addr master_port
    max_cpu_loras max_cudagraph_capture_size max_log_len max_logprobs max_long_partial_prefills max_lora_rank
    max_loras max_num_partial_prefills max_parallel_loading_workers max_seq_len_to_capture media_io_kwargs
    middleware mm_encoder_attn_backend mm_encoder_only mm_encoder_tp_mode mm_processor_cache_gb
    mm_processor_cache_type mm_processor_kwargs model_impl model_loader_extra_config moe_backend nnodes
    node_rank num_gpu_blocks_override num_lookahead_slots num_redundant_experts numa_bind numa_bind_cpus
    numa_bind_nodes observability_config offload_backend optimization_level otlp_traces_endpoint
    override_attention_dtype performance_mode pooler_config prefill_context_parallel_size
    prefix_caching_hash_algo preemption_mode profiler_config pt_load_map_location quantization
    quantization_config ray_workers_use_nsight reasoning_config reasoning_parser reasoning_parser_plugin
    renderer_num_workers response_role return_tokens_as_token_ids root_path rope_scaling rope_theta runner
    safetensors_load_strategy safetensors_prefetch_num_threads scheduler_cls scheduler_reserve_full_isl
    scheduling_policy shutdown_timeout show_hidden_metrics_for_version skip_mm_profiling skip_tokenizer_init
    spec_method spec_model spec_tokens speculative_config ssl_ca_certs ssl_cert_reqs ssl_certfile ssl_ciphers
    ssl_keyfile stream_interval structured_outputs_config swap_space task tokenizer tokenizer_mode
    tokenizer_revision tokens_only tool_call_parser tool_parser_plugin tool_server
    trust_request_chat_template ubatch_size uds use_tqdm_on_load uvicorn_log_level video_pruning_rate
    weight_transfer_config worker_cls worker_extension_cls
    """.split()
)
"""Flags of `vllm serve`, 0.11 to 0.33, in snake case."""

_TRAIN_FLAGS = frozenset(
    """
    checkpoint_best d2t_path data_path draft_arch draft_attn_impl draft_hidden_act draft_config embed_requires_grad
    fsdp_shard gradient_checkpointing hidden_states_backend hidden_states_dtype hidden_states_path legacy_data
    log_dir logger loss_fn loss_implementation max_anchors mask_token_id muon_lr muon_momentum muon_weight_decay
    noise_std no_resume_from_checkpoint norm_before_fc norm_before_residual num_workers on_generate on_missing
    optimizer prefetch_factor request_timeout run_name save_best save_path scheduler_num_cosine_cycles
    scheduler_total_steps scheduler_type scheduler_warmup_steps speculator_type t2d_path target_layer_ids
    token_freq_path total_steps ttt_step_loss_decay use_off_policy_tokens val_freq verifier_name_or_path
    vllm_endpoint weight_decay
    """.split()
)
"""Flags of `python -m speculators.train`, 0.9, in snake case."""

SYNONYMS: Mapping[str, str] = {
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
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
}
"""What people write when they mean a parameter; suggested where the step knows the right-hand name."""


@dataclass(frozen=True)
class Builtin:
    """A built-in step.

    Attributes:
        params: model of its `with:`.
        flags: names of flags known to pass through; empty: none pass.
        default_output: path under workdir of what it makes, ``{name}`` being the step's name; None: nothing.
        takes: parameter -> built-in step upstream whose output it gets when the plan does not say.
        required: parameters without which it cannot start, once those of ``takes`` are filled.
        on_gpu: it computes on GPUs, where the host has some.
    """

    params: type[_Params]
    flags: frozenset[str] = frozenset()
    default_output: str | None = None
    takes: Mapping[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    on_gpu: bool = True

    def names(self) -> list[str]:
        """The step's own parameters."""
        return list(self.params.model_fields)


BUILTIN: Mapping[str, Builtin] = {
    "serve": Builtin(ServeParams, _VLLM_FLAGS, required=("model",)),
    "generate": Builtin(
        GenerateParams, default_output="{name}.jsonl", required=("model", "dataset"), on_gpu=False
    ),
    "vocab_map": Builtin(
        VocabMapParams,
        default_output="{name}",
        takes={"dataset": "generate"},
        required=("dataset",),
        on_gpu=False,
    ),
    "extract": Builtin(
        ExtractParams,
        _VLLM_FLAGS,
        default_output="{name}",
        takes={"dataset": "generate"},
        required=("model", "dataset", "layers"),
    ),
    "train": Builtin(
        TrainParams,
        _TRAIN_FLAGS,
        default_output="{name}",
        takes={"hidden_states": "extract", "vocab_map": "vocab_map"},
        required=("model", "hidden_states"),
    ),
    "evaluate": Builtin(
        EvaluateParams,
        _VLLM_FLAGS,
        default_output="{name}.json",
        takes={"draft": "train"},
        required=("model", "draft"),
    ),
}


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
