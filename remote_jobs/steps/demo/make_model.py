"""Make the demo's model: a random Qwen3-like checkpoint in 64 shards, a tokenizer, and prompts for it.

    python make_model.py FOLDER [--seconds 20]

Written by hand instead of through transformers, which takes longer to import than this takes to run. The sizes are
chosen so that loading takes seconds and extracting the prompts about `--seconds` on this machine: a matrix product is
timed to find out how many prompts that is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

NUM_SHARDS = 64
VOCAB_SIZE = 32768
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 24,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 1024,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LAYERS = (2, 12, 21, 24)
MIN_SAMPLES, MAX_SAMPLES = 64, 1024
EFFICIENCY = 0.55
"""Share of a large matrix product's speed that a forward pass over short prompts reaches (measured on 2 cores)."""

WHO = [
    "the river",
    "a compiler",
    "my neighbour",
    "this theorem",
    "the old clock",
    "a tensor",
    "the harbour",
    "every shard",
    "our teacher",
]
DOES = [
    "moves",
    "explains",
    "hides",
    "measures",
    "repairs",
    "forgets",
    "divides",
    "follows",
    "remembers",
    "carries",
]
WHAT = [
    "seven stones",
    "the last layer",
    "a quiet street",
    "every token",
    "the winter light",
    "its own name",
    "the long way home",
]
HOW = [
    "slowly",
    "without a word",
    "twice a day",
    "for no reason",
    "in the dark",
    "with great care",
    "before breakfast",
]


def weights() -> Iterator[tuple[str, torch.Tensor]]:
    """Names and random values of a Qwen3 checkpoint, in the order of the layers."""
    size, wide, head = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    queries, keys = head * CONFIG["num_attention_heads"], head * CONFIG["num_key_value_heads"]

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns).normal_(0, 0.02)

    yield "model.embed_tokens.weight", matrix(VOCAB_SIZE, size)
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", torch.ones(size)
        yield at + "self_attn.q_proj.weight", matrix(queries, size)
        yield at + "self_attn.k_proj.weight", matrix(keys, size)
        yield at + "self_attn.v_proj.weight", matrix(keys, size)
        yield at + "self_attn.o_proj.weight", matrix(size, queries)
        yield at + "self_attn.q_norm.weight", torch.ones(head)
        yield at + "self_attn.k_norm.weight", torch.ones(head)
        yield at + "post_attention_layernorm.weight", torch.ones(size)
        yield at + "mlp.gate_proj.weight", matrix(wide, size)
        yield at + "mlp.up_proj.weight", matrix(wide, size)
        yield at + "mlp.down_proj.weight", matrix(size, wide)
    yield "model.norm.weight", torch.ones(size)
    yield "lm_head.weight", matrix(VOCAB_SIZE, size)


def save_model(folder: str) -> int:
    """Write config.json, 64 shards of about equal size and their index; returns the bytes of the weights."""
    os.makedirs(folder, exist_ok=True)
    torch.manual_seed(7)
    named = list(weights())
    total = sum(tensor.numel() * 4 for _, tensor in named)
    shards: list[dict[str, torch.Tensor]] = [{}]
    written = 0
    for position, (name, tensor) in enumerate(named):
        # A new shard where the running total passes the next 64th, as long as every later shard still gets a tensor.
        due = written >= total * len(shards) / NUM_SHARDS or len(named) - position <= NUM_SHARDS - len(shards)
        if shards[-1] and due and len(shards) < NUM_SHARDS:
            shards.append({})
        shards[-1][name] = tensor
        written += tensor.numel() * 4
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        path = os.path.join(folder, name)
        save_file(shard, path, metadata={"format": "pt"})
        _leave_cold(path)
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    _write_json(
        os.path.join(folder, "model.safetensors.index.json"),
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )
    _write_json(os.path.join(folder, "config.json"), CONFIG)
    return total


def _leave_cold(path: str) -> None:
    """Put a file on the disk and out of the page cache, so that the first load reads the disk, as real first loads do."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def sentences(number: int, seed: int) -> list[str]:
    """Plain sentences: text to train the tokenizer on, and prompts."""
    rng = random.Random(seed)
    return [
        f"{rng.choice(WHO)} {rng.choice(DOES)} {rng.choice(WHAT)} {rng.choice(HOW)}." for _ in range(number)
    ]


def save_tokenizer(folder: str) -> Tokenizer:
    """Train a byte-level BPE tokenizer and write it as transformers reads it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences(4000, seed=1), trainer)
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    record = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "model_max_length": 1024,
    }
    _write_json(os.path.join(folder, "tokenizer_config.json"), record)
    return tokenizer


def save_prompts(path: str, tokenizer: Tokenizer, seconds: float) -> tuple[int, int]:
    """Write prompts that take about `seconds` to extract here; returns their number and their tokens."""
    rng = random.Random(3)
    budget = seconds * tokens_per_second()
    tokens = number = 0
    with open(path, "w", encoding="utf-8") as stream:
        while number < MIN_SAMPLES or (tokens < budget and number < MAX_SAMPLES):
            text = " ".join(sentences(rng.randint(2, 6), seed=1000 + number))
            ids = tokenizer.encode(text).ids
            mask = [int(position >= len(ids) // 3) for position in range(len(ids))]
            stream.write(json.dumps({"id": f"prompt-{number}", "input_ids": ids, "loss_mask": mask}) + "\n")
            tokens += len(ids)
            number += 1
    return number, tokens


def tokens_per_second() -> float:
    """Guess how many tokens a second the model extracts on this machine, from a timed matrix product."""
    left, right = torch.rand(256, 2048), torch.rand(2048, 2048)
    for _ in range(2):  # the first one pays for the threads
        began = time.perf_counter()
        for _ in range(4):
            left @ right
        took = time.perf_counter() - began
    flops = 4 * 2 * 256 * 2048 * 2048 / took
    first = itertools.takewhile(lambda named: not named[0].startswith("model.layers.1."), weights())
    per_layer = sum(tensor.numel() for name, tensor in first if name.startswith("model.layers.0."))
    return EFFICIENCY * flops / (2 * per_layer * CONFIG["num_hidden_layers"])


def _write_json(path: str, record: object) -> None:
    with open(path, "w", encoding="utf-8") as stream:
        json.dump(record, stream, indent=2)


def main() -> None:
    """Make everything below FOLDER and print one JSON line about it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("folder")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="how long the extraction should take about"
    )
    options = parser.parse_args()
    torch.set_num_threads(min(len(os.sched_getaffinity(0)), 16))
    model = os.path.join(options.folder, "model")
    size = save_model(model)
    samples, tokens = save_prompts(
        os.path.join(options.folder, "prompts.jsonl"), save_tokenizer(model), options.seconds
    )
    print(
        json.dumps(
            {"bytes": size, "shards": NUM_SHARDS, "samples": samples, "tokens": tokens, "layers": LAYERS}
        )
    )


if __name__ == "__main__":
    main()
