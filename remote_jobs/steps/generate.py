"""The generate step: the target's own answers to prompts, as token ids with a loss mask, ready for extract and train.

    python generate.py --dataset prompts.jsonl --samples 10000 [--endpoint http://host:8000] [--output FOLDER]

`responses.jsonl`: one row per answer {id, prompt_id, input_ids, loss_mask, reasoning, response, finish_reason}. input_ids
are the prompt's and the answer's tokens, thinking included; loss_mask is 1 on what was generated. Running it again goes
on where it ended; success means that every prompt has its rows, and `errors.jsonl` is empty.
"""

from __future__ import annotations

import os
import sys

if __package__ in {None, ""}:  # started as a script: its own folder must not shadow libraries
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import argparse
import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from tqdm import tqdm

from remote_jobs.steps import entry
from remote_jobs.steps.chat import Answer, ChatClient, Refused, Unreachable
from remote_jobs.steps.extraction.errors import ConfigError, DatasetError, IncompleteError, StepError
from remote_jobs.steps.extraction.progress import Progress
from remote_jobs.steps.extraction.sample_file import write_atomically
from remote_jobs.steps.extraction.samples import output_folder
from remote_jobs.steps.extraction.stop import StopSignal
from remote_jobs.steps.prompts import Prompt, read_prompts

RESPONSES = "responses.jsonl"
ERRORS = "errors.jsonl"
SUMMARY = "summary.json"
SETTINGS = "settings.json"
FAILURES_IN_A_ROW = 20
"""Unreachable so many times in a row, with nothing answered in between: the server is gone."""


@dataclass
class Tally:
    """Counts of this run."""

    answered: int = 0
    errors: int = 0
    truncated: int = 0
    answer_tokens: int = 0
    in_a_row: int = 0
    first_error: str = ""
    started: float = field(default_factory=time.monotonic)


