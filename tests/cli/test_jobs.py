"""The commands on a real sshd with real jobs, through the installed `orch`. One host for the module, small jobs."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.main import main
from tests.cli.terminal import Terminal
from tests.sshd.server import Sshd, free_port, make_key
from tests.support.jobdir import JobDir, agents, kill
from tests.support.laptop import ORCH, Answer, Laptop
from tests.support.waiting import wait_until

SNAPSHOTS = Path(__file__).parent / "snapshots"
GO = "until [ -e go ]; do sleep 0.05; done"
BAR = "for i in 1 2 3 4; do printf '\\rLoading: %d%%|#| %d/4 [00:01<00:01, 1.00it/s]' $((i*25)) $i; done; echo"


class Host:
    """The module's host with its laptop, and what runs there."""

    def __init__(self, folder: Path, sshd: Sshd) -> None:
        self.folder, self.sshd = folder, sshd
        self.root = folder / "root"
        self.laptop = self.another_laptop("laptop")
        self._number = 0

    def another_laptop(self, name: str) -> Laptop:
        return Laptop(self.folder / name, {"box": self.sshd.inventory_entry(root=str(self.root))})

    def quick(self, *arguments: object, expect: int | None = None) -> Answer:
        """`orch ARGUMENTS` in this process: the same program without the half second that its imports take."""
        streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="replace", write_through=True) for _ in "oe"]
        before, folder = dict(os.environ), Path.cwd()
        os.environ.clear()
        os.environ.update(self.laptop.environment)
        os.chdir(self.laptop.folder)
        try:
            with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
                status = main([str(item) for item in arguments])
        finally:
            os.environ.clear()
            os.environ.update(before)
            os.chdir(folder)
        out, err = (stream.buffer.getvalue().decode("utf-8", "replace") for stream in streams)  # type: ignore[attr-defined]
        answer = Answer(["orch", *map(str, arguments)], status, out, err)
        assert expect is None or status == expect, f"expected exit status {expect}: {answer}"
        return answer

    def status(self, job: str) -> dict[str, Any]:
        """The job's object of `orch status JOB --json`."""
        [found] = self.quick("status", job, "--json", expect=0).json["jobs"]
        return dict(found)

    def plan(self, *steps: dict[str, Any], **top: Any) -> tuple[Path, Path]:
        """A plan with its own work folder: (plan, folder)."""
        self._number += 1
        name = f"job{self._number}"
        work = self.folder / name
        work.mkdir()
        return self.laptop.plan(steps, name=name, workdir=str(work), **top), work

    def launch(self, run: str, *arguments: object, **step: Any) -> tuple[str, Path]:
        """Launch one step: (job id, work folder)."""
        plan, work = self.plan({"name": "work", "run": run, "retry": {"attempts": 1}, **step})
        return self.start(plan, *arguments), work

    def start(self, plan: Path, *arguments: object) -> str:
        """Launch without preflight: the job's id."""
        return self.quick("launch", plan, "--no-preflight", *arguments, expect=0).out.strip()

    def job(self, job: str) -> JobDir:
        return JobDir(self.root, job)

    def running(self, job: str) -> JobDir:
        """The job, once its state says that it runs: written a moment after the launch has answered."""
        found = self.job(job)
        wait_until(lambda: found.state == "running", f"{job} runs", seen=found.kinds)
        return found

    def end(self) -> None:
        if (self.root / "jobs").is_dir():
            for path in (self.root / "jobs").iterdir():
                self.job(path.name).end_everything()
        for pid in agents(self.root):
            kill(pid)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, shared_sshd: Sshd) -> Iterator[Host]:
    ready = Host(tmp_path_factory.mktemp("cli"), shared_sshd)
    yield ready
    ready.end()


# ------------------------------------------------------------------------------------------------- snapshots of the JSON

_VOLATILE = [
    (re.compile(r"job\d+-\d{8}-[0-9a-z]{6}"), "<job>"),
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z"), "<time>"),
    (re.compile(r"\b[0-9a-f]{64}\b"), "<sha256>"),
]
_NUMBERS = {"age_s", "skew_s", "seq", "pid", "low_s", "high_s", "took_s", "line", "started_line", "ended_line", "quiet_s", "log_bytes", "log_quiet_s"}


def normal(value: Any, folder: Path, key: str = "") -> Any:
    """A document with what differs from run to run replaced by its kind."""
    if isinstance(value, dict):
        return {name: normal(item, folder, name) for name, item in value.items()}
    if isinstance(value, list):
        return [normal(item, folder, key) for item in value]
    if isinstance(value, str):
        value = value.replace(str(folder), "<folder>")
        for pattern, word in _VOLATILE:
            value = pattern.sub(word, value)
        return re.sub(r"\bjob\d+\b", "<plan>", value)
    if key in _NUMBERS and isinstance(value, (int, float)) and not isinstance(value, bool):
        return "<number>"
    return value


