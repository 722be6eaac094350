"""Supervisor and agent as a host sees them: real processes, real kills, an empty environment, the oldest Python too."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.answers import check_record
from orchestrator.services.outcome import failure_words
from tests.sshd.server import free_port
from tests.support.host_side import Agent, HostSide, Refused, attempts, ended, log_text, look, pythons
from tests.support.jobdir import JobDir, alive, environment, kill
from tests.support.waiting import wait_until


@pytest.fixture(params=pythons().values(), ids=pythons().keys())
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HostSide]:
    with HostSide(tmp_path, request.param) as side:
        yield side


def step(name: str, run: str, **more: object) -> dict[str, object]:
    return {"name": name, "run": run, "retry": {"attempts": 1}, **more}


def newest(agent: Agent, job: str, **fields: object) -> list[dict[str, Any]]:
    """The newest attempt of the first step, once there is one."""
    found: list[dict[str, Any]] = look(agent, job, **fields)["state"]["steps"][0]["attempts"][-1:]
    return found


# ------------------------------------------------------------------------------------------------------ how it ends


STRANGE_LINES = [
    '{"phase": ["x"], "state": "progress"}', '{"phase": "p", "state": {}}', '{"phase": {"a": 1}}', '["phase"]', "null", "{", "",
    "[" * 3900, "[" * 60000, '{"phase": "a", "state": "progress", "done": 36893488147419103232}', '{"phase": "a", "done": 1e999}',
    '{"phase": "a", "done": NaN, "total": -Infinity}', '{"phase": "a", "done": true}', '{"phase": "a", "done": -1, "total": []}',
    '{"phase": "\\ud800", "state": "start"}', '{"phase": "' + "y" * 5000 + '"}', '{"phase": "a", "done": ' + "9" * 5000 + "}",
]  # fmt: skip
"""Behind `::orch `: what no step of ours prints, and any program may."""
STRANGE_BARS = [
    f"x: 50%|##   | {'9' * 30}/{'9' * 40} [{'9' * 30}:00<{'9' * 30}:00, {'9' * 400}s/it]",
    f"x: 50%|##   | 1/{'9' * 20} [00:01<00:01, 0.{'0' * 300}1it/s]",
    "x: 50%|##   | 5/10 [999999999 days, 00:01<999999999 days, 00:01, 1e999s/it]",
    f"x: 50%|##   | 1/{'9' * 15} [9999999:00<00:01, 999999999s/it]",
    f"Loading files: 10% ({'9' * 100}/{'9' * 101})",
    f"global_step={'9' * 100}",
    f"Loading weights took {'9' * 400} seconds",
]


def test_nothing_that_a_program_prints_ends_it_or_spoils_its_record(host: HostSide) -> None:
    (host.work / "lines").write_text("".join([*(f"::orch {line}\n" for line in STRANGE_LINES), *(f"{bar}\n" for bar in STRANGE_BARS)]))
    agent = host.agent()
    job = host.launch(agent, "cat lines; until [ -e go ]; do sleep 0.03; done; cat lines; exit 3")
    wait_until(lambda: any(attempt.get("bars") for attempt in newest(agent, job.id)), "the lines were read")
    check_record(job.id, look(agent, job.id))
    assert alive(job.main)
    (host.work / "go").touch()
    assert ended(job) == "failed"
    assert attempts(agent, job.id) == [("failed", 3)]
    check_record(job.id, look(agent, job.id))
    assert not [event for event in job.events() if event["kind"] == "note"]


def test_a_mistake_in_our_own_reading_of_a_log_does_not_end_the_step(host: HostSide) -> None:
    reader = host.release / "remote_jobs" / "agent" / "markers.py"
    reader.write_text(reader.read_text().replace("def feed(", "def feed(self, chunk):\n        raise KeyError('x')\n\n    def _feed("))
    job = host.launch(host.agent(), "echo one; until [ -e go ]; do sleep 0.03; done; echo two")
    wait_until(lambda: job.kinds().count("note") == 1, "it is noted")
    (host.work / "go").touch()
    assert ended(job) == "succeeded"
    [note] = [event["data"]["text"] for event in job.events() if event["kind"] == "note"]
    assert note.startswith("orch does not understand this log (KeyError: 'x', see supervisor.log)")


@pytest.mark.parametrize(
    ("run", "state", "exit_status"),
    [
        ("true", "succeeded", 0),
        ("exit 3", "failed", 3),
        ("kill -9 $$", "failed", -9),
        ("kill -SEGV $$", "failed", -11),
        ("exec /nowhere/at/all", "failed", 127),
    ],
)
def test_exit_statuses(host: HostSide, run: str, state: str, exit_status: int) -> None:
    agent = host.agent()
    job = host.launch(agent, run)
    assert ended(job) == state
    assert attempts(agent, job.id) == [(state, exit_status)]
    assert job.record("result.json")["state"] == state
    assert not (job.path / "reserve").exists()


def test_a_job_outlives_its_agent_and_another_agent_finds_it(host: HostSide) -> None:
    first = host.agent()
    job = host.launch(first, "until [ -e go ]; do sleep 0.03; done; exit 5")
    job.wait_for_kind("attempt_started")
    first.process.kill()
    first.process.wait()
    assert alive(job.supervisor)
    (host.work / "go").touch()
    assert ended(job) == "failed"
    assert attempts(host.agent(), job.id) == [("failed", 5)]


def test_agent_ends_with_its_channel_and_holds_nothing_open(host: HostSide) -> None:
    """A closed channel ends the agent, and no process of the job keeps its pipes open (else ssh would hang)."""
    agent = host.agent()
    job = host.launch(agent, "sleep 60")
    job.wait_for_kind("attempt_started")
    pipes = {os.readlink(f"/proc/{agent.process.pid}/fd/{number}") for number in (0, 1)}
    for pid in (job.supervisor, job.main):
        held: set[str] = set()
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it goes on working, and closes files meanwhile
                held.add(os.readlink(path))
        assert not held & pipes, f"{pid} holds the channel"
    assert agent.close() == 0
    assert alive(job.main)


def test_surroundings_of_a_job(host: HostSide) -> None:
    agent = host.agent(SSH_CONNECTION="1.2.3.4 5 6.7.8.9 22", SSH_AUTH_SOCK="/tmp/dead")
    job = host.launch(
        agent,
        "env > env.txt; readlink /proc/self/fd/0 > stdin.txt; cat /proc/self/oom_score_adj > oom.txt; "
        "ls -l /proc/self/fd > fds.txt; cut -d' ' -f6 /proc/self/stat > session.txt; trap > traps.txt; "
        "grep Sig /proc/self/status > signals.txt; ps -o pid= -p $$ >/dev/null",
    )
    assert ended(job) == "succeeded"
    env = dict(line.split("=", 1) for line in (host.work / "env.txt").read_text().splitlines() if "=" in line)
    assert env["ORCH_JOB"] == job.id
    assert (env["PYTHONUNBUFFERED"], env["COLUMNS"], env["SPT_NOENV"]) == ("1", "400", "1")
    assert env["ORCH_WORKDIR"] == str(host.work)
    assert "SSH_CONNECTION" not in env
    assert "SSH_AUTH_SOCK" not in env
    assert (host.work / "stdin.txt").read_text() == "/dev/null\n"
    assert (host.work / "oom.txt").read_text() == "500\n"
    ignored = [line.split()[1] for line in (host.work / "signals.txt").read_text().splitlines() if "SigIgn" in line]
    # Signals 32 and 33 are glibc's own: posix_spawn in whoever started the tests may ignore them, no program can use them.
    allowed = 1 << 12 | 1 << 24 | 1 << 31 | 1 << 32
    assert int(ignored[0], 16) & ~allowed == 0, "the job must not start with ignored signals"


def test_supervisor_is_small_detached_and_marked_by_no_terminal(host: HostSide) -> None:
    agent = host.agent()
    job = host.launch(agent, "for i in $(seq 2000); do echo line $i of some output; done; sleep 60")
    job.wait_for_kind("attempt_started")
    supervisor = job.supervisor
    fields = Path(f"/proc/{supervisor}/stat").read_text().rpartition(")")[2].split()
    parent, session, terminal = int(fields[1]), int(fields[3]), int(fields[4])
    assert parent != agent.process.pid
    assert session != os.getsid(agent.process.pid)
    assert terminal == 0
    assert "ORCH_JOB" not in environment(supervisor), "the supervisor is not a process of the job"
    status = Path(f"/proc/{supervisor}/status").read_text()
    [peak] = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")]
    assert peak < 25 * 1024, f"{peak} KiB"
    assert os.readlink(f"/proc/{supervisor}/cwd") == "/"


def test_a_step_that_was_not_started_again_says_why(host: HostSide) -> None:
    """Here by a change that no `orch` sends: a fault of the host's must not be told as the program's."""
    agent = host.agent()
    job = host.launch(agent, "exit 3")
    assert ended(job) == "failed"
    agent.request("control", job=job.id, action="retry", args={"set": {"work.run": 5}}, wait_s=10)
    wait_until(lambda: job.kinds().count("finished") == 2, "it fails again, without an attempt")
    wait_until(lambda: not job.supervisors(), "and its supervisor has written that down")
    [step] = look(agent, job.id)["state"]["steps"]
    assert str(step["waiting"]).startswith("orch itself failed: TypeError")
    assert len(step["attempts"]) == 1
    view = {"id": job.id, "host": "box", "state": "failed", "steps": [step]}
    assert "not started again: orch itself failed: TypeError" in failure_words(view)


# -------------------------------------------------------------------------------------------------------- one copy


def starts(host: HostSide) -> list[str]:
    """Pids that the job wrote down, one per start."""
    path = host.work / "starts"
    return path.read_text().split() if path.exists() else []


def test_a_resent_launch_adopts(host: HostSide) -> None:
    agent = host.agent()
    spec = host.spec("echo $$ >> starts; sleep 60")
    first = agent.request("launch", spec=spec, secrets={}, new=False)
    second = agent.request("launch", spec=spec, secrets={}, new=False)
    third = host.agent().request("launch", spec=spec, secrets={}, new=False)
    assert [first["adopted"], second["adopted"], third["adopted"]] == [False, True, True]
    wait_until(lambda: starts(host), "the job runs")
    assert len(starts(host)) == 1
    [job] = host.jobs()
    assert len(job.supervisors()) == 1


def test_many_agents_launch_the_same_job_at_once(host: HostSide) -> None:
    agents = [host.agent() for _ in range(6)]
    spec = host.spec("echo $$ >> starts; sleep 60")
    numbers = [agent.send("launch", spec=spec, secrets={}, new=False) for agent in agents]
    answers = [agent.answer(number) for agent, number in zip(agents, numbers, strict=True)]
    assert {answer["job"] for answer in answers} == {spec["id"]}
    assert [answer["adopted"] for answer in answers].count(False) == 1, "one of them made the job"
    wait_until(lambda: starts(host), "the job runs")
    [job] = host.jobs()
    assert len(job.supervisors()) == 1
    assert len(starts(host)) == 1


def test_the_same_id_with_another_plan_is_refused(host: HostSide) -> None:
    agent = host.agent()
    host.launch(agent, "sleep 60")
    with pytest.raises(Refused, match="exists_other"):
        agent.request("launch", spec=host.spec("true", plan_sha256="1" * 64), secrets={}, new=False)


@pytest.mark.parametrize("job", ["", "..", "../../etc", "a/b", ".hidden", "a\0b", "x" * 300])
def test_ids_that_would_leave_the_folder_are_refused(host: HostSide, job: str) -> None:
    agent = host.agent()
    with pytest.raises(Refused):
        agent.request("launch", spec=host.spec("true", job), secrets={}, new=False)
    assert agent.request("hello")["ok"], "the agent lives on"


# ------------------------------------------------------------------------------------------------- lost, and found


def test_lost_with_and_without_survivors(host: HostSide) -> None:
    agent = host.agent()
    job = host.launch(agent, "sleep 300 & wait")
    job.wait_for_kind("attempt_started")
    main = job.main
    wait_until(lambda: len(job.marked()) == 2, "main and child run")
    kill(job.supervisor)
    wait_until(lambda: not job.supervisors(), "the supervisor is gone")
    found = look(agent, job.id)
    assert (found["state"]["state"], found["alive"]) == ("lost", False)
    assert main in [process["pid"] for process in found["lost"]["processes"]]
    for pid in job.marked():
        kill(pid)
    wait_until(lambda: not job.marked(), "they are gone")
    found = look(agent, job.id)
    assert found["state"]["state"] == "lost"
    assert found["lost"]["processes"] == []


def test_retry_of_a_lost_job_ends_the_survivors_first(host: HostSide) -> None:
    agent = host.agent()
    job = host.launch(agent, "echo $$ >> starts; until [ -e go ]; do sleep 0.03; done")
    job.wait_for_kind("attempt_started")
    main = job.main
    kill(job.supervisor)
    wait_until(lambda: not job.supervisors(), "the supervisor is gone")
    agent.request("control", job=job.id, action="retry", args={}, wait_s=10)
    job.wait_for_kind("attempt_started", count=2)
    assert not alive(main)
    (host.work / "go").touch()
    assert ended(job) == "succeeded"
    assert [state for state, _ in attempts(agent, job.id)] == ["lost", "succeeded"]
    seqs = [event["seq"] for event in job.events()]
    assert seqs == sorted(set(seqs))


# --------------------------------------------------------------------------------------------------- stop and trees


ESCAPE = (
    "setsid sleep 996 & (sleep 996 &) ; env -i setsid sleep 996 & setsid -f sleep 996; "
    "env -i setsid -f sleep 996; touch ready; sleep 996"
)


def sleepers() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ends while we look
            if alive(int(path.name)) and (path / "cmdline").read_bytes() == b"sleep\x00996\x00":
                found.append(int(path.name))
    return found


def test_stop_finds_escapees(host: HostSide) -> None:
    agent = host.agent()
    before = set(sleepers())
    job = host.launch(agent, [step("work", ESCAPE, grace_s=1.0)])
    wait_until((host.work / "ready").exists, "all have started")
    wait_until(lambda: len(set(sleepers()) - before) == 6, "six sleepers run")
    agent.request("control", job=job.id, action="stop", args={}, wait_s=10)
    assert ended(job) == "stopped"
    assert not set(sleepers()) - before


def test_stop_ladder_ends_in_sigkill_and_says_so(host: HostSide) -> None:
    agent = host.agent()
    job = host.launch(agent, [step("work", "trap '' TERM; touch ready; while :; do sleep 0.05; done", grace_s=0.4)])
    wait_until((host.work / "ready").exists, "the trap is set")
    started = time.monotonic()
    answer = agent.request("control", job=job.id, action="stop", args={"reason": "enough"}, wait_s=10)
    assert answer["acknowledged"] is True
    assert ended(job) == "stopped"
    assert 0.3 < time.monotonic() - started < 15, "the plan's grace, not the usual one of 15 s"
    signals = [event["data"]["signal"] for event in job.events() if event["kind"] == "stop_sent"]
    assert [str(signum).replace("SIG", "") for signum in signals] in (["TERM", "KILL"], ["15", "9"])


def test_a_stop_that_came_too_late_does_not_stop_a_later_retry(host: HostSide) -> None:
    """Written while the supervisor was ending, read by nobody: the next life of the job is not its business."""
    agent = host.agent()
    job = host.launch(agent, "[ -e good ]")
    assert ended(job) == "failed"
    late = {"v": 1, "id": "1.000000-stop-late", "action": "stop", "args": {}}
    (job.path / "control" / "1.000000-stop-late.json").write_text(json.dumps(late))
    (host.work / "good").touch()
    agent.request("control", job=job.id, action="retry", args={}, wait_s=10)
    job.wait_for_kind("finished", count=2)
    assert ended(job) == "succeeded"


def test_a_stop_during_the_end_is_acknowledged_and_leaves_nothing_behind(host: HostSide) -> None:
    agent = host.agent()
    job = host.launch(agent, "until [ -e go ]; do sleep 0.03; done")
    job.wait_for_kind("attempt_started")
    (host.work / "go").touch()
    answer = agent.request("control", job=job.id, action="stop", args={}, wait_s=10)
    assert answer["acknowledged"] is True
    assert ended(job) in {"succeeded", "stopped"}
    assert not list((job.path / "control").glob("*.json"))


def test_stragglers_are_reported_and_ended_when_the_main_process_ends(host: HostSide) -> None:
    agent = host.agent()
    job = host.launch(agent, "setsid sleep 300 & echo $! > child; exit 0")
    assert ended(job, within_s=40) == "succeeded"
    assert not alive(int((host.work / "child").read_text()))
    [event] = [event for event in job.events() if event["kind"] == "stragglers"]
    assert event["data"]["processes"][0]["pid"] == int((host.work / "child").read_text())


def test_signals_to_the_supervisor_are_noted_not_obeyed(host: HostSide) -> None:
    agent = host.agent()
    job = host.launch(agent, "until [ -e go ]; do sleep 0.03; done")
    job.wait_for_kind("attempt_started")
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        kill(job.supervisor, signum)
    job.wait_for_kind("note", count=3)
    (host.work / "go").touch()
    assert ended(job) == "succeeded"


# ---------------------------------------------------------------------------------------------------- needs, services


def test_steps_run_in_the_order_of_their_needs(host: HostSide) -> None:
    agent = host.agent()
    steps = [
        step("c", "echo c >> order", needs=["b"]),
        step("a", "echo a >> order"),
        step("b", "echo b >> order", needs=["a"]),
    ]
    assert ended(host.launch(agent, steps)) == "succeeded"
    assert (host.work / "order").read_text().split() == ["a", "b", "c"]


def test_a_step_whose_need_failed_is_skipped(host: HostSide) -> None:
    agent = host.agent()
    job = host.launch(agent, [step("a", "exit 1"), step("b", "touch ran", needs=["a"]), step("c", "touch other")])
    assert ended(job) == "failed"
    states = [item["state"] for item in look(agent, job.id)["state"]["steps"]]
    assert states == ["failed", "skipped", "succeeded"]
    assert not (host.work / "ran").exists()


@pytest.mark.parametrize("ready", ["log", "port", "http"])
def test_a_service_is_ready_before_its_user_starts_and_stopped_after(host: HostSide, ready: str) -> None:
    agent = host.agent()
    port = free_port()
    server = f"{host.python} -u -m http.server {port} --bind 127.0.0.1"
    probe = {"log": "Serving HTTP", "port": port, "http": f"http://127.0.0.1:{port}/"}[ready]
    steps = [
        step("serve", server, service={"ready": {ready: probe}, "timeout_s": 80}),
        step("use", f"exec 3<>/dev/tcp/127.0.0.1/{port} && touch reached", needs=["serve"]),
    ]
    job = host.launch(agent, steps)
    assert ended(job) == "succeeded"
    assert (host.work / "reached").exists()
    assert [item["state"] for item in look(agent, job.id)["state"]["steps"]] == ["succeeded", "succeeded"]
    assert "step_ready" in job.kinds()


def test_a_service_that_is_never_ready_fails(host: HostSide) -> None:
    agent = host.agent()
    steps = [
        step("serve", "sleep 60", service={"ready": {"log": "never printed"}, "timeout_s": 0.5}, grace_s=0.5),
        step("use", "touch reached", needs=["serve"]),
    ]
    job = host.launch(agent, steps)
    assert ended(job) == "failed"
    assert not (host.work / "reached").exists()


# ------------------------------------------------------------------------------------------------------------- looks


def test_long_poll_answers_when_the_job_ends(host: HostSide) -> None:
    agent = host.agent()
    job = host.launch(agent, "until [ -e go ]; do sleep 0.01; done; date +%s.%N > ended")
    job.wait_for_kind("attempt_started")
    delays = []
    seq = look(agent, job.id)["state"]["seq"]
    number = agent.send("look", jobs=[job.id], seen={job.id: seq}, wait_s=20)
    (host.work / "go").touch()
    while True:
        answer = agent.answer(number)
        state = answer["jobs"][job.id]["state"]
        if state["state"] == "succeeded":
            delays.append(time.time() - float((host.work / "ended").read_text()))
            break
        number = agent.send("look", jobs=[job.id], seen={job.id: state["seq"]}, wait_s=20)
    assert delays[0] < 15, "not at the end of the poll's 20 s"


def test_an_idle_long_poll_lasts_its_time_and_others_are_answered_meanwhile(host: HostSide) -> None:
    agent = host.agent()
    job = host.launch(agent, "sleep 60")
    wait_until(lambda: job.state == "running", "the state says so too: it is written after the event")
    seq = look(agent, job.id)["state"]["seq"]
    started = time.monotonic()
    number = agent.send("look", jobs=[job.id], seen={job.id: seq}, wait_s=4.0)
    for _ in range(5):
        agent.request("hello")
    assert time.monotonic() - started < 3.5
    agent.answer(number)
    assert time.monotonic() - started >= 3.8


def test_who_asks_for_the_living_hears_of_an_end_and_of_no_earlier_one(host: HostSide) -> None:
    agent = host.agent()
    ended(host.launch(agent, "true", job="before"))
    job = host.launch(agent, "until [ -e go ]; do sleep 0.01; done")
    wait_until(lambda: job.state == "running", "the state says so too")
    seen = {job.id: look(agent, job.id)["state"]["seq"]}
    started = time.monotonic()
    number = agent.send("look", active_only=True, seen=seen, wait_s=0.8)
    assert set(agent.answer(number)["jobs"]) == {job.id}
    assert time.monotonic() - started > 0.5, "the job that had ended before is no news"
    (host.work / "go").touch()
    state = None
    while state != "succeeded":
        found = agent.answer(agent.send("look", active_only=True, seen=seen, wait_s=20))["jobs"][job.id]["state"]
        state, seen[job.id] = found["state"], found["seq"]
    assert agent.answer(agent.send("look", active_only=True, seen=seen, wait_s=0.1))["jobs"] == {}


def test_log_deltas_are_exact_and_bounded(host: HostSide) -> None:
    agent = host.agent()
    job = host.launch(agent, "seq -f 'line %.0f of a log' 40000; printf 'no newline \\377 at the end'")
    assert ended(job) == "succeeded"
    whole = job.log(1, "work").read_bytes()
    cursor = {"job": job.id, "step": "work", "attempt": 1, "inode": 0, "offset": 0, "max_bytes": 65536}
    read = b""
    for _ in range(100):
        answer = agent.request("look", jobs=[job.id], logs=[cursor])
        part = log_text(answer)
        assert len(part) <= 65536
        read += part
        entry = answer["logs"][0]
        cursor.update(inode=entry["inode"], offset=entry["end"])
        if entry["caught_up"]:
            break
    assert read == whole
    tail = agent.request("look", jobs=[job.id], logs=[{**cursor, "offset": -1, "tail_bytes": 100}])
    assert whole.endswith(log_text(tail))
    assert 0 < len(log_text(tail)) <= 100


def test_damaged_jobs_and_strange_folders_hide_no_healthy_one(host: HostSide) -> None:
    agent = host.agent()
    job = host.launch(agent, "true")
    ended(job)
    for name, content in (("no-spec", None), ("half", b'{"v": 1, "id'), ("newer", b'{"v": 99}'), ("binary", b"\0\xff" * 99)):
        (host.root / "jobs" / name).mkdir()
        if content:
            (host.root / "jobs" / name / "spec.json").write_bytes(content)
    (host.root / "jobs" / "a-file").touch()
    answer = agent.request("look")
    assert answer["jobs"][job.id]["state"]["state"] == "succeeded"
    assert answer["jobs"]["no-spec"]["unfinished"] is True if "no-spec" in answer["jobs"] else True
    assert {"half", "newer", "binary"} <= set(answer["unreadable"])
    assert "99" in answer["unreadable"]["newer"]


@pytest.mark.parametrize(
    "line",
    [b"not json\n", b"[]\n", b"{}\n", b'{"id": 1}\n', b'{"id": 2, "op": "no such"}\n', b'{"id": 3, "op": "look", "jobs": 7}\n',
     b'{"id": 4, "op": "launch"}\n', b'{"id": 5, "op": "get", "path": "/etc/shadow", "offset": -5, "length": 1e99}\n',
     b"\xff\xfe\n", b'{"id": 6, "op": "control", "job": "../x", "action": "stop"}\n'],
)  # fmt: skip
def test_nonsense_on_the_wire_does_not_end_the_agent(host: HostSide, line: bytes) -> None:
    agent = host.agent()
    assert agent.process.stdin is not None
    agent.process.stdin.write(line)
    agent.process.stdin.flush()
    agent._last = 100
    assert agent.request("hello")["ok"]


def test_secrets_reach_the_job_and_nothing_else(host: HostSide) -> None:
    agent = host.agent()
    secret = "hunter2-" + "x" * 20
    spec = host.spec([step("work", "printf '%s' \"$TOKEN\" | wc -c > tmp; mv tmp length; until [ -e go ]; do sleep 0.03; done")])
    spec["steps"][0]["secrets"] = ["TOKEN"]
    agent.request("launch", spec=spec, secrets={"work": {"TOKEN": secret}}, new=False)
    [job] = host.jobs()
    wait_until((host.work / "length").exists, "the job has read it")
    wait_until(lambda: job.state == "running", "all that a start writes is there: no file comes and goes")
    assert int((host.work / "length").read_text()) == len(secret)
    for path in job.path.rglob("*"):
        if path.is_file() and secret.encode() in path.read_bytes():
            assert path.name == "secrets.json"
            assert path.stat().st_mode & 0o777 == 0o600
    for pid in (job.supervisor, agent.process.pid):
        assert secret.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    (host.work / "go").touch()
    ended(job)
    assert not [path for path in host.root.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def test_files_are_put_in_pieces_verified_and_resumed(host: HostSide) -> None:
    import hashlib

    agent = host.agent()
    data = os.urandom(300_000)
    sha256 = hashlib.sha256(data).hexdigest()
    assert agent.request("have", sha256=[sha256])["missing"] == [{"sha256": sha256, "offset": 0}]
    agent.request("put", data[:100_000], sha256=sha256, size=len(data), offset=0, last=False)
    agent.process.kill()
    other = host.agent()
    [missing] = other.request("have", sha256=[sha256])["missing"]
    assert missing == {"sha256": sha256, "offset": 100_000}
    answer = other.request("put", data[100_000:], sha256=sha256, size=len(data), offset=100_000, last=True)
    assert answer["stored"] is True
    assert other.request("have", sha256=[sha256])["missing"] == []
    with pytest.raises(Refused):
        other.request("put", b"other bytes", sha256="0" * 64, size=11, offset=0, last=True)
    assert other.request("have", sha256=["0" * 64])["missing"] == [{"sha256": "0" * 64, "offset": 0}]


def test_the_process_table_shows_the_job(host: HostSide) -> None:
    agent = host.agent()
    job = host.launch(agent, "sleep 61 & wait")
    wait_until(lambda: len(job.marked()) == 2, "main and child run")
    [attempt] = wait_until(lambda: newest(agent, job.id, processes=True), "the attempt is in the job's state")
    commands = [process["command"] for process in attempt["processes"]]
    assert any("sleep 61" in command for command in commands)
    assert {"pid", "ppid", "user", "state", "cpu_pct", "rss_mib", "command"} <= set(attempt["processes"][0])


DAEMON = "( setsid sh -c 'sleep {0} & exec sleep 1{0}' & ) ; sleep 2{0}"
"""A session of its own, its parent gone, with a child: neither descent nor session leads to it from the main process."""


def commands(agent: Agent, job: JobDir) -> list[set[str]]:
    """What each step's running attempt is shown to run, its shells left out."""
    steps = look(agent, job.id, processes=True)["state"]["steps"]
    found = [[row["command"] for one in item["attempts"] for row in one.get("processes") or []] for item in steps]
    return [{command for command in some if command.startswith("sleep")} for some in found]


