"""What a checkpoint's own files say about the model, read without torch or transformers, and checked before the load.

Finds in milliseconds what costs vLLM a minute and a real load twenty: missing and truncated shards, layer ids beyond the
model. Format of the header: https://huggingface.co/docs/safetensors (8 bytes little-endian length, JSON, data).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from remote_jobs.steps.extraction.errors import CheckpointError, ConfigError
from remote_jobs.steps.extraction.sample_file import MAX_HEADER_BYTES

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "merges.txt")
EDGE_BYTES = 65536


@dataclass(frozen=True)
class ModelFacts:
    """A checkpoint folder and the few numbers that an extraction depends on."""

    name: str  # as the user gave it
    folder: str
    config: dict[str, Any]
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    max_tokens: int  # longest sequence the positions allow
    dtype: str  # of the weights: bfloat16, float16, float32
    first_moe_layer: int | None  # None: dense
    shards: tuple[str, ...]  # paths, in natural order; empty when the checkpoint is not safetensors
    fingerprint: str
    tokenizer_sha256: str | None
    revision: str | None


def read_model(name: str, revision: str | None = None) -> ModelFacts:
    """Read a checkpoint's configuration and check its files. `name` is a folder, or a repository id of the hub.

    Raises:
        ConfigError: no such model, or its config.json lacks what is needed.
        CheckpointError: a shard is missing or truncated.
    """
    folder, revision = _locate(name, revision)
    config_path = os.path.join(folder, "config.json")
    try:
        with open(config_path, encoding="utf-8") as stream:
            config = json.load(stream)
    except FileNotFoundError:
        raise ConfigError(f"{folder} has no config.json: not a Hugging Face checkpoint") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{config_path} is not valid JSON: {error}") from None
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    shards = _shards(folder)
    for shard in shards:
        check_shard(shard)
    return ModelFacts(
        name=name,
        folder=folder,
        config=config,
        num_hidden_layers=_number(text, config_path, "num_hidden_layers", "n_layer", "num_layers"),
        hidden_size=_number(text, config_path, "hidden_size", "n_embd", "d_model"),
        vocab_size=_number(text, config_path, "vocab_size"),
        max_tokens=_max_tokens(text, config_path),
        dtype=_dtype(text, config),
        first_moe_layer=_first_moe_layer(text),
        shards=tuple(shards),
        fingerprint=_fingerprint(folder, shards),
        tokenizer_sha256=_tokenizer_sha256(folder),
        revision=revision,
    )


def check_layer_ids(layer_ids: Sequence[int], num_hidden_layers: int) -> tuple[int, ...]:
    """Check layer ids; id k is the input of layer k, so 0 .. num_hidden_layers are legal, ascending, each once.

    Raises:
        ConfigError: says which id is wrong and what would be right.
    """
    ids = tuple(layer_ids)
    if not ids:
        raise ConfigError(
            "--layers is empty",
            hint=f"give layer ids 0..{num_hidden_layers}, as in --layers 2,{num_hidden_layers}",
        )
    outside = [k for k in ids if not 0 <= k <= num_hidden_layers]
    if outside:
        raise ConfigError(
            f"--layers {_joined(ids)}: layer id {outside[0]} is outside 0..{num_hidden_layers} "
            f"(the model has {num_hidden_layers} layers; id k is the input of layer k, {num_hidden_layers} the last one's output)"
        )
    if list(ids) != sorted(set(ids)):
        raise ConfigError(
            f"--layers {_joined(ids)} must be ascending, each id once",
            hint=f"write --layers {_joined(sorted(set(ids)))}",
        )
    return ids


def default_layer_ids(num_hidden_layers: int) -> tuple[int, ...]:
    """EAGLE-3's usual choice, as vLLM and speculators >= 0.5 number it: 2, n//2, n-3 and the last layer's output n."""
    n = num_hidden_layers
    return tuple(sorted({k for k in (2, n // 2, n - 3, n) if 0 < k <= n}))


def check_shard(path: str) -> None:
    """Compare a safetensors file's size with what its header says.

    Raises:
        CheckpointError: truncated, grown, or no safetensors file at all (an LFS pointer, for one).
    """
    name = os.path.basename(path)
    size = os.path.getsize(path)
    with open(path, "rb") as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length < 2:
            raise CheckpointError(
                f"{path}: invalid header (header too small): the file is empty or no safetensors file"
            )
        if length > MAX_HEADER_BYTES:
            lfs = start.startswith(b"version ")
            why = (
                "it is a git-lfs pointer, the weights were never fetched" if lfs else "not a safetensors file"
            )
            raise CheckpointError(f"{path}: invalid header (header too large): {why}")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        cut = "incomplete metadata, file not fully covered" if size < 8 + length else "invalid header"
        raise CheckpointError(f"{path}: Error while deserializing header: {cut}") from None
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise CheckpointError(
            f"{path}: incomplete metadata, file not fully covered: {size} bytes, its header says {expected}",
            hint=f"{name} is {'truncated' if size < expected else 'longer than it should be'}: fetch it again",
        )


def _locate(name: str, revision: str | None) -> tuple[str, str | None]:
    if os.path.isdir(name):
        return os.path.abspath(name), revision or _snapshot_revision(name)
    if os.path.exists(name):
        raise ConfigError(f"{name} is a file: --model takes the checkpoint's folder")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ConfigError(
            f"no such model folder: {name}", hint="relative paths are under the plan's workdir on the host"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(f"no folder {name}, and huggingface_hub is not installed to fetch it") from None
    folder = snapshot_download(
        name, revision=revision, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.py"]
    )
    return folder, revision or _snapshot_revision(folder)


def _snapshot_revision(folder: str) -> str | None:
    """Commit hash of a folder inside the hub's cache (`.../snapshots/<commit>`); None elsewhere."""
    parent, commit = os.path.split(os.path.realpath(folder))
    return commit if os.path.basename(parent) == "snapshots" else None


