"""Good plans: what they become, what --set does to them, and what their hash covers."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.core.errors import ConfigError
from orchestrator.core.inventory import Host
from orchestrator.core.plan import LoadedPlan, load_plan, parse_set
from orchestrator.core.schema import Secret

PROJECT = Path(__file__).parents[2]
WORDS = """\
    name: words
    steps:
      - name: extract
        uses: extract
        with: {model: m, dataset: d.jsonl, layers: [2, 30], gpu_memory_utilization: 0.9}
      - name: own
        run: python {files}/s.py
        needs: [extract]
        env: {A: 1.10, B: no, C: true, D: 0x10, E: 2024-01-01, F: ""}
"""
Load = Callable[..., LoadedPlan]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load_text(text: str, *sets: str) -> LoadedPlan:
        path = tmp_path / "plan.yaml"
        path.write_text(textwrap.dedent(text), "utf-8")
        return load_plan(path, sets)

    return load_text


def test_text_stays_as_written(load: Load) -> None:
    step = load(WORDS).plan.step("own")
    assert step.env == {"A": "1.10", "B": "no", "C": "true", "D": "0x10", "E": "2024-01-01", "F": ""}
    assert step.needs == ["extract"]


def test_run_true_is_a_command(load: Load) -> None:
    assert load("name: a\nsteps: [{name: x, run: true}]").plan.step("x").run == "true"


def test_empty_keys_are_as_if_not_written(load: Load) -> None:
    loaded = load(
        "name: a\nhost:\nsteps:\n  - name: x\n    run: y\n    needs:\n    env:\n    retry: {attempts: }\n"
    )
    assert loaded.plan_sha256 == load("name: a\nsteps: [{name: x, run: y, retry: {}}]").plan_sha256


def test_yaml_conveniences_work(load: Load) -> None:
    text = """\
        name: a
        env: &common {A: "1"}
        steps:
          - &base {name: x, run: y, timeout_s: 1h30m, env: {<<: *common, B: "2"}}
          - {<<: *base, name: z}
    """
    plan = load("﻿" + textwrap.dedent(text)).plan  # with a byte order mark
    assert plan.step("z").env == {"A": "1", "B": "2"}
    assert plan.step("z").timeout_s == 5400


def test_set_replaces_adds_and_clears(load: Load) -> None:
    loaded = load(
        WORDS,
        "extract.with.layers=[2,61]",
        "extract.retry.gpu_oom.gpu_memory_utilization.add=-0.1",
        "extract.with.gpu_memory_utilization=",
        "own.env.A=2.50",
        "own.env.NEW={from: env}",
        "workdir=/data/x",
        "gate.wait=5m",
        "own.needs.0=extract",
    )
    extract, own = loaded.plan.steps
    assert extract.params == {"model": "m", "dataset": "d.jsonl", "layers": [2, 61]}
    assert extract.retry == {"gpu_oom": {"gpu_memory_utilization": {"add": -0.1}}}
    assert own.env["A"] == "2.50"
    assert own.env["NEW"] == Secret("env")
    assert loaded.plan.workdir == "/data/x"
    assert loaded.plan.gate.wait == 300


def test_later_set_wins(load: Load) -> None:
    assert (
        load(WORDS, "extract.with.samples=1", "extract.with.samples=2").plan.step("extract").params["samples"]
        == 2
    )


def test_set_may_repair_a_plan(load: Load) -> None:
    with pytest.raises(ConfigError):
        load("name: a\nsteps: [{name: x, run: y, gpus: many}]")
    assert load("name: a\nsteps: [{name: x, run: y, gpus: many}]", "x.gpus=2").plan.step("x").gpus == 2


def test_set_value_with_equals_sign(load: Load) -> None:
    assert load(WORDS, "own.run=A=1 ./go --flag=x").plan.step("own").run == "A=1 ./go --flag=x"


def test_parse_set() -> None:
    assert parse_set("train.with.lr=1e-5") == ("train.with.lr", 1e-5)
    assert parse_set("a.b=no") == ("a.b", "no")


def test_hash_is_of_the_meaning(load: Load) -> None:
    first = load(WORDS)
    again = load("# a comment\n" + textwrap.dedent(WORDS).replace("[2, 30]", "[2,   30]"))
    assert again.plan_sha256 == first.plan_sha256
    changed = load(WORDS, "extract.with.samples=10")
    assert changed.plan_sha256 != first.plan_sha256
    assert load(WORDS, "extract.with.layers=[2,30]").plan_sha256 == first.plan_sha256


def test_errors_that_come_later_know_their_line(load: Load) -> None:
    loaded = load(WORDS, "extract.with.samples=3")
    error = loaded.error(("steps", 1, "run"), "not good")
    assert (error.file, error.line) == (str(loaded.path), 7)
    assert "--set extract.with.samples=3: too few" in str(
        loaded.error(("steps", 0, "with", "samples"), "too few")
    )


def test_other_braces_stay_and_slips_are_told(load: Load) -> None:
    loaded = load(
        """\
        name: a
        steps:
          - name: x
            run: |
              awk '{print $1}' {workdir}/a; echo ${files} {steps} {work_dir}; python -c 'f"{x.y}"'
        """
    )
    assert len(loaded.warnings) == 1
    assert "{work_dir} stays as it is; did you mean {workdir}?" in loaded.warnings[0]
    assert "plan.yaml:4" in loaded.warnings[0]


def test_unknown_flags_pass_and_extra_args_hold_the_rest(load: Load) -> None:
    text = (
        "name: a\nsteps: [{name: x, uses: serve, with: {model: m, brand_new_thing: 3, kv_cache_dtype: fp8}}]"
    )
    assert load(text).plan.step("x").params["brand_new_thing"] == 3


def test_local_files(load: Load, tmp_path: Path) -> None:
    (tmp_path / "run me.sh").write_text("#!/bin/sh\n")
    package = tmp_path / "lib" / "pkg"
    package.mkdir(parents=True)
    (package / "a.py").write_text("")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "a.pyc").write_text("")
    (package / "sub").mkdir()
    (package / "sub" / "é.txt").write_text("")
    loaded = load("name: a\nsteps: [{name: x, run: y, files: [run me.sh, lib/pkg, 'lib/p*/a.py']}]")
    assert sorted(file.name for file in loaded.files) == ["a.py", "pkg/a.py", "pkg/sub/é.txt", "run me.sh"]
    assert all(file.path.is_absolute() for file in loaded.files)


def test_two_files_of_one_name(load: Load, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "s.py").write_text(folder)
    text = "name: a\nsteps: [{name: x, run: y, files: [a/s.py]}, {name: z, run: y, files: [%s/s.py]}]"
    with pytest.raises(ConfigError, match=r"both land as 's\.py'"):
        load(text % "b")
    assert len(load(text % "a").files) == 1


def test_secrets_nearest_to_the_step_win(load: Load) -> None:
    loaded = load(
        """\
        name: a
        env: {P: {from: env}, Q: {from: env}, R: plain}
        steps:
          - {name: x, run: y, env: {Q: plain, S: {file: ~/.token}, H: {keyring: hub/me}}}
          - {name: z, run: y}
        """
    )
    host = Host(ssh="a", env={"H": {"env": "HOST_H"}, "R": {"from": "env"}})  # type: ignore[dict-item]
    assert loaded.secrets(host) == {
        "x": {"P": Secret("env"), "S": Secret("file", "~/.token"), "H": Secret("keyring", "hub/me")},
        "z": {"P": Secret("env"), "Q": Secret("env"), "H": Secret("env", "HOST_H")},
    }


@pytest.mark.parametrize("path", sorted((PROJECT / "plans").glob("*.yaml")), ids=lambda path: path.name)
def test_sample_plans_are_sound(path: Path) -> None:
    loaded = load_plan(path)
    assert loaded.plan.name
    assert not loaded.warnings
