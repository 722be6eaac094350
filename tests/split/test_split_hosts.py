"""One extraction over two hosts, fetched and merged on the laptop; and on one host, which joins it by itself."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.extract.conftest import Result, read_sample
from tests.support.hosts import Hosts
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    entry = {"gpus": 1, "python": sys.executable}
    with Hosts(tmp_path_factory.mktemp("over hosts"), {"a": entry, "b": entry}) as ready:
        yield ready


def plan_of(hosts: Hosts, name: str, **step: object) -> Path:
    path = hosts.laptop.folder / f"{name}.yaml"
    split = {"ranges": 3, "hosts": ["a", "b"]}
    path.write_text(json.dumps({"name": name, "workdir": "~/work", "steps": [{"name": "part", "split": split, **step}]}))
    return path


def test_ranges_of_two_hosts_are_fetched_and_merged(
    hosts: Hosts, models: dict[str, Path], dataset: Path, run_extract: Callable[..., Result], tmp_path: Path
) -> None:
    laptop = hosts.laptop
    given = {"model": str(models["llama"]), "dataset": str(dataset), "layers": [0, 2, 5, 6], "backend": "transformers", "device": "cpu"}
    plan = plan_of(hosts, "states", uses="extract", **{"with": given})
    before = {name: len(hosts.jobs(name)) for name in ("a", "b")}
    jobs = laptop.run("launch", plan, "--no-preflight", "--json", within_s=120, expect=0).json["jobs"]
    assert [job["host"] for job in jobs] == ["a", "b"]
    assert {name: len(hosts.jobs(name)) - count for name, count in before.items()} == {"a": 1, "b": 1}
    names = [[step["name"] for step in laptop.status(job["job"])["steps"]] for job in jobs]
    assert names == [["part-1of3"], ["part-2of3", "part-3of3"]]
    results = tmp_path / "results"
    laptop.run("wait", jobs[0]["job"], within_s=240, expect=0)
    laptop.run("fetch", jobs[0]["job"], results, expect=0)
    early = laptop.run("merge", results / "part", "--json", expect=1)
    assert early.json["error"]["code"] == "incomplete"
    assert "lacks 2 ranges of 3: 2/3, 3/3" in early.err
    laptop.run("wait", jobs[1]["job"], within_s=240, expect=0)
    laptop.run("fetch", jobs[1]["job"], results, expect=0)
    answer = laptop.run("merge", results / "part", "--json", expect=0).json

    one = run_extract(models["llama"], dataset)
    assert answer["samples"] == len(one.files()) == 14
    assert answer["prompts_sha256"] == one.manifest()["prompts_sha256"]
    merged = json.loads((results / "part" / "manifest.json").read_text())
    times = ("created_at", "updated_at")
    assert {**merged, **dict.fromkeys(times)} == {**one.manifest(), **dict.fromkeys(times)}
    for row, path in one.files().items():
        mine, theirs = read_sample(results / "part" / f"hs_{row}.safetensors"), read_sample(path)
        assert mine["hidden_states"].sub(theirs["hidden_states"]).abs().max() < 1e-4
        assert mine["token_ids"].equal(theirs["token_ids"])


def test_all_hosts_are_ready_before_the_first_one_starts_and_half_a_launch_is_finished(hosts: Hosts) -> None:
    laptop = hosts.laptop
    plan = plan_of(hosts, "half", gpus=1, run="echo $ORCH_SPLIT_INDEX >> half; until [ -e go ]; do sleep 0.05; done")
    before = {name: len(hosts.jobs(name)) for name in ("a", "b")}
    hosts.sshd["b"].stop()
    try:
        assert laptop.run("launch", plan, "--no-preflight").status == 3
    finally:
        hosts.sshd["b"].start()
    assert {name: len(hosts.jobs(name)) for name in ("a", "b")} == before, "nothing was started"

    hosts.smi["b"].hold(0, os.getpid(), 40_000)  # no job of orch: somebody else's
    half = laptop.run("launch", plan, "--no-preflight")
    hosts.smi["b"].save(processes=[])
    assert half.status == 4, half
    assert len(hosts.jobs("a")) == before["a"] + 1
    assert "type the same command again" in half.err
    assert "ranges 2 to 3" in half.err
    answer = laptop.run("launch", plan, "--no-preflight", "--json", expect=0)
    assert "b: the ranges of part run one after another" in answer.err, answer
    whole = answer.json["jobs"]
    assert [job["adopted"] for job in whole] == [True, False]
    assert {name: len(hosts.jobs(name)) for name in ("a", "b")} == {name: number + 1 for name, number in before.items()}
    works = [hosts.folder / name / "sshd" / "home" / "work" for name in ("a", "b")]
    for work in works:
        wait_until((work / "half").exists, "its ranges run")  # the launch has answered before the folder is made
        (work / "go").touch()
    for job in whole:
        laptop.run("wait", job["job"], expect=0)
    done = [(work / "half").read_text().split() for work in works]
    assert [sorted(ranges) for ranges in done] == [["1"], ["2", "3"]]


def test_what_cannot_be_split_over_hosts_is_said(hosts: Hosts) -> None:
    laptop = hosts.laptop
    plan = plan_of(hosts, "told", run="true")
    on_one = laptop.run("launch", plan, "--host", "a", expect=2)
    assert "--set part.split=3" in on_one.err
    stranger = laptop.run("launch", plan, "--set", "part.split.hosts=[a,c]", expect=2)
    assert "no host is called 'c'" in stranger.err
    assert f"{plan}:1:" in stranger.err or "--set part.split.hosts" in stranger.err, stranger
    record = json.loads(plan.read_text())
    record["steps"].append({"name": "train", "run": "true", "needs": ["part"]})
    plan.write_text(json.dumps(record))
    assert "a plan of its own" in laptop.run("launch", plan, expect=2).err


def test_on_one_host_the_step_joins_its_ranges_by_itself(
    hosts: Hosts, models: dict[str, Path], dataset: Path, run_extract: Callable[..., Result], tmp_path: Path
) -> None:
    laptop, work = hosts.laptop, hosts.work("a")
    given = {"model": str(models["qwen3"]), "dataset": str(dataset), "layers": [0, 2, 5, 6], "backend": "transformers"}
    steps = [
        {"name": "extract", "uses": "extract", "gpus": 0, "with": {**given, "device": "cpu"}},
        {"name": "after", "run": "cat {steps.extract.output}/manifest.json > seen", "needs": ["extract"]},
    ]
    plan = laptop.plan(steps, name="joined", host="a", workdir=str(work))
    job = laptop.launch(plan, "--set", "extract.split=2")
    laptop.run("wait", job, within_s=240, expect=0)
    names = [step["name"] for step in laptop.status(job)["steps"]]
    assert names == ["extract-1of2", "extract-2of2", "extract", "after"]
    manifest = json.loads((work / "seen").read_text())
    assert manifest["complete"] is True
    assert manifest["samples"] == {"expected": 14, "valid": 14}
    assert not list((work / "extract").glob("range-*"))
    fetched = laptop.run("fetch", job, tmp_path / "here", "--json", expect=0).json
    assert len([item for item in fetched["fetched"] if "hs_" in item["path"]]) == 14, "each file once"
