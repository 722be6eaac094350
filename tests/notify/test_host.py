"""What the supervisor sends by itself, to a real HTTP server: what, once, and with no address left behind."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remote_jobs.agent import notices
from remote_jobs.agent.fold import Fold
from remote_jobs.agent.notify import SlipWatch
from remote_jobs.protocol import JobSpec
from tests.notify.receiver import Receiver
from tests.support.host_side import HostSide, ended, pythons
from tests.support.jobdir import JobDir, alive, command_line, kill, pids
from tests.support.waiting import wait_until

NUMBERS = itertools.count(1)
TOKEN = "hook-T0ken-8f2a"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        yield server


@pytest.fixture
def host(tmp_path: Path) -> Iterator[HostSide]:
    with HostSide(tmp_path / "host", pythons().get("3.8") or next(iter(pythons().values()))) as side:
        yield side


def webhook(on: list[str], number: int = 1, **more: Any) -> dict[str, Any]:
    return {"id": f"plan-{number}", "kind": "webhook", "label": "webhook 127.0.0.1", "on": on, **more}


def launch(
    host: HostSide, step: str | dict[str, Any], notify: list[dict[str, Any]], addresses: dict[str, str]
) -> JobDir:
    # An id of its own: processes are found by it, and other tests may run on this machine.
    job = f"notify-{os.getpid()}-{next(NUMBERS)}"
    steps = [step] if isinstance(step, dict) else step
    spec = host.spec(steps, job, notify=notify)
    host.agent().request("launch", spec=spec, secrets={"@notify": addresses}, new=False)
    return JobDir(host.root, job)


def records(job: JobDir) -> dict[str, dict[str, Any]]:
    folder = job.path / "notify"
    names = sorted(path.name for path in folder.glob("*.json")) if folder.is_dir() else []
    return {name: job.record(f"notify/{name}") for name in names}


def settled(job: JobDir, state: str, count: int = 1) -> list[dict[str, Any]]:
    """Wait until so many records are in a state."""

    def found() -> list[dict[str, Any]]:
        return [record for record in records(job).values() if record.get("state") == state]

    wait_until(lambda: len(found()) >= count, f"{count} notification(s) {state}", seen=lambda: records(job))
    return found()


def test_retries_and_the_end_are_told_with_what_happened(host: HostSide, receiver: Receiver) -> None:
    step = {
        "name": "work",
        "run": "[ $ORCH_ATTEMPT = 2 ] || { echo 'ConnectionError: Connection reset by peer'; exit 1; }",
        "retry": {"attempts": 2},
    }
    notify = [webhook(["retry", "success", "failure"]), webhook(["failure"], 2)]
    addresses = {
        "plan-1": receiver.url(f"all?key={TOKEN}"),
        "plan-1 header Authorization": f"Bearer {TOKEN}",
        "plan-2": receiver.url("bad"),
    }
    job = launch(host, step, notify, addresses)
    assert ended(job) == "succeeded"
    settled(job, "sent", 2)
    path = f"all?key={TOKEN}"
    assert receiver.kinds(path) == ["retry", "success"]
    assert receiver.at("bad") == []
    retry, success = (item.json for item in receiver.at(path))
    assert retry["class"] == "network"
    assert "Step work, attempt 1 failed" in retry["text"]
    assert (success["title"], success["job"], success["schema"]) == ("plan on box has succeeded", job.id, 1)
    assert success["content"] == success["text"]
    assert receiver.got[0].headers["Authorization"] == f"Bearer {TOKEN}"
    # Nothing of the address stays behind: not in spec, events, state, records or logs, and the secrets are gone.
    for file in job.path.rglob("*"):
        if file.is_file():
            assert TOKEN not in file.read_bytes().decode(errors="replace"), file


def test_a_busy_server_is_asked_again_and_a_refusal_is_noted(host: HostSide, receiver: Receiver) -> None:
    receiver.statuses = [503]
    step = {"name": "work", "run": "echo 'ConnectionError: reset by peer'; exit 1", "retry": {"attempts": 2}}
    job = launch(host, step, [webhook(["retry"])], {"plan-1": receiver.url("hook")})
    settled(job, "sent")
    assert receiver.kinds("hook") == ["retry", "retry"], "the same message twice: the first was not taken"
    assert receiver.got[0].json["key"] == receiver.got[1].json["key"]
    ended(job)

    receiver.statuses = [404]
    second = launch(host, "true", [webhook(["step"])], {"plan-1": receiver.url("gone?" + TOKEN)})
    [record] = settled(second, "failed")
    assert record["error"] == "HTTP 404"
    assert len(receiver.at("gone?" + TOKEN)) == 1


def test_a_supervisor_that_is_killed_tells_nothing_twice(host: HostSide, receiver: Receiver) -> None:
    go = host.work / "go"
    step = {
        "name": "work",
        "run": f"[ $ORCH_ATTEMPT = 1 ] && {{ echo 'ConnectionError: reset by peer'; exit 1; }}; until [ -e {go} ]; do sleep 0.05; done",
        "retry": {"attempts": 4},
    }
    job = launch(host, step, [webhook(["retry", "success", "failure"])], {"plan-1": receiver.url("hook")})
    settled(job, "sent")
    job.wait_for_kind("attempt_started", count=2)
    kill(job.supervisor, signal.SIGKILL)
    wait_until(lambda: not job.supervisors(), "the supervisor is dead")
    go.touch()
    host.agent().request("control", job=job.id, action="retry", args={}, wait_s=10)
    assert ended(job) == "succeeded"
    wait_until(lambda: "success" in receiver.kinds("hook"), "the end was told, with the address kept over the kill")
    told = [item.json["key"] for item in receiver.at("hook")]
    assert len(told) == len(set(told)), "each event once"
    assert receiver.kinds("hook").count("success") == 1


def test_an_event_that_died_with_its_supervisor_is_told_by_the_next(host: HostSide, receiver: Receiver) -> None:
    job = launch(host, {"name": "work", "run": "exit 3", "retry": {"attempts": 1}}, [webhook(["failure"])], {})
    assert ended(job) == "failed"
    settled(job, "failed")  # no address came along: said in the record
    for path in (job.path / "notify").iterdir():
        path.unlink()  # as if it had been killed between the event and the record
    secrets = {"@notify": {"plan-1": receiver.url("hook")}}
    host.agent().request("control", job=job.id, action="retry", args={}, wait_s=10, secrets=secrets)
    wait_until(lambda: len(receiver.at("hook")) == 2, "the lost message and the one of the second end")
    ended(job)
    assert receiver.kinds("hook") == ["failure", "failure"]


def test_a_command_on_the_host_gets_the_message(host: HostSide) -> None:
    told = host.work / "told"
    notify = [
        {
            "id": "plan-1",
            "kind": "command",
            "label": "command",
            "on": ["failure"],
            "command": f'{{ echo "$ORCH_NOTIFY_KIND $ORCH_NOTIFY_JOB $PASSWORD"; cat; }} > {told}.part && mv {told}.part {told}',
        }
    ]
    job = launch(host, "echo out of luck; exit 3", notify, {"plan-1 env PASSWORD": TOKEN})
    assert ended(job) == "failed"
    first, message = wait_until(lambda: told.exists() and told.read_text(), "the command ran").split("\n", 1)
    assert first == f"failure {job.id} {TOKEN}"
    assert '"class": "unknown"' in message
    assert f"orch why {job.id}" in message


def test_a_heartbeat_goes_on_while_the_supervisor_lives(host: HostSide, receiver: Receiver) -> None:
    notify = [{"id": "host-1", "kind": "heartbeat", "label": "heartbeat", "every_s": 1, "end": True}]
    addresses = {"host-1": receiver.url("alive"), "host-1 end": receiver.url("paused")}
    go = host.work / "go"
    job = launch(host, f"until [ -e {go} ]; do sleep 0.05; done", notify, addresses)
    wait_until(lambda: len(receiver.at("alive")) >= 3, "three heartbeats")
    assert {item.method for item in receiver.at("alive")} == {"GET"}
    go.touch()
    assert ended(job) == "succeeded"
    wait_until(lambda: receiver.at("paused"), "the goodbye, so that nobody is alarmed")
    assert [item.method for item in receiver.at("paused")] == ["POST"]


def goodbye_refused(host: HostSide, receiver: Receiver, addresses: dict[str, str], exit_status: int) -> JobDir:
    """A job with a heartbeat that has ended, and whose goodbye a busy server has not taken."""
    notify = [{"id": "host-1", "kind": "heartbeat", "label": "heartbeat", "every_s": 3600, "end": True}]
    go = host.work / "go"
    job = launch(host, f"until [ -e {go} ]; do sleep 0.05; done; exit {exit_status}", notify, addresses)
    wait_until(lambda: receiver.at("alive"), "the only heartbeat")
    receiver.statuses = [503]
    go.touch()
    assert ended(job) == ("failed" if exit_status else "succeeded")
    wait_until(lambda: receiver.at("paused"), "the goodbye, which the busy server does not take")
    return job


def test_the_goodbye_of_a_heartbeat_is_tried_again(host: HostSide, receiver: Receiver) -> None:
    """Lost, it would turn a healthy end into an alarm."""
    goodbye_refused(host, receiver, {"host-1": receiver.url("alive"), "host-1 end": receiver.url("paused")}, 0)
    wait_until(lambda: len(receiver.at("paused")) == 2, "the goodbye, again after the server was busy")


def test_the_goodbye_of_a_heartbeat_is_not_said_of_a_job_that_runs_again(host: HostSide, receiver: Receiver) -> None:
    """It would put the alarm to sleep: nobody would be told what becomes of the second run."""
    courier = host.release / "remote_jobs" / "agent" / "courier.py"
    courier.write_text(courier.read_text().replace("WAITS_S = (5.0, ", "WAITS_S = (15.0, "))  # time for a retry on any machine
    addresses = {"host-1": receiver.url("alive"), "host-1 end": receiver.url("paused")}
    job = goodbye_refused(host, receiver, addresses, 3)
    couriers = [pid for pid in pids() if {"supervise", job.id} <= set(command_line(pid))]  # forks of its supervisor
    assert couriers
    again = {"job": job.id, "action": "retry", "args": {"set": {"work.run": "sleep 1000"}}, "secrets": {"@notify": addresses}}
    host.agent().request("control", **again)
    wait_until(lambda: len(receiver.at("alive")) == 2, "it runs again")
    assert any(map(alive, couriers)), "before the second try"
    wait_until(lambda: not any(map(alive, couriers)), "the first run's courier has made up its mind")
    assert len(receiver.at("paused")) == 1


def test_a_courier_outlives_its_supervisor_and_holds_nothing_of_it(host: HostSide, receiver: Receiver) -> None:
    receiver.statuses = [503]
    job = launch(host, "true", [webhook(["success"])], {"plan-1": receiver.url("hook")})
    assert ended(job) == "succeeded"
    agent = host.agent()
    found = agent.request("look", jobs=[job.id])["jobs"][job.id]
    assert found["alive"] is False, "the lock is free though a courier may still run"
    settled(job, "sent")
    assert len(receiver.at("hook")) == 2


def test_laptops_take_each_message_once(host: HostSide) -> None:
    targets = [{"id": "plan-1", "kind": "apprise", "label": "apprise slack", "on": ["success"]}]
    job = launch(host, "true", targets, {})
    assert ended(job) == "succeeded"
    first, second = host.agent(), host.agent()

    def ask(agent: Any, name: str) -> list[str]:
        messages = agent.request("notify", job=job.id, do="take", targets=[name], by="laptop")["messages"]
        return [item["kind"] for item in messages]

    assert ask(first, "plan-1 apprise mailto") == [], "not this one's: its inventory says something else"
    assert ask(first, "plan-1 apprise slack") == ["success"]
    assert ask(second, "plan-1 apprise slack") == []
    [key] = [record["key"] for record in records(job).values()]
    first.request("notify", job=job.id, do="settle", key=key, error=None, by="laptop")
    assert [record["state"] for record in records(job).values()] == ["sent"]


def test_a_bar_that_slows_down_is_told(host: HostSide, receiver: Receiver) -> None:
    source = host.release / "remote_jobs" / "agent" / "notify.py"  # the same program with a shorter patience
    source.write_text(source.read_text().replace("SUSTAIN_S = 60.0", "SUSTAIN_S = 1.0"))
    slow = host.work / "slow"
    bar = "printf '\\rLoading: %d%%|#| %d/200 [%02d:%02d<?, ?it/s]' $((i/2)) $i $((SECONDS/60)) $((SECONDS%60))"
    run = f"for i in $(seq 1 200); do {bar}; if [ -e {slow} ]; then sleep 3; else sleep 0.1; fi; done"
    job = launch(host, run, [webhook(["failure"], eta_slip_s=5.0)], {"plan-1": receiver.url("hook")})
    wait_until(lambda: job.record("state.json").get("eta"), "there is a forecast")
    slow.touch()
    wait_until(lambda: receiver.kinds("hook"), "the slip is told", within_s=15, seen=lambda: job.record("state.json").get("eta"))
    [told] = receiver.at("hook")
    assert told.json["kind"] == "eta_slip"
    assert "The expected end has moved by" in told.json["text"]
    assert [event["data"]["to"] for event in job.events() if event["data"].get("notify")] == ["plan-1"]


def told_of(*events: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """The message about the last of some events of a job of three steps."""
    steps = [{"name": "serve", "service": {}}, {"name": "extract", "needs": ["serve"]}, {"name": "train", "needs": ["extract"]}]
    spec = JobSpec("plan-1", "plan", "box", "/w", "0", "2026-11-30T00:00:00.000Z", "r", steps)
    folded, event = Fold(spec), {}
    for seq, (kind, given) in enumerate(events, 1):
        fields = dict(given)
        event = {"seq": seq, "at": f"2026-11-30T0{seq}:00:00.000Z", "kind": kind, "step": fields.pop("step", None)}
        event |= {"attempt": fields.pop("attempt", None), "data": fields}
        folded.apply(event)
    [kind] = notices.kinds_of(event)
    return notices.message_of(spec, event, kind, folded.state)


OOM = {"class": "gpu_oom", "summary": "CUDA out of memory", "advice": "lower gpu_memory_utilization"}
BEGUN: list[tuple[str, dict[str, Any]]] = [("attempt_started", {"step": "extract", "attempt": 1})]
BROKEN = [*BEGUN, ("attempt_ended", {"step": "extract", "attempt": 1, "state": "failed", "exit_status": 1})]
DONE = [*BEGUN, ("step_succeeded", {"step": "extract", "attempt": 1})]
GIVEN_UP = ("step_failed", {"step": "extract", "reason": "attempt 1 of 1 failed (gpu_oom)", "verdict": OOM})
TOLD = {
    "retry": (
        [*BROKEN, ("retry_scheduled", {"step": "extract", "attempt": 1, "delay_s": 12.0, "reason": "network: trying again"})],
        ["plan on box", "step extract failed", "extract, attempt 1 failed", "starts attempt 2 in 12 s", "Nothing to do", "orch why plan-1"],
    ),
    "hang": (
        [*BEGUN, ("hang_suspected", {"step": "extract", "attempt": 1, "text": "the job hangs: still for 15 min"})],
        ["plan on box seems to hang in step extract", "attempt 1: the job hangs: still for 15 min.", "ends this attempt", "orch why plan-1"],
    ),
    "slip": (
        [("note", {"text": "the expected end has moved by 40 min", "notify": "eta_slip"})],
        ["takes longer than expected", "moved by 40 min", "nothing has failed", "orch watch plan-1"],
    ),
    "step done": (DONE, ["plan on box finished step extract", "goes on with: serve, train", "orch status plan-1"]),
    "step failed": (
        [*BROKEN, GIVEN_UP],
        ["plan on box failed in step extract", "gpu_oom: CUDA out of memory", "not try this step again: attempt 1 of 1",
         "left out: train", "Still to end: serve", "To do: lower gpu_memory_utilization; orch why plan-1"],
    ),
    "failure": (
        [*BROKEN, GIVEN_UP, ("finished", {"state": "failed"})],
        ["plan on box has failed", "Step extract, attempt 1 failed", "is over after 3 h 0 min", "not try again by itself", "then orch retry plan-1"],
    ),
    "success": ([*BEGUN, ("finished", {"state": "succeeded"})], ["has succeeded", "All 3 steps are done after 1 h", "orch fetch plan-1 DEST"]),
    "stopped": ([*BEGUN, ("finished", {"state": "stopped"})], ["was stopped", "on request after 1 h", "orch retry plan-1"]),
}  # fmt: skip


@pytest.mark.parametrize("name", TOLD)
def test_who_reads_it_on_a_phone_learns_what_happened_what_orch_does_and_what_to_do(name: str) -> None:
    events, words = TOLD[name]
    message = told_of(*events)
    whole = f"{message['title']}\n{message['text']}"
    assert [word for word in words if word not in whole] == [], whole
    assert len(whole.splitlines()) <= 7
    assert "orch " in whole.splitlines()[-1], "the last line is for the hand"


def test_a_notification_names_the_job_and_the_host_to_type() -> None:
    held = {"class": "gpu_busy", "summary": "held", "advice": "see who holds them: orch gpus HOST; then: orch retry JOB"}
    text = told_of(*BEGUN, ("step_failed", {"step": "extract", "reason": "held", "verdict": held}))["text"]
    assert "orch gpus box; then: orch retry plan-1; orch why plan-1" in text


def test_an_end_that_slips_is_told_when_it_is_sure() -> None:
    watch = SlipWatch(1800.0)
    told = []
    for minute in range(240):
        now = 60.0 * minute
        left = 7200.0 - now if minute < 60 else 7200.0 - now + 3600.0  # after an hour: an hour longer
        eta = {"low_s": 0.9 * left, "high_s": 1.1 * left} if left > 0 and minute != 30 else None
        moved = watch.look(eta, now)
        if moved is not None:
            told.append((minute, round(moved / 60)))
    assert len(told) == 1
    minute, moved = told[0]
    assert 61 <= minute <= 90
    assert 30 <= moved <= 60
    steady = SlipWatch(600.0)
    assert all(steady.look({"low_s": 3600 - t, "high_s": 3700 - t}, t) is None for t in range(0, 3600, 60))
    jump = SlipWatch(600.0)
    jumps = [jump.look({"low_s": (9000 if t == 120 else 3600) - t, "high_s": 9500 - t}, t) for t in range(0, 600, 30)]
    assert jumps == [None] * 20, "one odd forecast is no slip"