def test_what_left_the_main_process_is_shown_as_stop_knows_it(host: HostSide) -> None:
    agent = host.agent()
    job = host.launch(agent, DAEMON.format(71))
    wait_until(lambda: commands(agent, job) == [{"sleep 71", "sleep 171", "sleep 271"}], "all of the job's are shown")


def test_what_left_is_shown_at_its_own_step(host: HostSide) -> None:
    agent = host.agent()
    wiped = "( setsid sh -c 'env -i sleep 73 & exec sleep 173' & ) ; sleep 273"
    job = host.launch(agent, [step("one", DAEMON.format(72)), step("two", wiped)])
    expected = [{"sleep 72", "sleep 172", "sleep 272"}, {"sleep 73", "sleep 173", "sleep 273"}]
    wait_until(lambda: commands(agent, job) == expected, "each step shows its own", seen=lambda: commands(agent, job))


def test_the_first_look_knows_what_a_process_has_used(host: HostSide) -> None:
    """A one-shot `status` has no look before it: CPU since the start, as ps shows it."""
    job = host.launch(host.agent(), "while [ ! -e enough ]; do :; done; sleep 60")
    job.wait_for_kind("attempt_started")
    main = job.main
    wait_until(lambda: sum(map(int, Path(f"/proc/{main}/stat").read_text().split()[13:15])) >= 20, "it has used 0.2 s")
    [attempt] = wait_until(lambda: newest(host.agent(), job.id, processes=True), "the attempt is in the job's state")
    (host.work / "enough").touch()
    assert attempt["processes"][0]["cpu_pct"] > 1


