"""A checkpoint as a check sees it: where it lies, what its config says, what its shards hold.

Understands nested language configs of multimodal models (Kimi-K2.5: `text_config`), MLA and MoE, quantized
checkpoints and the Hugging Face cache.  Standard library only, Python 3.8.
"""

from __future__ import annotations

import json
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Tuple

from remote_jobs.agent.checks import safetensors
from remote_jobs.agent.checks.context import Step

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "language_model_config")
_READERS = 16
_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_UNSCALED_ROPES = frozenset({"default", "su", "longrope", "llama3", "mrope"})
"""Rope types whose factor does not stretch the length (vLLM, _get_and_verify_max_len)."""


@dataclass
class Located:
    """Where a model is: a folder, or why there is none."""

    folder: Optional[str]
    hub_name: Optional[str] = None
    problem: str = ""


def locate(step: Step) -> Optional[Located]:
    """Folder of the step's `model`: a path, or a name in the Hugging Face cache. None: the step names no model."""
    value = step.params.get("model")
    if not isinstance(value, str) or not value:
        return None
    path = step.path(value)
    if os.path.isdir(path):
        return Located(path)
    if os.path.exists(path):
        return Located(None, problem="{} is a file; `model` takes the checkpoint's folder".format(path))
    if value.startswith((".", "/", "~")) or not _HUB_NAME.match(value):
        return Located(None, problem="no such folder: {}".format(path))
    return Located(cached_snapshot(step, value), hub_name=value)


