"""Names of the flags of vLLM and speculators, in snake case: only for telling a misspelt parameter from a real flag.

A name that is not here still passes (see :mod:`orchestrator.core.steps`), so the lists may lag behind.
"""

from __future__ import annotations

VLLM_FLAGS = frozenset(
    """
    additional_config aggregate_engine_logging all2all_backend allow_credentials allowed_headers
    allowed_local_media_path allowed_methods allowed_origins api_key api_server_count async_scheduling
    attention_backend attention_config block_size calculate_kv_scales chat_template
    chat_template_content_format code_revision compilation_config config config_format convert
    cp_kv_cache_interleave_size cpu_offload_gb cpu_offload_params cudagraph_capture_sizes
    cudagraph_metrics data_parallel_address data_parallel_backend data_parallel_external_lb
    data_parallel_hybrid_lb data_parallel_rank data_parallel_rpc_port data_parallel_size_local
    data_parallel_start_rank decode_context_parallel_size default_chat_template_kwargs
    disable_access_log_for_endpoints disable_cascade_attn disable_chunked_mm_input
    disable_custom_all_reduce disable_fastapi_docs disable_hybrid_kv_cache_manager disable_log_requests
    disable_log_stats disable_mm_preprocessor_cache disable_sliding_window disable_uvicorn_access_log
    distributed_executor_backend distributed_timeout_seconds download_dir enable_auto_tool_choice
    enable_chunked_prefill enable_dbo enable_eplb enable_expert_parallel enable_flashinfer_autotune
    enable_force_include_usage enable_log_deltas enable_log_outputs enable_log_requests enable_lora
    enable_mfu_metrics enable_mm_embeds enable_prefix_caching enable_prompt_embeds
    enable_prompt_tokens_details enable_request_id_headers enable_return_routed_experts enable_scale_out
    enable_server_load_tracking enable_sleep_mode enable_ssl_refresh enable_tokenizer_info_endpoint
    eplb_config exclude_tools_when_tool_choice_none expert_placement_strategy fully_sharded_loras
    gdn_prefill_backend generation_config guided_decoding_backend h11_max_header_count
    h11_max_incomplete_event_size headless hf_config_path hf_overrides hf_token ignore_patterns
    interleave_mm_strings io_processor_plugin kernel_config kv_cache_dtype kv_cache_dtype_skip_layers
    kv_cache_memory kv_cache_memory_bytes kv_cache_metrics kv_events_config kv_offloading_backend
    kv_offloading_size kv_sharing_fast_prefill kv_transfer_config limit_mm_per_prompt linear_backend
    load_format log_config_file log_error_stack logits_processors logprobs_mode
    long_prefill_token_threshold lora_dtype lora_modules lora_target_modules mamba_block_size
    mamba_cache_dtype mamba_cache_mode mamba_ssm_cache_dtype master_addr master_port max_cpu_loras
    max_cudagraph_capture_size max_log_len max_logprobs max_long_partial_prefills max_lora_rank max_loras
    max_num_partial_prefills max_parallel_loading_workers max_seq_len_to_capture media_io_kwargs
    middleware mm_encoder_attn_backend mm_encoder_only mm_encoder_tp_mode mm_processor_cache_gb
    mm_processor_cache_type mm_processor_kwargs model_impl model_loader_extra_config moe_backend nnodes
    node_rank num_gpu_blocks_override num_lookahead_slots num_redundant_experts numa_bind numa_bind_cpus
    numa_bind_nodes observability_config offload_backend optimization_level otlp_traces_endpoint
    override_attention_dtype performance_mode pooler_config preemption_mode prefill_context_parallel_size
    prefix_caching_hash_algo profiler_config pt_load_map_location quantization quantization_config
    ray_workers_use_nsight reasoning_config reasoning_parser reasoning_parser_plugin renderer_num_workers
    response_role return_tokens_as_token_ids root_path rope_scaling rope_theta runner
    safetensors_load_strategy safetensors_prefetch_num_threads scheduler_cls scheduler_reserve_full_isl
    scheduling_policy show_hidden_metrics_for_version shutdown_timeout skip_mm_profiling
    skip_tokenizer_init spec_method spec_model spec_tokens speculative_config ssl_ca_certs ssl_cert_reqs
    ssl_certfile ssl_ciphers ssl_keyfile stream_interval structured_outputs_config swap_space task
    tokenizer tokenizer_mode tokenizer_revision tokens_only tool_call_parser tool_parser_plugin
    tool_server trust_request_chat_template ubatch_size uds use_tqdm_on_load uvicorn_log_level
    video_pruning_rate weight_transfer_config worker_cls worker_extension_cls
    """.split()  # noqa: SIM905 - a list of 200 strings is not easier to read
)
"""Flags of `vllm serve`, 0.11 to 0.33."""

TRAIN_FLAGS = frozenset(
    """
    checkpoint_best d2t_path data_path draft_arch draft_attn_impl draft_config draft_hidden_act
    embed_requires_grad fsdp_shard gradient_checkpointing hidden_states_backend hidden_states_dtype
    hidden_states_path legacy_data log_dir logger loss_fn loss_implementation mask_token_id max_anchors
    muon_lr muon_momentum muon_weight_decay no_resume_from_checkpoint noise_std norm_before_fc
    norm_before_residual num_workers on_generate on_missing optimizer prefetch_factor request_timeout
    run_name save_best save_path scheduler_num_cosine_cycles scheduler_total_steps scheduler_type
    scheduler_warmup_steps speculator_type t2d_path target_layer_ids token_freq_path total_steps
    ttt_step_loss_decay use_off_policy_tokens val_freq verifier_name_or_path vllm_endpoint weight_decay
    """.split()  # noqa: SIM905
)
"""Flags of `python -m speculators.train`, 0.9."""
