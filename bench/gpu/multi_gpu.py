"""On a host with N GPUs, through `orch` over a private sshd: gate, claims, tensor parallelism, torchrun, kills.

    python -m bench.gpu.multi_gpu --gpus 2 --python PYTHON --models FOLDER --out FOLDER [--parts gate,claims,mla,dense]

PYTHON has vLLM >= 0.20, speculators and torch; FOLDER holds checkpoints of make_checkpoint.py (`qwen3`, `deepseek`). With
``--gpus 0`` and tiny checkpoints the same script runs on CPU, which is how it is tried before a GPU is at hand.
Prints one JSON line per part; a part that fails says so and the next one runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.sshd.server import Sshd
from tests.support.jobdir import JobDir, command_line, environment, kill, pids
from tests.support.laptop import Laptop

HOLD = "import torch, time; x = torch.empty({gib} << 28, dtype=torch.float32, device='cuda'); print('held', flush=True); time.sleep(3600)"
TERMINAL = {"succeeded", "failed", "stopped", "lost"}
LIMIT_S = 560.0


class Site:
    """The host behind its sshd, and a laptop that knows it."""

    def __init__(self, args: argparse.Namespace, sshd: Sshd) -> None:
        self.args, self.root, self.work = args, args.out / "root", args.out / "work"
        self.work.mkdir(parents=True, exist_ok=True)
        entry = sshd.inventory_entry(
            root=str(self.root),
            python=str(args.python),
            agent_python=str(args.python),
            gpus=args.gpus,
            env=dict(args.env),
        )
        self.laptop = Laptop(args.out / "laptop", {"box": entry}, environment=dict(args.laptop_env))
        self.jobs: list[JobDir] = []
        self.peak_mib: dict[int, int] = {}

    def plan(self, name: str, steps: list[dict[str, Any]], **top: Any) -> Path:
        return self.laptop.plan(steps, name=name, workdir=str(self.work / name), **top)

    def launch(self, plan: Path, *more: str, expect: int = 0) -> JobDir | None:
        answer = self.laptop.run("launch", plan, *more, within_s=240, expect=expect)
        if expect:
            return None
        self.jobs.append(JobDir(self.root, answer.out.strip()))
        return self.jobs[-1]

    def status(self, job: JobDir) -> dict[str, Any]:
        [found] = self.laptop.run("status", job.id, "--json").json["jobs"]
        return found

    def follow(
        self, job: JobDir, each: Callable[[dict[str, Any]], None] = lambda _: None, within_s: float = LIMIT_S
    ) -> dict[str, Any]:
        """Ask until the job has ended; ``each`` sees every answer."""
        deadline = time.monotonic() + within_s
        while True:
            seen = self.status(job)
            each(seen)
            self.note_memory()
            if seen["state"] in TERMINAL:
                return seen
            if time.monotonic() > deadline:
                self.laptop.run("stop", job.id, "--wait", within_s=120)
                raise TimeoutError(f"{job.id} has not ended: {brief(seen)}\n{self.tail(job)}")
            time.sleep(1.0)

    def note_memory(self) -> None:
        for row in query("index,memory.used"):
            index, used = (int(cell) for cell in row.split(","))
            self.peak_mib[index] = max(used, self.peak_mib.get(index, 0))

    def tail(self, job: JobDir, lines: int = 25) -> str:
        logs = sorted(job.path.glob("steps/*/attempts/*/log"), key=lambda path: path.stat().st_mtime)
        return "\n".join(logs[-1].read_text(errors="replace").splitlines()[-lines:]) if logs else "no log"


def query(fields: str) -> list[str]:
    """Rows of nvidia-smi; none on a host without GPUs."""
    with contextlib.suppress(OSError):
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return []


def brief(seen: dict[str, Any]) -> list[Any]:
    """Steps and attempts of a status answer in one line."""
    return [
        (
            step["name"],
            step["state"],
            [(a["state"], a["exit_status"], (a["verdict"] or {}).get("class")) for a in step["attempts"]],
        )
        for step in seen["steps"]
    ]


def tell(part: str, **facts: Any) -> None:
    """One line of the result."""
    print(json.dumps({"part": part, **facts}, default=str), flush=True)


@contextlib.contextmanager
def foreign(index: int, python: Path, gib: int) -> Iterator[int]:
    """Somebody else's process that holds memory of one GPU."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": str(index)}
    process = subprocess.Popen(
        [str(python), "-c", HOLD.format(gib=gib)], stdout=subprocess.PIPE, env=env, start_new_session=True
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
    finally:
        process.kill()
        process.wait()


def gate(site: Site) -> None:
    """One GPU held by a foreign process: closed for all, open for the others; freed: open."""
    every = site.args.gpus
    all_gpus = site.plan("gate", [{"name": "all", "run": "nvidia-smi -L", "gpus": every}])
    with foreign(0, site.args.python, 8) as pid:
        answer = site.laptop.run("gpus", "box", "--json", expect=4).json
        held = next(gpu for gpu in answer["gpus"] if gpu["index"] == 0)
        refused = site.laptop.run("launch", all_gpus, expect=4, within_s=120)
        named = str(pid) in refused.err
        rest = site.plan("rest", [{"name": "one", "run": "echo GPU=$CUDA_VISIBLE_DEVICES", "gpus": 1}])
        job = site.launch(rest)
        assert job is not None
        ended = site.follow(job, within_s=60)
        chosen = site.tail(job, 3)
    began = time.monotonic()
    job = site.launch(all_gpus)
    assert job is not None
    opened = site.follow(job, within_s=60)
    tell("gate", held=held["why"], named_pid=named, message=refused.err.strip().splitlines()[:6], one_gpu_job=(ended["state"], chosen),
         freed=opened["state"], freed_to_done_s=round(time.monotonic() - began, 2))  # fmt: skip


def claims(site: Site) -> None:
    """Two jobs of one GPU each run at once on different GPUs; one that wants all waits for both."""
    hold = "echo GPU=$CUDA_VISIBLE_DEVICES; while [ ! -e {workdir}/go ]; do sleep 0.1; done"
    folder = str(site.work / "claims")
    plans = [
        site.laptop.plan([{"name": "hold", "run": hold, "gpus": n}], name=name, workdir=folder)
        for name, n in (("one", 1), ("two", 1), ("all", site.args.gpus))
    ]
    jobs = [site.launch(plan) for plan in plans]
    deadline = time.monotonic() + 30
    states: list[str] = []
    while time.monotonic() < deadline:
        states = [site.status(job)["state"] for job in jobs if job]
        if states[:2] == ["running", "running"]:
            break
        time.sleep(0.2)
    shown = [site.tail(job, 1) for job in jobs[:2] if job]
    Path(folder, "go").touch()
    ended = [site.follow(job, within_s=90)["state"] for job in jobs if job]
    tell("claims", while_held=states, gpus=shown, ended=ended)


def rows(path: Path, count: int, tokens: int, vocabulary: int) -> Path:
    """A dataset of random token ids."""
    rng = random.Random(0)
    with path.open("w") as file:
        for index in range(count):
            ids = [rng.randrange(5, vocabulary) for _ in range(rng.randrange(tokens // 8, tokens))]
            mask = [0] * 8 + [1] * (len(ids) - 8)
            file.write(json.dumps({"id": str(index), "input_ids": ids, "loss_mask": mask}) + "\n")
    return path


def engine(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Flags of serve and extract."""
    flags: dict[str, Any] = {"model": str(model), "max_model_len": args.tokens, "enforce_eager": True}
    if args.gpus:
        return {**flags, "tensor_parallel_size": args.gpus, "gpu_memory_utilization": 0.6}
    return {**flags, "dtype": "float32"}


class Strike:
    """Kills one process with SIGKILL, as soon as the work is far enough; in a thread, since work on a GPU is quick."""

    def __init__(self, ripe: Callable[[], object], victim: Callable[[], int | None]) -> None:
        self._ripe, self._victim, self._over = ripe, victim, threading.Event()
        self._killed: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            pid = self._victim() if self._ripe() else None
            if pid is not None:
                self._killed = {"pid": pid, "command": " ".join(command_line(pid))[:80]}
                kill(pid, signal.SIGKILL)
                return

    def end(self) -> dict[str, Any]:
        """Who was killed; empty when the work was over too early."""
        self._over.set()
        self._thread.join()
        return self._killed


def worker_of(job: str) -> int | None:
    """A worker of tensor parallelism, else the engine's process."""
    named = {pid: " ".join(command_line(pid)) for pid in pids() if environment(pid).get("ORCH_JOB") == job}
    for kind in ("Worker", "EngineCore"):
        found = [pid for pid, command in named.items() if kind in command]
        if found:
            return max(found)
    return None


def main_of(job: JobDir) -> int | None:
    """Pid of the first attempt's main process."""
    started = [event for event in job.events() if event["kind"] == "attempt_started"]
    return int(started[0]["data"]["process"]["pid"]) if started else None


class LoadWatch:
    """Our forecasts of the shard bar against the time at which it was full."""

    def __init__(self) -> None:
        self.told: list[tuple[tuple[str, int, int], float, float]] = []
        self.full_at: dict[tuple[str, int, int], float] = {}

    def __call__(self, seen: dict[str, Any]) -> None:
        now = time.monotonic()
        for step in seen["steps"]:
            for attempt in step["attempts"]:
                for bar in attempt["bars"]:
                    if not bar["label"].endswith("shards"):
                        continue
                    key = (step["name"], attempt["n"], bar["instance"])
                    if bar["done"] == bar["total"]:
                        self.full_at.setdefault(key, now)
                    elif bar.get("eta_s") is not None:
                        self.told.append((key, now, bar["eta_s"]))

    def errors_s(self) -> list[float]:
        """|forecast - truth| in seconds of each forecast told, in order."""
        return [
            round(abs(at + eta_s - self.full_at[key]), 1)
            for key, at, eta_s in self.told
            if key in self.full_at
        ]


def mla(site: Site) -> None:
    """Serve, then extract with one worker killed half-way: verdict, clean GPUs, resumed, files complete and right."""
    args = site.args
    model = args.models / "deepseek"
    folder = site.work / "mla"
    folder.mkdir(exist_ok=True)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    data = rows(folder / "rows.jsonl", args.samples, args.tokens, vocabulary)
    ask = (
        'curl -sf $(python3 -c \'import json; print(json.load(open("serve/endpoint.json"))["url"])\')/v1/models'
        if not args.gpus
        else "curl -sf http://127.0.0.1:8000/v1/models"
    )
    steps = [
        {"name": "serve", "uses": "serve", "gpus": args.gpus, "with": engine(args, model)},
        {"name": "ask", "needs": ["serve"], "run": ask},
        {"name": "extract", "uses": "extract", "needs": ["ask"], "gpus": args.gpus, "retry": {"attempts": 3},
         "with": {**engine(args, model), "dataset": str(data), "layers": [1, 2, layers // 2, layers], "verify": 4}},
    ]  # fmt: skip
    plan = site.plan("mla", steps)
    preflight = site.laptop.run("preflight", plan, "--json", within_s=180).json
    predictions = [
        check for check in preflight["checks"] if "memory" in check["name"] or "disk" in check["name"]
    ]
    job = site.launch(plan)
    assert job is not None
    watch = LoadWatch()
    files = site.work / "mla" / "extract"
    strike = Strike(
        lambda: len(list(files.glob("hs_*.safetensors"))) >= args.samples // 4, lambda: worker_of(job.id)
    )
    began = time.monotonic()
    ended = site.follow(job, watch)
    killed = strike.end()
    why = (
        site.laptop.run("why", job.id, "--step", "extract", "--attempt", "1", "--json").json
        if killed
        else None
    )
    manifest = site.work / "mla" / "extract" / "manifest.json"
    kept = json.loads(manifest.read_text()) if manifest.exists() else {}
    tell("mla", state=ended["state"], steps=brief(ended), took_s=round(time.monotonic() - began), killed=killed,
         verdict=(why or {}).get("verdict", {}).get("class"), summary=(why or {}).get("verdict", {}).get("summary"),
         files=len(list(manifest.parent.glob("hs_*.safetensors"))), samples=kept.get("samples"), verified=kept.get("verified"),
         eta_errors_s=watch.errors_s(), predictions=[(c["name"], c["found"]) for c in predictions], peak_mib=dict(site.peak_mib),
         tail=None if ended["state"] == "succeeded" else site.tail(job))  # fmt: skip


def dense(site: Site) -> None:
    """The whole plan on a dense target, then the training again with one kill: same steps, same losses."""
    args = site.args
    model = args.models / "qwen3"
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    folder = site.work / "dense"
    folder.mkdir(exist_ok=True)
    data = rows(folder / "rows.jsonl", args.samples, args.tokens, vocabulary)
    train = {"epochs": 2, "total_seq_len": 2 * args.tokens, **({} if args.gpus else {"optimizer": "adamw"})}
    steps = [
        {"name": "vocab_map", "uses": "vocab_map",
         "with": {"model": str(model), "dataset": str(data), "draft_vocab_size": vocabulary // 2, "min_coverage": 0.1}},
        {"name": "extract", "uses": "extract", "gpus": args.gpus,
         "with": {**engine(args, model), "dataset": str(data), "layers": [2, layers // 2, layers - 3, layers], "verify": 8}},
        {"name": "train", "uses": "train", "needs": ["extract", "vocab_map"], "gpus": args.gpus, "with": train},
    ]  # fmt: skip
    began = time.monotonic()
    job = site.launch(site.plan("dense", steps))
    assert job is not None
    watch = LoadWatch()
    ended = site.follow(job, watch)
    manifest = site.work / "dense" / "extract" / "manifest.json"
    kept = json.loads(manifest.read_text()) if manifest.exists() else {}
    tell("dense", state=ended["state"], steps=brief(ended), took_s=round(time.monotonic() - began), verified=kept.get("verified"),
         train=losses(site.work / "dense" / "train"), eta_errors_s=watch.errors_s(),
         tail=None if ended["state"] == "succeeded" else site.tail(job))  # fmt: skip
    if ended["state"] == "succeeded":
        again(site, train, model, data)


def again(site: Site, train: dict[str, Any], model: Path, data: Path) -> None:
    """Train alone on the same states, its main process killed after the first checkpoint."""
    out = site.work / "again" / "train"
    given = {"model": str(model), "dataset": str(data), "hidden_states": str(site.work / "dense" / "extract"),
             "vocab_map": str(site.work / "dense" / "vocab_map")}  # fmt: skip
    job = site.launch(
        site.plan(
            "again",
            [
                {
                    "name": "train",
                    "uses": "train",
                    "gpus": site.args.gpus,
                    "with": {**given, **train},
                    "retry": {"attempts": 3},
                }
            ],
        )
    )
    assert job is not None
    strike = Strike(
        lambda: losses(out)["steps"] and any(path.name.isdigit() for path in (out / "checkpoints").glob("*")),
        lambda: main_of(job),
    )
    ended = site.follow(job)
    killed = strike.end()
    tell("train-killed-once", state=ended["state"], steps=brief(ended), killed=killed, train=losses(out),
         tail=None if ended["state"] == "succeeded" else site.tail(job))  # fmt: skip


def losses(folder: Path) -> dict[str, Any]:
    """Number of different training steps and the last losses of a metrics.jsonl."""
    steps: dict[int, Any] = {}
    with contextlib.suppress(OSError):
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if "train" in row:
                    steps[int(row.get("global_step", row.get("step", len(steps))))] = row["train"].get("loss")
    return {
        "steps": len(steps),
        "first_losses": list(steps.values())[:3],
        "last_losses": list(steps.values())[-3:],
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--python", type=Path, default=Path(sys.executable))
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="gate,claims,mla,dense")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument(
        "--env",
        type=lambda text: tuple(text.split("=", 1)),
        action="append",
        default=[],
        help="NAME=VALUE for the host's jobs",
    )
    parser.add_argument(
        "--laptop-env", type=lambda text: tuple(text.split("=", 1)), action="append", default=[]
    )
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.models = args.models.resolve()
    with Sshd(args.out / "sshd") as sshd:
        site = Site(args, sshd)
        try:
            for name in args.parts.split(","):
                try:
                    {"gate": gate, "claims": claims, "mla": mla, "dense": dense}[name](site)
                except Exception:
                    tell(name, failed=traceback.format_exc()[-3000:])
        finally:
            for job in site.jobs:
                job.end_everything()


if __name__ == "__main__":
    main()
