"""Write a large checkpoint with random weights in 64 shards, straight to safetensors.

    python -m bench.gpu.make_checkpoint qwen3|deepseek FOLDER

qwen3: about 14 GB (36 layers of 4096). deepseek: about 31 GB (27 layers of 2048, MLA, 64 experts). The weights are written
shard by shard on the GPU's random generator, so that the making takes a minute and little memory. The tokenizer is the
tiny checkpoints' one, filled up with words that no text has, so that every id can be printed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, DeepseekV3Config, PreTrainedTokenizerFast, Qwen3Config

from tests.pipeline import make_models

SHARDS = 64
CONFIGS = {
    "qwen3": lambda: Qwen3Config(
        vocab_size=32000, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=8192, tie_word_embeddings=False,
    ),
    "deepseek": lambda: DeepseekV3Config(
        vocab_size=32000, hidden_size=2048, intermediate_size=8192, moe_intermediate_size=1408, num_hidden_layers=27,
        num_attention_heads=16, num_key_value_heads=16, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6,
        n_group=1, topk_group=1, first_k_dense_replace=1, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64,
        qk_nope_head_dim=128, v_head_dim=128, max_position_embeddings=8192,
    ),
}  # fmt: skip


def expanded(name: str, shape: torch.Size) -> list[tuple[str, tuple[int, ...]]]:
    """Checkpoint tensors of a parameter: transformers 5 fuses experts into one tensor, checkpoints hold each expert."""
    if name.endswith("mlp.experts.gate_up_proj"):
        base, experts, width, hidden = name.removesuffix("gate_up_proj"), shape[0], shape[1] // 2, shape[2]
        return [
            (f"{base}{e}.{part}.weight", (width, hidden))
            for e in range(experts)
            for part in ("gate_proj", "up_proj")
        ]
    if name.endswith("mlp.experts.down_proj"):
        base = name.removesuffix("down_proj")
        return [(f"{base}{e}.down_proj.weight", tuple(shape[1:])) for e in range(shape[0])]
    return [(name, tuple(shape))]


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with as many ids as the model has."""
    core = json.loads(make_models.tokenizer().backend_tokenizer.to_str())
    words = core["model"]["vocab"]
    words.update({f"word{number}": number for number in range(max(words.values()) + 1, vocabulary)})
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(core)),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=make_models.CHAT_TEMPLATE,
    )


def main() -> None:
    """See the module."""
    kind, folder = sys.argv[1], Path(sys.argv[2])
    config = CONFIGS[kind]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors = [item for name, value in model.state_dict().items() for item in expanded(name, value.shape)]
    total = sum(torch.Size(shape).numel() * 2 for _, shape in tensors)
    folder.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(SHARDS)]
    filled = 0
    for name, shape in tensors:
        shards[min(SHARDS - 1, filled * SHARDS // total)].append((name, shape))
        filled += torch.Size(shape).numel() * 2
    weight_map = {}
    for index, shard in enumerate(shards, start=1):
        file = f"model-{index:05}-of-{SHARDS:05}.safetensors"
        content = {}
        for name, shape in shard:
            if len(shape) == 1:
                value = (
                    torch.zeros(shape, device=device) if "bias" in name else torch.ones(shape, device=device)
                )
            else:
                value = torch.randn(shape, device=device) * 0.02
            content[name] = value.to(torch.bfloat16).cpu()
            weight_map[name] = file
        save_file(content, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    written = {
        **config.to_dict(),
        "architectures": [type(model).__name__],
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    if kind == "deepseek":
        written |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    (folder / "config.json").write_text(json.dumps(written, indent=1))
    tokenizer(config.vocab_size).save_pretrained(folder)
    print(json.dumps({"model": kind, "bytes": total, "shards": SHARDS, "tensors": len(tensors)}))


if __name__ == "__main__":
    main()