def test_records_are_json_lines_with_one_event_each(host: HostSide) -> None:
    agent = host.agent()
    job = host.launch(agent, "true")
    ended(job)
    lines = (job.path / "events.jsonl").read_bytes().splitlines()
    events = [json.loads(line) for line in lines]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert all(event["v"] == 1 and event["at"].endswith("Z") for event in events)
    assert events[0]["kind"] == "created"
    assert events[-1]["kind"] == "finished"


def test_a_supervisor_that_crashes_is_not_said_to_be_killed(host: HostSide) -> None:
    """A defect of ours is told as one: with `killed` a person would look for who killed it."""
    module = host.release / "remote_jobs" / "agent" / "usage.py"
    sound = module.read_text()
    module.write_text(sound + "\n\ndef _broken(self, now):\n    raise TypeError('of no use')\n\n\nUsageKeeper.tick = _broken\n")
    agent = host.agent()
    job = host.launch(agent, "sleep 1000")
    wait_until(lambda: look(agent, job.id)["lost"], "it is lost")
    reason = look(agent, job.id)["lost"]["reason"]
    assert "the supervisor crashed, a defect of orch (TypeError at usage.py:" in reason
    assert str(job.path / "supervisor.log") in reason
    module.write_text(sound)
    agent.request("control", job=job.id, action="retry", args={})
    wait_until(lambda: len(attempts(agent, job.id)) == 2, "it is tried again")
    kill(job.supervisor)
    wait_until(lambda: look(agent, job.id)["lost"], "it is lost again")
    assert "the supervisor was killed" in look(agent, job.id)["lost"]["reason"], "what an earlier one did is not told of this one"
    agent.request("control", job=job.id, action="retry", args={"set": {"work.run": "exit 0"}})
    assert ended(job) == "succeeded"
    told = [one["verdict"] for one in look(agent, job.id)["state"]["steps"][0]["attempts"]]
    assert "the supervisor of attempt 1 crashed, a defect of orch" in told[0]["summary"]
    assert "the supervisor of attempt 2 was killed" in told[1]["summary"]


def test_null_in_a_retry_means_what_leaving_a_key_out_does(host: HostSide) -> None:
    agent = host.agent()
    job = host.launch(agent, "exit 3")
    assert ended(job) == "failed"
    changes = {"work.gpus": None, "work.retry": None, "work.run": "exit 4"}
    agent.request("control", job=job.id, action="retry", args={"set": changes})
    wait_until(lambda: attempts(agent, job.id)[1:2], "another attempt")
    wait_until(lambda: attempts(agent, job.id)[1] == ("failed", 4), "its end", seen=lambda: attempts(agent, job.id))
    agent.request("control", job=job.id, action="stop", args={})
    wait_until(lambda: look(agent, job.id)["state"]["state"] in ("stopped", "failed"), "it goes on to its end")