def _shards(folder: str) -> list[str]:
    index_path = os.path.join(folder, INDEX_FILE)
    if os.path.exists(index_path):
        try:
            with open(index_path, encoding="utf-8") as stream:
                names = sorted(set(json.load(stream)["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{index_path} is damaged: no weight_map in it") from None
        missing = [name for name in names if not os.path.exists(os.path.join(folder, name))]
        if missing:
            listed = ", ".join(repr(name) for name in missing[:8]) + (", ..." if len(missing) > 8 else "")
            raise CheckpointError(
                f"Weight files referenced in index but missing: {{{listed}}}",
                hint=f"{len(missing)} of {len(names)} shards are not in {folder}: fetch them again",
            )
        return [os.path.join(folder, name) for name in names]
    if os.path.exists(os.path.join(folder, SINGLE_FILE)):
        return [os.path.join(folder, SINGLE_FILE)]
    return []


def _number(config: dict[str, Any], path: str, *keys: str) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise ConfigError(f"{path} has no usable {keys[0]} (seen: {config.get(keys[0])!r})")


def _max_tokens(config: dict[str, Any], path: str) -> int:
    """Longest sequence: max_position_embeddings, stretched where a rope scaling says so (as vLLM derives it)."""
    limit = _number(config, path, "max_position_embeddings", "n_positions", "max_sequence_length")
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if isinstance(scaling, dict):
        factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
        if isinstance(factor, (int, float)) and isinstance(original, int):
            limit = max(limit, int(factor * original))
    return limit


def _dtype(text: dict[str, Any], config: dict[str, Any]) -> str:
    for source in (text, config):
        for key in ("dtype", "torch_dtype"):
            if isinstance(source.get(key), str):
                return source[key].replace("torch.", "")
    return "float32"


def _first_moe_layer(config: dict[str, Any]) -> int | None:
    """Index of the first layer with routed experts; None for dense models."""
    experts = [config.get(key) for key in ("n_routed_experts", "num_experts", "num_local_experts")]
    if not any(isinstance(number, int) and number > 1 for number in experts):
        return None
    dense = config.get("first_k_dense_replace")
    if isinstance(dense, int):
        return dense
    only = config.get("mlp_only_layers") or []
    step = config.get("decoder_sparse_step") or 1
    layers = range(int(config.get("num_hidden_layers") or 0))
    return next((k for k in layers if k not in only and (k + 1) % step == 0), 0)


def _fingerprint(folder: str, shards: Sequence[str]) -> str:
    """Identity of a checkpoint without reading it whole: config, index, and name, size, head and tail of every shard."""
    digest = hashlib.sha256()
    for name in ("config.json", INDEX_FILE):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            with open(path, "rb") as stream:
                digest.update(hashlib.sha256(stream.read()).digest())
    for shard in shards:
        size = os.path.getsize(shard)
        digest.update(f"{os.path.basename(shard)}:{size}\n".encode())
        with open(shard, "rb") as stream:
            digest.update(stream.read(EDGE_BYTES))
            stream.seek(max(0, size - EDGE_BYTES))
            digest.update(stream.read(EDGE_BYTES))
    return digest.hexdigest()


def _tokenizer_sha256(folder: str) -> str | None:
    digest = hashlib.sha256()
    found = False
    for name in TOKENIZER_FILES:
        path = os.path.join(folder, name)
        if os.path.exists(path):
            found = True
            digest.update(name.encode() + b"\0")
            with open(path, "rb") as stream:
                digest.update(stream.read())
    return digest.hexdigest() if found else None


def _joined(ids: Sequence[int]) -> str:
    return ",".join(map(str, ids))
