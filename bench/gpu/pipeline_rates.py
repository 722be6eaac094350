"""On a GPU host: tokens per second of extraction beside vLLM's plain prefill of the same prompts, in one run.

    python pipeline_rates.py MODEL [--samples 512] [--tokens 512] [--out FOLDER] [--memory FOLDER] [any vLLM flag]

Each engine lives in a process of its own. Plain: every prompt answered with one token, nothing stored. Extraction: the
vllm backend as extract uses it, every file checked, fsynced and renamed. Where the disk is too slow for the engine's
states, no code can keep up: so the disk is measured too (the same files, written and fsynced by as many threads), and the
extraction is run again with the files in --memory (default /dev/shm, when it has the room), which shows what is ours.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from remote_jobs.patches import probe
from remote_jobs.steps.extraction import backends, options
from remote_jobs.steps.extraction.backends import BackendConfig
from remote_jobs.steps.extraction.dataset import Row
from remote_jobs.steps.extraction.model import default_layer_ids, read_model
from remote_jobs.steps.extraction.progress import Progress
from remote_jobs.steps.extraction.samples import WRITER_THREADS, Shape, sample_files, write_atomically

AIM = 0.9
WARM_UP = 64
"""Prompts before the clock starts: kernels, allocators and the pinned buffers of the copies are warm after them."""


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

    answer(rows[:WARM_UP], "warm")
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
        for _, path in backend.states([row.token_ids for row in rows[:WARM_UP]]):
            os.unlink(path)
        began = time.perf_counter()
        written = 0
        for index, states in backend.states([row.token_ids for row in rows]):
            written += len(writer.submit(rows[index], states))
        written += len(writer.drain())
        seconds = time.perf_counter() - began
        if written != len(rows):
            raise SystemExit(f"{written} of {len(rows)} files were written")
        writer.close()
        return seconds
    finally:
        backend.close()


def disk_bytes_per_s(folder: str, file_bytes: int) -> float:
    """What the disk takes: files of a sample's size, each fsynced, by as many threads as extract has; at most 4 GiB."""
    data = os.urandom(1 << 20) * (file_bytes // (1 << 20) + 1)
    count = max(8, min(256, 4 * 1024**3 // file_bytes))
    os.makedirs(folder, exist_ok=True)
    names = [os.path.join(folder, f"{index}.bin") for index in range(count)]
    began = time.perf_counter()
    with ThreadPoolExecutor(WRITER_THREADS) as pool:
        list(pool.map(lambda name: write_atomically(name, data, sync_folder=False), names))
    rate = count * len(data) / (time.perf_counter() - began)
    shutil.rmtree(folder)
    return rate


def sample_bytes(args: argparse.Namespace) -> int:
    """Size of one sample's file in bytes."""
    model = read_model(args.model)
    shape = Shape(len(default_layer_ids(model.num_hidden_layers)), model.hidden_size, "bfloat16")
    return shape.sample_bytes(args.tokens)


def measure(args: argparse.Namespace, flags: list[str], part: str, out: str) -> float:
    """Tokens per second of one part, in a process of its own."""
    command = [
        sys.executable,
        __file__,
        args.model,
        "--samples",
        str(args.samples),
        "--tokens",
        str(args.tokens),
    ]
    subprocess.run([*command, "--out", out, "--part", part, *flags], check=True, stdout=sys.stderr)
    return args.samples * args.tokens / float(json.loads(Path(out, f"{part}.json").read_text()))


def main() -> None:
    """Run both in processes of their own and print the comparison."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--out", default="rates")
    parser.add_argument("--memory", default="/dev/shm/orch-rates", help="folder in memory; none: never there")
    parser.add_argument("--part", choices=("plain", "extraction"))
    args, flags = parser.parse_known_args()
    os.makedirs(args.out, exist_ok=True)
    if args.part:
        seconds = (plain if args.part == "plain" else extraction)(args, flags)
        Path(args.out, f"{args.part}.json").write_text(json.dumps(seconds))
        return
    size = sample_bytes(args)
    bare = measure(args, flags, "plain", args.out)
    rate = measure(args, flags, "extraction", args.out)
    disk = disk_bytes_per_s(os.path.join(args.out, "disk"), size)
    result = {
        "model": args.model,
        "tokens": args.samples * args.tokens,
        "bytes_per_token": size // args.tokens,
        "tokens_per_s": {"plain": round(bare), "extraction": round(rate)},
        "extraction_share_of_plain": round(rate / bare, 3),
        "disk_mb_per_s": {
            "measured": round(disk / 1e6),
            "needed_for_plain": round(bare * size / args.tokens / 1e6),
        },
        "versions": {name: probe.version_of(name) for name in ("vllm", "torch", "safetensors")},
    }
    for path in sample_files(args.out):
        os.unlink(path)
    shm = os.path.dirname(args.memory)
    room = shutil.disk_usage(shm).free if os.path.isdir(shm) else 0
    if rate < AIM * bare and room > 2 * size * args.samples:
        memory = measure(args, flags, "extraction", args.memory)
        shutil.rmtree(args.memory)
        result["in_memory"] = {"tokens_per_s": round(memory), "share_of_plain": round(memory / bare, 3)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
