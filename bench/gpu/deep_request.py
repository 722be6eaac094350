"""Makes a checkpoint of real sizes with shards that are holes, and prints the preflight request for it.

python deep_request.py qwen3|deepseek FOLDER      sizes as measured on H200: 4096 x 36 dense, 2048 x 27 MLA + 64 experts
"""

from __future__ import annotations

import json
import os
import struct
import sys
from typing import Any

VOCAB = 32000
COMMON: dict[str, Any] = {"vocab_size": VOCAB, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "hidden_act": "silu",
                          "torch_dtype": "bfloat16", "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288,
        "rope_theta": 1000000.0, "attention_bias": False, **COMMON,
    },
    "deepseek": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 2048, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "num_nextn_predict_layers": 0,
        "rope_theta": 10000.0, "attention_bias": False, **COMMON,
    },
}  # fmt: skip
SHARDS = {"qwen3": 63, "deepseek": 64}
LAYER_IDS = {"qwen3": [2, 18, 33, 36], "deepseek": [2, 13, 24, 27]}
BYTES = {"qwen3": 14_400_000_000, "deepseek": 30_800_000_000}


def make_model(kind: str, folder: str) -> None:
    """Config, a tokenizer that needs no library, and sparse shards whose headers add up to the real size."""
    os.makedirs(folder, exist_ok=True)
    config, count = CONFIGS[kind], SHARDS[kind]
    write(folder, "config.json", config)
    vocab = {f"t{n}": n for n in range(VOCAB)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "t0"}
    write(folder, "tokenizer.json", {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"},
                                     "normalizer": None, "post_processor": None, "decoder": None, "truncation": None,
                                     "padding": None, "model": model})  # fmt: skip
    write(
        folder,
        "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0", "eos_token": "t1"},
    )
    each = BYTES[kind] // count // 2
    weight_map = {}
    for number in range(count):
        name = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        layer = number % config["num_hidden_layers"]
        tensor = f"model.layers.{layer}.part{number}.weight"
        weight_map[tensor] = name
        header = json.dumps(
            {tensor: {"dtype": "BF16", "shape": [each], "data_offsets": [0, 2 * each]}}
        ).encode()
        with open(os.path.join(folder, name), "wb") as stream:
            stream.write(struct.pack("<Q", len(header)) + header)
            stream.truncate(8 + len(header) + 2 * each)
    write(folder, "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def write(folder: str, name: str, value: Any) -> None:
    """A JSON file."""
    with open(os.path.join(folder, name), "w", encoding="utf-8") as stream:
        json.dump(value, stream)


def main() -> None:
    """Make the model and print the request."""
    kind, out = sys.argv[1:]
    model, work = os.path.join(out, kind), os.path.join(out, "work")
    make_model(kind, model)
    os.makedirs(work, exist_ok=True)
    with open(os.path.join(work, "data.jsonl"), "w", encoding="utf-8") as stream:
        for number in range(16):
            ids = [2 + (number + k) % (VOCAB - 2) for k in range(512)]
            stream.write(json.dumps({"input_ids": ids, "loss_mask": [1] * len(ids)}) + "\n")
    gpus = int(os.environ.get("ORCH_DEEP_GPUS", "1"))
    params = {"model": model, "dataset": "data.jsonl", "layers": LAYER_IDS[kind], "tensor_parallel_size": gpus,
              "max_model_len": 2048, "output": "out"}  # fmt: skip
    step = {"name": "extract", "uses": "extract", "gpus": gpus, "params": params, "patches": "none"}
    spec = {
        "id": "deep",
        "name": "deep",
        "host": "here",
        "workdir": work,
        "python": sys.executable,
        "steps": [step],
    }
    print(json.dumps({"spec": spec, "facts": {"root": os.path.join(out, "root"), "deep": True}}))


if __name__ == "__main__":
    main()