def shape(value: Any) -> Any:
    """The names and kinds of a document, for facts that differ between machines."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in sorted(value.items())}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def frozen(name: str, document: Any) -> None:
    """Compare with the frozen document; ORCH_FREEZE=1 writes it anew."""
    path = SNAPSHOTS / f"{name}.json"
    text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    if os.environ.get("ORCH_FREEZE"):
        path.write_text(text, encoding="utf-8")
    assert json.loads(path.read_text(encoding="utf-8")) == json.loads(text)


# ------------------------------------------------------------------------------------------------------- the commands


def test_launch_prints_the_id_alone_and_freezes_its_json(host: Host) -> None:
    plan, _ = host.plan({"name": "work", "run": "true"})
    answer = host.laptop.run("launch", plan, "--no-preflight", expect=0)
    assert re.fullmatch(r"job\d+-\d{8}-[0-9a-z]{6}\n", answer.out)
    document = host.quick("launch", plan, "--no-preflight", "--json", expect=0).json
    frozen("launch", normal(document, host.folder))


def test_a_job_from_launch_to_history_with_frozen_documents(host: Host) -> None:
    job, _ = host.launch(f"{BAR}; echo RuntimeError: boom >&2; exit 3")
    waited = host.quick("wait", job, "--json")
    assert waited.status == 1
    frozen("wait", normal(waited.json, host.folder))
    why = host.quick("why", job, "--json", expect=0).json
    assert {"schema", "job", "step", "attempt", "verdict", "exit_status", "evidence", "changed_next", "incident"} <= set(why)
    assert (why["step"], why["attempt"], why["exit_status"]) == ("work", 1, 3)
    frozen("why", sorted(why))
    history = host.quick("history", "--json", expect=0).json
    [entry] = [item for item in history["jobs"] if item["id"] == job]
    frozen("history", normal(entry, host.folder))
    text = host.quick("status", job, expect=0).out
    assert text.startswith(f"{job}  failed  on box")
    assert "exit 3" in text
    assert "exit 3" in host.quick("why", job, expect=0).out


def test_status_of_a_running_job_is_frozen(host: Host) -> None:
    job, work = host.launch(f"{BAR}; {GO}")

    def document() -> Any:
        found = host.quick("status", job, "--json", expect=0).json
        attempts = found["jobs"][0]["steps"][0]["attempts"]
        return found if attempts and attempts[0]["bars"] and attempts[0].get("processes") else None

    found = wait_until(document, "the bar and the processes are in the status", every_s=0.2)
    attempt = found["jobs"][0]["steps"][0]["attempts"][0]
    attempt["processes"] = shape([{**row, "cpu_pct": 0.0} for row in attempt["processes"]])
    attempt["bars"] = shape(attempt["bars"])
    attempt["phases"] = shape(attempt["phases"])
    found["jobs"][0]["eta"] = None  # it comes when the bar has been followed for a while
    frozen("status", normal(found, host.folder))
    (work / "go").touch()
    host.quick("wait", job, expect=0)


def test_abbreviations_ambiguity_and_nearest(host: Host) -> None:
    plan, _ = host.plan({"name": "work", "run": "true"})
    one, two = host.start(plan), host.start(plan, "--new")
    common = one[: next(at for at, (mine, other) in enumerate(zip(one, two, strict=True)) if mine != other)]
    answer = host.quick("wait", common)
    assert answer.status == 2
    assert one in answer.err
    assert two in answer.err
    assert host.quick("wait", one[: len(common) + 1], expect=0).out == f"{one} succeeded\n"
    answer = host.quick("wait", one[:-1] + "?", "--json")
    assert answer.status == 2
    assert answer.json["error"]["code"] == "no_job"
    assert one[:-6] in answer.json["error"]["hint"]


def test_an_empty_ledger_finds_the_jobs_again(host: Host) -> None:
    job, _ = host.launch("true")
    host.quick("wait", job, expect=0)
    stranger = host.another_laptop("stranger")
    assert job in {item["id"] for item in stranger.run("status", "--json", expect=0).json["jobs"]}
    assert stranger.run("wait", job, expect=0).out == f"{job} succeeded\n"


def test_wait_times_out_with_124_and_the_job_goes_on(host: Host) -> None:
    job, work = host.launch(GO)
    host.running(job)
    answer = host.quick("wait", job, "--timeout", "0.5")
    assert answer.status == 124
    assert "the job goes on" in answer.err
    assert host.status(job)["state"] == "running"
    (work / "go").touch()
    assert host.quick("wait", job, "--timeout", "1m", expect=0).out == f"{job} succeeded\n"


def test_watch_in_a_pipe_prints_dated_lines_and_exits_as_the_job_did(host: Host) -> None:
    job, _ = host.launch(f"{BAR}; exit 4")
    answer = host.laptop.run("watch", job)
    assert answer.status == 1
    lines = answer.out.splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ box ", line) for line in lines), lines
    assert any(f"{job} work: attempt 1 started" in line for line in lines)
    assert any("exit 4" in line for line in lines)
    assert [line[:20] for line in lines] == sorted(line[:20] for line in lines)
    assert f"{job}: failed" in lines[-1]
    assert "\x1b" not in answer.out


def test_what_a_program_says_of_its_own_progress_is_shown_as_a_bar_is(host: Host) -> None:
    """`::orch` lines, as `orch init`'s first plan prints them: in status, watch and explain, with an expected end."""
    marker = """'::orch {"phase": "count", "state": "progress", "done": '$i', "total": 25}'"""
    job, work = host.launch(f"for i in $(seq 17); do echo {marker}; sleep 0.15; done; {GO}")
    wanted = r"running +count 17/25 68%, \d\d:\d\d.* left, for "
    wait_until(
        lambda: re.search(wanted, host.quick("status", job, expect=0).out.splitlines()[1]), "the count is shown",
        every_s=0.2, seen=lambda: host.quick("status", job).out,
    )  # fmt: skip
    assert "phases: count (running, 17/25 68%)" in host.quick("explain", host.job(job).log(1, "work"), expect=0).out
    with host.laptop.started("watch", job) as process:
        assert process.stdout is not None
        wait_until(lambda: "count 17/25 68%" in process.stdout.readline().decode(), "a dated line tells the count")
        (work / "go").touch()
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "17/25" not in out.decode(), "told once"


def test_launch_watch_exits_as_the_job_did(host: Host) -> None:
    plan, _ = host.plan({"name": "work", "run": "exit 5", "retry": {"attempts": 1}})
    answer = host.laptop.run("launch", plan, "--no-preflight", "--watch")
    assert answer.status == 1
    assert re.match(r"job\d+-\d{8}-\w{6}\n", answer.out)


