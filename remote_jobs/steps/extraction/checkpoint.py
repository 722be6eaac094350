"""Load a checkpoint into a transformers model, shard by shard, with vLLM's shard bar. Imports torch.

Every tensor is really read while its shard's bar step is open (safetensors alone would map the file and read later), so
the bar is what a person takes it for. The conversion from the file's names to the model's (fused experts, prefixes,
tied weights) is transformers' own.
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from remote_jobs.steps.extraction.errors import CheckpointError, ConfigError
from remote_jobs.steps.extraction.model import ModelFacts
from remote_jobs.steps.extraction.progress import Progress


def load_model(
    model: ModelFacts, dtype: torch.dtype, device: str, progress: Progress, *, trust_remote_code: bool
) -> Any:
    """Build the causal language model of a checkpoint folder.

    Raises:
        ConfigError: transformers does not know this architecture, or needs trust_remote_code.
        CheckpointError: weights are damaged, missing or do not fit.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # transformers counts parameters; ours counts shards
    try:
        config = AutoConfig.from_pretrained(model.folder, trust_remote_code=trust_remote_code)
        # The class that `auto` picks, remote code included, found without allocating any weight.
        with torch.device("meta"):
            architecture = type(AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code))
    except (ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"transformers cannot build {model.name}: {str(error).strip().splitlines()[0]}"
        ) from error
    weights = read_weights(model, progress)
    try:
        loaded, info = architecture.from_pretrained(
            None, config=config, state_dict=weights, torch_dtype=dtype, output_loading_info=True
        )
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"the weights of {model.name} do not fit its configuration: {error}") from error
    # The head is not used here; everything else that is missing would be random numbers.
    missing = sorted(name for name in info["missing_keys"] if not name.startswith("lm_head."))
    if missing or info["mismatched_keys"]:
        names = ", ".join(map(str, (missing or sorted(info["mismatched_keys"]))[:5]))
        raise CheckpointError(f"Following weights were not initialized from checkpoint: {names}")
    return loaded.to(device).eval()


def read_weights(model: ModelFacts, progress: Progress) -> dict[str, torch.Tensor]:
    """Read all tensors of a checkpoint into memory, one shard after the other.

    Raises:
        CheckpointError: names the shard that cannot be read.
    """
    weights: dict[str, torch.Tensor] = {}
    with progress.shard_bar(len(model.shards)) as bar:
        for shard in model.shards:
            try:
                with safe_open(shard, framework="pt", device="cpu") as stream:
                    for name in stream.keys():  # noqa: SIM118  (not a dict)
                        weights[name] = stream.get_tensor(name).clone()
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{shard}: {error}") from error
            bar.update()
    return weights
