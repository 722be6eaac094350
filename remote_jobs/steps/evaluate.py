"""The evaluate step: how many tokens a draft saves. Acceptance length, and speed with the draft against without.

    python evaluate.py --model FOLDER --draft train/draft --dataset responses.jsonl [--samples 64] [any vLLM flag]

The same held-out prompts are answered twice by vLLM, greedily, in a process of its own each time: alone, and with EAGLE-3
speculative decoding. Without --skip the last tenth of the rows is used, which speculators' trainer keeps for validation.
Result: `evaluation.json`. Where vLLM cannot run the draft on this device, that is what it says.
"""

from __future__ import annotations

import os
import sys

if __package__ in {None, ""}:  # started as a script: its own folder must not shadow libraries
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import argparse
import json
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from remote_jobs.agent import procs
from remote_jobs.steps import entry, vllm_limits
from remote_jobs.steps.ending import end_everything
from remote_jobs.steps.extraction.errors import ConfigError, DatasetError, StepError
from remote_jobs.steps.extraction.model import read_model
from remote_jobs.steps.extraction.progress import Progress
from remote_jobs.steps.extraction.sample_file import write_atomically
from remote_jobs.steps.extraction.samples import output_folder
from remote_jobs.steps.extraction.stop import StopSignal
from remote_jobs.steps.prompts import read_prompts

