"""Check extracted states against a fresh forward pass that shares no code with the extraction.

    python check_states.py MODEL DATASET STATES [--samples 8]

Every file is opened and its token ids compared with the dataset; `--samples` of them are recomputed, one prompt at a
time, with transformers' own `output_hidden_states`. Prints one JSON line; exit status 1 when anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import torch
from safetensors.torch import load_file

TOLERANCE = 1e-3


def expected_states(model: Any, ids: list[int], layer_ids: list[int]) -> torch.Tensor:
    """States [seq, L, H] of one prompt; id k is what goes into layer k, the last id what comes out of the last layer."""
    before_norm: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _module, args: before_norm.append(args[0]))
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    hook.remove()
    # transformers puts the final norm into its last entry; the contract is the state before it.
    by_id = [*output.hidden_states[:-1], before_norm[0]]
    return torch.stack([by_id[layer_id][0] for layer_id in layer_ids], dim=1)


def main() -> int:
    """Check and report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("dataset")
    parser.add_argument("states")
    parser.add_argument("--samples", type=int, default=8)
    options = parser.parse_args()
    with open(options.dataset, encoding="utf-8") as stream:
        rows = [json.loads(line) for line in stream if line.strip()]
    with open(os.path.join(options.states, "manifest.json"), encoding="utf-8") as stream:
        layer_ids = json.load(stream)["layer_ids"]
    problems = []
    found = sum(
        name.startswith("hs_") and name.endswith(".safetensors") for name in os.listdir(options.states)
    )
    if found != len(rows):
        problems.append(f"{found} files for {len(rows)} prompts")
    samples: dict[int, dict[str, torch.Tensor]] = {}
    for index, row in enumerate(rows):
        path = os.path.join(options.states, f"hs_{index}.safetensors")
        if not os.path.exists(path):
            problems.append(f"no file for prompt {index}")
            continue
        samples[index] = load_file(path)
        if samples[index]["token_ids"].tolist() != row["input_ids"]:
            problems.append(f"file {index} holds the tokens of another prompt")

    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(options.model, torch_dtype=torch.float32).eval()
    chosen = sorted(samples)[:: max(1, len(samples) // options.samples)][: options.samples]
    worst = 0.0
    for index in chosen:
        expected = expected_states(model, rows[index]["input_ids"], layer_ids)
        difference = (samples[index]["hidden_states"] - expected).norm(dim=(0, 2)) / expected.norm(dim=(0, 2))
        worst = max(worst, float(difference.max()))
        if not float(difference.max()) <= TOLERANCE:
            problems.append(
                f"file {index} differs from a fresh forward pass by {float(difference.max()):.2g}"
            )
    report = {
        "files": found,
        "prompts": len(rows),
        "tokens": sum(len(row["input_ids"]) for row in rows),
        "recomputed": len(chosen),
        "layer_ids": layer_ids,
        "worst_relative_difference": worst,
        "tolerance": TOLERANCE,
        "problems": problems[:10],
    }
    print(json.dumps(report))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