def test_watching_everything_ends_when_nothing_runs(host: Host) -> None:
    job, work = host.launch(GO)
    with host.laptop.started("watch") as process:
        assert process.stdout is not None
        wait_until(lambda: job in process.stdout.readline().decode(), "the job is shown")
        (work / "go").touch()
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert f"{job}: succeeded" in out.decode()
    quiet = host.laptop.run("watch", expect=0)
    assert quiet.out == ""
    assert "nothing runs" in quiet.err


def test_ctrl_c_in_watch_is_130_and_leaves_the_job(host: Host) -> None:
    job, work = host.launch(GO)
    host.running(job)
    with host.laptop.started("watch", job) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "jobs on hosts go on" in err.decode()
    assert host.status(job)["state"] == "running"
    (work / "go").touch()
    host.quick("wait", job, expect=0)


def test_stop_is_final_until_retry(host: Host) -> None:
    job, work = host.launch(GO)
    host.job(job).wait_for_kind("attempt_started")
    document = host.quick("stop", job, "--wait", "--json", expect=0).json
    frozen("stop", normal(document, host.folder))
    assert host.quick("wait", job).status == 1
    assert host.quick("stop", job, expect=0).out == f"{job} stopped\n"
    (work / "go").touch()
    document = host.quick("retry", job, "--json", expect=0).json
    assert document["acknowledged"] is True
    frozen("retry", normal({**document, "state": "<state>"}, host.folder))
    host.quick("wait", job, expect=0)
    assert "nothing to retry" in host.quick("retry", job, expect=2).err
    assert host.quick("retry", job, "--json", expect=2).json["error"]["code"] == "wrong_state", "no trouble of the host"


def test_a_wrong_set_of_retry_reaches_no_host(host: Host) -> None:
    job, _ = host.launch("exit 1")
    host.quick("wait", job)
    for option, words in (
        ("nostep.with.x=1", "no step is called 'nostep'"),
        ("work=1", "the path ends at the step"),
        ("work.foo=1", "unknown key 'foo'"),
        ("work.env.X", "no '='"),
        ("work.env.X=[1", "cannot be read"),
    ):
        answer = host.quick("retry", job, "--set", option)
        assert answer.status == 2
        assert words in answer.err
    assert "reopened" not in host.job(job).kinds()


def test_retry_with_set_changes_the_step(host: Host) -> None:
    job, _ = host.launch('test "$HELLO" = there')
    assert host.quick("wait", job).status == 1
    host.quick("retry", job, "--set", "work.env.HELLO=there", expect=0)
    host.quick("wait", job, expect=0)


def test_a_retry_of_one_step_says_what_runs_again_with_it(host: Host) -> None:
    hold = {"run": "until [ -e go ]; do sleep 0.05; done", "needs": ["a"], "retry": {"attempts": 1}}
    plan, work = host.plan(
        {"name": "a", "run": "echo a >> ran"},
        {"name": "b", **hold},
        {"name": "c", "run": "echo c >> ran", "needs": ["b"]},
        {"name": "d", "run": "echo d >> ran", "needs": ["c"]},
        {"name": "e", **hold},
    )
    job = host.start(plan)
    wait_until(lambda: host.job(job).kinds().count("attempt_started") == 3, "b and e run")
    host.quick("stop", job, "--step", "b", expect=0)
    host.job(job).wait_for_kind("step_stopped")  # before it could see that it may go
    (work / "go").touch()
    host.quick("wait", job, expect=1)
    done = host.quick("retry", job, "--step", "a", "--json", expect=2).json["error"]
    assert (done["code"], "step a of job" in done["message"], "nothing to retry" in done["message"]) == ("wrong_state", True, True)
    again = host.quick("retry", job, "--step", "c", expect=0).out
    assert again.endswith(": c, and b which it needs, then d which was skipped for want of it\n")
    host.quick("wait", job, expect=0)
    assert (work / "ran").read_text().split() == ["a", "c", "d"]


def test_the_advice_of_why_can_be_typed_as_it_stands(host: Host) -> None:
    job, _ = host.launch("echo something odd", done={"count": "out/*", "equals": 3})
    host.quick("wait", job, expect=1)
    [line] = [line for line in host.quick("why", job, expect=0).out.splitlines() if "-> " in line]
    command = line.split("orch ")[1]
    assert command == f"logs {job} --step work --tail 200"
    assert host.quick(*shlex.split(command), expect=0).out == "something odd\n"


def test_of_two_failed_steps_the_first_to_fail_is_the_cause(host: Host) -> None:
    late = {"name": "late", "run": "until [ -e failed ]; do sleep 0.02; done; sleep 1; exit 4", "retry": {"attempts": 1}}
    early = {"name": "early", "run": "touch failed; echo here; exit 3", "retry": {"attempts": 1}}
    job = host.start(host.plan(late, early)[0])
    waited = host.quick("wait", job, expect=1)
    assert "failed: step early, attempt 1 (exit 3)" in waited.err
    assert waited.err.split("; after it failed: ")[1].startswith("late\n")
    told = host.quick("why", job, expect=0).out
    assert "step early, attempt 1: exit 3" in told
    assert "failed after it: late, exit 4" in told
    document = host.quick("why", job, "--json", expect=0).json
    assert (document["step"], [one["step"] for one in document["also_failed"]]) == ("early", ["late"])
    assert host.quick("logs", job, expect=0).out == "here\n"
    assert host.quick("why", job, "--step", "late", "--json", expect=0).json["exit_status"] == 4


