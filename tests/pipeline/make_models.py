"""Make the tiny checkpoints of the pipeline tests: a dense Qwen3-like one and an MLA + MoE one like DeepSeek-V3.

Runs under the host environment's Python (torch and transformers needed): ``python make_models.py FOLDER``. Random
weights, fixed seed, many shards, a byte-level BPE tokenizer with a ChatML template that knows ``<think>``.

Facts behind the sizes: vLLM's MLA backends take only ``kv_lora_rank`` 512 with ``qk_rope_head_dim`` 64, and DeepSeek's
router bias exists only with ``topk_method: noaux_tc``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 2048
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SUBJECTS = [
    "the river",
    "a compiler",
    "my neighbour",
    "this theorem",
    "the old clock",
    "a tensor",
    "the harbour",
]
VERBS = ["moves", "explains", "hides", "measures", "repairs", "forgets", "divides"]
OBJECTS = [
    "seven stones",
    "the last shard",
    "a quiet street",
    "every token",
    "the winter light",
    "its own name",
]


def sentences() -> list[str]:
    """Some hundred plain sentences: training text of the tokenizer and material for prompts."""
    return [f"{s} {v} {o}." for s in SUBJECTS for v in VERBS for o in OBJECTS]


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with exactly the special tokens of :data:`SPECIAL`."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        sentences(),
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL,
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
    )


def save(model: torch.nn.Module, folder: Path, shard_size: str) -> None:
    """Write a checkpoint in the Hugging Face layout, bf16, tokenizer and generation config included."""
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size=shard_size)
    tokenizer().save_pretrained(folder)
    ids = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(ids))


def qwen3(folder: Path) -> None:
    """Dense: 8 layers of 256, 16 shards or more."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=False,
        initializer_range=0.06, bos_token_id=0, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    save(Qwen3ForCausalLM(config), folder, "700KB")


def deepseek(folder: Path) -> None:
    """MLA attention and routed experts (8, 2 of them used), first layer dense."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2,
        n_group=2, topk_group=1, first_k_dense_replace=1, kv_lora_rank=512, q_lora_rank=128, qk_rope_head_dim=64,
        qk_nope_head_dim=64, v_head_dim=64, max_position_embeddings=2048, initializer_range=0.06, bos_token_id=0,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    save(DeepseekV3ForCausalLM(config), folder, "1200KB")
    path = folder / "config.json"
    written = json.loads(path.read_text())
    written.update(topk_method="noaux_tc", scoring_func="sigmoid")
    path.write_text(json.dumps(written, indent=2))


def main() -> None:
    """Write both checkpoints below the folder given; print how many shards each has."""
    root = Path(sys.argv[1])
    for name, make in (("qwen3-tiny", qwen3), ("dsv3-tiny", deepseek)):
        make(root / name)
        print(name, len(list((root / name).glob("*.safetensors"))), "shards")


if __name__ == "__main__":
    main()
