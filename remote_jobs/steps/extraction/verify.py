"""--verify N: recompute samples alone, with the reference, and compare with what lies on the disk. Imports torch.

Two questions per sample and layer id. Is it the right layer: of all layers of the reference, the stored one must fit best;
an off-by-one layer id trains a bad draft silently. Are the numbers right: relative norm of the difference over the sample,
below what rounding explains at that depth.

That limit grows with the root of the depth, because rounding errors of the residual stream add up like a random walk: n
roundings of unit roundoff u give a relative error of about sqrt(n) u (Higham and Mary, "A new approach to probabilistic
rounding error analysis", SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4; the constant there is 1 to 3). Layer id k lies
behind 12 k of them (norm, projections, rotation, scores, weighted sum, output, sum; norm, gate, product, down, sum), and two
independent computations differ by sqrt(2) as much. Measured in bf16 on H200, vLLM beside transformers, 36 layers of 4096:
0.013 / 0.018 / 0.021 to 0.054 / 0.022 at ids 2 / 18 / 33 / 36, where the limits are 0.028 / 0.081 / 0.110 / 0.115. float32
has a fixed limit instead: which of its products a device computes in TF32 is not known here.

Mixture-of-experts models send near-ties to other experts, so single tokens differ freely behind the first expert layers
(measured: 90 % of tokens within 0.02 behind the first, none behind the tenth). There the median over the tokens counts up
to the first expert layer's output, and deeper only the best fit does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open

from remote_jobs.steps.extraction.backends import BackendConfig
from remote_jobs.steps.extraction.dataset import Row
from remote_jobs.steps.extraction.errors import VerificationError
from remote_jobs.steps.extraction.samples import sample_path

UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
ROUNDINGS_PER_LAYER = 12
TOLERANCE_32_BIT = 1e-3
SAME_FIT = 1.1
"""A neighbouring layer fits better only when it is closer by this factor: layers of a small model can be near-equal."""


@dataclass(frozen=True)
class Difference:
    """How far one layer of one sample is from the reference (relative, 0 = equal) and which layer id fits best."""

    layer_id: int
    sample: float  # norm of the difference over the norm, whole sample
    median: float  # the same per token, median
    best_id: int
    best: float  # median per token at best_id
    judged: str  # sample | median | fit


def limit_at(layer_id: int, dtype: str) -> float:
    """Largest relative difference that rounding explains between two computations of a layer id's states."""
    if dtype not in UNIT_ROUNDOFF:
        return TOLERANCE_32_BIT
    return math.sqrt(2 * (ROUNDINGS_PER_LAYER * layer_id + 1)) * UNIT_ROUNDOFF[dtype]


def pick(rows: Sequence[Row], number: int) -> list[Row]:
    """Evenly spread rows, the first and the last among them."""
    number = min(number, len(rows))
    if number < 2:
        return list(rows[:number])
    return [rows[round(k * (len(rows) - 1) / (number - 1))] for k in range(number)]


def compare(
    stored: torch.Tensor, reference: torch.Tensor, layer_ids: Sequence[int], first_moe_layer: int | None
) -> list[Difference]:
    """Compare states [seq, L, H] with the reference's states at every layer id, [n + 1, seq, H]."""
    found = []
    reference = reference.float()
    norms = reference.norm(dim=2).clamp_min(1e-12)
    for position, layer_id in enumerate(layer_ids):
        difference = reference - stored[:, position].float()[None]
        per_token = (difference.norm(dim=2) / norms).median(dim=1).values  # [n + 1]
        sample = float(difference[layer_id].norm() / reference[layer_id].norm().clamp_min(1e-12))
        best_id = int(per_token.argmin())
        if first_moe_layer is None or layer_id <= first_moe_layer:
            judged = "sample"
        else:
            judged = "median" if layer_id == first_moe_layer + 1 else "fit"
        found.append(
            Difference(
                layer_id, sample, float(per_token[layer_id]), best_id, float(per_token[best_id]), judged
            )
        )
    return found


def verify(
    folder: str,
    rows: Sequence[Row],
    config: BackendConfig,
    dtype: str,
    reference: Any,
    tolerance: float | None,
) -> dict[str, Any]:
    """Recompute the rows with an open transformers backend and compare; returns the manifest's record.

    Raises:
        VerificationError: names the sample, the layer id and the figures.
    """
    limits = {k: tolerance if tolerance is not None else limit_at(k, dtype) for k in config.layer_ids}
    worst = dict.fromkeys(config.layer_ids, 0.0)
    judged = dict.fromkeys(config.layer_ids, "sample")
    with config.progress.sample_bar(len(rows), 0, "Verifying against a fresh forward pass") as bar:
        for row in rows:
            with safe_open(sample_path(folder, row.index), framework="pt") as stream:
                stored = stream.get_tensor("hidden_states")
            for found in compare(
                stored, reference.all_layers(row.token_ids), config.layer_ids, config.model.first_moe_layer
            ):
                value = found.sample if found.judged == "sample" else found.median
                if found.best_id != found.layer_id and found.median > found.best * SAME_FIT + 1e-6:
                    raise VerificationError(
                        f"{row.named()}: the states stored for layer id {found.layer_id} (relative difference {found.median:.4f}) "
                        f"are those of layer id {found.best_id} ({found.best:.4f})"
                    )
                worst[found.layer_id] = max(worst[found.layer_id], value)
                judged[found.layer_id] = found.judged
                if found.judged != "fit":
                    limit = limits[found.layer_id]
                    if not value <= limit:
                        raise VerificationError(
                            f"{row.named()}: layer id {found.layer_id} differs from a fresh forward pass by {value:.4f} "
                            f"(relative, limit {limit:.2g})"
                        )
            bar.update()
    by_norm = [k for k in config.layer_ids if judged[k] != "fit"] or list(config.layer_ids)
    nearest = max(by_norm, key=lambda k: worst[k] / limits[k] if limits[k] else 0.0)
    return {
        "samples": len(rows),
        # Of the layer that came nearest to its limit; all of them below. A layer judged by its fit alone has no limit.
        "worst_relative_difference": worst[nearest],
        "tolerance": limits[nearest],
        "by_layer": {
            str(k): {
                "judged": judged[k],
                "worst": worst[k],
                "limit": None if judged[k] == "fit" else limits[k],
            }
            for k in config.layer_ids
        },
    }