def test_a_step_that_was_ended_with_its_service_says_so(host: Host) -> None:
    plan, work = host.plan(
        {"name": "web", "run": f"echo up; {GO}; exit 3", "service": {"ready": {"log": "up"}}, "retry": {"attempts": 1}},
        {"name": "user", "run": "touch running; exec sleep 600", "needs": ["web"]},
    )
    job = host.start(plan)
    wait_until((work / "running").exists, "the step that needs the service runs")
    (work / "go").touch()
    assert "step web, attempt 1 (exit 3)" in host.quick("wait", job, expect=1).err
    said = "orch ended this attempt because the service web ended, which the step needs"
    [line] = [line for line in host.quick("status", job, expect=0).out.splitlines() if line.startswith("  user")]
    assert re.search(rf"user +skipped +took .*{said}", line), line
    assert re.search(rf"user attempt 1, failed, .*{said}", host.quick("why", job, expect=0).out)
    why = host.quick("why", job, "--step", "user", expect=0).out
    assert said in why
    assert f"what became of the service: orch why {job} --step web" in why
    assert said in host.quick("watch", job, expect=1).out
    assert host.quick("wait", job).status == 1


def test_who_stops_a_service_ends_what_needs_it(host: Host) -> None:
    plan, work = host.plan(
        {"name": "web", "run": f"echo up; {GO}", "service": {"ready": {"log": "up"}}},
        {"name": "user", "run": "touch running; exec sleep 600", "needs": ["web"]},
        {"name": "other", "run": GO},
    )
    job = host.start(plan)
    wait_until((work / "running").exists, "the step that needs the service runs")
    assert host.quick("stop", job, "--step", "web", "--wait", expect=0).out == f"{job} web stopped\n"
    wait_until(lambda: [step["state"] for step in host.status(job)["steps"]] == ["stopped", "skipped", "running"], "its user ends")
    (work / "go").touch()
    host.quick("wait", job, expect=1)


def test_a_service_that_is_never_ready_says_what_was_asked_and_gets_more_time(host: Host) -> None:
    plan, work = host.plan(
        {
            "name": "web", "run": f"{GO}; echo up; exec sleep 600",
            "service": {"ready": {"log": "up"}, "timeout_s": 1}, "retry": {"attempts": 1},
        },
        {"name": "user", "run": "true", "needs": ["web"]},
    )  # fmt: skip
    job = host.start(plan)
    assert "not ready after 1 s: 'up' is not in its log" in host.quick("wait", job, expect=1).err
    why = host.quick("why", job, expect=0).out
    assert f"orch retry {job} --set web.service.timeout_s=TIME" in why
    (work / "go").touch()
    host.quick("retry", job, "--set", "web.service.timeout_s=5m", expect=0)
    host.quick("wait", job, expect=0)


def test_what_a_probe_of_a_service_saw_is_said(host: Host) -> None:
    folder = host.folder / "no-pages"
    folder.mkdir()
    port = free_port()
    serve = f"exec {sys.executable} -m http.server {port} --bind 127.0.0.1 --directory {folder}"
    for ready, seen in (
        ({"http": f"http://127.0.0.1:{port}/nothere"}, f"http://127.0.0.1:{port}/nothere: HTTP 404"),
        ({"port": free_port()}, "Connection refused"),
    ):
        service = {"ready": ready, "timeout_s": 5}
        plan, _ = host.plan(
            {"name": "web", "run": serve, "service": service, "retry": {"attempts": 1}},
            {"name": "user", "run": "true", "needs": ["web"]},
        )
        assert seen in host.quick("wait", host.start(plan), expect=1).err


def test_set_of_a_retry_is_read_as_that_of_a_launch(host: Host) -> None:
    plan, work = host.plan(
        {"name": "work", "run": "exit 3", "retry": {"attempts": 1}, "done": {"count": "out-*", "equals": 2}}
    )
    job = host.start(plan)
    host.quick("wait", job, expect=1)
    assert "whole number" in host.quick("retry", job, "--set", "work.done.equals=many", expect=2).err
    host.quick("retry", job, "--set", "work.run=true", expect=0)
    assert "0 files instead of 2" in host.quick("wait", job, expect=1).err
    (work / "out-1").touch()
    host.quick("retry", job, "--set", "work.done.equals=1", expect=0)
    host.quick("wait", job, expect=0)


def test_extend_moves_the_limit_of_what_runs(host: Host) -> None:
    job, work = host.launch(GO, timeout_s="10m")
    assert host.quick("extend", job, "2h", expect=0).out == f"{job} work may run for 2h10m\n"
    document = host.quick("extend", job, "30m", "--step", "work", "--json", expect=0).json
    assert (document["acknowledged"], document["limits_s"]) == (True, {"work": 9600.0})
    refused = host.quick("extend", job, "soon", expect=2)
    assert "is not a time" in refused.err
    assert "no time to add" in host.quick("extend", job, "0", expect=2).err
    (work / "go").touch()
    host.quick("wait", job, expect=0)
    over = host.quick("extend", job, "1h", expect=2)
    assert "is over (succeeded)" in over.err
    assert "orch retry" not in over.err, "which would be refused"
    free, work = host.launch(GO)
    assert "has no time limit" in host.quick("extend", free, "1h", expect=2).err
    assert "stop it first" in host.quick("retry", free, expect=2).err
    (work / "go").touch()
    host.quick("wait", free, expect=0)


def test_stop_of_one_step_tells_of_that_step(host: Host) -> None:
    plan, work = host.plan(
        {"name": "runs", "run": GO}, {"name": "waits", "run": "true", "needs": ["runs"]}, {"name": "other", "run": f"trap '' TERM; {GO}"}
    )
    job = host.start(plan)
    wait_until(lambda: host.job(job).kinds().count("attempt_started") == 2, "two steps run")
    assert host.quick("stop", job, "--step", "waits", "--wait", expect=0).out == f"{job} waits stopped\n"
    ended = host.quick("stop", job, "--step", "runs", "--wait", "--json", expect=0).json
    assert (ended["state"], ended["stopping"]) == ("running", {"runs": "stopped"})
    late = host.quick("stop", job, "--step", "other", "--wait", "--timeout", "0", expect=124)
    assert f"step other of job {job}" in late.err
    (work / "go").touch()
    host.quick("wait", job, expect=1)


