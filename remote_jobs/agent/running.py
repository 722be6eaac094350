"""One attempt under way: its start, what it prints and counts, the limits it must keep, its way down the stop ladder.

One `Run` per attempt, ticked by the stepper until the main process is gone; what follows from its end is in ending.py.
Nothing here blocks: probe, count and stacks are side tasks.  Standard library only; must not import stepper.py.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Sequence, Tuple

from remote_jobs import protocol
from remote_jobs.agent import command, counting, hang, history, judge, launch_env, limits, procs, ready
from remote_jobs.agent.attempt import Attempt, utc_now
from remote_jobs.agent.side import SideTask
from remote_jobs.protocol import EventKind

if TYPE_CHECKING:
    from remote_jobs.agent.gpu_wait import GpuWait
    from remote_jobs.agent.supervisor import Supervisor

STACKS_TIMEOUT_S = 40.0
_MAX_PHASE_EVENTS = 500


class Terms:
    """What an attempt is held to now: requests and other steps change it while the attempt runs."""

    # Written out: a NamedTuple or dataclass is compiled at import, for which every start of a supervisor would pay.
    def __init__(
        self,
        step: protocol.StepSpec,
        changes: Mapping[str, Any],
        *,
        extra_s: float,
        others: Sequence[Attempt],
        needed: bool,
        stop: Optional[Tuple[str, str]],
    ) -> None:
        self.step, self.changes = step, changes
        self.extra_s = extra_s
        """Added to the step's time limits by `orch extend`."""
        self.others = others
        """Attempts of other steps: their processes are not this one's."""
        self.needed = needed
        """False for a service whose users are all done."""
        self.stop = stop
        """(kind, reason) once the step is to stop for good."""


