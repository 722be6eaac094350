"""What the host gets: every default filled in, nothing secret in it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.errors import ConfigError
from orchestrator.core.inventory import Host
from orchestrator.core.notify import Target
from orchestrator.core.plan import load_plan
from orchestrator.core.spec import build_spec
from remote_jobs.protocol import JobSpec, StepSpec

PIPELINE = """\
name: Kimi K2.5
workdir: /data/x
steps:
  - {name: serve, uses: serve, with: {model: /m, tensor_parallel_size: 8, trust_remote_code: true}}
  - {name: generate, uses: generate, needs: [serve], with: {dataset: p.jsonl}}
  - {name: map, uses: vocab_map, needs: [generate]}
  - {name: extract, uses: extract, needs: [generate], with: {extra_args: [--new-flag, a, b, --other=1, --on]}}
  - {name: train, uses: train, needs: [extract, map]}
  - {name: own, run: "true", grace_s: 2m, output: res, service: {ready: {port: 80}}}
"""


def build(tmp_path: Path, text: str = PIPELINE, host: Host | None = None, *sets: str) -> JobSpec:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    spec, files = build_spec(
        load_plan(path, sets),
        "box",
        host or Host(ssh="box", gpus=8),
        release="abc",
        job_id="kimi-20261129-000000",
        created_at="2026-11-29T00:00:00Z",
    )
    assert files == []
    json.dumps(dataclasses.asdict(spec), allow_nan=False)
    return spec


def steps(spec: JobSpec) -> dict[str, StepSpec]:
    return {step.name: step for step in spec.step_specs()}


def test_pipeline_defaults(tmp_path: Path) -> None:
    found = steps(build(tmp_path))
    assert {name: step.gpus for name, step in found.items()} == {
        "serve": 8, "generate": 0, "map": 0, "extract": 8, "train": 8, "own": 0,
    }  # fmt: skip
    assert found["extract"].params == {
        "model": "/m",
        "trust_remote_code": True,
        "tensor_parallel_size": 8,
        "dataset": "{steps.generate.output}/responses.jsonl",
        "new_flag": "a b",
        "other": "1",
        "on": True,
    }
    assert found["map"].params["dataset"] == "{steps.generate.output}/responses.jsonl"
    assert found["map"].params["model"] == found["train"].params["model"] == "/m"
    assert "model" not in found["generate"].params  # it asks the server
    assert {name: step.grace_s for name, step in found.items()} == {
        "serve": None, "generate": 15, "map": 15, "extract": None, "train": 130, "own": 120,
    }  # fmt: skip
    assert found["own"].service == {"ready": {"port": 80}, "timeout_s": 1800}
    assert found["own"].output == "res"
    assert found["serve"].patches == "auto"
    assert found["own"].patches is None


def test_cpu_host_needs_no_gpus(tmp_path: Path) -> None:
    assert {step.gpus for step in steps(build(tmp_path, host=Host(ssh="box", gpus=0))).values()} == {0}


def test_unknown_gpu_count_takes_what_the_parameters_imply(tmp_path: Path) -> None:
    found = steps(build(tmp_path, PIPELINE, Host(ssh="box")))
    assert (found["serve"].gpus, found["extract"].gpus, found["train"].gpus) == (8, 8, 1)


def test_stated_gpus_set_the_tensor_parallel_size(tmp_path: Path) -> None:
    found = steps(build(tmp_path, PIPELINE, None, "extract.gpus=4"))
    assert found["extract"].params["tensor_parallel_size"] == 4
    text = "name: a\nsteps: [{name: x, uses: extract, gpus: 8, with: {model: m, dataset: d, pipeline_parallel_size: 2}}]"
    assert steps(build(tmp_path, text))["x"].params["tensor_parallel_size"] == 4


@pytest.mark.parametrize(
    ("params", "gpus"),
    [
        ({}, 1),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2, "pipeline_parallel_size": 2}, 8),
        ({"backend": "transformers"}, 1),
        ({"backend": "transformers", "device": "cpu"}, 0),
    ],
)
def test_gpus_of_extract(params: dict[str, Any], gpus: int, tmp_path: Path) -> None:
    given = json.dumps({"model": "m", "dataset": "d", **params})
    text = f"name: a\nsteps: [{{name: x, uses: extract, with: {given}}}]"
    assert steps(build(tmp_path, text))["x"].gpus == gpus


def test_more_gpus_than_the_host_has(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"plan.yaml:4: step serve needs 8 GPUs, and the host box has 4"):
        build(tmp_path, PIPELINE, Host(ssh="box", gpus=4))
    with pytest.raises(ConfigError, match=r"--set own.gpus=9: step own needs 9 GPUs"):
        build(tmp_path, PIPELINE, None, "own.gpus=9")


def test_no_secret_is_in_the_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_sekrit")
    text = "name: a\nenv: {HF_TOKEN: {from: env}, A: '1'}\nsteps: [{name: x, run: y, env: {K: {keyring: s/u}, B: '2'}}]"
    spec = build(tmp_path, text, Host(ssh="b", gpus=0, env={"H": "3", "A": "0"}))
    assert spec.env == {"H": "3", "A": "1"}
    assert steps(spec)["x"].env == {"B": "2"}
    assert steps(spec)["x"].secrets == ["HF_TOKEN", "K"]
    assert "sekrit" not in json.dumps(dataclasses.asdict(spec))


def test_default_workdir_is_one_folder_per_plan(tmp_path: Path) -> None:
    text = "name: My Plan!\nsteps: [{name: x, run: y}]"
    assert build(tmp_path, text, Host(ssh="b", root="/data/o/")).workdir == "/data/o/work/my-plan"
    assert build(tmp_path, text).workdir == "~/.orchestrator/work/my-plan"


def test_job_wide_settings(tmp_path: Path) -> None:
    text = (
        "name: a\ngate: {wait: 5m, memory_mib: 20, reap: none}\nlog_limit: 1GiB\nrestart_after_reboot: true\n"
        "notify: mailto://me:pass@x\npython: /p\nsteps: [{name: x, run: y, retry: {attempts: 2}}]"
    )
    spec = build(
        tmp_path, text, Host(ssh="b", gpus=2, python="/other", allow_tmpfs=True, notify=[Target(apprise="slack://tokenA/tokenB")])
    )
    assert spec.gate == {"wait_s": 300, "memory_mib": 20, "reap": "none"}
    assert (spec.log_limit_bytes, spec.restart_after_reboot, spec.allow_tmpfs) == (1 << 30, True, True)
    assert [item["id"] + " " + item["label"] for item in spec.notify] == ["host-1 apprise slack", "plan-1 apprise mailto"]
    assert "token" not in str(spec)
    assert "pass" not in str(spec)
    assert (spec.python, spec.host_gpus) == ("/p", 2)
    assert spec.controller.startswith("orchestrator ")


def test_plain_retry_value_is_a_set(tmp_path: Path) -> None:
    text = "name: a\nsteps: [{name: x, uses: serve, with: {model: m}, retry: {gpu_oom: {max_num_seqs: 4, attempts: 2}}}]"
    assert steps(build(tmp_path, text))["x"].retry == {"gpu_oom": {"max_num_seqs": {"set": 4}, "attempts": 2}}