def test_a_launch_that_was_cut_short_has_nothing_to_stop_retry_or_fetch(host: Host, tmp_path: Path) -> None:
    """Its folder is there, its plan is not: wrong usage, and no request is left for a later launch to obey."""
    job = "cut-20260101-abcdef"
    folder = host.root / "jobs" / job
    folder.mkdir(parents=True)
    commands = [
        ["stop"], ["retry"], ["retry", "--set", "one.run=true"], ["extend", "1h"], ["why"], ["forward"], ["report"],
        ["fetch", str(tmp_path)], ["fetch", str(tmp_path), "--what", "logs"],
    ]  # fmt: skip
    for command in commands:
        answer = host.quick(command[0], job, *command[1:], expect=2)
        assert f"the launch of {job} is not finished\n  if it was cut short, start it anew with: orch launch PLAN" in answer.err, answer
    assert f"the launch of {job} is not finished" in host.quick("history", job, expect=0).err
    assert list(folder.iterdir()) == []
    assert "launch not finished" in host.quick("status", job, expect=0).out
    assert "is not finished" in host.quick("wait", job, "--timeout", "0", expect=124).err
    folder.rmdir()


def test_a_launch_that_was_cut_short_is_told_by_whoever_waits_for_it(host: Host) -> None:
    """Said once, and waited for: it may be under way from elsewhere."""
    job = "half-20260101-abcdef"
    folder = host.root / "jobs" / job
    folder.mkdir(parents=True)
    for step in ([], ["--step", "work"]):
        answer = host.quick("logs", job, *step, expect=2)
        assert f"the launch of {job} is not finished" in answer.err
        assert "orch launch PLAN" in answer.err
    lines = {}
    for command, said in ((["logs", job, "-f"], "stderr"), (["watch", job, "--plain"], "stdout")):
        with host.laptop.started(*command) as process:
            stream = getattr(process, said)
            lines[command[0]] = [stream.readline().decode()]
            while "not finished" not in lines[command[0]][-1]:
                lines[command[0]].append(stream.readline().decode())
                assert lines[command[0]][-1], "it ended without a word"
            with pytest.raises(subprocess.TimeoutExpired):  # further looks, and no further word
                process.wait(timeout=3)
            process.send_signal(signal.SIGINT)
            rest = process.communicate(timeout=60)
        assert b"not finished" not in rest[0] + rest[1]
    assert f"the launch of {job} is not finished" in lines["logs"][0]
    assert "queued" in lines["watch"][0]
    assert "launch not finished" in lines["watch"][1]
    assert "orch launch PLAN" in lines["watch"][1]
    with Terminal([ORCH, "watch", job], environment=host.laptop.environment, cwd=host.laptop.folder) as terminal:
        terminal.shows(f"{job}  queued")
        terminal.shows("launch not finished")
        terminal.type("q")
        assert terminal.ended() == 0
    folder.rmdir()


def test_a_launch_under_way_from_elsewhere_is_followed(host: Host) -> None:
    """Its folder comes first, its log later: what waits for the one goes on to the other."""
    done, _ = host.launch("echo here I am")
    host.quick("wait", done, expect=0)
    wait_until(lambda: not host.job(done).supervisors(), "the supervisor has left, and writes nothing there any more")
    folder, aside = host.job(done).path, host.folder / "aside"
    folder.rename(aside)
    folder.mkdir()
    with host.laptop.started("logs", done, "-f") as process:
        assert process.stderr is not None
        assert b"is not finished" in process.stderr.readline()
        folder.rmdir()
        aside.rename(folder)
        out, _ = process.communicate(timeout=60)
    assert out == b"here I am\n"
    assert process.returncode == 0


@pytest.mark.parametrize("command", ["stop", "retry", "extend", "why", "logs", "forward"])
def test_a_step_that_is_not_there_is_wrong_usage(host: Host, command: str) -> None:
    job, work = host.launch(GO)
    answer = host.quick(command, job, *(["1h"] if command == "extend" else []), "--step", "wrok")
    (work / "go").touch()
    assert answer.status == 2, answer
    assert f"job {job} has no step 'wrok'" in answer.err
    assert "work" in answer.err.split("step", 2)[2]
    assert host.quick("wait", job, expect=0), "nothing was stopped"


# ------------------------------------------------------------------------------------------------------------- logs


def test_logs_are_the_very_bytes_in_a_pipe(host: Host) -> None:
    job, _ = host.launch(r"printf 'one\r two\033[31m\n\377\000\nthree'")
    host.quick("wait", job, expect=0)
    done = subprocess.run([ORCH, "logs", job], capture_output=True, env=host.laptop.environment, check=True)
    assert done.stdout == b"one\r two\x1b[31m\n\xff\x00\nthree"
    done = subprocess.run([ORCH, "logs", job, "--tail", "2"], capture_output=True, env=host.laptop.environment, check=True)
    assert done.stdout == b"\xff\x00\nthree"
    done = subprocess.run([ORCH, "logs", job, "--tail", "0"], capture_output=True, env=host.laptop.environment, check=True)
    assert done.stdout == b""


def test_logs_follow_through_the_attempts(host: Host) -> None:
    plan, work = host.plan(
        {"name": "work", "run": f"echo try $ORCH_ATTEMPT; [ -e go ] && exit 0; {GO}; kill -9 $$", "retry": {"attempts": 2}}
    )
    job = host.start(plan)
    with host.laptop.started("logs", job, "-f") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"try")
        (work / "go").touch()
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.startswith(b"try")
    assert b"now step work, attempt 2" in err
    for number in (1, 2):
        log = host.job(job).log(1, "work", number).read_bytes()
        assert host.quick("logs", job, "--attempt", number, expect=0).out == log.decode()


