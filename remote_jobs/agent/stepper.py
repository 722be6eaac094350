"""What one step of a job does next: wait for its needs, claim GPUs, pass the gate, run, be judged, try again.

One `Stepper` per step, ticked by the supervisor.  `mode` says where the step stands between two ticks; every
transition that others may know of is an event.  Nothing here blocks: gate, verdict, probe and file counts are
side tasks.  Standard library only.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Tuple

from remote_jobs import protocol
from remote_jobs.agent import (
    command,
    fewer_gpus,
    gpu_access,
    hang,
    history,
    incident,
    judge,
    launch_env,
    limits,
    policy,
    procs,
    ready,
    recovery,
)
from remote_jobs.agent.attempt import Attempt, utc_now
from remote_jobs.agent.side import SideTask
from remote_jobs.protocol import EventKind

if TYPE_CHECKING:
    from remote_jobs.agent.supervisor import Supervisor

IDLE, CLAIM, GATE, RUNNING, JUDGING, CLEANUP, BACKOFF, DONE = (
    "idle", "claim", "gate", "running", "judging", "cleanup", "backoff", "done",
)  # fmt: skip

GATE_WAIT_S = 1800.0
GATE_EVERY_S = 1.0
GATE_EVERY_LATER_S = 15.0
GATE_OFTEN_S = 600.0
"""After this the driver is asked less often, and at once when one of the processes it named has ended."""
BROKEN_READS = 3
"""Readings in a row that no waiting can heal (a GPU is missing or broken) before the step fails."""
STACKS_TIMEOUT_S = 40.0
SERVICE_FELT_S = 60.0
"""A step that failed this short before its service was seen to die most likely failed of that."""
CLAIM_EVERY_S = 1.0
SURVEY_EVERY_S = 5.0
COUNT_EVERY_S = 15.0
READY_EVERY_S = 1.0
CLEANUP_GPU_WAIT_S = 120.0
STRAGGLER_GRACE_S = 2.0
_MAX_PHASE_EVENTS = 500
_FAST_START_S = 5.0


class Stepper:
    """Drives one step. ``spec`` holds the step with every override (``orch retry --set``) applied."""

    def __init__(self, boss: "Supervisor", spec: protocol.StepSpec, index: int) -> None:
        self.boss, self.index = boss, index
        self.original = spec
        self.spec = spec
        self.mode = IDLE
        self.attempt: Optional[Attempt] = None
        self.claim: Any = None
        self.changes: Dict[str, Any] = {}
        self.history: List[Dict[str, Any]] = []
        self.stop_kind: Optional[str] = None
        self.stop_reason = ""
        self.progressed = False
        self._due = 0.0
        self._side: Optional[SideTask] = None
        self._probe: Optional[SideTask] = None
        self._count: Optional[SideTask] = None
        self._probe_at = 0.0
        self._count_at = 0.0
        self._waiting: Optional[str] = None
        self._gate_since: Optional[float] = None
        self._read_again_at = 0.0
        self._holders: List[protocol.ProcessId] = []
        self._broken = 0
        self._stacks: Optional[SideTask] = None
        self._failed_at = 0.0
        self.kept = 0
        """Most work (samples, checkpoints) that any attempt of this step kept."""
        self._ready = False
        self._phases: Dict[str, str] = {}
        self._phase_events = 0
        self._judgement: Dict[str, Any] = {}
        self._cleanup_since = 0.0
        self._killed_at = 0.0
        self._reported_stragglers = False
        self._counted: Optional[int] = None
        self._service_lost = False
        self._extra_s = 0.0
        self._hang = hang.HangWatch()
        self.hang_verdict: Optional[Dict[str, Any]] = None
        self._suspicion: Tuple[str, str] = ("", "")
        self._argv: List[str] = []
        self._among: Optional[List[int]] = None
        self._reading: Dict[str, Any] = {}
        self._forecasts = history.ForecastKeeper()
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
        return self.spec.service is not None or self.spec.uses == "serve"

    @property
    def state(self) -> str:
        """The step's state by its events."""
        return str(self.boss.fold.step(self.name)["state"])

    @property
    def serving(self) -> bool:
        """A service whose probe answered and whose main process still runs."""
        return self._ready and self.mode == RUNNING and self.attempt is not None and self.attempt.exit_status is None

    def dependents(self) -> List["Stepper"]:
        """Steps that need this one."""
        return [other for other in self.boss.steppers if self.name in other.spec.needs]

    def others(self) -> List[Attempt]:
        """Attempts of other steps that may still have processes."""
        return [s.attempt for s in self.boss.steppers if s is not self and s.attempt is not None]

    def side_pids(self) -> List[int]:
        """Our side tasks' pids, which are not the job's processes."""
        return [task.pid for task in self._tasks()]

    def watch_fds(self) -> List[int]:
        """Pipes whose data should wake the loop."""
        return [task.fd for task in self._tasks() if task.pending]

    def _tasks(self) -> List[SideTask]:
        return [task for task in (self._side, self._probe, self._count, self._stacks) if task is not None]

    def next_due(self, now: float) -> float:
        """When this step wants its next tick (monotonic, s)."""
        if self.mode == DONE:
            return now + 60.0
        if self.mode in (RUNNING, JUDGING, CLEANUP) and self.attempt is not None:
            young = now - self.attempt.started_mono < _FAST_START_S
            fast = young or self.attempt.stopping or self.mode != RUNNING or self._stacks is not None
            return now + (0.1 if fast else 1.0)
        return max(now + 0.02, self._due)

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
        self._drop_side()
        self._drop_stacks()
        attempt, self.attempt = self.attempt, None  # first, so that nothing below reads a log that is closed
        if attempt is not None:
            attempt.kill_all(self.others())
            attempt.log.close()
            if attempt.n <= len(self.boss.fold.attempts(self.name)):
                self.boss.emit(
                    EventKind.ATTEMPT_JUDGED, self.name, attempt.n, state="failed",
                    verdict=judge.unknown_verdict(text, signature="orch_bug", retry="no"),
                )  # fmt: skip
        self._end(EventKind.STEP_FAILED, reason=text)

    def _tick_done(self, now: float) -> None:
        return

    def _tick_idle(self, now: float) -> None:
        if self.stop_kind:
            self._end(EventKind.STEP_STOPPED, reason=self.stop_reason)
            return
        waiting_for = None
        for need in self.spec.needs:
            other = self.boss.by_name[need]
            if other.is_service:
                if other.serving:
                    continue
                if other.mode != DONE:
                    waiting_for = need
                    continue
            elif other.state == "succeeded":
                continue
            elif other.mode != DONE:
                waiting_for = need
                continue
            self._end(EventKind.STEP_SKIPPED, reason="step {} {}".format(need, other.state))
            return
        if waiting_for is None:
            if self.is_service and self.dependents() and all(s.mode == DONE for s in self.dependents()):
                self._end(EventKind.STEP_SKIPPED, reason="no step needs it any more")
                return
            self.mode, self._due, self._gate_since, self._waiting = CLAIM, 0.0, None, None
        else:
            self._due = now + 0.5

    def _tick_claim(self, now: float) -> None:
        if self.stop_kind:
            self._drop_side()
            self._end(EventKind.STEP_STOPPED, reason=self.stop_reason)
            return
        if now < self._due or not self.boss.may_start:
            return
        if self.spec.gpus > 0 and self.claim is None:
            if not self._surveyed(now):
                return
            among, self._among = self._among, None
            if among is not None and len(among) < self.spec.gpus:  # foreign work or a fault: as at a closed gate
                self._gate_since = self._gate_since or now
                self._closed(now, self._reading, can_wait=len(self._reading["survey"]["healthy"]) >= self.spec.gpus)
                return
            self.claim, reason = gpu_access.claim_gpus(self.boss.claimer, self.boss.spec, self.spec, among)
            if self.claim is None:
                self._due = now + (CLAIM_EVERY_S if among is None else SURVEY_EVERY_S)
                if reason != self._waiting:
                    self._waiting = reason
                    self.boss.emit(EventKind.STEP_QUEUED, self.name, reason=reason)
                return
        self._waiting = None
        self.mode, self._due = GATE, 0.0
        self._gate_since, self._read_again_at, self._broken = now, 0.0, 0

    def _surveyed(self, now: float) -> bool:
        """True once it is known which GPUs may be claimed; only asked for when some of the host's are enough."""
        without = self.changes.get(fewer_gpus.WITHOUT) or []
        if not 0 < self.spec.gpus < (self.boss.spec.host_gpus or 0) and not without:
            return True
        if self._side is None:
            spec, layout = self.boss.spec, self.boss.layout
            self._side = SideTask(
                lambda: gpu_access.read_gate(layout, spec, None), timeout_s=180.0, memory_mib=None
            )
        if not self._side.ready():
            self._due = now + 0.1
            return False
        self._reading = self._side.result or {}
        self._among = gpu_access.usable(self._reading, without)
        self._side = None
        return True

    def _tick_gate(self, now: float) -> None:
        if self.stop_kind:
            self._drop_side()
            self._end(EventKind.STEP_STOPPED, reason=self.stop_reason)
            return
        if not self.boss.may_start:
            return
        if self.spec.gpus <= 0:
            self._start(now)
            return
        if self._side is None:
            if now < self._due:
                return
            if now < self._read_again_at and all(procs.is_alive(holder) for holder in self._holders):
                self._due = now + GATE_EVERY_S
                return
            self._side = self._gate_reading()
            return
        if not self._side.ready():
            self._due = now + 0.1
            return
        reading, error = self._side.result, self._side.error
        self._side = None
        if reading and reading.get("reaped"):
            self.boss.emit(EventKind.REAPED, self.name, processes=reading["reaped"], text=reading.get("reaped_text"))
        if reading and reading.get("open"):
            self._start(now)
            return
        self._closed(now, reading or {"reasons": ["the GPUs could not be read: {}".format(error)]})

    def _closed(self, now: float, reading: Mapping[str, Any], *, can_wait: Optional[bool] = None) -> None:
        """The GPUs cannot be had now: wait, go on with fewer where the plan allows that, or give up."""
        reasons = reading.get("reasons") or ["too few GPUs may be used"]
        waited = now - (self._gate_since or now)
        given = self.boss.spec.gate.get("wait_s")
        limit = GATE_WAIT_S if given is None else float(given)
        can_wait = reading.get("can_wait", True) if can_wait is None else can_wait
        self._broken = 0 if can_wait else self._broken + 1
        if self._broken >= BROKEN_READS and self._went_smaller(reading):
            return
        if waited > limit or self._broken >= BROKEN_READS:
            answers = (reading.get("gpus") or {}).get("gpus")
            broken = ("gpu_hardware" if answers else "driver") if self._broken >= BROKEN_READS else None
            verdict = judge.gate_verdict(reasons, waited, broken=broken)
            self._end(EventKind.STEP_FAILED, reason=verdict["summary"], verdict=verdict)
            return
        text = "; ".join(reasons)
        if text != self._waiting:
            self._waiting = text
            self.boss.emit(EventKind.STEP_GATED, self.name, reasons=reasons, wait_s=limit)
        self._holders = recovery.identities(reading.get("holders") or [])
        self._read_again_at = now + (GATE_EVERY_LATER_S if waited > GATE_OFTEN_S and self._holders else 0.0)
        self._due = now + (SURVEY_EVERY_S if self.mode == CLAIM and self._broken == 0 else GATE_EVERY_S)

    def _went_smaller(self, reading: Mapping[str, Any]) -> bool:
        """Leave broken GPUs out before an attempt, where the plan allows fewer: claim again among the others."""
        params = {**self.spec.params, **policy.parameters(self.changes)}
        without = self.changes.get(fewer_gpus.WITHOUT) or []
        changes, why = fewer_gpus.change(self.spec, params, reading.get("survey") or {}, without)
        if not changes:
            return False
        self.boss.emit(EventKind.STEP_QUEUED, self.name, reason="goes on {}".format(why), changes=changes)
        self._change(changes)
        self._release()
        self.mode, self._due, self._broken, self._gate_since, self._waiting = CLAIM, 0.0, 0, None, None
        return True

    def _change(self, changes: Mapping[str, Any]) -> None:
        """Run the next attempts with these."""
        self.changes.update(changes)
        self.spec = fewer_gpus.applied(self.spec, self.changes)

    # ----------------------------------------------------------------------------------------------------------- start

    def _start(self, now: float) -> None:
        boss = self.boss
        n = len(boss.fold.attempts(self.name)) + 1
        params = {**self.spec.params, **policy.parameters(self.changes)}
        self._gate_since = None
        attempt = Attempt(
            boss.job, self.spec, self.index, n,
            params=params, changes=self.changes,
            gpus=self.claim.indices if self.claim is not None else None,
            log_limit_bytes=boss.spec.log_limit_bytes,
            usual=lambda: history.usual_paces(boss.runs(), self.spec),
            usual_phases=lambda: history.usual_phases(boss.runs(), self.spec),
        )  # fmt: skip
        self.attempt, self._ready, self._phases, self._counted = attempt, False, {}, None
        self._forecasts = history.ForecastKeeper()
        self._phase_events, self._hang, self._reported_stragglers = 0, hang.HangWatch(), False
        self._service_lost = False
        argv: List[str] = []
        try:
            os.makedirs(boss.places.workdir, exist_ok=True)
            argv = command.argv(self.spec, boss.spec, boss.places, params)
            env = command.environment(
                self.spec, boss.spec, boss.places,
                base=os.environ, attempt=n, gpus=attempt.gpus,
                secrets=boss.secrets.get(self.name) or {},
                exports=launch_env.timer_exports(self.spec),
            )  # fmt: skip
            env.update(limits.environment(self.changes))
            env.update(launch_env.overlay_env(self.spec, boss.spec, boss.job, boss.layout, env))
            if boss.allocation is not None:
                argv, of_nodes = boss.allocation.across_nodes(self.spec, argv, n, attempt.dir)
                env.update(of_nodes)
            attempt.oom_kills_before = judge.oom_kills()
            attempt.patch_hash = env.get("ORCH_PATCHES")
            attempt.start(argv, env, boss.places.workdir, self.claim.fds if self.claim is not None else ())
        except (OSError, ValueError) as exc:
            attempt.fail_to_start(judge.start_failure_text(argv, boss.places.workdir, exc))
        self.mode = RUNNING
        boss.emit(
            EventKind.ATTEMPT_STARTED, self.name, n,
            process=protocol.to_dict(attempt.process) if attempt.process else None,
            argv=argv, changes=dict(self.changes), gpus=attempt.gpus,
        )  # fmt: skip
        self._write_attempt(argv)

    def _write_attempt(self, argv: Optional[List[str]] = None, **extra: Any) -> None:
        assert self.attempt is not None
        if argv is not None:
            self._argv = argv
        try:
            self.attempt.write_record(self.attempt.record(self._argv, **extra))
        except OSError as exc:
            print("attempt.json: {}".format(exc), flush=True)

    # --------------------------------------------------------------------------------------------------------- running

    def _tick_running(self, now: float) -> None:
        attempt = self.attempt
        assert attempt is not None
        if attempt.exit_status is not None:
            if self.boss.allocation is None or not self.boss.allocation.takes(attempt, now):
                self._on_ended(now)
            return
        if attempt.read_log():
            self.progressed = True
            self._forecasts.take(attempt.snapshot()["bars"], now)
            self._report_phases()
        attempt.scan(now)
        attempt.log.enforce_limit()
        if self.stop_kind and not attempt.stopping:
            attempt.request_stop(self.stop_kind, self.stop_reason)
        if self._stacks is not None and (attempt.stopping or self._stacks.ready()):
            self._drop_stacks()
            attempt.request_stop(*self._suspicion)
        if attempt.stopping:
            self._climb(now)
            return
        if self._stacks is not None:
            return
        if self.is_service:
            self._tick_service(now)
        self._tick_count(now)
        self._check_limits(now)

    def _climb(self, now: float) -> None:
        assert self.attempt is not None
        attempt = self.attempt
        attempt.side_pids = self.boss.side_pids()
        signum = attempt.climb(now, self.others())
        if signum is not None:
            self.boss.emit(
                EventKind.STOP_SENT, self.name, attempt.n, signal=procs.signal_name(signum), reason=attempt.stop_reason
            )

    def _tick_service(self, now: float) -> None:
        assert self.attempt is not None
        users = self.dependents()
        if users and all(user.mode == DONE for user in users):
            self.attempt.request_stop("service", "the steps that need it are done")
            return
        if self._ready:
            return
        ready_rule = (self.spec.service or {}).get("ready") or {"marker": "ready"}
        if "marker" in ready_rule or "log" in ready_rule:
            answered = ready.in_log(ready_rule, self.attempt)
        else:
            answered = False
            if self._probe is None and now >= self._probe_at:
                self._probe = SideTask(lambda: ready.probe(ready_rule), timeout_s=5.0)
            elif self._probe is not None and self._probe.ready():
                answered = bool(self._probe.result)
                self._probe = None
                self._probe_at = now + READY_EVERY_S
        if answered:
            self._ready = True
            self.boss.emit(EventKind.STEP_READY, self.name, self.attempt.n)
            return
        limit = self.changes.get(limits.READY_WITHIN) or (self.spec.service or {}).get("timeout_s")
        if limit and now - self.attempt.started_mono > float(limit) + self._extra_s:
            self._suspect("not_ready", "not ready after {:.0f} s".format(float(limit)))

    def _tick_count(self, now: float) -> None:
        """A `run` step with `done.count` shows that count as its progress."""
        if not (self.spec.done or {}).get("count"):
            return
        if self._count is not None:
            if self._count.ready():
                if self._count.error is None and self._count.result != self._counted:
                    self._counted, self.progressed = self._count.result, True
                self._count = None
        elif now >= self._count_at:
            done, workdir = dict(self.spec.done or {}), self.boss.places.workdir
            done["count"] = self.boss.places.filled(done["count"])
            self._count = SideTask(lambda: judge.count_files(workdir, str(done["count"])), timeout_s=120.0)
            self._count_at = now + COUNT_EVERY_S

    def _check_limits(self, now: float) -> None:
        attempt = self.attempt
        assert attempt is not None
        limit = self.spec.timeout_s
        if limit and now - attempt.started_mono > float(limit) + self._extra_s:
            self._suspect("timeout", "ran longer than timeout_s = {:.0f}".format(float(limit)))
            return
        reason = self._hang.look(now, attempt, self.spec, service_ready=self._ready)
        if reason:
            self.boss.emit(EventKind.HANG_SUSPECTED, self.name, attempt.n, reason=reason["summary"], text=reason["summary"])
            self.hang_verdict = reason
            self._suspect("hang", reason["summary"])

    def _suspect(self, kind: str, reason: str) -> None:
        """Take the stacks of an attempt that is to be ended for standing still; then it is stopped."""
        attempt = self.attempt
        assert attempt is not None
        if self._stacks is not None:
            return
        attempt.side_pids = self.boss.side_pids()
        folder, alive, secrets = attempt.dir, attempt.own_processes(self.others()), self.boss.secret_values()
        self._suspicion = (kind, reason)
        self._stacks = SideTask(
            lambda: hang.write_stacks(folder, alive, secrets), timeout_s=STACKS_TIMEOUT_S, memory_mib=None
        )

    def _report_phases(self) -> None:
        assert self.attempt is not None
        for phase in self.attempt.snapshot().get("phases", []):
            name, state = str(phase.get("name")), str(phase.get("state"))
            if self._phases.get(name) != state and self._phase_events < _MAX_PHASE_EVENTS:
                self._phases[name] = state
                self._phase_events += 1
                self.boss.emit(EventKind.PHASE_CHANGED, self.name, self.attempt.n, phase=name, state=state)

    # --------------------------------------------------------------------------------------------------------- the end

    def take_exit(self, pid: int, status: int) -> bool:
        """Take a reaped child that is this attempt's main process."""
        attempt = self.attempt
        if attempt is None or attempt.process is None or attempt.process.pid != pid or attempt.exit_status is not None:
            return False
        attempt.on_exit(status)
        return True

    def _on_ended(self, now: float) -> None:
        """The main process is gone: record that at once, then find out why."""
        attempt = self.attempt
        assert attempt is not None
        self._drop_stacks()
        attempt.read_log()
        attempt.scan(now, force=True)
        self._report_phases()
        self._write_attempt(exit_status=attempt.exit_status, ended_at=utc_now())
        provisional = "succeeded" if attempt.exit_status == 0 else "failed"
        if attempt.stop_kind in ("user", "service", "slurm"):
            provisional = "succeeded" if attempt.stop_kind == "service" else "stopped"
        if attempt.stop_kind in ("hang", "timeout", "not_ready"):
            provisional = "failed"
        self.boss.emit(
            EventKind.ATTEMPT_ENDED, self.name, attempt.n,
            state=provisional, exit_status=attempt.exit_status, reason=attempt.stop_reason, **attempt.snapshot(),
        )  # fmt: skip
        for user in self.dependents() if self.is_service and attempt.stop_kind is None else ():
            user.service_died(self.name)
        facts = judge.Facts.of(attempt, self, self.boss)
        self._side = SideTask(lambda: judge.judge(facts), timeout_s=120.0)
        self.mode = JUDGING

    def _tick_judging(self, now: float) -> None:
        if self._side is None or not self._side.ready():
            return
        attempt = self.attempt
        assert attempt is not None
        result = self._side.result or judge.fallback(attempt, self._side.error)
        self._side = None
        self._judgement = result
        attempt.progress = int(result.get("progress") or 0)
        if self.is_service:
            attempt.progress = sum(user.kept_so_far() for user in self.dependents())
        self.kept = max(self.kept, attempt.progress)
        self.boss.emit(
            EventKind.ATTEMPT_JUDGED, self.name, attempt.n,
            state=result["state"], verdict=result.get("verdict"), progress=attempt.progress,
        )  # fmt: skip
        self._keep_history(attempt)
        self.mode, self._cleanup_since, self._killed_at = CLEANUP, now, 0.0

    def _keep_history(self, attempt: Attempt) -> None:
        shown = self.boss.fold.attempts(self.name)[-1]
        took_s = (attempt.ended_mono or time.monotonic()) - attempt.started_mono
        row = history.row_of(self.boss.spec, self.spec, shown, took_s, self._forecasts.scores)
        history.append(self.boss.layout, row)

    def _tick_cleanup(self, now: float) -> None:
        """No process of the attempt may be left, and its GPU memory must be back, before anything else happens."""
        attempt = self.attempt
        assert attempt is not None
        attempt.side_pids = self.boss.side_pids()
        left = attempt.own_processes(self.others())
        if left:
            self._end_stragglers(now, left)
            return
        if self.claim is not None and not self.stop_kind and not self._gpus_back(now):
            return
        self._drop_side()
        self._decide(now)

    def _end_stragglers(self, now: float, left: List[procs.Proc]) -> None:
        attempt = self.attempt
        assert attempt is not None
        if not self._reported_stragglers:
            self._reported_stragglers = True
            names = [{"pid": proc.pid, "command": procs.command_line(proc.pid, 120)} for proc in left[:50]]
            names = incident.scrubbed(names, self.boss.secret_values())
            self.boss.emit(
                EventKind.STRAGGLERS, self.name, attempt.n, processes=names,
                text="step {} ended, {} process(es) of it did not: ending them".format(self.name, len(left)),
            )  # fmt: skip
            for proc in left:
                procs.send_signal(proc, 15)
            self._killed_at = now + STRAGGLER_GRACE_S
        elif now >= self._killed_at:
            for proc in left:
                procs.send_signal(proc, 9)
            self._killed_at = now + 1.0

    def _gpus_back(self, now: float) -> bool:
        if self._side is None:
            if now < self._due:
                return False
            self._side = self._gate_reading()
            return False
        if not self._side.ready():
            return False
        reading = self._side.result or {}
        self._side = None
        self._due = now + GATE_EVERY_S
        # A holder is somebody else's process: ours is back then, and waiting for theirs is the gate's business.
        ours_back = reading.get("open") or reading.get("holders") or not reading.get("can_wait", True)
        return bool(ours_back) or now - self._cleanup_since > CLEANUP_GPU_WAIT_S

    def _gate_reading(self) -> SideTask:
        spec, layout, claim = self.boss.spec, self.boss.layout, self.claim
        return SideTask(lambda: gpu_access.read_gate(layout, spec, claim.indices), timeout_s=180.0, memory_mib=None)

    def _decide(self, now: float) -> None:
        attempt, result = self.attempt, self._judgement
        assert attempt is not None
        self.attempt = None
        attempt.log.close()
        if attempt.stop_kind == "service" or (result["state"] == "succeeded" and not self.is_service):
            self._end(EventKind.STEP_SUCCEEDED)
        elif attempt.stop_kind == "user" or self.stop_kind:
            self._end(EventKind.STEP_STOPPED, reason=attempt.stop_reason or self.stop_reason)
        elif attempt.stop_kind == "slurm":  # its allocation ends: no failure, the next one goes on with it
            self.boss.emit(EventKind.STEP_QUEUED, self.name, reason=attempt.stop_reason)
            self._release()
            self.mode, self._due = IDLE, now
        elif self._service_lost or self._need_is_down():
            self._service_lost = False
            self.boss.emit(EventKind.STEP_QUEUED, self.name, reason="waits until the service it needs is back")
            self._release()
            self.mode, self._due = IDLE, now
        else:
            self._retry_or_fail(attempt, result, now)

    def _retry_or_fail(self, attempt: Attempt, result: Dict[str, Any], now: float) -> None:
        verdict = result.get("verdict") or judge.unknown_verdict("the service ended by itself")
        self.history.append({"verdict": verdict, "progress": attempt.progress, "n": attempt.n})
        self._failed_at = now
        decision = policy.decide(
            self.spec, verdict, self.history, attempt.params, self.boss.rng,
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
            self._release()  # a claim is kept between attempts, but not one of a broken GPU
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
        elif now >= self._due:
            self.mode, self._due = (IDLE if self._need_is_down() else CLAIM), 0.0

    def _need_is_down(self) -> bool:
        needed = [self.boss.by_name[need] for need in self.spec.needs]
        return any(other.is_service and not other.serving and other.mode != DONE for other in needed)

    def _end(self, kind: EventKind, **data: Any) -> None:
        self._release()
        self.mode = DONE
        self.boss.emit(kind, self.name, **data)

    def _release(self) -> None:
        if self.spec.gpus > 0:
            self.boss.claimer.forget(self.boss.spec.id, self.name)
        if self.claim is not None:
            self.claim.release()
            self.claim = None

    def _drop_stacks(self) -> None:
        if self._stacks is not None:
            if self._stacks.pending:
                self._stacks.cancel()
            self._stacks = None

    def _drop_side(self) -> None:
        if self._side is not None:
            self._side.cancel()
            self._side = None

    # ---------------------------------------------------------------------------------------------------- from outside

    def service_died(self, service: str) -> None:
        """The service this step needs ended by itself: what runs is in vain, and does not count as an attempt."""
        if self.mode == RUNNING and self.attempt is not None and not self.attempt.stopping:
            self._service_lost = True
            self.attempt.request_stop("service_lost", "the service {} ended".format(service))
        elif self.mode == BACKOFF and self.history and time.monotonic() - self._failed_at < SERVICE_FELT_S:
            last = str((self.history[-1]["verdict"] or {}).get("class"))
            if last in ("network", "unknown"):  # it noticed before we did: that is no failure of its own
                self.history.pop()

    def kept_so_far(self) -> int:
        """Samples or checkpoints kept by any attempt, the running one included."""
        running = self.attempt.work_done() if self.attempt is not None else 0
        return max(self.kept, running, self._counted or 0)

    def stop(self, kind: str, reason: str) -> None:
        """Stop the step for good, wherever it stands."""
        self.stop_kind, self.stop_reason = kind, reason
        self._due = 0.0

    def give_up(self, verdict: Dict[str, Any]) -> None:
        """Fail a step that may not start any more; one that still waits for others is left to their end."""
        if self.mode in (CLAIM, GATE, BACKOFF) or (self.mode == IDLE and self.boss.fold.attempts(self.name)):
            self._drop_side()
            self._end(EventKind.STEP_FAILED, reason=verdict["summary"], verdict=verdict)

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
        self.spec = fewer_gpus.applied(recovery.with_overrides(self.original, self.boss.overrides), self.changes)

    def recover(self, *, by_itself: bool) -> None:
        """Take up a step as an earlier supervisor left it: end what still runs of it, mark its attempt lost.

        ``by_itself``: nobody asked for a retry (the host restarted, say), so the lost attempt counts as one.
        """
        state = self.state
        if state in protocol.STEP_TERMINAL:
            self.mode = DONE
            return
        past = recovery.replay(self.name, self.boss.replayed)
        self.history, self.kept = past.history, past.kept
        self._change(past.changes)
        attempts = self.boss.fold.attempts(self.name)
        last = attempts[-1] if attempts else None
        if last is not None and last["state"] not in protocol.ATTEMPT_TERMINAL:
            left = recovery.left_running(self.boss.job, self.index, self.spec, last["n"])
            recovery.end_processes(left, self.spec)
            rebooted = recovery.of_another_boot(self.boss.job, self.index, self.name, last["n"])
            verdict = self.boss.epitaph or judge.lost_verdict(last, [proc.pid for proc in left], rebooted=rebooted)
            kept = recovery.kept_by(self.boss.job, self.index, self.spec, last["n"], self.boss.places)
            self.kept = max(self.kept, kept)
            ended = "stopped" if self.boss.cancelled else "lost"
            self.boss.emit(
                EventKind.ATTEMPT_ENDED, self.name, last["n"], state=ended, exit_status=None,
                reason=verdict["summary"],
            )  # fmt: skip
            self.boss.emit(
                EventKind.ATTEMPT_JUDGED, self.name, last["n"], state=ended, verdict=verdict, progress=kept
            )
            self.history.append({"verdict": verdict, "progress": kept, "n": last["n"]})
            if by_itself:
                params = {**self.spec.params, **policy.parameters(self.changes)}
                decision = policy.decide(self.spec, verdict, self.history, params, self.boss.rng)
                self._obey(decision, last["n"], verdict, time.monotonic())
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

    def add_progress(self, step_state: Dict[str, Any]) -> None:
        """Put what the newest attempt shows into the state object (not an event: it changes every second)."""
        self.progressed = False
        if self.attempt is None or not step_state["attempts"]:
            return
        newest = step_state["attempts"][-1]
        if newest["n"] != self.attempt.n:
            return
        snapshot = self.attempt.snapshot()
        newest["bars"], newest["phases"] = snapshot.get("bars", []), snapshot.get("phases", [])
        if self._counted is not None:
            newest["bars"] = [*newest["bars"], judge.count_bar(self.spec, self._counted)]
        newest["log_bytes"] = self.attempt.log.size()
        newest["log_quiet_s"] = round(time.monotonic() - self.attempt.last_log_mono, 1)
        if self.attempt.log.gap:
            newest["log_gap"] = list(self.attempt.log.gap)
