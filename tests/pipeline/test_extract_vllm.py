"""Hidden states out of real vLLM (CPU build) equal transformers' at every chosen layer, in every awkward shape of a batch.

The stated tolerance in bf16: relative norm of the difference 0.03 for dense models; for MoE the median over tokens, up to
the first routed layers, since routing flips near-ties.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from remote_jobs.agent import procs
from remote_jobs.logs import explain_bytes
from tests.pipeline.conftest import ROOT, Host, none_alive, tree
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900, func_only=True)]
TOLERANCE = 0.03
PARITY = Path(__file__).with_name("parity.py")


def rows(path: Path, longest: int) -> Path:
    """Three prompts that share their first 200 tokens, one at the limit, and short ones."""
    shared = [(7 * k) % 1900 + 5 for k in range(200)]
    lengths = [17, 40, 64, 65, 3]
    prompts = [[*shared, 11, 12, 13 + k] for k in range(3)]
    prompts += [[(13 * k + n) % 1900 + 5 for k in range(n)] for n in [*lengths, longest]]
    path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in prompts))
    return path


def compared(host: Host, model: Path, layers: str, longest: int) -> dict[str, Any]:
    dataset = rows(host.folder / "rows.jsonl", longest)
    argv = [host.python, PARITY, model, layers, dataset, host.folder / "scratch"]
    done = subprocess.run(argv, env=host.env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_dense(host: Host, models: Path) -> None:
    found = compared(host, models / "qwen3-tiny", "0,2,4,5,8", longest=260)
    for layer, seen in found["layers"].items():
        assert seen["relative"] < TOLERANCE, (layer, seen)
        assert seen["worst_token"] < 3 * TOLERANCE, (layer, seen)
        assert seen["alone"] < TOLERANCE, (layer, seen)
        assert seen["another_layer_fits_better"] == 0, (layer, seen)
    assert found["facts"]["patch_set_sha256"]


def test_mla_and_moe(host: Host, models: Path) -> None:
    found = compared(host, models / "dsv3-tiny", "1,2,3,6", longest=230)
    assert found["first_moe_layer"] == 1
    assert found["layers"]["1"]["relative"] < TOLERANCE, "behind the dense layer nothing may differ"
    for layer in ("1", "2"):
        assert found["layers"][layer]["median"] < TOLERANCE, found["layers"]
    for layer, seen in found["layers"].items():
        assert seen["another_layer_fits_better"] == 0, (layer, seen)


def test_what_this_vllm_cannot_do_is_refused_before_the_load(host: Host, models: Path) -> None:
    dataset = rows(host.folder / "rows.jsonl", 50)
    common = ["--model", models / "qwen3-tiny", "--dataset", dataset, "--backend"]
    ran = host.run("extract", *common, "vllm-legacy", expect=2)
    assert (
        "needs vLLM 0.11 - 0.16 with speculators 0.3.0 or 0.4.0 (found vllm 0.32.0+cpu, speculators 0.9.0)"
        in ran.last
    )
    ran = host.run("extract", *common, "vllm", "--pipeline-parallel-size", 2, expect=2)
    assert "tensor parallelism only" in ran.last
    mla = ["--model", models / "dsv3-tiny", "--dataset", dataset, "--layers", "0,2", "--backend", "vllm"]
    assert "layer id 0" in host.run("extract", *mla, expect=2).last
    ran = host.run("extract", *common, "vllm", expect=2, ORCH_PATCHES="none")
    assert "patch set vllm-cpu-hidden-states" in ran.last
    assert "load_weights" not in ran.log


def test_the_engine_dies_half_way_and_nothing_good_is_lost(host: Host, models: Path) -> None:
    """SIGKILL of vLLM's worker while samples come out: said, nothing left running; then only the missing ones are made."""
    dataset = host.folder / "rows.jsonl"
    prompts = [[(13 * k + n) % 1900 + 5 for k in range(60 + n % 50)] for n in range(40)]
    dataset.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in prompts))
    out = host.folder / "states"
    args = ["--model", models / "qwen3-tiny", "--dataset", dataset, "--layers", "2,5,8", "--output", out]
    args += ["--dtype", "float32", "--max-num-seqs", 2]
    process, log = host.start("extract", *args)
    wait_until(
        lambda: len(list(out.glob("hs_*.safetensors"))) >= 10, "ten samples", within_s=400, every_s=0.02
    )
    below = tree(process.pid)
    [worker] = [found.pid for found in below if procs.command_line(found.pid, 64).startswith("VLLM::Worker")]
    os.kill(worker, signal.SIGKILL)
    assert process.wait(120) == 1, log.read_text()[-2000:]
    failure = explain_bytes(log.read_bytes(), 1)["failure"] or {}
    assert (failure["class"], failure["retry"]) == ("killed", "yes"), failure
    assert none_alive(below)
    made = {path.name: path.stat().st_mtime_ns for path in out.glob("hs_*.safetensors")}
    assert 10 <= len(made) < 40, log.read_text()[-1000:]
    ran = host.run("extract", *args, "--verify", 12)
    assert "Done: 40 of 40 samples are valid" in ran.log
    assert all((out / name).stat().st_mtime_ns == when for name, when in made.items())
    assert json.loads((out / "manifest.json").read_text())["verified"]["samples"] == 12
    assert not [name for name in os.listdir(out) if name.endswith(".lock") and name != ".extract.lock"]