class Run:
    """One attempt from its start to the exit of its main process."""

    def __init__(
        self,
        boss: "Supervisor",
        step: protocol.StepSpec,
        index: int,
        n: int,
        params: Mapping[str, Any],
        changes: Mapping[str, Any],
        gpus: "GpuWait",
    ) -> None:
        self._boss, self._step, self._gpus = boss, step, gpus
        self.attempt = Attempt(
            boss.job, step, index, n,
            params=params, changes=changes, gpus=gpus.indices,
            log_limit_bytes=boss.spec.log_limit_bytes,
            usual=lambda: history.usual_paces(boss.runs(), step),
            usual_phases=lambda: history.usual_phases(boss.runs(), step),
        )  # fmt: skip
        self.ready = False
        """A service whose probe has answered."""
        self.progressed = False
        """Something to show has changed since the state was last written."""
        self.service_lost = False
        """Stopped because the service that it needs has died."""
        self.hang_verdict: Optional[Dict[str, Any]] = None
        self.forecasts = history.ForecastKeeper()
        self._count = counting.FileCount()
        self._readiness = ready.ReadyWatch()
        self._hang = hang.HangWatch()
        self._stacks: Optional[SideTask] = None
        self._suspicion: Tuple[str, str] = ("", "")
        self._phases: Dict[str, str] = {}
        self._phase_events = 0
        self._told_unreadable = False
        self._argv: List[str] = []

    @property
    def counted(self) -> Optional[int]:
        """Files of `done.count`; None before they were counted."""
        return self._count.files

    @property
    def inspecting(self) -> bool:
        """True while stacks are taken, after which it is stopped."""
        return self._stacks is not None

    def tasks(self) -> List[SideTask]:
        """Side tasks that may still run."""
        stacks = [self._stacks] if self._stacks is not None else []
        return [*stacks, *self._readiness.tasks(), *self._count.tasks()]

    def close(self) -> None:
        """End the side tasks: nobody waits for them any more."""
        for task in self.tasks():
            if task.pending:
                task.cancel()

    # ----------------------------------------------------------------------------------------------------------- start

    def start(self) -> None:
        """Start the main process; what keeps it from starting goes into its log, as the end of the attempt."""
        boss, step, attempt = self._boss, self._step, self.attempt
        try:
            os.makedirs(boss.places.workdir, exist_ok=True)
            self._argv = command.argv(step, boss.spec, boss.places, attempt.params)
            env = command.environment(
                step, boss.spec, boss.places,
                base=os.environ, attempt=attempt.n, gpus=attempt.gpus,
                secrets=boss.secrets.get(step.name) or {},
                exports=launch_env.timer_exports(step),
            )  # fmt: skip
            env.update(limits.environment(attempt.changes))
            env.update(launch_env.overlay_env(step, boss.spec, boss.job, boss.layout, env))
            if boss.allocation is not None:
                self._argv, of_nodes = boss.allocation.across_nodes(step, self._argv, attempt.n, attempt.dir)
                env.update(of_nodes)
            attempt.oom_kills_before = judge.oom_kills()
            attempt.patch_hash = env.get("ORCH_PATCHES")
            attempt.start(self._argv, env, boss.places.workdir, self._gpus.fds)
        except (OSError, ValueError) as exc:
            attempt.fail_to_start(judge.start_failure_text(self._argv, boss.places.workdir, exc))
        boss.emit(
            EventKind.ATTEMPT_STARTED, step.name, attempt.n,
            process=protocol.to_dict(attempt.process) if attempt.process else None,
            argv=self._argv, changes=dict(attempt.changes), gpus=attempt.gpus,
        )  # fmt: skip
        self._write_record()

    def _write_record(self, **extra: Any) -> None:
        try:
            self.attempt.write_record(self.attempt.record(self._argv, **extra))
        except OSError as exc:
            print("attempt.json: {}".format(exc), flush=True)

    # ------------------------------------------------------------------------------------------------------------ tick

    def tick(self, now: float, terms: Terms) -> None:
        """Look after a main process that still runs. ``now`` is monotonic, in s."""
        attempt = self.attempt
        if attempt.read_log():
            self.progressed = True
            self.forecasts.take(attempt.snapshot()["bars"], now)
            self._report_phases()
        self._tell_unreadable()
        attempt.scan(now)
        attempt.log.enforce_limit()
        if terms.stop is not None and not attempt.stopping:
            attempt.request_stop(*terms.stop)
        if self._stacks is not None and (attempt.stopping or self._stacks.ready()):
            self._drop_stacks()
            attempt.request_stop(*self._suspicion)
        if attempt.stopping:
            self._climb(now, terms.others)
            return
        if self._stacks is not None:
            return
        if ready.is_service(terms.step):
            self._look_after_service(now, terms)
        if self._count.tick(now, terms.step, self._boss.places):
            self.progressed = True
        self._check_limits(now, terms)

    def take_exit(self, pid: int, status: int) -> bool:
        """Take a reaped child that is the main process."""
        process = self.attempt.process
        if process is None or process.pid != pid or self.attempt.exit_status is not None:
            return False
        self.attempt.on_exit(status)
        return True

    def ended(self, now: float) -> None:
        """The main process is gone: take in the rest of what it printed, and write down when and how."""
        self.close()
        self.attempt.read_log()
        self.attempt.scan(now, force=True)
        self._report_phases()
        self._write_record(exit_status=self.attempt.exit_status, ended_at=utc_now())

    def _tell_unreadable(self) -> None:
        if self.attempt.unreadable is not None and not self._told_unreadable:
            self._told_unreadable = True
            text = "orch does not understand this log ({}, see supervisor.log): no bars and phases any more; the step goes on"
            self._emit(EventKind.NOTE, text=text.format(self.attempt.unreadable))

    def _climb(self, now: float, others: Sequence[Attempt]) -> None:
        signum = self.attempt.climb(now, others)
        if signum is not None:
            self._emit(EventKind.STOP_SENT, signal=procs.signal_name(signum), reason=self.attempt.stop_reason)

    def _look_after_service(self, now: float, terms: Terms) -> None:
        if not terms.needed:
            self.attempt.request_stop("service", "the steps that need it are done")
            return
        if self.ready:
            return
        if self._readiness.tick(now, terms.step, self.attempt):
            self.ready = True
            self._emit(EventKind.STEP_READY)
            return
        limit = terms.changes.get(limits.READY_WITHIN) or (terms.step.service or {}).get("timeout_s")
        if limit and now - self.attempt.started_mono > float(limit) + terms.extra_s:
            said = self._readiness.said(terms.step)
            self._suspect("not_ready", "not ready after {:.15g} s: {}".format(float(limit) + terms.extra_s, said), terms.others)

    def _check_limits(self, now: float, terms: Terms) -> None:
        limit = terms.step.timeout_s
        if limit and now - self.attempt.started_mono > float(limit) + terms.extra_s:
            more = " and the {:.15g} s it was given more".format(terms.extra_s) if terms.extra_s else ""
            self._suspect("timeout", "ran longer than timeout_s = {:.15g}{}".format(float(limit), more), terms.others)
            return
        verdict = self._hang.look(now, self.attempt, terms.step, service_ready=self.ready)
        if verdict:
            self._emit(EventKind.HANG_SUSPECTED, reason=verdict["summary"], text=verdict["summary"])
            self.hang_verdict = verdict
            self._suspect("hang", verdict["summary"], terms.others)

    def _suspect(self, kind: str, reason: str, others: Sequence[Attempt]) -> None:
        """Take the stacks of an attempt that is to be ended for standing still; then it is stopped."""
        if self._stacks is not None:
            return
        folder, alive, secrets = self.attempt.dir, self.attempt.own_processes(others), self._boss.secret_values()
        self._suspicion = (kind, reason)
        self._stacks = SideTask(
            lambda: hang.write_stacks(folder, alive, secrets), timeout_s=STACKS_TIMEOUT_S, memory_mib=None
        )

    def _drop_stacks(self) -> None:
        if self._stacks is not None:
            if self._stacks.pending:
                self._stacks.cancel()
            self._stacks = None

    def _report_phases(self) -> None:
        for phase in self.attempt.snapshot().get("phases", []):
            name, state = str(phase.get("name")), str(phase.get("state"))
            if self._phases.get(name) != state and self._phase_events < _MAX_PHASE_EVENTS:
                self._phases[name] = state
                self._phase_events += 1
                self._emit(EventKind.PHASE_CHANGED, phase=name, state=state)

    def _emit(self, kind: EventKind, **data: Any) -> None:
        self._boss.emit(kind, self._step.name, self.attempt.n, **data)

    # ------------------------------------------------------------------------------------------------------------ show

    def show(self, state: Dict[str, Any]) -> None:
        """Put what the attempt shows into its part of the job's state (not an event: it changes every second)."""
        attempt = self.attempt
        snapshot = attempt.snapshot()
        state["bars"], state["phases"] = snapshot.get("bars", []), snapshot.get("phases", [])
        if self.counted is not None:
            state["bars"] = [*state["bars"], counting.bar(self._step, self.counted)]
        state["log_bytes"] = attempt.log.size()
        state["log_quiet_s"] = round(time.monotonic() - attempt.last_log_mono, 1)
        if attempt.log.gap:
            state["log_gap"] = list(attempt.log.gap)
