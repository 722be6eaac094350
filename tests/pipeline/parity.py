"""Under the host's Python: one engine start, many prompts in every awkward shape, compared with transformers. Prints JSON.

    python parity.py MODEL LAYERS ROWS.jsonl SCRATCH

Pass 1 computes all prompts together, pass 2 some of them alone; the reference is transformers in the same dtype. Per
layer id: relative norm of the difference over all tokens, and the median over tokens (routing of MoE models flips
near-ties, so single tokens differ there). `best` counts for how many prompts the reference at another layer fits better.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from safetensors.torch import load_file

from remote_jobs.steps.extraction import backends
from remote_jobs.steps.extraction.backends import BackendConfig
from remote_jobs.steps.extraction.dataset import read_dataset
from remote_jobs.steps.extraction.model import read_model
from remote_jobs.steps.extraction.progress import Progress


def computed(backend: object, prompts: list) -> dict[int, torch.Tensor]:
    """States of every prompt, float32."""
    found = {}
    for index, states in backend.states(prompts):
        content = load_file(states)
        assert content["token_ids"].tolist() == prompts[index].tolist()
        found[index] = content["hidden_states"].float()
    return found


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm of b."""
    return float((a - b).norm() / b.norm())


def main() -> None:
    """See the module."""
    model_path, layers, dataset, scratch = sys.argv[1:5]
    model = read_model(model_path)
    layer_ids = tuple(map(int, layers.split(",")))
    rows = read_dataset(dataset, vocab_size=model.vocab_size, max_tokens=model.max_tokens)
    prompts = [row.token_ids for row in rows]
    longest = max(map(len, prompts))
    Path(scratch).mkdir(parents=True, exist_ok=True)

    def config(**flags: str) -> BackendConfig:
        return BackendConfig(model, layer_ids, longest, dict(flags), (), scratch, Progress())

    module = backends.load("vllm")
    # Dense: a budget below the longest prompts, so that they are prefilled in chunks, several prompts in one batch. vLLM's
    # CPU build has no chunked prefill for MLA.
    budget = 64 if model.first_moe_layer is None else longest + 1
    settings = config(max_num_batched_tokens=str(budget), max_num_seqs="8", max_model_len=str(longest + 1))
    module.check(settings)
    engine = module.open_backend(settings)
    try:
        together = computed(engine, prompts)
        some = list(range(0, len(prompts), 3))
        alone = {index: computed(engine, [prompts[index]])[0] for index in some}
        facts = engine.facts()
    finally:
        engine.close()
    plain = backends.load("transformers")
    reference = plain.open_backend(config())
    expected = {index: reference.all_layers(prompts[index]).transpose(0, 1).float() for index in together}
    result: dict[str, object] = {"prompts": len(prompts), "longest": longest, "facts": facts, "layers": {}}
    for position, layer in enumerate(layer_ids):
        ours = torch.cat([together[index][:, position] for index in sorted(together)])
        theirs = torch.cat([expected[index][:, layer] for index in sorted(together)])
        by_token = (ours - theirs).norm(dim=1) / theirs.norm(dim=1)
        better = 0
        for index, states in together.items():
            fits = [
                relative(states[:, position], expected[index][:, k])
                for k in range(model.num_hidden_layers + 1)
            ]
            better += fits.index(min(fits)) != layer
        result["layers"][layer] = {
            "relative": relative(ours, theirs),
            "median": float(by_token.median()),
            "worst_token": float(by_token.max()),
            "alone": max(relative(alone[index][:, position], together[index][:, position]) for index in some),
            "another_layer_fits_better": better,
        }
    result["first_moe_layer"] = model.first_moe_layer
    print(json.dumps(result))


if __name__ == "__main__":
    main()