RESULT = "evaluation.json"
VALIDATION_SHARE = 0.1
METRICS = "vllm:spec_decode_"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the step; returns the exit status. The last line printed says why it failed."""
    args, flags = _parse(argv)
    if args.measure:  # this very script, in the process that holds the engine
        return measure(args, flags)
    return entry.run("evaluate", lambda progress: evaluate(args, flags, progress))


def evaluate(args: argparse.Namespace, flags: list[str], progress: Progress) -> int:
    """Measure both ways and print the comparison."""
    stop = StopSignal()
    procs.become_subreaper()
    with stop.installed(), output_folder(args.output) as folder:
        with progress.phase("load_config"), stop.raising():
            entry.put_patches_in_force(progress)
            model = read_model(args.model)
            args.draft = os.path.realpath(entry.needed("draft", "--draft", args.draft))
            if not os.path.isfile(os.path.join(args.draft, "config.json")):
                raise ConfigError(
                    f"{args.draft} has no config.json: --draft takes a checkpoint that train wrote"
                )
            prompts = _prompts(args, trust_remote_code="--trust-remote-code" in flags)
            if max(map(len, prompts)) + args.max_tokens > model.max_tokens:
                raise ConfigError(
                    f"--max-tokens {args.max_tokens} is too long: the model ends at {model.max_tokens} tokens"
                )
            write_atomically(os.path.join(folder, "prompts.json"), json.dumps(prompts).encode())
        results = {}
        for name in ("baseline", "draft"):
            with progress.phase(name):
                results[name] = _measured(name, args, flags, folder, stop)
        answer = compare(results["baseline"], results["draft"])
        write_atomically(os.path.join(folder, RESULT), json.dumps(answer, indent=2).encode() + b"\n")
        for line in answer["text"]:
            progress.say(line)
        progress.mark(
            "done", "done", acceptance_length=answer["acceptance_length"], speedup=answer["speedup"]
        )
    return 0


def _measured(
    name: str, args: argparse.Namespace, flags: list[str], folder: str, stop: StopSignal
) -> dict[str, Any]:
    """Run one measurement in its own process; its numbers, or {"error"} when vLLM cannot run the draft on this device.

    Raises:
        StepError: the baseline failed, or the draft failed on a GPU.
    """
    result = os.path.join(folder, f"{name}.json")
    entry.remove(result)
    command = [
        sys.executable,
        os.path.abspath(__file__),
        "--measure",
        name,
        "--model",
        args.model,
        "--draft",
        args.draft,
    ]
    command += [
        "--output",
        folder,
        "--max-tokens",
        str(args.max_tokens),
        "--concurrency",
        str(args.concurrency),
    ]
    command += ["--num-speculative-tokens", str(args.num_speculative_tokens), *flags]
    env = {
        **os.environ,
        **vllm_limits.limit_env(vllm_limits.load_limit_s(vllm_limits.checkpoint_bytes(args.model))),
    }
    child = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL)
    try:
        while child.poll() is None:
            stop.check()
            time.sleep(0.1)
    finally:
        end_everything()
    if child.returncode == 0 and os.path.exists(result):
        return dict(entry.read_json(result))
    if name == "draft" and vllm_limits.is_cpu_build():
        return {
            "error": f"vLLM's CPU build ended with exit status {child.returncode} when it was to use the draft"
        }
    raise StepError(
        f"the measurement {name!r} ended with exit status {child.returncode}; the reason is further up"
    )


def measure(args: argparse.Namespace, flags: list[str]) -> int:
    """In the engine's process: answer the prompts, write times and counters."""
    from vllm import LLM, EngineArgs, SamplingParams
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    prompts = entry.read_json(os.path.join(args.output, "prompts.json"))
    argv = ["--model", args.model, "--max-num-seqs", str(args.concurrency), "--no-enable-prefix-caching"]
    if not any(flag.startswith("--max-model-len") for flag in flags):
        argv += ["--max-model-len", str(max(map(len, prompts)) + args.max_tokens + 1)]
    if args.measure == "draft":
        draft = {
            "method": "eagle3",
            "model": args.draft,
            "num_speculative_tokens": args.num_speculative_tokens,
        }
        argv += ["--speculative-config", json.dumps(draft)]
    parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args([*argv, *flags])
    engine_args = EngineArgs.from_cli_args(parsed)
    engine_args.disable_log_stats = False  # the counters of speculative decoding come with the statistics
    llm = LLM(**vars(engine_args))
    sampling = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)
    inputs: Any = [{"prompt_token_ids": ids} for ids in prompts]
    llm.generate(
        inputs[:1], sampling, use_tqdm=False
    )  # compilation and first kernels are not what is measured
    before = counters(llm.get_metrics())
    started = time.perf_counter()
    outputs = llm.generate(inputs, sampling)
    seconds = time.perf_counter() - started
    after = counters(llm.get_metrics())
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    result = {
        "seconds": seconds,
        "tokens": sum(map(len, answers)),
        "answers": answers,
        "counters": {name: value - before.get(name, 0) for name, value in after.items()},
    }
    write_atomically(os.path.join(args.output, f"{args.measure}.json"), json.dumps(result).encode())
    return 0


def counters(metrics: Any) -> dict[str, float]:
    """Speculative decoding's counters out of vLLM's metrics: drafts, draft_tokens, accepted_tokens, accepted_at_<k>."""
    found: dict[str, float] = {}
    for metric in metrics:
        if not metric.name.startswith(METRICS):
            continue
        name = metric.name.removeprefix(METRICS).removeprefix("num_")
        if hasattr(metric, "values"):
            for position, value in enumerate(metric.values):
                found[f"accepted_at_{position}"] = found.get(f"accepted_at_{position}", 0) + value
        elif hasattr(metric, "value"):
            found[name] = found.get(name, 0) + metric.value
    return found


