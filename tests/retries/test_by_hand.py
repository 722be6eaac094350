"""What a person does: stop wherever the job stands, retry with settings, take up what was lost or cut short by a reboot."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.retries.box import Box, events
from tests.support.host_side import JOB, Refused, ended, look
from tests.support.jobdir import JobDir, alive, kill
from tests.support.waiting import wait_until

OLD_BOOT = "11111111-2222-3333-4444-555555555555"
HOLD = "echo $$ >> starts; until [ -e go ]; do sleep 0.03; done"
CRONTAB = """#!/bin/bash
touch {log}
if [ "$1" = -l ]; then cat {tab} 2>/dev/null; else cat > {tab}; echo installed >> {log}; fi
"""


def starts(box: Box) -> list[int]:
    path = box.work / "starts"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def lose(job: JobDir) -> None:
    """Kill the supervisor, as the OOM killer would."""
    kill(job.supervisor)
    wait_until(lambda: not job.supervisors(), "the supervisor is gone")


def forge_boot(job: JobDir) -> None:
    """Make all records of a dead job say that they come from another boot."""

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: OLD_BOOT if key == "boot_id" else changed(item) for key, item in value.items()}
        return [changed(item) for item in value] if isinstance(value, list) else value

    lines = [json.dumps(changed(event)) for event in job.events()]
    (job.path / "events.jsonl").write_text("".join(line + "\n" for line in lines))
    for path in [job.path / "state.json", job.path / "lock", *job.path.rglob("attempt.json")]:
        path.write_text(json.dumps(changed(json.loads(path.read_bytes()))) + "\n")


def crontab(box: Box) -> Path:
    """A stand-in crontab; the returned file is the user's table."""
    program, tab = box.bin / "crontab", box.side.folder / "crontab.txt"
    program.write_text(CRONTAB.format(tab=tab, log=box.side.folder / "crontab.log"))
    program.chmod(0o755)
    return tab


def reboot(box: Box, job: JobDir) -> None:
    """Everything of the job dies, and what is left says that this was before the last boot."""
    wait_until(lambda: job.state == "running" and starts(box), "it runs and says so")
    lose(job)
    for pid in job.marked():
        kill(pid)
    wait_until(lambda: not job.marked(), "all is dead")
    forge_boot(job)


# ------------------------------------------------------------------------------------------------------------- by hand


def test_a_stop_during_backoff_is_final_and_a_retry_takes_it_up(box: Box) -> None:
    job = box.launch({"name": "work", "run": "[ $ORCH_ATTEMPT = 2 ] || kill -9 $$"})
    job.wait_for_kind("retry_scheduled")
    box.control(job, "stop", args={"reason": "enough"})
    assert ended(job) == "stopped"
    assert job.kinds().count("attempt_started") == 1
    box.control(job, "retry")
    box.hurry(job, "succeeded")
    assert (job.path / "result.1.json").exists()


def test_a_stop_is_final_also_when_its_supervisor_is_killed_over_it(box: Box) -> None:
    """The stop was acknowledged, the job resisted, the supervisor died: whoever takes over stops it."""
    stubborn = "trap '' TERM; touch up; while :; do sleep 0.1; done"
    job = box.launch({"name": "work", "run": stubborn, "grace_s": 30.0, "timeout_s": 600.0})
    wait_until((box.work / "up").exists, "the trap is set")
    box.control(job, "stop")
    lose(job)
    assert look(box.agent, job.id)["state"]["state"] == "lost"
    for pid in job.marked():
        kill(pid)
    box.control(job, "extend", args={"timeout_s": 1.0})  # any request starts a supervisor
    assert ended(job, within_s=40) == "stopped"
    assert job.kinds().count("attempt_started") == 1


