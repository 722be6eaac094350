"""What one step of a job does next: wait for its needs and its GPUs, run, be judged, try again.

One `Stepper` per step, ticked by the supervisor.  `mode` says where the step stands between two ticks; every
transition that others may know of is an event.  What happens within a mode is in gpu_wait.py, running.py and ending.py;
this file joins them.  Nothing here blocks.  Standard library only.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional

from remote_jobs import protocol
from remote_jobs.agent import causes, ending, fewer_gpus, incident, judge, policy, ready, recovery
from remote_jobs.agent.attempt import Attempt
from remote_jobs.agent.gpu_wait import GpuWait
from remote_jobs.agent.running import Run, Terms
from remote_jobs.protocol import EventKind

if TYPE_CHECKING:
    import random

    from remote_jobs.agent.supervisor import Supervisor

IDLE, WAITING, RUNNING, JUDGING, CLEANUP, BACKOFF, DONE = (
    "idle", "waiting", "running", "judging", "cleanup", "backoff", "done",
)  # fmt: skip

NEEDS_EVERY_S = 0.5
UNTIL_BACK = "waits until the service it needs is back"
_FAST_START_S = 5.0


def _rng() -> "random.Random":
    """Source of a backoff's jitter."""
    import random  # here: only a failure needs it, and every start of a supervisor would pay for it

    return random.Random()


