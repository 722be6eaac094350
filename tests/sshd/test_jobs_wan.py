"""The link itself fails: packets vanish for a minute, on a real TCP connection with a real round-trip time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.netem import Wan
from tests.sshd.server import Sshd, wait_until
from tests.support.laptop import Laptop

HOLE_S = 60.0


@pytest.fixture
def wan(tmp_path: Path) -> Iterator[Wan]:
    """A link with a round trip of 100 ms."""
    with Wan(tmp_path / "wan", delay_ms=50) as link:
        yield link


@pytest.fixture
def far(tmp_path: Path, wan: Wan) -> Iterator[Sshd]:
    """A real sshd at its other end."""
    with Sshd(tmp_path / "sshd", address=wan.far_address, command_prefix=wan.far) as server:
        yield server


@pytest.mark.timeout(240)
def test_a_black_hole_of_a_minute_is_no_failure(tmp_path: Path, wan: Wan, far: Sshd) -> None:
    """The job ends in the dark; the watcher says that it cannot see, and afterwards what happened. Nothing is retried."""
    laptop = Laptop(tmp_path / "laptop", {"box": far.inventory_entry()}, command_prefix=wan.near)
    work = tmp_path / "work"
    go = tmp_path / "go"
    run = f"until [ -e '{go}' ]; do sleep 0.1; done; echo done >> out"
    job = laptop.launch(laptop.plan([{"name": "a", "run": run}], workdir=str(work)))
    with laptop.started("watch", job) as watcher:
        assert watcher.stdout is not None
        assert job.encode() in watcher.stdout.readline()
        wan.set(up=0)
        go.touch()
        wait_until((work / "out").exists, "the job ends in the dark", 30)
        dark = laptop.run("status", job, "--json", within_s=60)
        assert dark.status == 3, dark
        assert dark.json["jobs"][0]["reachable"] is False
        assert dark.json["jobs"][0]["state"] not in ("failed", "lost")
        until = time.monotonic() + HOLE_S
        wait_until(lambda: time.monotonic() > until, "the minute is over", HOLE_S + 5, every_s=0.5)
        assert watcher.poll() is None, "the watcher gave up"
        wan.set(up=1)
        out, err = watcher.communicate(timeout=90)
    assert watcher.returncode == 0, (out, err)
    assert b"succeeded" in out
    assert b"failed" not in out
    assert b"lost" not in out.replace(b"connection lost", b"")
    assert (work / "out").read_text() == "done\n"
    assert len(laptop.status(job)["steps"][0]["attempts"]) == 1
