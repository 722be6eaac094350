"""What follows the end of an attempt: its verdict, an end to everything it left behind, and which way its step goes.

One `Ending` per attempt whose main process is gone.  The verdict is made in a side task (judge.py); whether there is
another attempt, and with which changes, is policy.py.  Standard library only; must not import stepper.py.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence

from remote_jobs import protocol
from remote_jobs.agent import history, incident, judge, procs
from remote_jobs.agent.attempt import Attempt
from remote_jobs.agent.side import SideTask
from remote_jobs.protocol import EventKind

if TYPE_CHECKING:
    from remote_jobs.agent.running import Run
    from remote_jobs.agent.supervisor import Supervisor

JUDGE_TIMEOUT_S = 120.0
STRAGGLER_GRACE_S = 2.0
KILL_AGAIN_S = 1.0

SUCCEED, STOP, WAIT_AGAIN, TRY_AGAIN = "succeed", "stop", "wait again", "try again"


def state_before_verdict(exit_status: Optional[int], stop_kind: Optional[str]) -> str:
    """The state that an attempt's end shows by itself, before its log was judged."""
    if stop_kind in ("user", "slurm"):
        return "stopped"
    if stop_kind == "service":
        return "succeeded"
    if stop_kind in ("hang", "timeout", "not_ready"):
        return "failed"
    return "succeeded" if exit_status == 0 else "failed"


def course(
    state: str, stop_kind: Optional[str], *, is_service: bool, stop_asked: bool, service_down: bool
) -> str:
    """Where a step goes from a judged attempt: SUCCEED, STOP, WAIT_AGAIN (no failure of its own) or TRY_AGAIN.

    Args:
        state: the judged attempt's.
        stop_kind: who ended the attempt.
        is_service: a service that ends by itself has failed, whatever it says.
        stop_asked: the step is to stop for good.
        service_down: a service that the step needs died, or is not up.
    """
    if stop_kind == "service" or (state == "succeeded" and not is_service):
        return SUCCEED
    if stop_kind == "user" or stop_asked:
        return STOP
    return WAIT_AGAIN if stop_kind == "slurm" or service_down else TRY_AGAIN


class Ending:
    """From the exit of the main process until nothing of the attempt is left."""

    def __init__(self, boss: "Supervisor", step: protocol.StepSpec, run: "Run", others: Sequence[Attempt]) -> None:
        self._boss, self._step, self.run = boss, step, run
        facts = judge.Facts.of(run.attempt, step, boss, others, run.hang_verdict)
        self._task: Optional[SideTask] = SideTask(lambda: judge.judge(facts), timeout_s=JUDGE_TIMEOUT_S)
        self.judgement: Dict[str, Any] = {}
        """{state, verdict, progress, survey}; empty until it is known."""
        self.since = 0.0
        """When it was known (monotonic, s)."""
        self._kill_at: Optional[float] = None

    def tasks(self) -> List[SideTask]:
        """The verdict under way."""
        return [self._task] if self._task is not None else []

    def judged(self, now: float) -> bool:
        """True once the verdict is there."""
        if self._task is None:
            return True
        if not self._task.ready():
            return False
        task, self._task = self._task, None
        self.judgement, self.since = task.result or judge.fallback(self.run.attempt, task.error), now
        return True

    def record(self, progress: int) -> None:
        """Write the verdict down with what the attempt kept, and what it took into the host's history."""
        attempt, result = self.run.attempt, self.judgement
        attempt.progress = progress
        self._boss.emit(
            EventKind.ATTEMPT_JUDGED, self._step.name, attempt.n,
            state=result["state"], verdict=result.get("verdict"), progress=progress,
        )  # fmt: skip
        shown = self._boss.fold.attempts(self._step.name)[-1]
        took_s = (attempt.ended_mono or time.monotonic()) - attempt.started_mono
        row = history.row_of(self._boss.spec, self._step, shown, took_s, self.run.forecasts.scores)
        history.append(self._boss.layout, row)

    def cleaned_up(self, now: float, others: Sequence[Attempt]) -> bool:
        """True when no process of the attempt is left; those that are get TERM, then KILL until they are gone."""
        left = self.run.attempt.own_processes(others)
        if not left:
            return True
        if self._kill_at is None:
            names = [{"pid": proc.pid, "command": procs.command_line(proc.pid, 120)} for proc in left[:50]]
            self._boss.emit(
                EventKind.STRAGGLERS, self._step.name, self.run.attempt.n,
                processes=incident.scrubbed(names, self._boss.secret_values()),
                text="step {} ended, {} process(es) of it did not: ending them".format(self._step.name, len(left)),
            )  # fmt: skip
            for proc in left:
                procs.send_signal(proc, 15)
            self._kill_at = now + STRAGGLER_GRACE_S
        elif now >= self._kill_at:
            for proc in left:
                procs.send_signal(proc, 9)
            self._kill_at = now + KILL_AGAIN_S
        return False

    def cancel(self) -> None:
        """Give the verdict up."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
