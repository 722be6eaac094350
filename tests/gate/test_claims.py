"""GPU claims: exclusive between processes and users, in order of arrival, let go by the kernel."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from remote_jobs.agent import claims
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
Start = Callable[..., "Claimant"]


class Claimant:
    """A real process that claims; its lines are read as they come."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-m", "tests.gate.claimant", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def held(self) -> str:
        """The line that tells of its claim. What it waits for may change before: a holder's files do not all close at once."""
        line = self.line()
        while line.startswith("waiting"):
            line = self.line()
        return line

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()


@pytest.fixture
def folder() -> Iterator[str]:
    """A claims folder that every user can reach (pytest's own folders are private)."""
    parent = tempfile.mkdtemp(prefix="orch-claims-")
    os.chmod(parent, 0o755)
    yield os.path.join(parent, "claims")
    shutil.rmtree(parent)


@pytest.fixture
def start(folder: str) -> Iterator[Start]:
    started: list[Claimant] = []

    def begin(job: str, gpus: str, host_gpus: int = 8, *extra: str) -> Claimant:
        claimant = Claimant(folder, job, gpus, str(host_gpus), *extra)
        started.append(claimant)
        return claimant

    yield begin
    for claimant in started:
        claimant.end()


def test_a_second_job_waits_names_the_holder_and_gets_the_gpu_when_the_holder_is_killed(start: Start) -> None:
    first = start("first", "=3")
    assert first.line() == "held 3"
    second = start("second", "=3")
    assert second.line() == "waiting gpu 3 held by job first"
    first.process.send_signal(signal.SIGKILL)
    assert second.held() == "held 3"


def test_the_queue_is_served_in_order_of_arrival(start: Start, folder: str) -> None:
    holder = start("holder", "8")
    assert holder.line() == "held 0,1,2,3,4,5,6,7"
    waiters = []
    for number in range(3):
        waiter = start(f"waiter{number}", "8")
        assert waiter.line().startswith("waiting gpu 0-7 held by job holder")
        waiters.append(waiter)
    assert [row["job"] for row in claims.status(folder)["queue"]] == ["waiter0", "waiter1", "waiter2"]
    assert claims.status(folder)["held"][0]["gpus"] == list(range(8))
    before = holder
    for waiter in waiters:
        before.say("release")
        assert waiter.held() == "held 0,1,2,3,4,5,6,7"
        before = waiter


def test_a_dead_waiter_does_not_block_the_queue(start: Start) -> None:
    holder = start("holder", "1", 1)
    assert holder.line() == "held 0"
    dead = start("dead", "1", 1)
    assert dead.line().startswith("waiting")
    last = start("last", "1", 1)
    assert "1 in the queue before it (job dead)" in last.line()
    dead.process.kill()
    dead.process.wait()
    holder.process.kill()
    assert last.held() == "held 0"


def test_eight_launches_at_once_never_share_a_gpu(start: Start) -> None:
    claimants = [start(f"job{n}", "2", 4) for n in range(8)]
    winners = []
    waiting = 0
    for claimant in claimants:
        if claimant.line().startswith("held"):
            winners.append(claimant)
        else:
            waiting += 1
    assert len(winners) == 2
    assert waiting == 6


def test_free_gpus_beside_a_running_job_are_used(start: Start) -> None:
    assert start("a", "2", 4).line() == "held 0,1"
    assert start("b", "2", 4).line() == "held 2,3"


def test_a_small_job_does_not_overtake_a_large_one_that_waits(start: Start) -> None:
    assert start("running", "2", 4).line() == "held 0,1"
    large = start("large", "4", 4)
    assert large.line().startswith("waiting gpu 0-1 held by job running")
    small = start("small", "1", 4)
    assert "1 in the queue before it (job large)" in small.line()


def test_the_claim_outlives_the_supervisor_as_long_as_the_work_lives(start: Start, folder: str) -> None:
    supervisor = start("job", "=0")
    assert supervisor.line() == "held 0"
    supervisor.say("child")
    heir = int(supervisor.line().split()[1])
    try:
        supervisor.process.kill()
        supervisor.process.wait()
        other = start("other", "=0")
        assert other.line() == "waiting gpu 0 held by job job"
    finally:
        os.kill(heir, signal.SIGKILL)
    assert other.held() == "held 0"
    assert [row["job"] for row in claims.status(folder)["held"]] == ["other"]


def test_released_but_still_held_by_its_work_stays_named(start: Start, folder: str) -> None:
    supervisor = start("job", "=0")
    assert supervisor.line() == "held 0"
    supervisor.say("child")
    heir = int(supervisor.line().split()[1])
    try:
        supervisor.say("release")
        assert supervisor.line() == "released"
        assert start("other", "=0").line() == "waiting gpu 0 held by job job"
    finally:
        os.kill(heir, signal.SIGKILL)


def test_claims_hold_between_users(start: Start, folder: str) -> None:
    other_uid = "65534" if os.getuid() == 0 else str(os.getuid())
    first = start("mine", "=0", 1)
    assert first.line() == "held 0"
    stranger = start("theirs", "=0", 1, other_uid)
    assert stranger.line().startswith("waiting gpu 0 held by job mine")
    first.process.kill()
    assert stranger.held() == "held 0"
    third = start("again", "=0", 1)
    assert "job theirs" in third.line()
    mode = os.stat(folder).st_mode
    assert mode & 0o7777 == 0o1777


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "claims").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(claims.ClaimsUnusable, match="not a link"):
        claims.Claimer(str(tmp_path / "claims")).claim("job", "step", 1, 1)


def test_more_gpus_than_the_host_has_is_an_error(folder: str) -> None:
    with pytest.raises(ValueError, match="asks for 8 GPUs, the host has 4"):
        claims.Claimer(folder).claim("job", "step", 8, 4)


def test_a_lock_file_removed_by_a_cleaner_does_not_let_two_in(start: Start, folder: str) -> None:
    first = start("first", "=0", 1)
    assert first.line() == "held 0"
    os.unlink(os.path.join(folder, "gpu0"))
    # The holder's lock is on a file without a name now: the ticket still says who holds it.
    second = start("second", "=0", 1)
    assert second.line().startswith("waiting gpu 0 held by job first")


def test_rubbish_in_a_ticket_of_another_user_is_survived(start: Start, folder: str) -> None:
    first = start("first", "=0", 1)
    assert first.line() == "held 0"
    ticket = next(Path(folder).glob("ticket-*"))
    ticket.write_text('{"job": 7, "wants": "x"')
    assert start("second", "=0", 1).line() == "waiting gpu 0 held by an unnamed process"


def test_stopping_leaves_the_queue(folder: str) -> None:
    mine, other = claims.Claimer(folder), claims.Claimer(folder)
    claim, _ = mine.claim("a", "s", 1, 1)
    assert claim is not None
    assert other.claim("b", "s", 1, 1)[0] is None
    other.forget("b", "s")
    assert claims.status(folder)["queue"] == []
    claim.release()
    wait_until(lambda: claims.status(folder)["held"] == [], "the claim is gone")