def test_logs_of_what_is_not_there(host: Host) -> None:
    plan, work = host.plan({"name": "first", "run": GO}, {"name": "second", "run": "true", "needs": ["first"]})
    job = host.start(plan)
    host.running(job)
    for arguments, words in (
        (["--step", "third"], "no step 'third'"),
        (["--step", "second"], "was not started"),
        (["--attempt", "7"], "no attempt 7: it had 1"),
    ):
        answer = host.quick("logs", job, *arguments)
        assert answer.status == 2
        assert words in answer.err
    (work / "go").touch()
    host.quick("wait", job, expect=0)
    answer = host.quick("logs", job, expect=0)
    assert "log of step" in answer.err


# ------------------------------------------------------------------------------------------------------------- fetch


def test_fetch_brings_verifies_skips_and_resumes(host: Host, tmp_path: Path) -> None:
    job, work = host.launch(
        "mkdir -p out/deep; head -c 3000000 /dev/zero | tr '\\0' x > out/big.bin; echo '{}' > out/deep/a.json; "
        "ln -s /etc/passwd out/link; ln -s / out/all; mkdir out/many; for i in 1 2 3 4 5 6; do ln -s / out/many/$i; done; touch -d 2020-01-02T03:04:05Z out/deep/a.json; mkfifo out/deep/pipe; "
        "python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('out/sock')\"",
        output="out",
    )
    host.quick("wait", job, expect=0)
    dest = tmp_path / "dest"
    document = host.quick("fetch", job, dest, "--json", expect=0).json
    frozen("fetch", normal({**document, "dest": "<dest>"}, host.folder))
    big = dest / "out" / "big.bin"
    assert big.read_bytes() == (work / "out" / "big.bin").read_bytes()
    assert (dest / "out" / "deep" / "a.json").stat().st_mtime == (work / "out" / "deep" / "a.json").stat().st_mtime
    assert not (dest / "out" / "link").exists()
    assert [path.name for path in dest.rglob("*") if not path.is_dir() and not path.is_file()] == []
    told = host.quick("fetch", job, dest, expect=0).err
    assert "8 links not followed: out/all, out/link, out/many/1, out/many/2, out/many/3 and 3 more" in told
    assert "2 special files left out: out/sock (socket), out/deep/pipe (fifo)" in told
    assert [path for path in dest.rglob("*") if path.name.endswith(".part")] == []
    again = host.quick("fetch", job, dest, "--json", expect=0).json
    assert again["fetched"] == []
    assert len(again["unchanged"]) == 2
    # A copy that broke off: its first bytes stay, the rest follows, and the hash is checked over the whole.
    os.replace(big, big.with_name("big.bin.part"))
    with big.with_name("big.bin.part").open("r+b") as file:
        file.truncate(1_500_000)
    before = host.sshd.log.stat().st_size
    assert before
    fetched = host.quick("fetch", job, dest, "--json", expect=0).json["fetched"]
    assert [item["path"] for item in fetched] == ["out/big.bin"]
    assert hashlib.sha256(big.read_bytes()).hexdigest() == fetched[0]["sha256"]
    # A wrong partial file is noticed by the hash and fetched anew.
    big.unlink()
    big.with_name("big.bin.part").write_bytes(b"y" * 1000)
    host.quick("fetch", job, dest, expect=0)
    assert big.read_bytes() == (work / "out" / "big.bin").read_bytes()


def test_fetch_logs_and_globs(host: Host, tmp_path: Path) -> None:
    job, _ = host.launch("mkdir -p out; echo a > out/a.txt; echo b > out/b.json; echo said", output="out")
    host.quick("wait", job, expect=0)
    host.quick("fetch", job, tmp_path / "logs", "--what", "logs", expect=0)
    assert (tmp_path / "logs/orch-job/steps/1-work/attempts/1/log").read_bytes() == b"said\n"
    assert (tmp_path / "logs/orch-job/spec.json").exists()
    assert "special" not in host.quick("fetch", job, tmp_path / "all", "--what", "all", expect=0).err
    host.quick("fetch", job, tmp_path / "some", "--include", "*.json", expect=0)
    assert sorted(path.name for path in (tmp_path / "some").rglob("*") if path.is_file()) == ["b.json"]
    assert "fits --include *.yaml" in host.quick("fetch", job, tmp_path / "none", "--include", "*.yaml", expect=0).err


def test_fetch_never_writes_through_a_link_in_dest(host: Host, tmp_path: Path) -> None:
    job, _ = host.launch("mkdir -p out; echo new > out/file", output="out")
    host.quick("wait", job, expect=0)
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "dest").mkdir()
    (tmp_path / "dest" / "out").symlink_to(outside)
    answer = host.quick("fetch", job, tmp_path / "dest")
    assert answer.status == 1
    assert "links are not followed" in answer.err
    assert list(outside.iterdir()) == []


# ------------------------------------------------------------------------------------------------- hosts, files, init


def test_hosts_check_freezes_its_shape(host: Host) -> None:
    document = host.quick("hosts", "check", "box", "--json").json
    [entry] = document["hosts"]
    assert entry["reachable"] is True
    frozen("hosts_check", shape({**entry, "facts": sorted(entry["facts"]), "accepted_key": None}))
    text = host.quick("hosts", "check").out
    for name in ("system", "python", "gpus", "root", "memory", "logout", "clock"):
        assert re.search(rf"^  (ok|warn|fail)\s+{name}\s", text, re.MULTILINE), text


