"""The pure parts of preflight: real configs' numbers, sizes, limits, and that one bad check disturbs no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.ui.preflight import preflight_lines
from remote_jobs.agent import checks, preflight
from remote_jobs.agent.checks import checkpoint, data, disk, host, memory, model, safetensors, timers
from remote_jobs.agent.checks.context import GIB, Job, Step, row
from remote_jobs.agent.jobdir import Layout
from remote_jobs.steps import preflight_env
from remote_jobs.steps.extraction.disk import default_reserve
from tests.preflight.world import CONFIG, World, write_checkpoint, write_shard

ROOT = Path(__file__).parents[2]
KIMI: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
    "text_config": {
        "model_type": "kimi_k2", "num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 163840,
        "num_attention_heads": 64, "num_key_value_heads": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "intermediate_size": 18432, "max_position_embeddings": 262144, "dtype": "bfloat16",
        "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096},
        "quantization_config": {"quant_method": "compressed-tensors"},
    },
}  # fmt: skip


def step_of(world_folder: Path, **step: Any) -> Step:
    """One step of a plan that only knows this step."""
    spec = {"workdir": str(world_folder), "steps": [{"name": "s", "uses": "extract", **step}]}
    return Job(spec, {"root": str(world_folder / "root")}).steps[0]


# ---------------------------------------------------------------------------------------------------------- configs


def test_nested_mla_config_of_kimi() -> None:
    config = model.parse_config(KIMI)
    assert (config.layers, config.hidden, config.vocab, config.heads) == (61, 7168, 163840, 64)
    assert config.kv_bytes_per_token(8, 2.0) == 61 * (512 + 64) * 2
    assert config.kv_bytes_per_token(1, 1.0) == 61 * 576
    assert config.max_positions == 262144
    assert config.quantization == "compressed-tensors"
    assert config.custom_code == ["configuration_kimi_k25.py"]


def test_grouped_query_attention_is_split_over_tensor_parallel() -> None:
    config = model.parse_config(
        {**CONFIG, "num_hidden_layers": 36, "num_key_value_heads": 8, "head_dim": 128}
    )
    assert config.kv_bytes_per_token(1, 2.0) == 2 * 36 * 8 * 128 * 2
    assert config.kv_bytes_per_token(8, 2.0) == 2 * 36 * 1 * 128 * 2
    assert config.kv_bytes_per_token(16, 2.0) == 2 * 36 * 1 * 128 * 2


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, 4096),
        ({"rope_type": "linear", "factor": 2.0}, 8192),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 4096),
    ],
)
def test_longest_sequence_as_vllm_derives_it(scaling: dict[str, Any] | None, expected: int) -> None:
    assert model.parse_config({**CONFIG, "rope_scaling": scaling}).max_positions == expected


def test_quantized_weights_count_as_stored(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.safetensors", {"packed": [1024, 128]}, "I32")
    write_shard(tmp_path / "b.safetensors", {"scale": [1024, 16]}, "BF16")
    weights = model.read_weights(str(tmp_path))
    assert weights.bytes_as(2.0) == 1024 * 128 * 4 + 1024 * 16 * 2
    assert weights.bytes_as(4.0) == 1024 * 128 * 4 + 1024 * 16 * 4


# ------------------------------------------------------------------------------------------------------- checkpoint


def test_64_shards_take_less_than_two_seconds(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "big", shards=64, layers=64, per_layer=300)
    began = time.monotonic()
    verdict = checkpoint.check(step_of(tmp_path, params={"model": str(tmp_path / "big")}), model.Shelf())
    assert time.monotonic() - began < 2.0
    assert verdict is not None
    assert "64 files" in verdict["found"]


def test_a_single_file_without_index_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "single"
    write_checkpoint(folder)
    for shard in folder.glob("model-*"):
        shard.unlink()
    (folder / "model.safetensors.index.json").unlink()
    write_shard(folder / "model.safetensors", {f"model.layers.{n}.w": [4, 4] for n in range(4)})
    verdict = checkpoint.check(step_of(tmp_path, params={"model": str(folder)}), model.Shelf())
    assert verdict is not None
    assert verdict["verdict"] == "ok"
    os.truncate(folder / "model.safetensors", 100)
    broken = checkpoint.check(step_of(tmp_path, params={"model": str(folder)}), model.Shelf())
    assert broken is not None
    assert "truncated" in broken["found"]


def test_a_header_beyond_the_cap_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes((safetensors.MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"x" * 64)
    assert "header would be 100000001 bytes" in str(safetensors.read_shard(str(path)).fault)


def test_a_hub_name_is_found_in_the_cache(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--Qwen--Tiny"
    write_checkpoint(repository / "snapshots" / "abc123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    verdict = checkpoint.check(
        step_of(tmp_path, params={"model": "Qwen/Tiny"}, env={"HF_HUB_CACHE": str(tmp_path / "hub")}),
        model.Shelf(),
    )
    assert verdict is not None
    assert verdict["verdict"] == "ok"


def test_gaps_in_a_header_are_damage(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "BF16", "shape": [2], "data_offsets": [4, 8]}}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    assert "gap or overlap" in str(safetensors.read_shard(str(path)).fault)


# ----------------------------------------------------------------------------------------------------------- memory


def test_a_model_that_needs_more_tensor_parallel_says_how_much(tmp_path: Path) -> None:
    step = step_of(tmp_path, gpus=1, params={"model": "m", "tensor_parallel_size": 1})
    need = memory.Need(
        weights=200 * GIB, kv_per_token=70_000, states_per_token=57_000, activations=GIB, max_model_len=4096
    )
    rows = memory.gpu_rows(step, need, [memory.GpuMemory(0, 140 * GIB, 0)])
    assert rows[0]["verdict"] == "fail"
    assert rows[0]["fix"] == "set tensor_parallel_size: 2"


def test_docker_default_shm_fails_only_for_several_workers() -> None:
    need = memory.Need(GIB, 1000.0, 0.0, 0.0, 1024)
    small = memory.HostMemory(available=100 * GIB, shm_total=64 * 1024**2, shm_free=64 * 1024**2)
    assert memory.host_rows(need, small, 1, on_gpu=True) == []
    rows = memory.host_rows(need, small, 8, on_gpu=True)
    assert rows[0]["verdict"] == "fail"
    assert "--shm-size" in rows[0]["fix"]


def test_a_display_on_the_gpu_lowers_what_can_be_asked_for(tmp_path: Path) -> None:
    step = step_of(tmp_path, gpus=1, params={"gpu_memory_utilization": 0.95})
    need = memory.Need(GIB, 1000.0, 0.0, 0.0, 1024)
    rows = memory.gpu_rows(step, need, [memory.GpuMemory(0, 24 * GIB, 3 * GIB)])
    assert rows[0]["verdict"] == "fail"
    assert "set gpu_memory_utilization to 0.86" in rows[0]["fix"]


# ------------------------------------------------------------------------------------------------------------- disk


def test_ten_thousand_kimi_samples_need_more_than_a_terabyte(tmp_path: Path) -> None:
    """10k samples of 2k tokens, 4 layers of 7168: 1.2 TB (measured layout: tokens x layers x hidden x 2 bytes)."""
    (tmp_path / "kimi").mkdir()
    (tmp_path / "kimi" / "config.json").write_text(json.dumps(KIMI))
    line = json.dumps({"input_ids": [1] * 2048}) + "\n"
    (tmp_path / "d.jsonl").write_text(line * 100)
    step = step_of(
        tmp_path, params={"model": str(tmp_path / "kimi"), "dataset": "d.jsonl", "layers": [2, 30, 58, 61]}
    )
    writes = disk.reckon(step, model.Shelf(), data.Scans())
    assert writes is not None
    assert writes.bytes == pytest.approx(100 * 2048 * 4 * 7168 * 2 * 1.1)
    target = disk.Target("out", "/data", "ext4", memory=False, free_bytes=10 * GIB, free_inodes=10**6)
    rows = disk.judge(target, writes, 0, allow_tmpfs=False)
    assert "lower samples" in rows[0]["fix"]
    assert disk.judge(target, writes, writes.bytes - GIB, allow_tmpfs=False) == []


def test_what_is_to_stay_free_counts_as_needed(tmp_path: Path) -> None:
    """The step pauses before it touches its reserve: a launch that would pause at once is refused beforehand."""
    (tmp_path / "kimi").mkdir()
    (tmp_path / "kimi" / "config.json").write_text(json.dumps(KIMI))
    (tmp_path / "d.jsonl").write_text(json.dumps({"input_ids": [1] * 20}) + "\n")
    params = {"model": str(tmp_path / "kimi"), "dataset": "d.jsonl", "layers": [2]}

    def found(**more: Any) -> Any:
        return disk.check(step_of(tmp_path, params={**params, **more}), model.Shelf(), data.Scans())

    kept = disk.gib(default_reserve(str(tmp_path)))
    assert f"and {kept} to stay free (min_free_gib)" in found()["found"], "what the step keeps when nothing is said"
    assert "to stay free" not in found(min_free_gib=0)["found"]
    little = found(min_free_gib=0.001)
    assert little["verdict"] == "ok"
    assert "and 1 MiB to stay free (min_free_gib)" in little["found"]
    much = found(min_free_gib=100_000)
    assert much["verdict"] == "fail"
    assert "and 100000 GiB to stay free (min_free_gib)" in much["found"]
    assert "or min_free_gib" in much["fix"]
    assert found(min_free_gib=100_000, model="of/an-unknown-size")["verdict"] == "fail", "no guess is needed for that"
    writes = disk.Writes(GIB, 10, "x", reserve=50 * GIB)
    full = disk.Target("o", "/d", "ext4", memory=False, free_bytes=GIB, free_inodes=None)
    assert disk.judge(full, disk.Writes(GIB, 10, "x", reserve=2 * GIB), GIB, allow_tmpfs=True) == [], "all of it is there already"
    assert disk.judge(full, disk.Writes(0.0, 0, "x", sure=False, reserve=2 * GIB), 0, allow_tmpfs=True)[0]["verdict"] == "fail"
    quota = disk.Target("o", "/d", "ext4", memory=False, free_bytes=100 * GIB, free_inodes=None, quota_left=2 * GIB)
    assert disk.judge(quota, writes, 0, allow_tmpfs=True) == [], "the reserve is of the disk, not of the quota"


def test_inodes_and_quota_count() -> None:
    writes = disk.Writes(GIB, 10_000, "x")
    few = disk.Target("o", "/d", "ext4", memory=False, free_bytes=100 * GIB, free_inodes=500)
    assert "500 inodes are free" in disk.judge(few, writes, 0, allow_tmpfs=False)[0]["found"]
    full = disk.Target(
        "o", "/d", "ext4", memory=False, free_bytes=100 * GIB, free_inodes=None, quota_left=1024
    )
    assert "left of your quota" in disk.judge(full, writes, 0, allow_tmpfs=False)[0]["found"]


def test_quota_output_is_read() -> None:
    text = (
        "Disk quotas for user ann (uid 1000):\n"
        "     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace\n"
        "      /dev/sdb1  900000* 800000 1000000       0      10       0       0       0\n"
    )
    assert disk.parse_quota(text, "/dev/sdb1") == 100_000 * 1024
    assert disk.parse_quota(text, "/dev/sdc1") is None


# ----------------------------------------------------------------------------------------------------------- timers


def test_a_26_minute_load_gets_longer_limits_and_says_so(tmp_path: Path) -> None:
    predicted, how = timers.predict(600 * 10**9, 400e6, None)
    assert 1500 < predicted < 1700
    verdict = timers.judge(step_of(tmp_path, uses="serve"), predicted, how, shard_s=24.0)
    assert verdict["verdict"] == "ok"
    assert int(verdict["exports"]["VLLM_ENGINE_READY_TIMEOUT_S"]) >= 3 * 1500
    assert "longer than the default limit" in verdict["found"]


def test_an_earlier_load_counts_more_than_a_warm_page_cache() -> None:
    assert timers.predict(10**9, 5e9, 1200.0)[0] > 1200


def test_the_plans_own_variable_is_not_overridden(tmp_path: Path) -> None:
    step = step_of(tmp_path, uses="serve", env={"VLLM_ENGINE_READY_TIMEOUT_S": "9999"})
    assert "VLLM_ENGINE_READY_TIMEOUT_S" not in timers.exports_for(100.0, step)


# ------------------------------------------------------------------------------------------------------------- host


def test_limits_locale_and_ports_are_judged_from_values() -> None:
    assert host.judge_limits((256, 256), (-1, -1), loads=True, many_gpus=False)["verdict"] == "fail"
    assert host.judge_limits((1024, 1048576), (-1, -1), loads=True, many_gpus=True)["verdict"] == "ok"
    assert host.judge_limits((65535, 65535), (65536, 65536), loads=True, many_gpus=True)["verdict"] == "warn"
    assert host.judge_locale({"LANG": "en_US.UTF-8"}, lambda name: False)["verdict"] == "warn"
    assert host.judge_locale({}, lambda name: True)["verdict"] == "ok"
    assert "privileged" in host.judge_port(80, "port", "denied", "")["found"]


def test_the_way_explains_part_of_a_clock_difference() -> None:
    ahead = host.judge_clock(1000.0, 1003.0, latency_s=2.0)
    assert ahead is not None
    assert ahead["verdict"] == "ok"
    assert host.judge_clock(None, 1.0) is None


# --------------------------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("versions", "backend", "expected"),
    [
        ({"vllm": "0.11.0", "speculators": "0.3.0"}, "auto", ""),
        ({"vllm": "0.16.0", "speculators": "0.4.0"}, "auto", ""),
        ({"vllm": "0.16.0rc2.dev12+gabc", "speculators": "0.4.0"}, "vllm-legacy", ""),
        ({"vllm": "0.16.0", "speculators": "0.3.0"}, "auto", "no patch set suits it"),
        ({"vllm": "0.26.0"}, "auto", ""),
        ({"vllm": "0.16.0"}, "auto", "needs speculators"),
    ],
)
def test_pairs(versions: dict[str, str], backend: str, expected: str) -> None:
    found = preflight_env.pair_problems("extract", backend, versions, [], "auto")
    assert (expected in found[0][0]) if expected else found == []


def test_a_suiting_patch_set_makes_the_pair_good_only_when_it_is_applied() -> None:
    versions, sets = (
        {"vllm": "0.16.0", "speculators": "0.3.0"},
        [{"name": "speculators-0.3.0", "state": "suits", "why": ""}],
    )
    assert preflight_env.pair_problems("extract", "auto", versions, sets, "auto") == []
    assert "patches: auto" in preflight_env.pair_problems("extract", "auto", versions, sets, "none")[0][1]


# ------------------------------------------------------------------------------------------- each check fails alone


def test_a_check_that_hangs_or_breaks_disturbs_no_other() -> None:
    released = threading.Event()

    def breaks() -> None:
        raise RuntimeError("boom")

    rows = checks.run_tasks(
        [
            (None, "hangs", lambda: row("ok", "late") if released.wait(30) else None, 0.3),
            (None, "breaks", breaks, 5.0),
            ("s", "fine", lambda: row("ok", "well"), 5.0),
        ]
    )
    released.set()
    assert [(r["name"], r["verdict"]) for r in rows] == [
        ("hangs", "fail"),
        ("breaks", "warn"),
        ("fine", "ok"),
    ]
    assert "no answer within" in rows[0]["found"]
    assert "boom" in rows[1]["found"]


def test_a_plan_of_commands_on_a_cpu_host_needs_nothing(tmp_path: Path) -> None:
    spec = {"workdir": str(tmp_path), "host_gpus": 0, "steps": [{"name": "a", "run": "true"}]}
    rows = checks.run(spec, {"root": str(tmp_path / "root")})
    assert not [r for r in rows if r["verdict"] == "fail"]
    assert "gpus" not in {r["name"] for r in rows}


def test_an_unreadable_plan_is_a_row() -> None:
    assert checks.run({"steps": 7}, {})[0]["verdict"] == "fail"


def test_the_process_ends_although_a_check_hangs(tmp_path: Path) -> None:
    """A dataset that is a FIFO nobody writes to: reading it would block for ever."""
    os.mkfifo(tmp_path / "stuck.jsonl")
    code = (
        "from remote_jobs.agent import checks; checks.CHECK_TIMEOUT_S = 1.0\n"
        "from remote_jobs.agent.checks.__main__ import main; main()"
    )
    spec = {
        "workdir": str(tmp_path),
        "steps": [{"name": "g", "uses": "generate", "params": {"dataset": "stuck.jsonl"}}],
    }
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        input=json.dumps({"spec": spec, "facts": {"root": str(tmp_path / "root"), "only": ["data", "locale"]}}),
        capture_output=True, text=True, timeout=20, check=True, cwd=ROOT,
    )  # fmt: skip
    rows = {r["name"]: r for r in json.loads(done.stdout)["checks"]}
    assert rows["data"]["verdict"] == "fail"
    assert rows["locale"]["verdict"] == "ok"


def test_python_3_8_runs_the_checks(tmp_path: Path) -> None:
    old = Path.home() / ".pyenv" / "versions" / "3.8.18" / "bin" / "python3.8"
    python = str(old) if old.exists() else sys.executable
    world = World(tmp_path / "world")
    done = subprocess.run(
        [python, "-S", "-E", "-m", "remote_jobs.agent.checks"],
        input=json.dumps(world.request()), capture_output=True, text=True, timeout=30, check=True, cwd=ROOT,
        env={**os.environ, **world.environment()},
    )  # fmt: skip
    assert json.loads(done.stdout)["ok"] is True


def test_the_agent_runs_the_checks_in_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path / "world")
    for name, value in world.environment().items():
        monkeypatch.setenv(name, value)
    answer = preflight.run(Layout(str(world.root)), {"spec": world.spec, "wall": time.time()})
    assert answer["passed"] is True
    assert {r["name"] for r in answer["checks"]} >= {"checkpoint", "versions", "gpus", "clock"}
    os.truncate(next(world.model.glob("model-00001*")), 30)
    assert preflight.run(Layout(str(world.root)), {"spec": world.spec})["passed"] is False


def test_an_agent_child_that_dies_is_a_row(tmp_path: Path) -> None:
    answer = preflight.run(Layout(str(tmp_path)), {})
    assert answer["passed"] is False
    assert "the checks died" in answer["checks"][0]["found"] or answer["checks"][0]["verdict"] == "fail"


# ------------------------------------------------------------------------------------------------------------ shown


def test_findings_are_shown_with_their_fix() -> None:
    rows = [
        {"step": None, "name": "gpus", "verdict": "ok", "took_s": 0.2, "found": "8 GPUs clean", "fix": ""},
        {
            "step": "extract",
            "name": "data",
            "verdict": "fail",
            "took_s": 0.1,
            "found": "layer id 5",
            "fix": "layers: [1]",
        },
        {
            "step": "extract",
            "name": "disk",
            "verdict": "warn",
            "took_s": 0.1,
            "found": "tight",
            "fix": "free some",
        },
    ]
    lines = [line.plain for line in preflight_lines(rows)]
    assert lines[0] == "ok    gpus          8 GPUs clean"
    assert lines[1].startswith("fail  extract data  layer id 5")
    assert lines[2].strip() == "-> layers: [1]"
    assert lines[-1] == "1 of 3 checks fail, 1 warning: nothing is started"
    assert preflight_lines(rows[:1])[-1].plain == "ready: 1 check, none fails"
