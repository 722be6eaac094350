"""The laptop's part on a real sshd: Apprise messages, each once whoever watches, and `orch watch --until --notify`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.core.errors import ConfigError, UsageError
from orchestrator.core.notify import Target
from orchestrator.core.plan import load_plan
from orchestrator.core.until import Until
from tests.cli.samples import attempt, job, step
from tests.notify.receiver import Receiver
from tests.sshd.server import Sshd
from tests.support.jobdir import JobDir, agents, kill
from tests.support.laptop import Laptop
from tests.support.waiting import wait_until

TOKEN = "sl4ck-T0ken-77aa"
PHASES = (
    "echo '::orch {\"phase\": \"load\", \"state\": \"start\"}'; until [ -e go ]; do sleep 0.05; done; "
    "echo '::orch {\"phase\": \"extract\", \"state\": \"start\"}'; until [ -e end ]; do sleep 0.05; done"
)


class Site:
    def __init__(self, folder: Path, sshd: Sshd) -> None:
        self.folder, self.root, self.sshd = folder, folder / "root", sshd
        self.laptop = self.another("laptop")

    def another(self, name: str, **more: object) -> Laptop:
        return Laptop(self.folder / name, {"box": self.sshd.inventory_entry(root=str(self.root), **more)})

    def end(self) -> None:
        for path in (self.root / "jobs").glob("*"):
            JobDir(self.root, path.name).end_everything()
        for pid in agents(self.root):
            kill(pid)


@pytest.fixture
def site(tmp_path: Path, shared_sshd: Sshd) -> Iterator[Site]:
    ready = Site(tmp_path, shared_sshd)
    yield ready
    ready.end()


def test_two_laptops_and_a_webhook_tell_each_end_once(site: Site) -> None:
    with Receiver() as receiver:
        apprise = f"json://127.0.0.1:{receiver.port}/apprise?+X-Token={TOKEN}"
        hook = receiver.url(f"hook?{TOKEN}")
        site.laptop.environment.update(HOOK=hook)
        site.laptop.environment["CHAT"] = apprise
        work = site.folder / "work"
        plan = site.laptop.plan(
            [{"name": "work", "run": "until [ -e go ]; do sleep 0.05; done; exit 3", "retry": {"attempts": 1}}],
            workdir=str(work),
            notify=[{"apprise": {"env": "CHAT"}, "on": ["failure"]}, {"webhook": {"env": "HOOK"}, "on": "failure"}],
        )
        found = site.laptop.launch(plan)
        # A second laptop with the same ledger and environment: two people, or the same one twice.
        with ThreadPoolExecutor(3) as pool:
            waits = [pool.submit(site.laptop.run, "wait", found) for _ in range(2)]
            waits.append(pool.submit(site.laptop.run, "watch", found, "--plain"))
            wait_until(work.is_dir, "the job runs")
            (work / "go").touch()
            assert [item.result().status for item in waits] == [1, 1, 1]
        wait_until(lambda: receiver.kinds(f"hook?{TOKEN}") == ["failure"], "the host's own webhook")
        chats = [item for item in receiver.got if item.path.startswith("/apprise")]
        assert [item.json["title"] for item in chats] == ["plan on box has failed"]
        assert f"orch why {found}" in chats[0].json["message"]
        assert site.laptop.run("wait", found).status == 1
        assert len([item for item in receiver.got if item.path.startswith("/apprise")]) == 1
        directory = JobDir(site.root, found)
        wait_until(
            lambda: {directory.record(f"notify/{path.name}").get("state") for path in (directory.path / "notify").glob("*.json")}
            == {"sent"},
            "both are noted as sent",
        )
        wait_until(lambda: not directory.supervisors(), "the supervisor has left: no file comes and goes")
        for folder in (site.root, site.laptop.store):
            for file in folder.rglob("*"):
                if file.is_file():
                    assert TOKEN not in file.read_bytes().decode(errors="replace"), file
        # After the end the host has no address any more; a retry brings it along again.
        (work / "go").unlink()
        site.laptop.run("retry", found, expect=0)
        (work / "go").touch()
        wait_until(lambda: receiver.kinds(f"hook?{TOKEN}") == ["failure"] * 2, "the second end, by the webhook")


def test_until_a_phase_with_a_message(site: Site) -> None:
    with Receiver() as receiver:
        site.laptop.environment["ORCH_NOTIFY"] = f"json://127.0.0.1:{receiver.port}/mine"
        work = site.folder / "work"
        plan = site.laptop.plan([{"name": "work", "run": PHASES, "retry": {"attempts": 1}}], workdir=str(work))
        found = site.laptop.launch(plan)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(site.laptop.run, "watch", found, "--plain", "--until", "phase=extract", "--notify")
            wait_until(work.is_dir, "the job runs")
            JobDir(site.root, found).wait_for_kind("phase_changed")
            assert not waiting.done(), "only loading so far"
            (work / "go").touch()
            assert waiting.result().status == 0
        assert [item.json["title"] for item in receiver.at("mine")] == ["plan on box: step work: phase extract began"]
        assert site.laptop.status(found)["state"] == "running", "watching ends nothing"
        (work / "end").touch()
        missed = site.laptop.run("watch", found, "--plain", "--until", "phase=train", expect=1)
        assert f"{found} succeeded without reaching phase=train" in missed.err
        assert site.laptop.run("watch", found, "--until", "step=wrok", expect=2).err.count("did you mean 'work'") == 1
        del site.laptop.environment["ORCH_NOTIFY"]
        assert "nobody to tell" in site.laptop.run("watch", found, "--notify", expect=2).err


def test_points_in_a_job() -> None:
    loading = attempt(2, phases=[{"name": "load", "state": "running"}])
    loaded = attempt(2, phases=[{"name": "load", "state": "done"}, {"name": "extract", "state": "running"}])
    old = attempt(1, state="failed", phases=[{"name": "extract", "state": "failed"}])

    def view(newest: dict[str, object], state: str = "running") -> dict[str, object]:
        return job(state=state, steps=[step("work", state, [old, newest])])

    point = Until.parse("phase=extract")
    assert point.see(view(loading)) is None, "an earlier attempt's phase does not count"
    assert point.see(view(loaded)) == "step work: phase extract began"
    assert point.see(view(loaded)) is None, "told once"
    assert Until.parse("phase=extract:done").see(view(loaded)) is None
    assert Until.parse("phase=load:done").see(view(loaded)) == "step work: phase load done"
    assert Until.parse("step=work").see(view(loaded)) is None
    assert Until.parse("step=work").see(view(loaded, "failed")) == "step work failed"
    assert Until.parse("state=running").see(view(loaded)) == "running"
    for wrong in ("", "phase", "phase=", "done=1", "step=a:done", "phase=a:b", "state=happy", "extract"):
        with pytest.raises(UsageError):
            Until.parse(wrong)


@pytest.mark.parametrize(
    ("notify", "message"),
    [
        ("nonsense", r"plan.yaml:2: notify.0: is not a URL"),
        ([{"webhook": "slack://x"}], r"notify.0.webhook: must start with http"),
        ([{"on": ["failure"]}], r"notify.0: has no address"),
        ([{"webhook": "https://x", "apprise": "slack://x"}], r"notify.0: has apprise and webhook"),
        ([{"apprise": "slack://x", "on": ["sucess"]}], r"notify.0.on.0: .*'sucess'.* is not allowed"),
        ([{"apprise": "slack://x", "headers": {"A": "b"}}], r"headers is for webhook, and this is apprise"),
        ([{"heartbeat": "https://x", "on": "failure"}], r"a heartbeat is asked for all the time"),
        ([{"webhook": {"from": "here"}}], r"is not a form of secret"),
    ],
)
def test_wrong_targets_are_said_with_their_place(notify: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(f"name: a\nnotify: {json.dumps(notify)}\nsteps: [{{name: x, run: y}}]")
    with pytest.raises(ConfigError, match=message):
        load_plan(path)


def test_labels_hold_no_secret() -> None:
    assert Target(apprise="slack://TokenA/TokenB").label == "apprise slack"
    assert Target(webhook="https://user:pass@hooks.example.org/T0/B0?x=y").label == "webhook hooks.example.org"
    assert Target(command="curl -H 'Authorization: x'").label == "command"
