"""A split step of a job over SSH: ranges side by side on GPUs of their own, one retried alone, joined at the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hosts import Hosts
from tests.support.waiting import wait_until

RANGE = (
    "[ \"$KEY\" = 'secret words' ] || exit 9; echo $CUDA_VISIBLE_DEVICES >> gpus-$ORCH_SPLIT_INDEX; echo $ORCH_OUTPUT >> outputs; touch up-$ORCH_SPLIT_INDEX; "
    "until [ -e go ]; do sleep 0.05; done; "
    "[ $ORCH_SPLIT_INDEX = 2 ] && [ ! -e fixed ] && exit 3; mkdir -p out; echo $ORCH_SPLIT_COUNT > out/$ORCH_SPLIT_INDEX"
)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(tmp_path_factory.mktemp("split"), {"box": {"gpus": 4}}) as ready:
        yield ready


def test_ranges_run_side_by_side_and_a_failed_one_is_retried_alone(hosts: Hosts) -> None:
    laptop, work = hosts.laptop, hosts.work("box")
    plan = laptop.plan(
        [
            {"name": "part", "run": RANGE, "split": 4, "gpus": 1, "output": "out", "retry": {"attempts": 1},
             "done": {"count": "out/*", "equals": 4}, "env": {"KEY": {"from": "env"}}},
            {"name": "after", "run": "cat {steps.part.output}/* > all", "needs": ["part"]},
        ],
        workdir=str(work),
    )  # fmt: skip
    laptop.environment["KEY"] = "secret words"
    job = laptop.launch(plan)
    wait_until(
        lambda: len(list(work.glob("up-*"))) == 4 and "4 ranges: 4 running" in laptop.run("status", job, expect=0).out,
        "all four run at once, and are said to", seen=lambda: laptop.status(job),
    )  # fmt: skip
    steps = {step["name"]: step for step in laptop.status(job)["steps"]}
    assert list(steps) == ["part-1of4", "part-2of4", "part-3of4", "part-4of4", "part", "after"]
    assert steps["part-2of4"]["part"] == {"of": "part", "index": 2, "count": 4}
    gpus = sorted((work / f"gpus-{index}").read_text().strip() for index in (1, 2, 3, 4))
    assert gpus == ["0", "1", "2", "3"], "each range has a GPU of its own"

    (work / "go").touch()
    laptop.run("wait", job, expect=1)
    states = {step["name"]: step["state"] for step in laptop.status(job)["steps"]}
    assert states == {
        "part-1of4": "succeeded", "part-2of4": "failed", "part-3of4": "succeeded", "part-4of4": "succeeded",
        "part": "skipped", "after": "skipped",
    }  # fmt: skip
    assert "exit 3" in laptop.run("why", job, expect=0).out

    (work / "fixed").touch()
    laptop.run("retry", job, "--set", "part.env.MORE=1", expect=0)
    laptop.run("wait", job, expect=0)
    tries = {step["name"]: len(step["attempts"]) for step in laptop.status(job)["steps"]}
    assert tries == {"part-1of4": 1, "part-2of4": 2, "part-3of4": 1, "part-4of4": 1, "part": 1, "after": 1}
    assert (work / "all").read_text().split() == ["4"] * 4
    assert set((work / "outputs").read_text().split()) == {str(work / "out")}, "all ranges share the plan's output"


def test_stop_of_the_split_step_stops_its_ranges(hosts: Hosts) -> None:
    laptop = hosts.laptop
    plan = laptop.plan([{"name": "part", "run": "sleep 600", "split": 3}], name="stopped")
    job = laptop.launch(plan)
    wait_until(
        lambda: [step["state"] for step in laptop.status(job)["steps"]][:3] == ["running"] * 3, "three ranges run"
    )
    laptop.run("stop", job, "--step", "part", expect=0)
    laptop.run("wait", job, expect=1)
    assert {step["state"] for step in laptop.status(job)["steps"]} <= {"stopped", "skipped"}


MISUSE = {
    "train": ({"uses": "train", "with": {"model": "m"}, "split": 2}, "which has no ranges"),
    "service": ({"run": "x", "service": {"ready": {"port": 80}}, "split": 2}, "is a service"),
    "zero": ({"run": "x", "split": 0}, "split"),
    "text": ({"run": "x", "split": "four"}, "split"),
    "no number": ({"run": "x", "split": {"hosts": ["box"]}}, "how many ranges"),
    "too few": ({"run": "x", "split": {"ranges": 1, "hosts": ["box", "other"]}}, "1 ranges for 2 hosts"),
    "twice": ({"run": "x", "split": {"ranges": 2, "hosts": ["box", "box"]}}, "twice"),
    "host": ({"run": "x", "split": {"ranges": 2, "hosts": ["box", "other"]}}, "remove host:"),
    "long": ({"name": "n" * 62, "run": "x", "split": 4}, "too long a name"),
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_told_with_the_line(case: str, hosts: Hosts, tmp_path: Path) -> None:
    step, words = MISUSE[case]
    plan = hosts.laptop.plan([{"name": "part", **step}], name="misuse")
    answer = hosts.laptop.run("launch", plan, expect=2)
    assert words in answer.err, answer
    assert f"{plan}:" in answer.err, answer
    assert answer.one_screen