@dataclass
class Sink:
    """Where answers and errors go, and the bar that counts them."""

    answers: IO[str]
    errors: IO[str]
    bar: tqdm
    tally: Tally

    def take(self, rows: list[dict[str, Any]]) -> None:
        """Store a conversation, in one write: a kill must not leave half of it (and if it does, it is found)."""
        _append(self.answers, *rows)
        self.tally.in_a_row = 0
        self.tally.answered += 1
        self.tally.answer_tokens += sum(sum(row["loss_mask"]) for row in rows)
        self.tally.truncated += any(row["finish_reason"] == "length" for row in rows)
        self._count()

    def failed(self, prompt: Prompt, error: Refused | Unreachable) -> None:
        """Note a failure.

        Raises:
            StepError: the server is gone.
        """
        self.tally.errors += 1
        self.tally.in_a_row = self.tally.in_a_row + 1 if isinstance(error, Unreachable) else 0
        text = f"{type(error).__name__}: {error}"
        self.tally.first_error = self.tally.first_error or text
        _append(self.errors, {"prompt_id": prompt.id, "line": prompt.line, "error": text})
        self._count()
        if self.tally.in_a_row >= FAILURES_IN_A_ROW:
            raise StepError(
                f"Connection refused: the server has not answered {self.tally.in_a_row} requests in a row ({error})",
                hint="its own log says why it died; every answer so far is kept, the next run asks for the rest",
            ) from error

    def _count(self) -> None:
        tally = self.tally
        rate = round(tally.answer_tokens / max(1e-6, time.monotonic() - tally.started))
        self.bar.set_postfix(
            ok=tally.answered, err=tally.errors, trunc=tally.truncated, tps=rate, refresh=False
        )
        self.bar.update(1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the step; returns the exit status. The last line printed says why it failed."""
    return entry.run("generate", lambda progress: generate(_parse(argv), progress))


def generate(args: argparse.Namespace, progress: Progress) -> int:
    """Bring responses.jsonl to one conversation per prompt."""
    stop = StopSignal()
    with stop.installed(), output_folder(args.output) as folder:
        with progress.phase("load_config"), stop.raising():
            prompts = read_prompts(entry.needed("prompts.jsonl", "--dataset", args.dataset), args.samples)
            url, model = _endpoint(args)
            _same_settings(folder, args, model)
            path = os.path.join(folder, RESPONSES)
            done = finished_prompts(path)
            wanted = [prompt for prompt in prompts if prompt.id not in done]
            have = len(prompts) - len(wanted)
            entry.remove(os.path.join(folder, ERRORS))
            progress.say(
                f"{len(prompts)} prompts, {have} have their answers, {len(wanted)} to do; {model} at {url}"
            )
        tally = Tally()
        if wanted:
            with (
                progress.phase("generate", done=have, total=len(prompts)),
                open(path, "a", encoding="utf-8") as answers,
                open(os.path.join(folder, ERRORS), "a", encoding="utf-8") as errors,
                progress.sample_bar(len(prompts), have, "Generating responses") as bar,
            ):
                asyncio.run(_run(args, url, model, wanted, Sink(answers, errors, bar, tally), stop))
        rows = finished_prompts(path)
        missing = [prompt for prompt in prompts if prompt.id not in rows]
        _summarise(folder, tally, prompts, missing, progress)
        if missing:
            first = ", ".join(prompt.id for prompt in missing[:5]) + (", ..." if len(missing) > 5 else "")
            why = f" ({tally.first_error})" if tally.first_error else ""
            raise IncompleteError(
                f"{len(missing)} of {len(prompts)} prompts have no answer: {first}{why}",
                hint=f"all reasons are in {os.path.join(folder, ERRORS)}; running it again asks for the missing ones only",
            )
        progress.mark("done", "done", done=len(prompts), total=len(prompts))
    return 0


async def _run(
    args: argparse.Namespace, url: str, model: str, wanted: Sequence[Prompt], sink: Sink, stop: StopSignal
) -> None:
    """Ask for all prompts with bounded concurrency; every finished conversation is written before the next."""
    params = {"max_tokens": args.max_tokens, "temperature": args.temperature, "top_p": args.top_p}
    params.update(args.sampling_params)
    queue: asyncio.Queue[Prompt] = asyncio.Queue()
    for prompt in wanted:
        queue.put_nowait(prompt)
    client = ChatClient(
        url, model, concurrency=args.concurrency, timeout_s=args.request_timeout_s, retries=args.max_retries
    )
    async with client:
        workers = [
            asyncio.create_task(_worker(client, queue, params, args.seed, sink))
            for _ in range(min(args.concurrency, len(wanted)))
        ]
        try:
            await _until_done(workers, stop)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            os.fsync(sink.answers.fileno())


async def _until_done(workers: Sequence[asyncio.Task[None]], stop: StopSignal) -> None:
    """Wait for the workers; a stop signal or the first error ends it."""
    pending = set(workers)
    while pending:
        stop.check()
        finished, pending = await asyncio.wait(pending, timeout=0.2, return_when=asyncio.FIRST_EXCEPTION)
        for worker in finished:
            worker.result()


async def _worker(
    client: ChatClient, queue: asyncio.Queue[Prompt], params: dict[str, Any], seed: int | None, sink: Sink
) -> None:
    while True:
        try:
            prompt = queue.get_nowait()
        except asyncio.QueueEmpty:
            return
        try:
            rows = await converse(client, prompt, params, seed)
        except (Refused, Unreachable) as error:
            sink.failed(prompt, error)
        else:
            sink.take(rows)


async def converse(
    client: ChatClient, prompt: Prompt, params: dict[str, Any], seed: int | None
) -> list[dict[str, Any]]:
    """Answer every user turn of a conversation; one row per answer.

    Thinking stays out of the history, as chat templates want it; in its own row it is part of the learned tokens.
    """
    history: list[dict[str, str]] = []
    rows: list[dict[str, Any]] = []
    users = sum(turn["role"] == "user" for turn in prompt.turns)
    for turn in prompt.turns:
        history.append(turn)
        if turn["role"] != "user":
            continue
        asked = dict(params)
        if seed is not None:
            asked["seed"] = _seed_of(seed, prompt.id, len(rows))
        answer = await client.complete(history, asked)
        history.append({"role": "assistant", "content": answer.response})
        rows.append(_row(prompt, len(rows), users, answer))
        if answer.finish_reason == "length" and len(rows) < users:
            # A cut answer would stand in the history of the next turn: the conversation ends here.
            rows[-1]["turns_left_out"] = users - len(rows)
            break
    rows[-1]["last"] = True
    return rows


def _row(prompt: Prompt, turn: int, turns: int, answer: Answer) -> dict[str, Any]:
    return {
        "id": prompt.id if turns == 1 else f"{prompt.id}#{turn}",
        "prompt_id": prompt.id,
        "input_ids": answer.prompt_ids + answer.answer_ids,
        "loss_mask": [0] * len(answer.prompt_ids) + [1] * len(answer.answer_ids),
        "reasoning": answer.reasoning,
        "response": answer.response,
        "finish_reason": answer.finish_reason,
    }


def finished_prompts(path: str) -> dict[str, int]:
    """Prompt ids of whole conversations in responses.jsonl and their row counts; what a kill cut off is removed.

    Raises:
        DatasetError: a damaged line that is not the last one: somebody else wrote into the file.
    """
    if not os.path.exists(path):
        return {}
    finished: dict[str, int] = {}
    keep = 0  # bytes up to the end of the last whole conversation
    position = 0
    open_rows = 0
    with open(path, "rb") as stream:
        for line, raw in enumerate(stream, start=1):
            position += len(raw)
            try:
                row = json.loads(raw)
                prompt_id, last = str(row["prompt_id"]), bool(row.get("last"))
            except (ValueError, KeyError, TypeError):
                if stream.read(1):
                    raise DatasetError(
                        f"{path} line {line} is damaged", hint="remove the line, or the file to start again"
                    ) from None
                break
            if not raw.endswith(b"\n"):
                break
            open_rows += 1
            if last:
                if prompt_id in finished:
                    raise DatasetError(f"{path} line {line}: prompt {prompt_id!r} is there twice")
                finished[prompt_id] = open_rows
                open_rows, keep = 0, position
    if keep != os.path.getsize(path):
        os.truncate(path, keep)
    return finished


def _append(stream: IO[str], *rows: dict[str, Any]) -> None:
    stream.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    stream.flush()


def _seed_of(seed: int, prompt_id: str, turn: int) -> int:
    """A seed of its own for every answer, the same in every run: a resumed run asks the same questions."""
    return (
        int.from_bytes(hashlib.sha256(f"{seed}/{prompt_id}/{turn}".encode()).digest()[:4], "little")
        & 0x7FFFFFFF
    )


def _endpoint(args: argparse.Namespace) -> tuple[str, str]:
    """(url, model id) of the server: as given, else from the endpoint.json of the needed serve step."""
    if args.endpoint:
        url = args.endpoint.rstrip("/").removesuffix("/v1/chat/completions").removesuffix("/v1")
        if not args.model:
            from remote_jobs.steps.serve import served_model

            return url, served_model(url)
        return url, args.model
    facts = entry.read_json(entry.needed("endpoint.json", "--endpoint"))
    return facts["url"], args.model or facts["model"]


def _same_settings(folder: str, args: argparse.Namespace, model: str) -> None:
    """Refuse to mix answers of two models or two ways of sampling in one file."""
    settings = {
        "model": model, "max_tokens": args.max_tokens, "temperature": args.temperature, "top_p": args.top_p,
        "seed": args.seed, "sampling_params": args.sampling_params,
    }  # fmt: skip
    path = os.path.join(folder, SETTINGS)
    if os.path.exists(path) and os.path.exists(os.path.join(folder, RESPONSES)):
        old = entry.read_json(path)
        changed = [
            f"{key} was {old.get(key)!r}, now {value!r}"
            for key, value in settings.items()
            if old.get(key) != value
        ]
        if changed:
            raise ConfigError(
                f"{folder} holds answers made otherwise: {'; '.join(changed)}", hint="use another --output"
            )
    write_atomically(path, json.dumps(settings, indent=2).encode() + b"\n")


def _summarise(
    folder: str, tally: Tally, prompts: Sequence[Prompt], missing: Sequence[Prompt], progress: Progress
) -> None:
    elapsed_s = time.monotonic() - tally.started
    summary = {
        "prompts": len(prompts), "answered": len(prompts) - len(missing), "errors": tally.errors,
        "truncated": tally.truncated, "answer_tokens": tally.answer_tokens, "seconds": round(elapsed_s, 1),
        "tokens_per_s": round(tally.answer_tokens / max(elapsed_s, 1e-6), 1),
    }  # fmt: skip
    write_atomically(os.path.join(folder, SUMMARY), json.dumps(summary, indent=2).encode() + b"\n")
    with contextlib.suppress(OSError):
        if not os.path.getsize(os.path.join(folder, ERRORS)):
            entry.remove(os.path.join(folder, ERRORS))
    progress.say(
        f"Generated {tally.answered} conversations in {elapsed_s:.1f} s ({tally.errors} errors, {tally.truncated} truncated), "
        f"{summary['tokens_per_s']} tok/s"
    )


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--dataset", help="prompts: .jsonl or .json (messages, ShareGPT conversations, or prompt texts)"
    )
    parser.add_argument("--samples", type=int, help="the first so many prompts (default: all)")
    parser.add_argument(
        "--output", default=entry.default_output("generate"), help="folder of responses.jsonl"
    )
    parser.add_argument("--endpoint", help="URL of the server (default: that of the needed serve step)")
    parser.add_argument("--model", help="id the server knows the model by (default: what it serves)")
    parser.add_argument("--concurrency", type=int, default=64, help="requests at a time")
    parser.add_argument("--max-tokens", type=int, default=8192, help="longest answer, thinking included")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument(
        "--seed", type=int, help="each answer gets a seed of its own, derived from this and its prompt's id"
    )
    parser.add_argument(
        "--sampling-params", type=_json_object, default={}, help="more of the request's fields, as JSON"
    )
    parser.add_argument("--max-retries", type=int, default=6, help="of one request, for faults that may pass")
    parser.add_argument("--request-timeout-s", type=float, default=1800.0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