def test_files_go_up_once_and_are_verified(host: Host) -> None:
    data = os.urandom(2_500_000)
    (host.laptop.folder / "payload.bin").write_bytes(data)
    (host.laptop.folder / "run.sh").write_text("#!/bin/sh\nsha256sum < $ORCH_FILES/payload.bin\n")
    (host.laptop.folder / "run.sh").chmod(0o755)
    plan, _ = host.plan({"name": "work", "run": "run.sh", "files": ["payload.bin", "run.sh"]})
    job = host.start(plan)
    host.quick("wait", job, expect=0)
    assert hashlib.sha256(data).hexdigest() in host.quick("logs", job, expect=0).out
    blobs = {path.name: path.stat().st_ino for path in (host.root / "blobs").iterdir()}
    host.start(plan)
    assert {path.name: path.stat().st_ino for path in (host.root / "blobs").iterdir()} == blobs


def test_a_second_job_of_a_plan_that_still_runs_is_said(host: Host) -> None:
    plan, _ = host.plan({"name": "work", "run": "sleep 300"})
    first = host.start(plan)
    again = host.quick("launch", plan, expect=0)
    assert again.out.strip() != first
    assert f"{first} of this very plan is running" in again.err or f"{first} of this very plan is queued" in again.err
    meant = host.quick("launch", plan, "--new", expect=0)
    assert first not in meant.err
    for job in (first, again.out.strip(), meant.out.strip()):
        host.quick("stop", job, "--wait", expect=0)
    assert "of this very plan" not in host.quick("launch", plan, "--set", "work.run='true'", expect=0).err


def test_no_second_copy_beside_a_lost_job_that_still_runs(host: Host) -> None:
    plan, _ = host.plan({"name": "work", "run": "exec sleep 300"})
    first = host.start(plan)
    job = host.job(first)
    job.wait_for_kind("attempt_started")
    before = set(os.listdir(host.root / "jobs"))
    kill(job.supervisor)
    wait_until(lambda: not job.supervisors(), "the supervisor is gone")
    again = host.quick("launch", plan, expect=5)
    assert "nothing was started" in again.err
    assert f"orch retry {first}" in again.err
    assert again.one_screen
    assert set(os.listdir(host.root / "jobs")) == before
    second = host.quick("launch", plan, "--new", expect=0).out.strip()
    host.quick("stop", second, "--wait", expect=0)
    host.quick("stop", first, "--wait", expect=0)
    third = host.quick("launch", plan, expect=0)
    assert "of this very plan" not in third.err
    host.quick("stop", third.out.strip(), "--wait", expect=0)


def test_what_stop_answers_is_remembered_and_its_time_limit_is_of_wait(host: Host) -> None:
    plan, _ = host.plan({"name": "work", "run": "trap '' TERM; sleep 300 & wait; sleep 300", "grace_s": 2})
    first = host.start(plan)
    host.job(first).wait_for_kind("attempt_started")
    assert "add --wait" in host.quick("stop", first, "--timeout", "5", expect=2).err
    assert host.quick("stop", first, expect=0).out == f"{first} stopping\n"
    refused = host.quick("retry", first, expect=2).err
    assert f"wait until it has stopped: orch wait {first}" in refused
    again = host.quick("launch", plan, expect=0)
    assert f"{first} of this very plan is stopping" in again.err
    host.quick("stop", again.out.strip(), "--wait", expect=0)
    host.quick("wait", first, expect=1)


def test_secrets_reach_the_process_and_nothing_else(host: Host) -> None:
    host.laptop.environment["MY_TOKEN"] = "s3cr3t-of-the-test"
    try:
        plan, _ = host.plan(
            {"name": "work", "run": 'test -n "$HF_TOKEN" && echo ${#HF_TOKEN}', "env": {"HF_TOKEN": {"env": "MY_TOKEN"}}}
        )
        job = host.start(plan)
    finally:
        del host.laptop.environment["MY_TOKEN"]
    host.quick("wait", job, expect=0)
    assert host.quick("logs", job, expect=0).out == "18\n"
    wait_until(lambda: not host.job(job).supervisors(), "the supervisor has cleaned up after the end")
    for path in (host.root / "jobs" / job).rglob("*"):
        if path.is_file():
            assert b"s3cr3t-of-the-test" not in path.read_bytes(), path
    answer = host.quick("launch", plan, "--no-preflight", "--json")
    assert answer.status == 2
    assert answer.json["error"]["code"] == "missing_secret"


