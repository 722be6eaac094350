"""serve with real vLLM: ready after a token, and no engine or worker left behind, whoever dies and whenever."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.pipeline.conftest import Host, none_alive, tree
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600, func_only=True)]
FLAGS = ["--max-model-len", 256, "--enforce-eager", "--dtype", "float32"]


def test_tensor_parallel_server_whose_api_process_is_killed(host: Host, models: Path) -> None:
    """Two workers; SIGKILL of the API process orphans engine and workers; serve ends them and fails."""
    args = [
        "--model",
        models / "qwen3-tiny",
        "--tensor-parallel-size",
        2,
        *FLAGS,
        "--output",
        host.folder / "serve",
    ]
    process, log = host.start("serve", *args, VLLM_CPU_OMP_THREADS_BIND="0|1")
    endpoint = host.folder / "serve" / "endpoint.json"
    wait_until(
        lambda: '"phase": "serve", "state": "ready"' in log.read_text() or process.poll() is not None,
        "the server is ready", within_s=400, seen=lambda: log.read_text()[-2000:],
    )  # fmt: skip
    facts = json.loads(endpoint.read_text())  # there before the marker that others wait for
    assert facts["model"] == str(models / "qwen3-tiny")
    below = tree(process.pid)
    assert len(below) >= 4, "API, engine, two workers"
    os.kill(facts["pid"], signal.SIGKILL)
    assert process.wait(60) == 1
    assert "vllm serve ended by itself with exit status -9" in log.read_text().splitlines()[-1]
    assert not endpoint.exists()
    assert none_alive(below)


def test_stopped_during_the_load(host: Host, models: Path) -> None:
    """vLLM loses a SIGTERM during the load and goes on to READY; serve does not."""
    args = ["--model", models / "qwen3-tiny", *FLAGS, "--output", host.folder / "serve"]
    process, log = host.start("serve", *args)
    wait_until(
        lambda: "Starting to load model" in log.read_text() or process.poll() is not None, "the load begins",
        within_s=300, every_s=0.02, seen=lambda: log.read_text()[-2000:],
    )  # fmt: skip
    below = tree(process.pid)
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert time.monotonic() - started < 15, "the supervisor's ladder would have killed it"
    assert none_alive(below)
    assert not (host.folder / "serve" / "endpoint.json").exists()


def test_faults_that_end_a_start(host: Host, models: Path) -> None:
    """A truncated shard is found in a second, and a flag that vLLM does not know ends the step with its reason."""
    import shutil

    broken = host.folder / "broken"
    shutil.copytree(models / "qwen3-tiny", broken)
    shard = broken / "model-00007-of-00018.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    ran = host.run("serve", "--model", broken, *FLAGS, expect=1, within_s=60)
    assert ran.last.startswith(f"CheckpointError: {shard}: incomplete metadata, file not fully covered")
    assert "non-default args" not in ran.log, "vLLM was not even started"
    ran = host.run("serve", "--model", models / "qwen3-tiny", "--no-such-flag", "1", expect=1)
    assert "vllm serve ended with exit status 2 before it was ready" in ran.last
    assert "unrecognized arguments: --no-such-flag" in ran.log
