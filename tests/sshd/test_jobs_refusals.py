"""What goes wrong before a job runs: each cause has its own one-screen message, its exit status and a next step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.stage import Stage, small_disk
from tests.sshd.server import free_port, make_key


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with Stage(tmp_path) as ready:
        yield ready


def refused(stage: Stage, code: str, *words: str, status: int = 3) -> None:
    """`launch` and `status` are both refused: people's text on one screen, JSON with the code, nothing on the host."""
    answer = stage.laptop.run("launch", stage.plan, "--no-preflight", expect=status)
    assert answer.one_screen, answer
    assert answer.out == ""
    for word in ("box", *words):
        assert word in answer.err, f"{word!r} is missing: {answer}"
    document = stage.laptop.run("launch", stage.plan, "--no-preflight", "--json", expect=status).json
    assert document["schema"] == 1
    assert document["error"]["code"] == code, document
    assert document["error"]["hint"], "say what to type next"
    assert not stage.jobs(), "nothing may have started"
    seen = stage.laptop.run("status", "--json")
    assert seen.status == (status if status == 3 and code != "host_full" else seen.status), seen
    assert seen.json["schema"] == 1


def reached_but_not_fit(stage: Stage, *words: str) -> None:
    """`hosts check` says that the host answers, and what keeps it from running jobs."""
    answer = stage.laptop.run("hosts", "check", expect=4)
    for word in ("box  not ready", *words):
        assert word in answer.out, f"{word!r} is missing: {answer}"
    [found] = stage.laptop.run("hosts", "check", "--json", expect=4).json["hosts"]
    assert (found["reachable"], found["ok"]) == (True, False)


def test_unknown_host_key(stage: Stage) -> None:
    stage.sshd.known_hosts.write_text("")
    refused(stage, "host_key_unknown", "SHA256:", "orch hosts check --accept-new box")
    stage.laptop.run("hosts", "check", "--accept-new", "box", expect=0)
    job = stage.launch()
    stage.go()
    stage.laptop.run("wait", job.id, expect=0)


def test_changed_host_key(stage: Stage, tmp_path: Path) -> None:
    other = make_key(tmp_path / "other").with_suffix(".pub").read_text().split()
    stage.sshd.known_hosts.write_text(f"[127.0.0.1]:{stage.cable.port} {other[0]} {other[1]}\n")
    refused(stage, "host_key_changed", "SHA256:")
    assert stage.laptop.run("hosts", "check", "--accept-new", "box").status == 3, "a changed key is never accepted"


def test_wrong_user(stage: Stage) -> None:
    entry = stage.sshd.inventory_entry(**stage.entry)
    entry["ssh"] = f"nobody-of-this-name@127.0.0.1:{stage.cable.port}"
    stage.laptop.write_inventory({"box": entry})
    refused(stage, "auth_refused", "nobody-of-this-name")


def test_refused_port(stage: Stage) -> None:
    entry = stage.sshd.inventory_entry(**stage.entry)
    port = free_port()
    entry["ssh"] = f"{stage.sshd.user}@127.0.0.1:{port}"
    stage.laptop.write_inventory({"box": entry})
    refused(stage, "unreachable", str(port), "refused")


def test_no_python_on_the_host(stage: Stage) -> None:
    stage.laptop.write_inventory({"box": {**stage.sshd.inventory_entry(**stage.entry), "agent_python": "/nowhere/python3"}})
    refused(stage, "no_python", "agent_python")
    reached_but_not_fit(stage, "agent_python")


def test_no_python_on_the_path(tmp_path: Path) -> None:
    """A host where neither python3 nor python is on the PATH of a login."""
    empty = tmp_path / "bin"
    empty.mkdir()
    for tool in ("sh", "cat", "mkdir", "uname"):
        os.symlink(f"/usr/bin/{tool}", empty / tool)
    with Stage(tmp_path / "stage") as stage:
        stage.sshd.options["SetEnv"] = f'"HOME={stage.sshd.home}" "PATH={empty}"'
        stage.sshd.restart()
        refused(stage, "no_python", "3.8")


def test_full_disk(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    with (
        small_disk(root, 4) as fill,
        Stage(tmp_path / "stage", root=root / "root", entry={"allow_tmpfs": True}) as stage,
    ):
        fill(True)
        refused(stage, "host_full", "full")
        reached_but_not_fit(stage, "disk is full")
        fill(False)
        job = stage.launch()
        stage.go()
        stage.laptop.run("wait", job.id, expect=0)
        stage.nothing_left()


def test_a_root_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with Stage(tmp_path / "stage", root=tmp_path / "file" / "root") as stage:
        refused(stage, "host_refused", "root:")
        reached_but_not_fit(stage, "cannot install itself")


def test_tmpfs_root_is_refused_unless_allowed(tmp_path: Path) -> None:
    with Stage(tmp_path / "stage", root=Path(f"/dev/shm/orch-test-{os.getpid()}")) as stage:
        try:
            answer = stage.laptop.run("launch", stage.plan, "--no-preflight", "--json")
            assert answer.status in {2, 3}, answer
            assert "allow_tmpfs" in answer.out
            assert not stage.jobs()
        finally:
            import shutil

            shutil.rmtree(stage.root, ignore_errors=True)
