"""The same through `orch` and a real sshd: why on one screen, retry with settings and secrets, the offer of a reboot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.stage import Stage
from tests.retries.box import LOGS
from tests.support.host_side import ended
from tests.support.jobdir import JobDir, agents, kill
from tests.support.waiting import wait_until

SLACK_S = 8.0  # a busy machine
OOM = LOGS / "own" / "gpu_oom_training_rank3.log"


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with Stage(tmp_path / "stage") as found:
        yield found


def plan(stage: Stage, step: dict[str, Any], **top: Any) -> Path:
    return stage.laptop.plan([{"name": "work", **step}], **stage.top, **top)


def end(stage: Stage, job: str) -> None:
    """Wait for the end, cutting every backoff short by `orch retry`."""

    def over() -> bool:
        state = stage.laptop.status(job)["state"]
        if state == "retry_wait":
            stage.laptop.run("retry", job)
        return state in ("failed", "succeeded")

    wait_until(over, "the job has ended", within_s=60, every_s=0.3)


def test_why_tells_it_on_one_screen_and_retry_sets_what_helps(stage: Stage) -> None:
    python = stage.folder / "python-of-the-step"
    python.write_text(
        f'#!/bin/sh\necho "$*" >> {stage.work}/argv\ncase "$*" in *"utilization 0.7"*) exit 0;; esac\ncat {OOM}; exit 1\n'
    )
    python.chmod(0o755)
    (stage.work / "rows.jsonl").write_text("{}\n")
    step = {
        "uses": "extract", "python": str(python), "gpus": 0, "patches": "none",
        "with": {"model": str(stage.work), "dataset": "rows.jsonl", "layers": [1], "gpu_memory_utilization": 0.9},
    }  # fmt: skip
    job = stage.laptop.launch(plan(stage, step), "--attempts", 2)
    end(stage, job)
    first = stage.laptop.run("why", job, "--step", "work", "--attempt", 1, "--json", expect=0).json
    design = {"schema", "job", "step", "attempt", "verdict", "exit_status", "evidence", "changed_next", "incident"}
    assert design <= set(first)
    assert (first["schema"], first["job"], first["step"], first["attempt"], first["exit_status"]) == (1, job, "work", 1, 1)
    assert first["changed_next"] == {"gpu_memory_utilization": 0.85}
    assert (first["verdict"]["class"], first["verdict"]["retry"]) == ("gpu_oom", "after_change")
    assert Path(first["incident"]).is_dir()
    screen = stage.laptop.run("why", job, "--attempt", 1, expect=0).out
    assert len(screen.splitlines()) <= 24
    for said in ("gpu_oom", "CUDA out of memory", "gpu_memory_utilization", "attempt 1", "exit", first["incident"]):
        assert said in screen, screen
    assert stage.laptop.run("why", job, "--json", expect=0).json["changed_next"] is None
    stage.laptop.run("retry", job, "--set", "work.with.gpu_memory_utilization=0.7", expect=0)
    stage.laptop.run("wait", job, "--timeout", 40, expect=0)
    called = (stage.work / "argv").read_text().splitlines()
    assert [line.partition("utilization ")[2].split()[0] for line in called] == ["0.9", "0.85", "0.7"]


def test_retry_brings_the_secrets_again_from_the_environment(stage: Stage) -> None:
    stage.laptop.environment["HF_TOKEN"] = "hf_first_value"
    step = {
        "run": "printf '%s\\n' \"$HF_TOKEN\" >> tokens; [ -e good ]", "env": {"HF_TOKEN": {"from": "env"}},
        "retry": {"attempts": 1},
    }  # fmt: skip
    job = stage.laptop.launch(plan(stage, step))
    end(stage, job)
    del stage.laptop.environment["HF_TOKEN"]
    refused = stage.laptop.run("retry", job)
    assert refused.status == 2, "no trouble of the host"
    assert refused.one_screen
    assert f"HF_TOKEN=... orch retry {job}" in refused.err
    (stage.work / "good").touch()
    stage.laptop.environment["HF_TOKEN"] = "hf_second_value"
    stage.laptop.run("retry", job, expect=0)
    stage.laptop.run("wait", job, "--timeout", 40, expect=0)
    wait_until(lambda: not JobDir(stage.root, job).supervisors(), "the supervisor has cleaned up after the end")
    assert (stage.work / "tokens").read_text().split() == ["hf_first_value", "hf_second_value"]
    for path in [*stage.root.rglob("*"), *stage.laptop.store.rglob("*")]:
        if path.is_file():
            assert b"hf_second_value" not in path.read_bytes(), path


def test_launch_and_status_print_what_to_type_for_a_restart_after_a_reboot(stage: Stage) -> None:
    step = {"run": "until [ -e reboot-go ]; do sleep 0.05; done"}
    answer = stage.laptop.run("launch", plan(stage, step, restart_after_reboot=True), "--no-preflight", expect=0)
    assert "restart_after_reboot" in answer.err
    assert "@reboot" in answer.err or "systemctl --user enable" in answer.err or "orch retry" in answer.err
    assert len(answer.out.split()) == 1, "stdout holds the id alone"

    def notes() -> list[str]:
        shown = stage.laptop.run("status", answer.out.strip(), expect=0).out.splitlines()
        return [line for line in shown if " note " in line]

    [note] = wait_until(notes, "the supervisor, once under way, has noted it")
    assert "restart_after_reboot" in note
    (stage.work / "reboot-go").touch()
    stage.laptop.run("wait", answer.out.strip(), "--timeout", 40, expect=0)


HANGS = "trap 'exit 0' TERM; echo working on it; while :; do sleep 600 & wait; done"
ASKS = "printf 'Do you wish to run the custom code? [y/N] '; exec sleep 600"
SERVES = "echo $$ >> serve.pids; echo up and ready; exec sleep 600"


def test_a_night_with_the_laptop_shut(stage: Stage) -> None:
    """A hang, a question and a user of a service that dies: all is settled when the laptop opens again."""
    plans: dict[str, list[dict[str, Any]]] = {
        "hang": [{"name": "work", "run": HANGS, "hang_s": 2.0, "grace_s": 2.0, "retry": {"attempts": 1}}],
        "question": [{"name": "work", "run": ASKS, "grace_s": 1.0, "retry": {"attempts": 5}}],
        "service": [
            {"name": "serve", "run": SERVES, "service": {"ready": {"log": "up and ready"}}, "grace_s": 1.0},
            {"name": "work", "run": "[ $ORCH_ATTEMPT = 2 ] || kill -9 $$", "needs": ["serve"]},
        ],
    }
    jobs = {
        name: JobDir(stage.root, stage.laptop.launch(stage.laptop.plan(steps, name=name, **stage.top)))
        for name, steps in plans.items()
    }
    for pid in agents(stage.root):
        kill(pid)  # nobody asks any more
    for job in jobs.values():
        ended(job, within_s=90)
    told = {name: stage.laptop.run("why", job.id, "--json", expect=0).json for name, job in jobs.items()}
    assert told["hang"]["verdict"]["signature"] == "hang"
    assert any("sleep 600" in row["command"] for row in told["hang"]["stacks"])
    kinds = jobs["hang"].kinds()
    assert kinds.index("hang_suspected") < kinds.index("stop_sent"), "the stacks are taken while it lives"
    assert told["question"]["verdict"]["class"] == "waiting_for_input"
    assert len(told["question"]["attempts"]) == 1
    assert stage.laptop.status(jobs["service"].id)["state"] == "succeeded"
    assert len((stage.work / "serve.pids").read_text().split()) == 1, "the service was kept"
    events = {event["kind"]: event for event in jobs["service"].events() if event["step"] == "work"}
    waited_s = events["attempt_started"]["mono"] - events["retry_scheduled"]["mono"]
    assert waited_s < events["retry_scheduled"]["data"]["delay_s"] + 2 + SLACK_S
    for job in jobs.values():
        assert not job.marked(), "nothing is left running"