def test_a_step_with_more_time_is_not_ended_at_its_first_limit(box: Box) -> None:
    job = box.launch({"name": "work", "run": HOLD, "timeout_s": 8.0, "retry": {"attempts": 1}})
    wait_until(lambda: starts(box), "it runs")
    answer = box.control(job, "extend", args={"timeout_s": 600, "step": "work"})
    assert (answer["acknowledged"], answer["limits_s"]) == (True, {"work": 608.0})
    began = time.monotonic()
    wait_until(lambda: time.monotonic() > began + 9, "its first limit is over", within_s=30)
    box.release_go()
    assert ended(job) == "succeeded"


def test_a_lost_job_is_cleaned_up_before_it_goes_on(box: Box) -> None:
    job = box.launch({"name": "work", "run": f"setsid sleep 600 & echo $! > child; {HOLD}"})
    wait_until(lambda: job.state == "running" and starts(box), "it runs and says so")
    child = int((box.work / "child").read_text())
    lose(job)
    found = look(box.agent, job.id)
    assert {starts(box)[0], child} <= {row["pid"] for row in found["lost"]["processes"]}
    box.control(job, "retry")
    wait_until(lambda: len(starts(box)) == 2, "the second attempt runs", within_s=40)
    assert not alive(starts(box)[0])
    assert not alive(child)
    box.release_go()
    box.hurry(job, "succeeded")
    assert [item["state"] for item in box.step(job)["attempts"]] == ["lost", "succeeded"]


def test_a_supervisor_killed_before_it_could_write_down_the_start(box: Box) -> None:
    """Nothing says that an attempt runs: it is found all the same, shown, and ended before another is started."""
    job = box.launch({"name": "work", "run": HOLD})
    wait_until(lambda: starts(box), "it runs")
    [first] = starts(box)
    lose(job)
    lines = (job.path / "events.jsonl").read_bytes().splitlines(keepends=True)
    (job.path / "events.jsonl").write_bytes(lines[0])
    (job.path / "state.json").unlink()
    found = look(box.agent, job.id)
    assert found["state"]["state"] == "lost"
    assert first in [row["pid"] for row in found["lost"]["processes"]]
    box.control(job, "retry")
    wait_until(lambda: len(starts(box)) == 2, "it runs again", within_s=40)
    assert not alive(first)
    box.release_go()
    box.hurry(job, "succeeded")


def test_a_retry_of_an_ended_job_needs_its_secrets_again(box: Box) -> None:
    run = "printf %s \"$TOKEN\" > token; exit 1"
    step = {"name": "work", "run": run, "secrets": ["TOKEN"], "retry": {"attempts": 1}}
    job = box.launch(step, secrets={"work": {"TOKEN": "first-value"}})
    assert ended(job) == "failed"
    with pytest.raises(Refused, match="needs TOKEN again") as refusal:
        box.control(job, "retry")
    assert refusal.value.code == "needs_secrets"
    box.control(job, "retry", secrets={"work": {"TOKEN": "second-value"}})
    assert ended(job) == "failed"
    assert (box.work / "token").read_text() == "second-value"
    assert not (job.path / "secrets.json").exists()


# -------------------------------------------------------------------------------------------------------------- reboot


def test_a_reboot_is_named_and_retry_goes_on(box: Box) -> None:
    job = box.launch({"name": "work", "run": HOLD})
    reboot(box, job)
    found = look(box.agent, job.id)
    assert found["state"]["state"] == "lost"
    assert found["lost"]["reason"].startswith("host rebooted at 2")
    box.control(job, "retry")
    box.release_go()
    box.hurry(job, "succeeded")
    assert "rebooted" in events(job, "attempt_judged")[0]["verdict"]["summary"]