def cached_snapshot(step: Step, name: str) -> Optional[str]:
    """Snapshot folder of a hub model in the cache, None when it is not there."""
    home = step.env("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    cache = step.env("HF_HUB_CACHE") or step.env("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    repository = os.path.join(os.path.expanduser(cache), "models--" + name.replace("/", "--"))
    revision = str(step.params.get("revision") or "main")
    try:
        with open(os.path.join(repository, "refs", revision), encoding="ascii") as file:
            revision = file.read().strip()
    except OSError:
        pass  # a revision may be a commit itself
    snapshot = os.path.join(repository, "snapshots", revision)
    return snapshot if os.path.isdir(snapshot) else None


class BadFile(ValueError):
    """A JSON file of a checkpoint cannot be used; the message names it."""


def read_json(folder: str, name: str) -> Dict[str, Any]:
    """A JSON object of a checkpoint.

    Raises:
        FileNotFoundError: not there. BadFile: not readable, an LFS pointer, not a JSON object.
    """
    path = os.path.join(folder, name)
    try:
        with open(path, "rb") as file:
            raw = file.read(safetensors.MAX_HEADER_BYTES)
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise BadFile("{} cannot be read: {}".format(path, exc.strerror)) from None
    if raw.startswith(safetensors.LFS_START):
        raise BadFile("{} is a Git LFS pointer: run `git lfs pull`".format(path))
    try:
        value = json.loads(raw.decode("utf-8"))
    except ValueError as exc:
        raise BadFile("{} is not valid JSON ({})".format(path, exc)) from None
    if not isinstance(value, dict):
        raise BadFile("{} is not a JSON object".format(path))
    return value


@dataclass
class ModelConfig:
    """The numbers of config.json that checks need; None where the config does not say."""

    raw: Dict[str, Any]
    layers: Optional[int] = None
    hidden: Optional[int] = None
    vocab: Optional[int] = None
    heads: Optional[int] = None
    kv_heads: Optional[int] = None
    head_dim: Optional[int] = None
    intermediate: Optional[int] = None
    max_positions: Optional[int] = None
    """Derived longest sequence, as vLLM derives it (rope scaling applied)."""
    dtype: str = "bfloat16"
    kv_lora_rank: Optional[int] = None
    rope_head_dim: int = 0
    quantization: Optional[str] = None
    custom_code: List[str] = field(default_factory=list)

    def kv_bytes_per_token(self, tensor_parallel: int, bytes_each: float) -> Optional[float]:
        """Bytes of KV cache per token and GPU. MLA keeps one latent per layer on every GPU."""
        if self.layers is None:
            return None
        if self.kv_lora_rank:
            return self.layers * (self.kv_lora_rank + self.rope_head_dim) * bytes_each
        if not self.heads or not self.head_dim:
            return None
        kv_heads = max(1, -(-(self.kv_heads or self.heads) // tensor_parallel))
        return 2 * self.layers * kv_heads * self.head_dim * bytes_each


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Pull the numbers out of a config.json of any family."""
    text: Mapping[str, Any] = raw
    for key in NESTED:
        inner = text.get(key)
        if isinstance(inner, dict):
            text = inner
    dtype = next(
        (str(s[k]) for s in (text, raw) for k in ("dtype", "torch_dtype") if isinstance(s.get(k), str)), ""
    )
    config = ModelConfig(
        raw=dict(raw),
        layers=_int(text, "num_hidden_layers", "n_layer", "num_layers", "n_layers"),
        hidden=_int(text, "hidden_size", "n_embd", "d_model"),
        vocab=_int(text, "vocab_size", "padded_vocab_size"),
        heads=_int(text, "num_attention_heads", "n_head", "num_heads"),
        kv_heads=_int(text, "num_key_value_heads", "multi_query_group_num", "n_head_kv"),
        head_dim=_int(text, "head_dim"),
        intermediate=_int(text, "intermediate_size", "n_inner", "ffn_hidden_size"),
        dtype=dtype.replace("torch.", "") or "float32",
        kv_lora_rank=_int(text, "kv_lora_rank"),
        rope_head_dim=_int(text, "qk_rope_head_dim") or 0,
    )
    if config.head_dim is None and config.hidden and config.heads:
        config.head_dim = config.hidden // config.heads
    config.max_positions = _max_positions(text)
    quantization = raw.get("quantization_config") or text.get("quantization_config")
    if isinstance(quantization, dict):
        config.quantization = str(quantization.get("quant_method") or "unknown")
    auto_map = raw.get("auto_map")
    if isinstance(auto_map, dict):
        files = {
            str(v).rpartition("--")[2].split(".")[0] + ".py" for v in auto_map.values() if isinstance(v, str)
        }
        config.custom_code = sorted(files)
    return config


def _int(source: Mapping[str, Any], *keys: str) -> Optional[int]:
    for key in keys:
        value = source.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _max_positions(text: Mapping[str, Any]) -> Optional[int]:
    limit = _int(
        text, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"
    )
    if limit is None:
        return None
    scaling = text.get("rope_scaling") or text.get("rope_parameters")
    if isinstance(scaling, dict):
        kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
        factor = scaling.get("factor")
        if kind not in _UNSCALED_ROPES and isinstance(factor, (int, float)) and factor >= 1:
            original = scaling.get("original_max_position_embeddings")
            base = original if kind == "yarn" and isinstance(original, int) else limit
            limit = max(limit if kind == "yarn" else 0, int(base * factor))
    return limit


@dataclass
class Weights:
    """The files of a checkpoint and what is wrong with them."""

    files: List[str] = field(default_factory=list)
    shards: List[safetensors.Shard] = field(default_factory=list)
    weight_map: Optional[Dict[str, str]] = None
    format: str = "none"
    problem: str = ""

    @property
    def total_bytes(self) -> int:
        """Size of all files."""
        return sum(shard.size for shard in self.shards)

    def bytes_as(self, dtype_bytes: float) -> float:
        """Bytes in memory when floating-point weights become this wide; others keep theirs."""
        total = 0.0
        for shard in self.shards:
            if not shard.numel:
                total += shard.size
            for dtype, count in shard.numel.items():
                width = (
                    dtype_bytes if dtype in safetensors.FLOATING else safetensors.DTYPE_BYTES.get(dtype, 1)
                )
                total += count * width
        return total


def read_weights(folder: str) -> Weights:
    """List the weight files and read every safetensors header, several at a time."""
    weights = _list_files(folder)
    paths = [os.path.join(folder, name) for name in weights.files]
    if weights.format == "safetensors":
        with ThreadPoolExecutor(min(_READERS, max(1, len(paths)))) as pool:
            weights.shards = list(pool.map(safetensors.read_shard, paths))
    else:
        weights.shards = [_plain_file(path) for path in paths]
    return weights


def _list_files(folder: str) -> Weights:
    for index, kind in ((INDEX, "safetensors"), ("pytorch_model.bin.index.json", "bin")):
        try:
            weight_map = read_json(folder, index).get("weight_map")
        except FileNotFoundError:
            continue
        except BadFile as exc:
            return Weights(problem=str(exc))
        if not isinstance(weight_map, dict) or not weight_map:
            return Weights(problem="{} has no weight_map".format(os.path.join(folder, index)))
        names = {str(tensor): str(file) for tensor, file in weight_map.items()}
        return Weights(sorted(set(names.values())), weight_map=names, format=kind)
    try:
        there = sorted(os.listdir(folder))
    except OSError as exc:
        return Weights(problem="{} cannot be listed: {}".format(folder, exc.strerror))
    if SINGLE in there:
        return Weights([SINGLE], format="safetensors")
    loose = [
        name
        for name in there
        if name.endswith(".safetensors") and not name.startswith(("consolidated", "adapter_"))
    ]
    if loose:
        return Weights(loose, format="safetensors")
    for suffix in (".safetensors", ".bin", ".pt", ".gguf"):
        found = [
            name
            for name in there
            if name.endswith(suffix) and not name.startswith(("training_args", "optimizer"))
        ]
        if found:
            return Weights(found, format=suffix[1:])
    return Weights()


def _plain_file(path: str) -> safetensors.Shard:
    """A weight file without a header to compare: present, not empty, not a pointer, and a zip that ends as one."""
    shard, name = safetensors.Shard(path), os.path.basename(path)
    try:
        with open(path, "rb") as file:
            shard.size = os.fstat(file.fileno()).st_size
            start = file.read(len(safetensors.LFS_START))
            file.seek(max(0, shard.size - 65558))
            tail = file.read()
    except OSError as exc:
        shard.fault, shard.fix = "{}: {}".format(name, exc.strerror), "fetch {} again".format(name)
        return shard
    if start == safetensors.LFS_START:
        shard.fault, shard.fix = "{} is a Git LFS pointer".format(name), "run `git lfs pull`"
    elif shard.size == 0:
        shard.fault, shard.fix = "{} is empty".format(name), "fetch it again"
    elif start.startswith(b"PK\x03\x04") and b"PK\x05\x06" not in tail:
        shard.fault, shard.fix = "{} is truncated: no end of its zip archive".format(name), "fetch it again"
    return shard


def missing_layers(weights: Weights, config: ModelConfig) -> List[int]:
    """Layers of the config for which no tensor is listed; empty where names follow no known scheme."""
    names = list(weights.weight_map or ()) or [name for shard in weights.shards for name in shard.tensors]
    seen = {int(m.group(1)) for m in map(_LAYER.search, names) if m}
    if not seen or config.layers is None:
        return []
    return [layer for layer in range(config.layers) if layer not in seen]


class Shelf:
    """Reads each model once, however many checks and steps ask for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: Dict[str, threading.Lock] = {}
        self._read: Dict[str, Tuple[Optional[ModelConfig], str, Weights]] = {}

    def get(self, folder: str) -> Tuple[Optional[ModelConfig], str, Weights]:
        """(config or None, what is wrong with config.json, weights) of a model folder."""
        with self._lock:
            lock = self._locks.setdefault(folder, threading.Lock())
        with lock:
            if folder not in self._read:
                self._read[folder] = self._load(folder)
            return self._read[folder]

    @staticmethod
    def _load(folder: str) -> Tuple[Optional[ModelConfig], str, Weights]:
        config, problem = None, ""
        try:
            config = parse_config(read_json(folder, "config.json"))
        except FileNotFoundError:
            problem = "{} has no config.json".format(folder)
        except BadFile as exc:
            problem = str(exc)
        return config, problem, read_weights(folder)
