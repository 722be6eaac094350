"""The whole tiny plan through a real sshd with real vLLM and speculators, every step killed once; and an MLA target.

The plan is plans/eagle3-tiny.yaml, the tour of the README, with two-turn prompts so that 32 conversations give 64 samples.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.conftest import ROOT
from tests.sshd.server import Sshd
from tests.support.jobdir import JobDir
from tests.support.laptop import Laptop
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(1500, func_only=True)]
PLAN = ROOT / "plans" / "eagle3-tiny.yaml"
TERMINAL = {"succeeded", "failed", "stopped", "lost"}
SETTLE_S = 1200.0


class Site:
    """A host behind sshd with the real environment, and a laptop that knows it."""

    def __init__(self, folder: Path, python: Path, sshd: Sshd) -> None:
        self.root, self.work = folder / "root", folder / "work"
        self.work.mkdir(parents=True)
        self.laptop = Laptop(
            folder / "laptop", {"box": sshd.inventory_entry(root=str(self.root), python=str(python), gpus=0)}
        )
        self.jobs: list[JobDir] = []

    def launch(self, plan: Path, *sets: str) -> JobDir:
        more = [word for each in sets for word in ("--set", each)]
        answer = self.laptop.run("launch", plan, "--host", "box", "--no-preflight", *more, expect=0)
        self.jobs.append(JobDir(self.root, answer.out.strip()))
        return self.jobs[-1]

    def steps(self, job: JobDir) -> dict[str, dict[str, Any]]:
        """Steps by name, as `orch status` shows them."""
        return {step["name"]: step for step in self.laptop.status(job.id)["steps"]}

    def log(self, job: JobDir, step: str) -> str:
        """All attempts' logs of a step."""
        [folder] = (job.path / "steps").glob(f"*-{step}")
        return "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("attempts/*/log")))

    def finished(self, job: JobDir) -> str:
        """Block until the job ended; its state."""
        wait_until(
            lambda: job.state in TERMINAL, f"{job.id} ends", within_s=SETTLE_S, every_s=0.5,
            seen=lambda: (job.kinds()[-8:], [self.log(job, name.split("-", 1)[1])[-1500:] for name in started(job)[-1:]]),
        )  # fmt: skip
        return job.state

    def end(self) -> None:
        for job in self.jobs:
            for pid in [*job.supervisors(), *job.marked()]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def started(job: JobDir) -> list[str]:
    folder = job.path / "steps"
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def main_of(job: JobDir, step: str) -> int:
    """Pid of the newest attempt of a step, 0 before it started or after it ended."""
    pid = 0
    for event in job.events():
        if event.get("step") == step and event["kind"] == "attempt_started":
            pid = int(event["data"]["process"]["pid"])
        elif event.get("step") == step and event["kind"] == "attempt_ended":
            pid = 0
    return pid


@pytest.fixture
def site(tmp_path: Path, host_python: Path, sshd: Sshd) -> Iterator[Site]:
    ready = Site(tmp_path / "site", host_python, sshd)
    yield ready
    ready.end()


def write_two_turn_prompts(path: Path, count: int) -> None:
    rows = []
    for index in range(count):
        turns = [{"role": "user", "content": f"stone {index}?"}, {"role": "user", "content": "and why?"}]
        rows.append(json.dumps({"id": f"p{index}", "messages": turns}))
    path.write_text("\n".join(rows) + "\n")


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_once(job: JobDir, step: str, ready: Callable[[], bool], what: str) -> None:
    """SIGKILL the main process of a step's first attempt, once it got somewhere."""
    wait_until(
        lambda: (main_of(job, step) and ready()) or job.state in TERMINAL, f"{step}: {what}", within_s=SETTLE_S, every_s=0.01,
        seen=lambda: job.kinds()[-6:],
    )  # fmt: skip
    pid = main_of(job, step)
    assert pid, f"{step} was not running any more: {job.kinds()[-6:]}"
    os.kill(pid, signal.SIGKILL)


def test_the_whole_plan_with_every_step_killed_once(site: Site, models: Path) -> None:
    work = site.work
    write_two_turn_prompts(work / "prompts.jsonl", 32)
    job = site.launch(
        PLAN,
        f"workdir={work}",
        f"serve.with.model={models / 'qwen3-tiny'}",
        "generate.with.concurrency=2",
        "generate.with.max_tokens=200",
        "generate.with.temperature=1",
        # Answers that end by themselves, so that the second turn is asked: a random model never says its end token.
        "generate.with.sampling_params={min_tokens: 12, stop: [a, e, s, t]}",
        "extract.with.max_num_seqs=2",
        "extract.with.verify=64",
    )
    kill_once(job, "serve", lambda: "Starting to load model" in site.log(job, "serve"), "the load has begun")
    kill_once(
        job, "generate", lambda: lines(work / "generate" / "responses.jsonl") >= 6, "six answers are there"
    )
    kill_once(job, "vocab_map", lambda: True, "it has started")
    kill_once(
        job,
        "extract",
        lambda: len(list((work / "extract").glob("hs_*.safetensors"))) >= 8,
        "eight samples are there",
    )
    kill_once(job, "train", lambda: lines(work / "train" / "metrics.jsonl") >= 4, "four steps are done")
    assert site.finished(job) == "succeeded", [
        (name, site.log(job, name)[-1500:]) for name in ("serve", "generate", "train")
    ]

    steps = site.steps(job)
    for name in ("serve", "generate", "vocab_map", "extract", "train"):
        attempts = steps[name]["attempts"]
        assert attempts[0]["exit_status"] == -9, (name, attempts[0])
        assert len(attempts) >= 2, name
        assert attempts[-1]["state"] == "succeeded", (name, attempts[-1])
    rows = [json.loads(line) for line in (work / "generate" / "responses.jsonl").read_text().splitlines()]
    assert sorted(row["id"] for row in rows) == sorted(f"p{i}#{turn}" for i in range(32) for turn in (0, 1))
    manifest = json.loads((work / "extract" / "manifest.json").read_text())
    assert manifest["complete"] is True
    assert (manifest["samples"], manifest["layer_ids"]) == ({"expected": 64, "valid": 64}, [2, 4, 5, 8])
    # Equal to an uninterrupted run: all 64 samples were computed again by the reference, in one go.
    assert manifest["verified"]["samples"] == 64
    assert manifest["verified"]["worst_relative_difference"] < 0.01, "float32"
    assert manifest["patch_set_sha256"]
    records = [json.loads(line) for line in (work / "train" / "metrics.jsonl").read_text().splitlines()]
    seen = [record["step"] for record in records if "train" in record]
    assert seen == list(range(len(seen))), "every training step once, in order"
    assert (work / "train" / "draft").resolve() == work / "train" / "checkpoints" / "1"
    evaluation = json.loads((work / "evaluate" / "evaluation.json").read_text())
    assert evaluation["supported"] is True
    assert evaluation["acceptance_length"] >= 1.0, "vLLM serves the draft"
    assert evaluation["same_answers"] == evaluation["prompts"] == 4
    attempt = json.loads(
        (next((job.path / "steps").glob("*-train")) / "attempts" / "1" / "attempt.json").read_text()
    )
    assert "speculators-cpu-training@" in attempt["patches"]
    wait_until(lambda: not job.marked() and not job.supervisors(), "nothing is left running", seen=job.marked)


def test_an_mla_target_through_serve_and_extract(site: Site, models: Path) -> None:
    """DeepSeek-like attention and experts: served, and its states verified."""
    rows = [
        {"input_ids": [(11 * k + n) % 1900 + 5 for k in range(20 + n)], "loss_mask": [1] * (20 + n)}
        for n in range(16)
    ]
    (site.work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (site.work / "prompts.jsonl").write_text(
        "".join(json.dumps({"id": f"p{i}", "prompt": f"stone {i}"}) + "\n" for i in range(4))
    )
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    serve = {
        "model": str(models / "dsv3-tiny"),
        "max_model_len": 256,
        "dtype": "float32",
        "enforce_eager": True,
    }
    extract = {"dataset": "rows.jsonl", "layers": [1, 2, 6], "dtype": "float32", "verify": 4}
    plan = site.laptop.plan(
        [
            {"name": "serve", "uses": "serve", "with": serve, "env": env},
            {
                "name": "generate",
                "uses": "generate",
                "needs": ["serve"],
                "with": {"dataset": "prompts.jsonl", "max_tokens": 8},
            },
            {"name": "extract", "uses": "extract", "needs": ["generate"], "with": extract, "env": env},
        ],
        workdir=str(site.work),
    )
    job = site.launch(plan)
    assert site.finished(job) == "succeeded", [
        (name, site.log(job, name)[-2500:]) for name in ("serve", "generate", "extract")
    ]
    manifest = json.loads((site.work / "extract" / "manifest.json").read_text())
    assert manifest["samples"] == {"expected": 16, "valid": 16}
    assert manifest["verified"]["samples"] == 4
    assert lines(site.work / "generate" / "responses.jsonl") == 4
