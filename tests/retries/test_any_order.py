"""Submit, kill, cut off, reconnect, stop, retry, look in any order: what must hold whatever happened before.

At most one live supervisor and one copy per job, seq never falls, terminal states stay, recorded results are found again.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from hypothesis.strategies import data

from tests.support.host_side import HostSide, Refused, pythons
from tests.support.jobdir import JobDir, kill
from tests.support.waiting import wait_until

TERMINAL = ("succeeded", "failed", "stopped")
RUN = (
    "exec 9>lock-$ORCH_JOB; flock -n 9 || touch SECOND-COPY; echo $$ >> starts-$ORCH_JOB; "
    "until [ -e go-$ORCH_JOB ]; do sleep 0.05 9>&-; done; echo $ORCH_ATTEMPT > result-$ORCH_JOB"
)
MAX_JOBS = 2


class AnyOrder(RuleBasedStateMachine):
    """One host; agents come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="orch-any-order-")
        self.side = HostSide(Path(self.folder.name), next(iter(pythons().values())))
        self.agent = self.side.agent()
        self.seqs: dict[str, int] = {}
        self.ended: dict[str, str] = {}

    def teardown(self) -> None:
        """End what is left."""
        self.side.__exit__()
        self.folder.cleanup()

    @property
    def some(self) -> list[JobDir]:
        return self.side.jobs()

    def pick(self, draw: Any) -> JobDir:
        """Any job."""
        return self.some[draw.draw(_index) % len(self.some)]

    # ---------------------------------------------------------------------------------------------------------- rules

    @initialize()
    def first(self) -> None:
        self.submit()

    @precondition(lambda self: len(self.some) < MAX_JOBS)
    @rule()
    def submit(self) -> None:
        spec = self.side.spec([{"name": "work", "run": RUN, "grace_s": 1.0}], f"job-{len(self.some)}")
        self.agent.request("launch", spec=spec, secrets={}, new=False, within_s=60)
        again = self.agent.request("launch", spec=spec, secrets={}, new=False, within_s=60)
        assert again["adopted"] is True

    @rule(draw=data())
    def kill_supervisor(self, draw: Any) -> None:
        for pid in self.pick(draw).supervisors():
            kill(pid)

    @rule(draw=data())
    def kill_job(self, draw: Any) -> None:
        for pid in self.pick(draw).marked():
            kill(pid)

    @rule()
    def cut_off_and_reconnect(self) -> None:
        self.agent.process.kill()
        self.agent.process.wait()
        self.agent = self.side.agent()

    @rule(draw=data())
    def stop(self, draw: Any) -> None:
        job = self.pick(draw)
        self.agent.request("control", job=job.id, action="stop", args={}, wait_s=10, within_s=60)

    @rule(draw=data())
    def retry(self, draw: Any) -> None:
        job = self.pick(draw)
        try:
            self.agent.request("control", job=job.id, action="retry", args={}, wait_s=10, within_s=60)
        except Refused as refusal:
            if refusal.code != "wrong_state":
                raise
        else:
            assert self.ended.pop(job.id, None) != "succeeded", "a job that succeeded is not taken up again"

    @rule(draw=data())
    def let_it_finish(self, draw: Any) -> None:
        job = self.pick(draw)
        (self.side.work / f"go-{job.id}").touch()
        if job.supervisors():
            for _ in range(2):
                self.retry_waiting(job)
            wait_until(lambda: "finished" in _since_reopened(job) or not job.supervisors(), "it ends", within_s=60)

    def retry_waiting(self, job: JobDir) -> None:
        """Cut a backoff short."""
        if job.state == "retry_wait":
            try:
                self.agent.request("control", job=job.id, action="retry", args={}, wait_s=10, within_s=60)
            except Refused as refusal:
                if refusal.code != "wrong_state":
                    raise

    # ----------------------------------------------------------------------------------------------------- invariants

    @invariant()
    def holds(self) -> None:
        """Look, and compare with everything seen before."""
        answer = self.agent.request("look", within_s=60)
        assert not answer["unreadable"], answer["unreadable"]
        assert set(answer["jobs"]) == {job.id for job in self.some}
        assert not (self.side.work / "SECOND-COPY").exists()
        for job in self.some:
            found = answer["jobs"][job.id]
            state, seq = found["state"]["state"], found["state"]["seq"]
            # A fork of the supervisor holds its lock for the moment until it lets go of it.
            wait_until(lambda job=job: len(job.supervisors()) <= 1, "at most one supervisor lives", within_s=5)
            seqs = [event["seq"] for event in job.events()]
            assert seqs == sorted(set(seqs))
            assert seq >= self.seqs.get(job.id, 0), "seq never falls"
            self.seqs[job.id] = seq
            if job.id in self.ended:
                assert state == self.ended[job.id], "a terminal state stays"
                assert job.record("result.json")["state"] == state, "the recorded result is found again"
            elif state in TERMINAL:
                self.ended[job.id] = state
                wait_until(lambda job=job: not job.supervisors() and not job.marked(), f"nothing of {job.id} is left")
            if state == "succeeded":
                assert (self.side.work / f"result-{job.id}").exists()


def _since_reopened(job: JobDir) -> list[str]:
    kinds = job.kinds()
    return kinds[len(kinds) - kinds[::-1].index("reopened") :] if "reopened" in kinds else kinds


def _indices() -> Any:
    from hypothesis.strategies import integers

    return integers(0, MAX_JOBS - 1)


_index = _indices()


def test_any_order() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        AnyOrder,
        settings=settings(
            max_examples=10, stateful_step_count=8, deadline=None, derandomize=True, database=None,
            phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