def test_going_on_after_a_reboot_is_offered_and_never_installed(box: Box) -> None:
    """The launch and the job's notes show a line to type; typed, it brings the job back; then it is not shown again."""
    tab = crontab(box)
    spec = box.side.spec([{"name": "work", "run": HOLD}], JOB, restart_after_reboot=True)
    answer = box.agent.request("launch", spec=spec, secrets={}, new=False)
    job = JobDir(box.root, JOB)
    [offer] = answer["warnings"]
    assert "@reboot" in offer
    assert not tab.exists(), "nothing is installed silently"
    wait_until(
        lambda: offer in [note["text"] for note in look(box.agent, job.id)["state"]["notes"]], "the notes say it, too"
    )
    typed = offer.partition("type there: ")[2]
    subprocess.run(["sh", "-c", typed], env=box.environment, check=True)
    [line] = tab.read_text().splitlines()

    reboot(box, job)
    assert "@reboot" not in str(box.why(job).get("offer")), "it is there by now"
    command = shlex.split(line)[1:]
    assert command[0] == box.side.python
    for _ in range(2):  # at most one supervisor, however often it runs
        subprocess.run(command, env=box.environment, check=True, timeout=60, stdin=subprocess.DEVNULL)
    job.wait_for_kind("retry_scheduled")
    box.release_go()
    box.hurry(job, "succeeded")
    assert [item["state"] for item in box.step(job)["attempts"]] == ["lost", "succeeded"]
    before = (job.path / "events.jsonl").read_bytes()
    subprocess.run(command, env=box.environment, check=True, timeout=60, stdin=subprocess.DEVNULL)
    assert (job.path / "events.jsonl").read_bytes() == before, "an ended job is not touched"


def test_a_start_at_boot_touches_only_jobs_that_want_it(box: Box) -> None:
    """Not those whose plan does not say so, nor those that were merely lost, nor one that kills the host each time."""
    command = [box.side.python, "-I", "-S", str(box.side.release), "resume", "--root", str(box.root)]
    plain = box.launch({"name": "work", "run": HOLD}, job="plain")
    reboot(box, plain)
    (box.work / "starts").unlink()
    lost = box.launch({"name": "work", "run": HOLD}, job="lost", restart_after_reboot=True)
    wait_until(lambda: lost.state == "running" and starts(box), "it runs")
    lose(lost)
    (box.work / "starts").unlink()
    killer = box.launch({"name": "work", "run": HOLD, "retry": {"attempts": 2}}, job="killer", restart_after_reboot=True)
    reboot(box, killer)
    subprocess.run(command, env=box.environment, check=True, timeout=60, stdin=subprocess.DEVNULL)
    killer.wait_for_kind("retry_scheduled")
    box.skip_backoff(killer)
    wait_until(lambda: len(starts(box)) == 2 and killer.state == "running", "the second attempt runs")
    lose(killer)
    for pid in killer.marked():
        kill(pid)
    forge_boot(killer)
    subprocess.run(command, env=box.environment, check=True, timeout=60, stdin=subprocess.DEVNULL)
    assert ended(killer) == "failed"
    assert "attempt 2 of 2 failed" in events(killer, "step_failed")[0]["reason"]
    for job in (plain, lost):
        assert look(box.agent, job.id)["state"]["state"] == "lost"
        assert not job.supervisors()


def test_without_cron_a_user_unit_is_offered(box: Box) -> None:
    (box.bin / "systemctl").write_text("#!/bin/sh\n")
    (box.bin / "systemctl").chmod(0o755)
    environment = {**box.environment, "PATH": f"{box.bin}:{Path(sys.executable).parent}"}
    agent = box.side.agent(**environment)
    spec = box.side.spec([{"name": "work", "run": "true"}], JOB, restart_after_reboot=True)
    [offer] = agent.request("launch", spec=spec, secrets={}, new=False)["warnings"]
    typed = offer.partition("type there: ")[2].partition(" && systemctl")[0]
    home = box.side.folder / "home"
    subprocess.run(["sh", "-c", typed], env={"HOME": str(home), "PATH": "/usr/bin:/bin"}, check=True)
    [unit] = (home / ".config" / "systemd" / "user").iterdir()
    lines = unit.read_text().splitlines()
    assert f"ExecStart={box.side.python} -I -S {box.side.release} resume --root {box.root}" in lines
    assert "WantedBy=default.target" in lines
    assert ended(JobDir(box.root, JOB)) == "succeeded"
