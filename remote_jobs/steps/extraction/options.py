"""Command line of extract. Flags are the plan's `with:` keys in kebab case; unknown ones go to the backend as they are."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from remote_jobs.steps.extraction.backends import NAMES
from remote_jobs.steps.extraction.errors import ConfigError
from remote_jobs.steps.extraction.parts import Part

DESCRIPTION = """\
Write the hidden states of chosen layers for every prompt of a dataset, one safetensors file per sample.

Layer id k is the INPUT of layer k, 0..num_hidden_layers; num_hidden_layers is the last layer's output before the final
norm. Each file hs_<row>.safetensors holds hidden_states [tokens, layers, hidden] in the model's dtype and token_ids.
Running it again goes on where it ended: valid files are kept, and success means that every row has one.
"""
EPILOG = """\
Any other flag goes to the backend under its own name (vLLM's flags for vllm: --tensor-parallel-size 8,
--gpu-memory-utilization 0.85, --enforce-eager, ...; for transformers: --dtype, --device, --max-num-batched-tokens,
--max-num-seqs or --batch-size, --max-model-len).

Example:
  python extract.py --model /models/qwen3 --dataset prompts.jsonl --layers 2,18,33,36 --output states --backend transformers

Exit status: 0 every sample is there; 1 something failed (the last line says what); 2 the command or plan is wrong;
143 or 130 stopped by SIGTERM or Ctrl-C (everything written so far is kept).
"""


@dataclass(frozen=True)
class Options:
    """The parsed command line."""

    model: str
    dataset: str
    layers: tuple[int, ...] | None
    output: str
    backend: str
    samples: int | None
    part: Part | None
    merge: int | None
    join: bool
    verify: int
    verify_tolerance: float | None
    revision: str | None
    trust_remote_code: bool
    overwrite: bool
    min_free_gib: float | None
    disk_wait_s: float
    flags: dict[str, Any]  # for the backend, snake case
    argv: tuple[str, ...]


def parse(argv: Sequence[str] | None = None) -> Options:
    """Parse a command line (sys.argv without it). argparse itself exits with 2 on wrong usage.

    Raises:
        ConfigError: an argument that no flag owns.
    """
    known, rest = _parser().parse_known_args(argv)
    values = vars(known)
    part = values.pop("range")
    if part is None and values["merge"] is None:
        part = _range_of_environment()
    return Options(**values, part=part, flags=backend_flags(rest), argv=tuple(rest))


def backend_flags(argv: Sequence[str]) -> dict[str, Any]:
    """Read flags whose names only the backend knows: `--a 1 --b=2 --c --no-d` -> {a: "1", b: "2", c: True, d: False}.

    Raises:
        ConfigError: a word that belongs to no flag.
    """
    flags: dict[str, Any] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or len(word) < 3:
            raise ConfigError(f"unexpected argument {word!r}: every option is --name value")
        name, equals, value = word[2:].partition("=")
        key = name.replace("-", "_")
        if equals:
            flags[key] = value
        elif words and not words[0].startswith("--"):
            flags[key] = words.pop(0)
        elif key.startswith("no_"):
            flags[key[3:]] = False
        else:
            flags[key] = True
    return flags


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="extract",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # an abbreviation would swallow the backend's flags
    )
    need = parser.add_argument_group("what to extract")
    need.add_argument(
        "--model", required=True, metavar="FOLDER", help="checkpoint folder, or a repository id of the hub"
    )
    need.add_argument(
        "--dataset", required=True, metavar="FILE", help="JSONL rows {id?, input_ids, loss_mask}"
    )
    need.add_argument(
        "--layers",
        type=_layers,
        metavar="K,K,...",
        help="layer ids, ascending (default: 2, n//2, n-3 and n of a model with n layers, as EAGLE-3 wants them)",
    )
    need.add_argument("--samples", type=_count, metavar="N", help="only the first N rows (default: all)")
    need.add_argument(
        "--range",
        type=_range,
        metavar="I/N",
        help="only the I-th of N ranges of the rows (default: $ORCH_SPLIT_INDEX of $ORCH_SPLIT_COUNT, else all rows)",
    )
    need.add_argument(
        "--merge",
        type=_count,
        metavar="N",
        help="compute nothing: check that the N ranges are all there and make one manifest of theirs",
    )
    need.add_argument(
        "--join",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="of ranges that share the output folder: whichever ends last merges them",
    )
    need.add_argument(
        "--revision", help="revision of the model: fetched from the hub, recorded in the manifest"
    )
    where = parser.add_argument_group("where and how")
    where.add_argument(
        "--output",
        default=os.environ.get("ORCH_OUTPUT") or "./extract",
        metavar="FOLDER",
        help="folder of the sample files (default: $ORCH_OUTPUT, else ./extract)",
    )
    where.add_argument(
        "--backend", choices=NAMES, default="auto", help="what computes the states (default: auto)"
    )
    where.add_argument(
        "--trust-remote-code",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="run the checkpoint's own code",
    )
    where.add_argument(
        "--overwrite",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="throw away what another extraction left in the output folder (and, without ranges, an earlier run of this one)",
    )
    where.add_argument(
        "--min-free-gib",
        type=_amount,
        metavar="X",
        help="pause when less than this is free (default: 2, or 2 %%)",
    )
    where.add_argument(
        "--disk-wait-s",
        type=_amount,
        default=3600.0,
        metavar="S",
        help="longest pause for room on the disk (default: 3600)",
    )
    proof = parser.add_argument_group("proof")
    proof.add_argument(
        "--verify",
        type=_count_or_none,
        default=0,
        metavar="N",
        help="recompute N samples with the transformers reference and compare",
    )
    proof.add_argument(
        "--verify-tolerance",
        type=_amount,
        metavar="X",
        help="largest relative difference per sample and layer (default: what rounding explains at that depth, in bfloat16 0.03 at layer id 2 and 0.11 at 33; 0.001 for float32)",
    )
    return parser


def _layers(text: str) -> tuple[int, ...]:
    """`2,30,58` or `[2, 30, 58]`."""
    try:
        value = json.loads(text if text.lstrip().startswith("[") else f"[{text}]")
    except ValueError:
        value = None
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layer ids, as in 2,30,58,61")
    return tuple(value)


def _range(text: str) -> Part:
    try:
        return Part.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _range_of_environment() -> Part | None:
    """The range that a scheduler's array gives its tasks; one of one is all rows."""
    index, count = os.environ.get("ORCH_SPLIT_INDEX"), os.environ.get("ORCH_SPLIT_COUNT")
    if not index and not count:
        return None
    try:
        part = Part.parse(f"{index}/{count}")
    except ValueError:
        raise ConfigError(
            f"ORCH_SPLIT_INDEX={index} and ORCH_SPLIT_COUNT={count} name no range",
            hint="set both: the index counts from 1 to the count",
        ) from None
    return part if part.count > 1 else None


def _count(text: str) -> int:
    number = int(text) if text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number above 0 is needed")
    return number


def _count_or_none(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _amount(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: a number of at least 0 is needed")
    return number