def compare(baseline: dict[str, Any], draft: dict[str, Any]) -> dict[str, Any]:
    """What the two measurements say together.

    Acceptance length is the mean number of tokens a target step yields: 1 + accepted / drafts (as vLLM logs it).
    """
    plain = baseline["tokens"] / baseline["seconds"]
    text = [
        f"Without a draft: {plain:.1f} tok/s ({baseline['tokens']} tokens in {baseline['seconds']:.1f} s)"
    ]
    answer: dict[str, Any] = {
        "baseline_tokens_per_s": plain,
        "acceptance_length": None,
        "speedup": None,
        "text": text,
    }
    if "error" in draft:
        text.append(f"This device cannot measure the draft: {draft['error']}. Run evaluate on a GPU host.")
        return {**answer, "supported": False, "why": draft["error"]}
    count = draft["counters"]
    drafts = count.get("drafts", 0)
    if not drafts:
        text.append(
            "vLLM proposed no draft at all: the checkpoint was loaded, but speculative decoding did not run."
        )
        return {**answer, "supported": False, "why": "no drafts were counted"}
    length = 1 + count.get("accepted_tokens", 0) / drafts
    fast = draft["tokens"] / draft["seconds"]
    at = [
        count[name] / drafts
        for name in sorted((n for n in count if n.startswith("accepted_at_")), key=_position)
    ]
    same = sum(a == b for a, b in zip(baseline["answers"], draft["answers"], strict=True))
    text += [
        f"With the draft:  {fast:.1f} tok/s ({draft['tokens']} tokens in {draft['seconds']:.1f} s)",
        f"Acceptance length {length:.3f} tokens a step; accepted by position: {', '.join(f'{share:.1%}' for share in at)}",
        f"Speed-up {fast / plain:.2f}; {same} of {len(baseline['answers'])} answers are the same token by token",
    ]
    return {
        **answer, "supported": True, "draft_tokens_per_s": fast, "acceptance_length": length, "speedup": fast / plain,
        "accepted_by_position": at, "drafts": drafts, "same_answers": same, "prompts": len(baseline["answers"]),
    }  # fmt: skip


def _position(name: str) -> int:
    return int(name.rsplit("_", 1)[1])


def _prompts(args: argparse.Namespace, *, trust_remote_code: bool) -> list[list[int]]:
    """Token ids of the held-out prompts.

    Raises:
        DatasetError: nothing is left after --skip.
    """
    path = entry.needed("responses.jsonl", "--dataset", args.dataset)
    with open(path, "rb") as stream:
        first = next((line for line in stream if line.strip()), b"{}")
    if b'"input_ids"' in first:
        prompts = []
        with open(path, "rb") as stream:
            for raw in stream:
                if raw.strip():
                    row = json.loads(raw)
                    mask = row.get("loss_mask") or []
                    prompts.append(row["input_ids"][: mask.index(1)] if 1 in mask else row["input_ids"])
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=trust_remote_code)
        prompts = []
        for prompt in read_prompts(path):
            end = next(index for index, turn in enumerate(prompt.turns) if turn["role"] == "user") + 1
            text = tokenizer.apply_chat_template(
                list(prompt.turns[:end]), tokenize=False, add_generation_prompt=True
            )
            prompts.append(tokenizer.encode(text, add_special_tokens=False))
    skip = len(prompts) - max(1, int(len(prompts) * VALIDATION_SHARE)) if args.skip is None else args.skip
    chosen = [prompt for prompt in prompts[skip:] if prompt][: args.samples]
    if not chosen:
        raise DatasetError(f"{path} has {len(prompts)} rows: none is left after the first {skip}")
    return chosen


def _parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, help="the target's checkpoint folder")
    parser.add_argument(
        "--draft", help="the draft's checkpoint folder (default: that of the needed train step)"
    )
    parser.add_argument(
        "--dataset", help="rows with input_ids, or prompts (default: what the needed generate step wrote)"
    )
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument(
        "--skip", type=int, help="rows to leave out at the start (default: all but the last tenth)"
    )
    parser.add_argument(
        "--output", default=entry.default_output("evaluate"), help="folder of evaluation.json"
    )
    parser.add_argument("--max-tokens", type=int, default=256, help="length of every answer")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at a time")
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--measure", choices=("baseline", "draft"), help=argparse.SUPPRESS)
    return parser.parse_known_args(argv)


if __name__ == "__main__":
    sys.exit(main())