class Stepper:
    """Drives one step. ``spec`` holds the step with every override (``orch retry --set``) applied."""

    def __init__(self, boss: "Supervisor", spec: protocol.StepSpec, index: int) -> None:
        self.boss, self.index = boss, index
        self._original = spec
        self.spec = spec
        self.mode = IDLE
        self.gpus = GpuWait(boss, spec.name)
        self.attempt: Optional[Attempt] = None
        """The attempt under way, until the step's course after its end is known."""
        self.changes: Dict[str, Any] = {}
        """What the policy changed since the plan: parameters, GPUs, limits."""
        self.history: List[Dict[str, Any]] = []
        """Failed attempts: [{verdict, progress, n}]."""
        self.kept = 0
        """Most work (samples, checkpoints) that any attempt of this step kept."""
        self.stop_kind: Optional[str] = None
        self.stop_reason = ""
        self._run: Optional[Run] = None
        """The newest attempt's, kept after its end."""
        self._ending: Optional[ending.Ending] = None
        self._due = 0.0
        self._failed_at = 0.0
        self._lost: Optional[Dict[str, Any]] = None
        """The attempt that an earlier supervisor left unfinished: {verdict, progress, n}."""
        self._extra_s = 0.0
        self.apply_overrides()

    # ------------------------------------------------------------------------------------------------------- questions

    @property
    def name(self) -> str:
        """The step's name."""
        return self.spec.name

    @property
    def finished(self) -> bool:
        """True once the step needs no more ticks."""
        return self.mode == DONE

    @property
    def is_service(self) -> bool:
        """A step that stays up until the steps that need it are done."""
        return ready.is_service(self.spec)

    @property
    def state(self) -> str:
        """The step's state by its events."""
        return str(self.boss.fold.step(self.name)["state"])

    @property
    def serving(self) -> bool:
        """A service whose probe answered and whose main process still runs."""
        return self.mode == RUNNING and self._run is not None and self._run.ready and self._run.attempt.exit_status is None

    @property
    def progressed(self) -> bool:
        """True when there is something new to show."""
        return self._run is not None and self._run.progressed

    def dependents(self) -> List["Stepper"]:
        """Steps that need this one."""
        return [other for other in self.boss.steppers if self.name in other.spec.needs]

    @property
    def needed(self) -> bool:
        """False once every step that needs this one is done; true where none does."""
        users = self.dependents()
        return not users or any(user.mode != DONE for user in users)

    def others(self) -> List[Attempt]:
        """Attempts of other steps that may still have processes."""
        return [s.attempt for s in self.boss.steppers if s is not self and s.attempt is not None]

    def watch_fds(self) -> List[int]:
        """Pipes whose data should wake the loop."""
        run = self._run.tasks() if self._run is not None else []
        judging = self._ending.tasks() if self._ending is not None else []
        return [task.fd for task in (*self.gpus.tasks(), *run, *judging) if task.pending]

    def next_due(self, now: float) -> float:
        """When this step wants its next tick (monotonic, s)."""
        if self.mode == DONE:
            return now + 60.0
        if self.mode in (RUNNING, JUDGING, CLEANUP) and self.attempt is not None:
            young = now - self.attempt.started_mono < _FAST_START_S
            fast = young or self.attempt.stopping or self.mode != RUNNING or (self._run is not None and self._run.inspecting)
            return now + (0.1 if fast else 1.0)
        return max(now + 0.02, self.gpus.due if self.mode == WAITING else self._due)

    # ------------------------------------------------------------------------------------------------------------ tick

    def tick(self, now: float) -> None:
        """Do what can be done now. Modes that lead straight on are taken in the same tick."""
        for _ in range(8):
            before = self.mode
            handler = getattr(self, "_tick_" + self.mode)
            handler(now)
            if self.mode == before:
                return

    def crash(self, text: str) -> None:
        """A bug of ours must not take the job's other steps along, nor leave this one's processes behind."""
        self.gpus.cancel()
        if self._run is not None:
            self._run.close()
        if self._ending is not None:
            self._ending.cancel()
        attempt, self.attempt = self.attempt, None  # first, so that nothing below reads a log that is closed
        started = attempt is not None and attempt.n <= len(self.boss.fold.attempts(self.name))
        if attempt is not None:
            attempt.kill_all(self.others())
            attempt.log.close()
            if started:
                self.boss.emit(
                    EventKind.ATTEMPT_JUDGED, self.name, attempt.n, state="failed",
                    verdict=judge.unknown_verdict(text, signature="orch_bug", retry="no"),
                )  # fmt: skip
        self._end(EventKind.STEP_FAILED, reason=text, unstarted=not started)

    def _tick_done(self, now: float) -> None:
        return

    def _tick_idle(self, now: float) -> None:
        if self.stop_kind:
            self._end(EventKind.STEP_STOPPED, reason=self.stop_reason)
            return
        if self._in_vain():
            return
        if self._unmet():
            self._due = now + NEEDS_EVERY_S
        else:
            self._wait_for_gpus()

    def _unmet(self) -> List["Stepper"]:
        """Needed steps that are not there (yet)."""
        needed = [self.boss.by_name[need] for need in self.spec.needs]
        return [other for other in needed if not (other.serving if other.is_service else other.state == "succeeded")]

    def _in_vain(self) -> bool:
        """End a step, before its next attempt, that can never start again or that nobody needs any more."""
        for other in self._unmet():
            if other.mode == DONE:
                self._end(EventKind.STEP_SKIPPED, reason="step {} {}".format(other.name, other.state))
                return True
        if self.is_service and not self.needed:
            self._end(EventKind.STEP_SKIPPED, reason="no step needs it any more")
            return True
        return False

    def _wait_for_gpus(self) -> None:
        self.gpus.begin()
        self.mode = WAITING

    def _wait_for_needs(self, reason: Optional[str]) -> None:
        self.boss.emit(EventKind.STEP_QUEUED, self.name, reason=reason)
        self.gpus.release()
        self.mode, self._due = IDLE, 0.0

    def _tick_waiting(self, now: float) -> None:
        if self.stop_kind:
            self._end(EventKind.STEP_STOPPED, reason=self.stop_reason)
            return
        if self._in_vain():
            return
        if self._unmet():
            self._wait_for_needs(UNTIL_BACK)
            return
        if not self.boss.may_start:
            return
        answer = self.gpus.tick(now, self.spec, self._params(), self.changes.get(fewer_gpus.WITHOUT) or [])
        if answer.is_open:
            self._start()
        elif answer.verdict is not None:
            self._end(EventKind.STEP_FAILED, reason=answer.verdict["summary"], verdict=answer.verdict, unstarted=True)
        elif answer.changes:
            self.boss.emit(
                EventKind.STEP_QUEUED, self.name, reason="goes on {}".format(answer.why), changes=answer.changes
            )
            self._change(answer.changes)
            self.gpus.release()
            self.gpus.begin()

    def _params(self) -> Dict[str, Any]:
        """The parameters of the step's program, as it would be started now."""
        return {**self.spec.params, **policy.parameters(self.changes)}

    def _change(self, changes: Mapping[str, Any]) -> None:
        """Run the next attempts with these."""
        self.changes.update(changes)
        self.spec = fewer_gpus.applied(self.spec, self.changes)

    # --------------------------------------------------------------------------------------------------------- attempt

    def _start(self) -> None:
        n = len(self.boss.fold.attempts(self.name)) + 1
        self._run = Run(self.boss, self.spec, self.index, n, self._params(), self.changes, self.gpus)
        self.attempt, self.mode = self._run.attempt, RUNNING
        self._run.start()

    def _tick_running(self, now: float) -> None:
        run, allocation = self._run, self.boss.allocation
        assert run is not None
        if run.attempt.exit_status is None:
            run.tick(now, self._terms())
        elif allocation is None or not allocation.takes(run.attempt, now):
            self._on_ended(run, now)

    def _terms(self) -> Terms:
        stop = (self.stop_kind, self.stop_reason) if self.stop_kind else None
        return Terms(
            self.spec, self.changes, extra_s=self._extra_s, others=self.others(), needed=self.needed, stop=stop
        )

    def take_exit(self, pid: int, status: int) -> bool:
        """Take a reaped child that is this attempt's main process."""
        return self.attempt is not None and self._run is not None and self._run.take_exit(pid, status)

    def _on_ended(self, run: Run, now: float) -> None:
        """The main process is gone: record that at once, then find out why."""
        attempt = run.attempt
        run.ended(now)
        self.boss.emit(
            EventKind.ATTEMPT_ENDED, self.name, attempt.n,
            state=ending.state_before_verdict(attempt.exit_status, attempt.stop_kind),
            exit_status=attempt.exit_status, reason=attempt.stop_reason, **attempt.snapshot(),
        )  # fmt: skip
        # A service that was stopped by its own name leaves its users as much in vain as one that died.
        for user in self.dependents() if self.is_service and attempt.stop_kind in (None, "user") else ():
            user.service_died(self.name)
        self._ending = ending.Ending(self.boss, self.spec, run, self.others())
        self.mode = JUDGING

    def _tick_judging(self, now: float) -> None:
        end = self._ending
        assert end is not None
        if not end.judged(now):
            return
        progress = int(end.judgement.get("progress") or 0)
        if self.is_service:
            progress = sum(user.kept_so_far() for user in self.dependents())
        self.kept = max(self.kept, progress)
        end.record(progress)
        self.mode = CLEANUP

    def _tick_cleanup(self, now: float) -> None:
        """No process of the attempt may be left, and its GPU memory must be back, before anything else happens."""
        end = self._ending
        assert end is not None
        if end.cleaned_up(now, self.others()) and (self.stop_kind or self.gpus.memory_is_back(now, end.since)):
            self.gpus.cancel()
            self.attempt = self._ending = None
            end.run.attempt.log.close()
            self._decide(end.run, end.judgement, now)

    def _decide(self, run: Run, result: Dict[str, Any], now: float) -> None:
        attempt = run.attempt
        way = ending.course(
            result["state"], attempt.stop_kind,
            is_service=self.is_service, stop_asked=bool(self.stop_kind),
            service_down=run.service_lost or self._need_is_down(),
        )  # fmt: skip
        if way == ending.SUCCEED:
            self._end(EventKind.STEP_SUCCEEDED)
        elif way == ending.STOP:
            self._end(EventKind.STEP_STOPPED, reason=attempt.stop_reason or self.stop_reason)
        elif way == ending.WAIT_AGAIN:
            of_slurm = attempt.stop_kind == "slurm"  # its allocation ends: the next one goes on with it
            self._wait_for_needs(attempt.stop_reason if of_slurm else UNTIL_BACK)
        else:
            self._retry_or_fail(attempt, result, now)

    def _retry_or_fail(self, attempt: Attempt, result: Dict[str, Any], now: float) -> None:
        verdict = result.get("verdict") or judge.unknown_verdict("the service ended by itself")
        self.history.append({"verdict": verdict, "progress": attempt.progress, "n": attempt.n})
        self._failed_at = now
        decision = policy.decide(
            self.spec, verdict, self.history, attempt.params, _rng(),
            survey=result.get("survey"), changed=self.changes, env=attempt.env,
        )  # fmt: skip
        incident.note_decision(attempt.dir, decision)
        self._obey(decision, attempt.n, verdict, now)

    def _obey(self, decision: policy.Decision, n: int, verdict: Dict[str, Any], now: float) -> None:
        if not decision.retry:
            self._end(EventKind.STEP_FAILED, reason=decision.reason, verdict=verdict)
            return
        self._change(decision.changes)
        if fewer_gpus.WITHOUT in decision.changes:
            self.gpus.release()  # a claim is kept between attempts, but not one of a broken GPU
        at = time.time() + decision.delay_s
        self.boss.emit(
            EventKind.RETRY_SCHEDULED, self.name, n,
            at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at)), delay_s=round(decision.delay_s, 1),
            changes=decision.changes, reason=decision.reason,
        )  # fmt: skip
        self.mode, self._due = BACKOFF, now + decision.delay_s

    def _tick_backoff(self, now: float) -> None:
        if self.stop_kind:
            self._end(EventKind.STEP_STOPPED, reason=self.stop_reason)
        elif not self._in_vain() and now >= self._due:
            if self._unmet():
                self._wait_for_needs(UNTIL_BACK)
            else:
                self._wait_for_gpus()

    def _need_is_down(self) -> bool:
        """A service that may come back; after one that failed for good the step's own failure stands."""
        return any(other.is_service and other.mode != DONE for other in self._unmet())

    def _end(self, kind: EventKind, **data: Any) -> None:
        self.gpus.release()
        self.mode = DONE
        self.boss.emit(kind, self.name, **data)

    # ---------------------------------------------------------------------------------------------------- from outside

    def service_died(self, service: str) -> None:
        """The service this step needs ended by itself: what runs is in vain, and does not count as an attempt."""
        run = self._run
        if self.mode == RUNNING and run is not None and not run.attempt.stopping and self.stop_kind is None:
            run.service_lost = True
            run.attempt.lost_service = service
            run.attempt.request_stop("service_lost", "the service {} ended".format(service))
        elif self.mode == BACKOFF and self.history and time.monotonic() - self._failed_at < causes.SERVICE_FELT_S:
            last = str((self.history[-1]["verdict"] or {}).get("class"))
            if last in ("network", "unknown"):  # it noticed before we did: that is no failure of its own
                self.history.pop()

    def kept_so_far(self) -> int:
        """Samples or checkpoints kept by any attempt, the running one included."""
        running = self.attempt.work_done() if self.attempt is not None else 0
        counted = self._run.counted if self._run is not None else None
        return max(self.kept, running, counted or 0)

    def stop(self, kind: str, reason: str) -> None:
        """Stop the step for good, wherever it stands."""
        self.stop_kind, self.stop_reason = kind, reason
        self._due = 0.0

    def give_up(self, verdict: Dict[str, Any]) -> None:
        """Fail a step that may not start any more; one that still waits for others is left to their end."""
        if self.mode in (WAITING, BACKOFF) or (self.mode == IDLE and self.boss.fold.attempts(self.name)):
            self._end(EventKind.STEP_FAILED, reason=verdict["summary"], verdict=verdict, unstarted=True)

    def retry_now(self) -> None:
        """End a backoff at once."""
        if self.mode == BACKOFF:
            self._due = 0.0

    def extend(self, seconds: Any) -> None:
        """Move the step's time limits by this many seconds."""
        if isinstance(seconds, (int, float)):
            self._extra_s += float(seconds)

    def apply_overrides(self, given: Optional[Mapping[str, Any]] = None) -> None:
        """Take `orch retry --set step.key=value` into the step's record; what was ``given`` just now beats what the
        policy had changed before.
        """
        for name in recovery.parameters_set(self.name, given or {}):
            self.changes.pop(name, None)
        overridden = recovery.with_overrides(self._original, self.boss.record.overrides)
        self.spec = fewer_gpus.applied(overridden, self.changes)

    def recover(self, *, by_itself: bool) -> None:
        """Take up a step as an earlier supervisor left it: end what still runs of it, mark its attempt lost.

        ``by_itself``: nobody asked for a retry (the host restarted, say), so the lost attempt counts as one.
        """
        if self.state in protocol.STEP_TERMINAL:
            self.mode = DONE
            return
        past = recovery.past_of(self.boss, self.spec, self.index)
        self.history, self.kept, self._lost = past.history, past.kept, past.lost
        self._change(past.changes)
        if past.lost is not None and by_itself:
            verdict = past.lost["verdict"]
            decision = policy.decide(self.spec, verdict, self.history, self._params(), _rng())
            self._obey(decision, past.lost["n"], verdict, time.monotonic())
            return
        self.mode = IDLE
        if self.state not in ("queued", "gated", "retry_wait"):
            self.boss.emit(EventKind.STEP_QUEUED, self.name, reason="taken up again")

    def reopen(self) -> None:
        """`orch retry`: steps that did not succeed run again; a service runs again when one of its users does."""
        again = self.state != "succeeded" or (
            self.is_service and any(user.state != "succeeded" for user in self.dependents())
        )
        if not again:
            self.mode = DONE
            return
        if self.state == "succeeded":
            self.boss.emit(EventKind.STEP_QUEUED, self.name, reason="needed again")
        self.history, self.stop_kind, self.mode, self._due = [], None, IDLE, 0.0

    def leave_lost(self) -> None:
        """`orch retry --step` of another step: what was lost of this one stays lost, until somebody retries it."""
        if self._lost is not None and self.mode != DONE:
            verdict = self._lost["verdict"]
            self._end(EventKind.STEP_FAILED, reason=verdict["summary"], verdict=verdict)

    def add_progress(self, step_state: Dict[str, Any]) -> None:
        """Put what the newest attempt shows into the state object (not an event: it changes every second)."""
        run = self._run
        if run is None:
            return
        run.progressed = False
        if self.attempt is None or not step_state["attempts"]:
            return
        newest = step_state["attempts"][-1]
        if newest["n"] == run.attempt.n:
            run.show(newest)