def test_init_writes_what_runs_and_never_overwrites(host: Host, tmp_path: Path) -> None:
    entry = host.sshd.inventory_entry()
    laptop = Laptop(tmp_path / "new", {})
    laptop.inventory.unlink()
    del laptop.environment["ORCH_INVENTORY"]
    arguments = [
        "init", entry["ssh"], "--name", "box", "--identity-file", entry["identity_file"],
        "--known-hosts", entry["known_hosts"], "--root", str(host.root),
    ]  # fmt: skip
    strange = tmp_path / "known hosts"  # where no key is known yet
    unknown = laptop.run(*arguments[:-4], "--known-hosts", strange, "--root", host.root, expect=3).err
    assert "SHA256:" in unknown
    told = unknown.split("then type: ")[1].strip()
    accepting = shlex.split(told)
    assert accepting[0] == "orch"
    laptop.run(*accepting[1:], expect=0)
    assert (laptop.folder / "inventory.yaml").exists(), "what was to be typed is all that it takes"
    shutil.rmtree(laptop.folder / "plans")
    laptop.inventory.unlink()
    other = make_key(tmp_path / "other").with_suffix(".pub").read_text()
    strange.write_text(f"{strange.read_text().split()[0]} {other}")
    changed = laptop.run(*accepting[1:], expect=3).err
    assert changed.split(" && ")[1].strip() == told, "of a changed key the same, behind the line that removes the old one"
    stranger = make_key(tmp_path / "a stranger")
    refused = laptop.run(*[stranger if word == entry["identity_file"] else word for word in arguments], expect=3).err
    typed = shlex.split(re.findall("see what ssh does with: (.*)", refused)[0])
    ssh = subprocess.run([*typed[:1], "-o", "BatchMode=yes", *typed[1:]], capture_output=True, text=True, check=False)
    assert ssh.returncode == 255, ssh
    assert f"Offering public key: {stranger}" in ssh.stderr
    assert "Permission denied" in ssh.stderr, "the host itself is known by the file that was named"
    own = [str(entry["identity_file"]) if word == str(stranger) else word for word in typed]
    assert subprocess.run(own, capture_output=True, check=False).returncode == 0, "with the right key it is let in"
    nameless = laptop.run("init", "no-such-host.invalid", expect=3).err
    assert "cannot be resolved" in nameless
    assert "inventory" not in nameless, "there is none yet"
    document = laptop.run(*arguments, "--json", expect=0).json
    assert document["written"] == ["inventory.yaml", "plans/first.yaml"]
    answer = laptop.run(*arguments)
    assert answer.status == 2
    assert "add a host to an inventory by hand" in answer.err
    assert "--force" in answer.err
    assert "'a b' is not an ssh destination" in laptop.run("init", "a b", expect=2).err, "what --force would not help comes first"
    missing = laptop.run(*["/no/key" if word == entry["identity_file"] else word for word in arguments], expect=2)
    assert missing.err.startswith("orch: there is no file /no/key\n  --identity-file is the private key")
    laptop.run(*arguments, "--force", expect=0)
    plan = laptop.folder / "plans" / "first.yaml"
    plan.write_text(plan.read_text().replace("seq 20", "seq 2").replace("sleep 1", "true").replace("~/orch-first", str(tmp_path / "first")))
    job = laptop.launch(plan)
    laptop.run("wait", job, expect=0)
    assert (tmp_path / "first" / "count" / "lines.txt").read_text() == "line 1\nline 2\n"


def test_paths_typed_for_init_are_of_the_folder_where_they_were_typed(host: Host, tmp_path: Path) -> None:
    entry = host.sshd.inventory_entry()
    laptop = Laptop(tmp_path / "new", {})
    key, known = (os.path.relpath(entry[name], laptop.folder) for name in ("identity_file", "known_hosts"))
    laptop.run("init", entry["ssh"], "--name", "box", "-C", "a/b", "--identity-file", key, "--known-hosts", known, expect=0)
    assert "box" in laptop.run("--inventory", "a/b/inventory.yaml", "hosts", "check", expect=0).out


def test_a_history_of_a_plan_that_is_not_there_names_those_that_are(host: Host) -> None:
    job, _ = host.launch("true")
    name = job.split("-")[0]
    answer = host.quick("history", "--plan", f"{name}x", expect=0)
    assert answer.out.startswith(f"No job is of plan '{name}x'; did you mean '{name}'? plans: {name}")
    assert host.quick("history", "--plan", f"{name}x", "--json", expect=0).json["jobs"] == []
    assert "and one is named" in host.quick("history", job, "--plan", name, expect=2).err
    empty = host.another_laptop("empty")
    assert empty.run("history", "--plan", "x", "--local", expect=0).out == "No jobs yet.\n"


def test_an_unreachable_host_is_3_with_what_was_known(host: Host, tmp_path: Path) -> None:
    job, work = host.launch(GO)
    laptop = host.laptop
    host.running(job)
    host.status(job)
    entry = host.sshd.inventory_entry(root=str(host.root))
    inventory = laptop.inventory.read_text()
    try:
        laptop.write_inventory({"box": {**entry, "ssh": "nobody@127.0.0.1:9"}})
        answer = host.quick("status", job, "--json", expect=3)
        [seen] = answer.json["jobs"]
        assert (seen["state"], seen["reachable"]) == ("running", False)
        assert seen["age_s"] >= 0
        [told] = answer.json["hosts"]
        assert told["error"]["code"] == "unreachable"
        text = host.quick("status", job, expect=3)
        assert "host unreachable, last seen" in text.out
        assert host.quick("wait", job, "--json", expect=3).json["error"]["code"] == "unreachable"
    finally:
        laptop.inventory.write_text(inventory)
        (work / "go").touch()
    laptop.run("wait", job, expect=0)


def test_text_off_a_terminal_is_never_shortened(host: Host) -> None:
    long = "x" * 3000
    job, _ = host.launch(f"echo RuntimeError: {long} >&2; exit 1")
    host.quick("wait", job)
    narrow = {**host.laptop.environment, "COLUMNS": "40"}
    for arguments in (["status", job], ["why", job], ["history"], ["watch", job]):
        done = subprocess.run([ORCH, *arguments], capture_output=True, text=True, env=narrow, check=False)
        assert "…" not in done.stdout
        assert all(line == line.rstrip() for line in done.stdout.splitlines())
        assert job in done.stdout


def test_a_failed_preflight_starts_nothing_and_says_what_to_do(host: Host) -> None:
    extract = {"model": "/nowhere/model", "dataset": "/nowhere/rows.jsonl", "layers": [1], "backend": "transformers", "device": "cpu"}
    plan, _ = host.plan({"name": "extract", "uses": "extract", "with": extract})
    before = sorted(path.name for path in (host.root / "jobs").glob("*"))
    answer = host.quick("launch", plan, "--json", expect=4)
    assert answer.json["error"]["code"] == "preflight_failed"
    assert "/nowhere/model" in answer.json["error"]["message"]
    assert "--no-preflight" in answer.json["error"]["hint"]
    document = host.quick("preflight", plan, "--json", expect=4).json
    assert document["ok"] is False
    frozen("preflight", [shape(check) for check in document["checks"] if check["verdict"] == "fail"][:1])
    assert sorted(path.name for path in (host.root / "jobs").glob("*")) == before
    assert host.quick("launch", plan, "--no-preflight", "--json", expect=0).json["adopted"] is False
