"""On a GPU host: tokens per second of extraction beside vLLM's plain prefill of the same prompts, in one run.

    python pipeline_rates.py MODEL [--samples 256] [--tokens 512] [--out FOLDER] [any vLLM flag]

Each engine lives in a process of its own. Plain: every prompt answered with one token, nothing stored. Extraction: the
vllm backend as extract uses it, every file checked, fsynced and renamed. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from remote_jobs.steps.extraction import backends, options
from remote_jobs.steps.extraction.backends import BackendConfig
from remote_jobs.steps.extraction.dataset import Row
from remote_jobs.steps.extraction.model import default_layer_ids, read_model
from remote_jobs.steps.extraction.progress import Progress


def config_of(args: argparse.Namespace, flags: list[str]) -> tuple[BackendConfig, list[Row]]:
    """The backend's configuration and the rows, the same for both."""
    model = read_model(args.model)
    rng = np.random.default_rng(0)
    rows = [
        Row(i, i + 1, None, rng.integers(5, model.vocab_size - 5, args.tokens, dtype=np.int32))
        for i in range(args.samples)
    ]
    scratch = os.path.join(args.out, ".scratch")
    os.makedirs(scratch, exist_ok=True)
    layers = default_layer_ids(model.num_hidden_layers)
    given = options.backend_flags(flags)
    return BackendConfig(model, layers, args.tokens, given, tuple(flags), scratch, Progress()), rows


def plain(args: argparse.Namespace, flags: list[str]) -> float:
    """Seconds of a plain prefill."""
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from remote_jobs.steps.extraction.backends.vllm import engine_argv

    config, rows = config_of(args, flags)
    argv = engine_argv(config, 3600)
    argv = argv[: argv.index("--speculative-config")]
    engine = LLMEngine.from_engine_args(
        EngineArgs.from_cli_args(EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(argv))
    )
    once = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

    def answer(chosen: list[Row], name: str) -> float:
        began = time.perf_counter()
        for row in chosen:
            engine.add_request(f"{name}{row.index}", {"prompt_token_ids": row.token_ids.tolist()}, once)
        while engine.has_unfinished_requests():
            engine.step()
        return time.perf_counter() - began

    answer(rows[:16], "warm")
    return answer(rows, "plain")


def extraction(args: argparse.Namespace, flags: list[str]) -> float:
    """Seconds of the extraction of the same prompts, files included."""
    from remote_jobs.steps.extraction.samples import SampleWriter

    config, rows = config_of(args, flags)
    module = backends.load("vllm")
    module.check(config)
    backend = module.open_backend(config)
    try:
        writer = SampleWriter(args.out, config.layer_ids)
        for _ in backend.states([row.token_ids for row in rows[:16]]):
            pass
        began = time.perf_counter()
        for index, states in backend.states([row.token_ids for row in rows]):
            writer.submit(rows[index], states)
        writer.drain()
        seconds = time.perf_counter() - began
        writer.close()
        return seconds
    finally:
        backend.close()


def main() -> None:
    """Run both in processes of their own and print the comparison."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--out", default="rates")
    parser.add_argument("--part", choices=("plain", "extraction"))
    args, flags = parser.parse_known_args()
    os.makedirs(args.out, exist_ok=True)
    if args.part:
        seconds = (plain if args.part == "plain" else extraction)(args, flags)
        Path(args.out, f"{args.part}.json").write_text(json.dumps(seconds))
        return
    for part in ("plain", "extraction"):
        subprocess.run([sys.executable, *sys.argv, "--part", part], check=True, stdout=sys.stderr)
    seconds = {
        part: json.loads(Path(args.out, f"{part}.json").read_text()) for part in ("plain", "extraction")
    }
    tokens = args.samples * args.tokens
    rate = {part: round(tokens / value) for part, value in seconds.items()}
    share = round(rate["extraction"] / rate["plain"], 3)
    print(
        json.dumps(
            {"model": args.model, "tokens": tokens, "tokens_per_s": rate, "extraction_share_of_plain": share}
        )
    )


if __name__ == "__main__":
    main()
