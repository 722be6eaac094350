"""The supervisor: one small process per job that starts, watches, retries and ends its steps.

It is the only writer of events.jsonl, state.json and result.json (record.py), holds the job's lock for its life and
needs no controller.  This file is the loop: signals, child exits, control files.  How it is started is in supervise.py,
what a step does next in stepper.py.  Nothing here blocks for long: whatever may hang runs in a side task.  Standard
library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional

from remote_jobs import protocol
from remote_jobs.agent import control, gpu_access, history, notify, procs, reboot, recovery, side, usage
from remote_jobs.agent.command import Places
from remote_jobs.agent.jobdir import JobDir, Layout, Lock
from remote_jobs.agent.record import Record
from remote_jobs.agent.stepper import Stepper
from remote_jobs.protocol import EventKind

if TYPE_CHECKING:
    from remote_jobs.agent.slurm.allocation import Allocation

TICK_S = 1.0
_BEAT_EVERY_S = 20.0


class Supervisor:
    """Runs one job from its spec to its final event."""

    def __init__(
        self, layout: Layout, job: JobDir, spec: protocol.JobSpec, secrets: Mapping[str, Any], lock: Lock
    ) -> None:
        self.layout, self.job, self.spec = layout, job, spec
        self.places = Places(spec, job)
        self.secrets = secrets
        self._claimer: Any = None
        self._runs: Optional[List[Dict[str, Any]]] = None
        self._shot_at: List[int] = []
        self._wake_fd = -1
        self.may_start = True
        """False where or when no attempt may begin: on a login node, and before an allocation ends."""
        self.allocation: Optional[Allocation] = None
        self.epitaph: Optional[Dict[str, Any]] = None
        """What attempts died of that an earlier supervisor left unfinished, where that is known from elsewhere."""
        self.crashed_before: Optional[str] = None
        """Where the earlier supervisor crashed, if it did."""
        self.cancelled = False
        """Those were ended because somebody wanted the job to stop."""
        self.replayed: List[Dict[str, Any]] = list(job.read_events())
        """Events of earlier supervisors, until their job is taken up."""
        self.record = Record(job, spec, lock, self.replayed)
        self.fold, self.events = self.record.fold, self.record.events
        self.steppers = [Stepper(self, step, index + 1) for index, step in enumerate(spec.step_specs())]
        self.by_name = {stepper.spec.name: stepper for stepper in self.steppers}
        self.notifier = notify.Notifier(self)
        self.usage = usage.UsageKeeper(self)

    def secret_values(self) -> List[str]:
        """Values that must appear in no record."""
        return [str(value) for step in self.secrets.values() for value in dict(step or {}).values() if value]

    @property
    def claimer(self) -> Any:
        """Claims of GPUs; made when a step first needs some."""
        if self.allocation is not None:
            return self.allocation.claimer
        if self._claimer is None:
            self._claimer = gpu_access.claimer()
        return self._claimer

    # -------------------------------------------------------------------------------------------------------- events

    def emit(self, kind: EventKind, step: Optional[str] = None, attempt: Optional[int] = None, **data: Any) -> None:
        """Record that something has happened: to disk first, then into the state. A full disk delays, never drops."""
        self.notifier.take(self.record.add(kind, step, attempt, data))

    # --------------------------------------------------------------------------------------------------------- files

    def write_state(self, *, durable: bool = False) -> None:
        """Replace state.json; without ``durable`` at most once a second."""
        if not durable and self.record.state_age_s() < TICK_S:
            return
        state = dict(self.fold.state)
        for stepper in self.steppers:
            stepper.add_progress(self.fold.step(stepper.spec.name))
        state["eta"] = history.job_eta(state, self.spec, self.runs(), time.time())
        self.notifier.look(state)
        self.record.write_state(state, durable=durable)

    def runs(self) -> List[Dict[str, Any]]:
        """What earlier attempts on this host took; read once."""
        if self._runs is None:
            self._runs = history.read(self.layout)
        return self._runs

    # ------------------------------------------------------------------------------------------------------- control

    def _read_control(self) -> None:
        for request in control.pending(self.job):
            if request["id"] not in self.record.acknowledged:
                self._obey(request)
            control.done(self.job, request["id"])

    def _meant(self, step: Optional[str]) -> List[Stepper]:
        """The steps that a request names: one, the ranges of a split one, or all."""
        return [one for one in self.steppers if control.means(step, one.spec)]

    def _obey(self, request: Mapping[str, Any]) -> None:
        args = request.get("args") or {}
        action = request.get("action")
        step = args.get("step")
        if not self._meant(step):
            self.emit(EventKind.NOTE, control=request["id"], text="{}: no step named {!r}".format(action, step))
        elif action == "stop":
            reason = str(args.get("reason") or "stopped on request")
            self.emit(EventKind.STOP_REQUESTED, control=request["id"], step=step, reason=reason)
            for stepper in self._meant(step):
                stepper.stop("user", reason)
        elif action == "retry":
            self.emit(EventKind.RETRY_REQUESTED, control=request["id"], step=step, set=args.get("set") or {})
            for stepper in self.steppers:
                stepper.apply_overrides(args.get("set"))
            for stepper in self._meant(step):
                stepper.retry_now()
        elif action == "extend":
            self.emit(EventKind.EXTENDED, control=request["id"], step=step, timeout_s=args.get("timeout_s"))
            for stepper in self._meant(step):
                stepper.extend(args.get("timeout_s"))
        else:
            self.emit(EventKind.NOTE, control=request["id"], text="unknown request {!r} left undone".format(action))

    # ---------------------------------------------------------------------------------------------------------- loop

    def run(self) -> str:
        """Run until the final event; the job's final state."""
        self._install_signals()
        self._wake_fd = control.open_fifo(self.job)
        self.record.make_reserve()
        self._begin()
        while self.allocation is None or not self.allocation.turn(time.monotonic()):
            self._reap()
            self._read_control()
            for stepper in self.steppers:
                self._tick(stepper)
            self._report_signals()
            self.notifier.tick(time.monotonic())
            self.usage.tick(time.monotonic())
            self.record.flush()
            if self.record.urgent:
                self.write_state(durable=True)
            over = all(stepper.finished for stepper in self.steppers) and not self.record.pending
            if over and self._all_gone():
                return self._finish()
            beat = self.record.state_age_s() > _BEAT_EVERY_S
            if beat or any(stepper.progressed for stepper in self.steppers):
                self.write_state()
            self._sleep()
        self.record.flush()
        self.notifier.close()
        return str(self.fold.state["state"])

    def settle(self) -> None:
        """Record what has happened and obey what was asked, without starting anything; a job that is over then ends."""
        self.may_start = False
        self._begin()
        self._read_control()
        for _ in self.steppers:  # one that ends may let the next one be skipped
            for stepper in self.steppers:
                self._tick(stepper)
        self.record.flush()
        if all(stepper.finished for stepper in self.steppers):
            if self.fold.state["state"] not in protocol.JOB_TERMINAL:
                self._finish()
        else:
            self.write_state(durable=True)

    def _tick(self, stepper: Stepper) -> None:
        try:
            stepper.tick(time.monotonic())
        except Exception as exc:
            traceback.print_exc()
            sys.stderr.flush()
            stepper.crash("orch itself failed: {}: {} (see supervisor.log)".format(type(exc).__name__, exc))

    def _begin(self) -> None:
        me = procs.identity(os.getpid())
        who = protocol.to_dict(me) if me else {"pid": os.getpid()}
        if not self.replayed:
            self.emit(EventKind.CREATED, release=self.spec.release, supervisor=who)
            offered = reboot.offer(self.layout, self.spec)
            if offered:
                self.emit(EventKind.NOTE, text=offered)
            return
        requests = control.pending(self.job)
        retry = next((item for item in requests if item.get("action") == "retry"), None)
        if retry is not None:
            for request in requests:
                if str(request["id"]) < str(retry["id"]):  # what was asked of the job's earlier life is over with it
                    control.done(self.job, request["id"])
        stopped = recovery.steps_stopped(self.replayed)
        final = self.fold.state["state"] in protocol.JOB_TERMINAL
        if not final:
            self.emit(EventKind.RECOVERED, supervisor=who, text=self._taken_over())
        for stepper in self.steppers:
            stepper.recover(by_itself=not requests and not self.fold.state["stop_requested"])
        self.replayed = []
        self._end_unrecorded()
        if retry is not None:
            self._reopen(retry, was_final=final)
        else:  # a stop is final, also when its supervisor was killed half-way
            everything = self.fold.state["stop_requested"]
            for stepper in self.steppers if everything else [one for one in self.steppers if one.name in stopped]:
                stepper.stop("user", "stopped on request")

    def _taken_over(self) -> str:
        if self.allocation is not None:
            return self.allocation.words()
        if self.epitaph is not None:
            return str(self.epitaph["summary"])
        if not self.may_start:
            return "taken up where no work may run: only records are written"
        return "a new supervisor took over: the earlier one ended without a final event"

    def _end_unrecorded(self) -> None:
        """End what a supervisor had started when it was killed before it could write that down: no second copy."""
        left = procs.find_job(self.spec.id)
        if left:
            names = ", ".join(str(proc.pid) for proc in left[:20])
            self.emit(EventKind.NOTE, text="processes without a record were still running and are ended: " + names)
            recovery.end_processes(left, protocol.StepSpec(name=""))

    def _reopen(self, request: Mapping[str, Any], *, was_final: bool) -> None:
        args = request.get("args") or {}
        again = self._with_needs(args.get("step"))
        self.emit(
            EventKind.REOPENED, control=request["id"], set=args.get("set") or {}, step_filter=args.get("step"), steps=again
        )
        if was_final:
            self.record.put_result_aside()
        for stepper in self.steppers:
            stepper.apply_overrides(args.get("set"))
            if again is None or stepper.name in again:
                stepper.reopen()
            else:
                stepper.leave_lost()

    def _with_needs(self, step: Any) -> Optional[List[str]]:
        """The step, what it needs and what waits for it: these are taken up again; None means all."""
        if step not in self.by_name:
            return None
        found = {step}
        for stepper in reversed(self.steppers):
            if stepper.name in found:
                found |= set(stepper.spec.needs)
        for stepper in self.steppers:
            if found & set(stepper.spec.needs) and stepper.state == "skipped":
                found.add(stepper.name)
        return [stepper.name for stepper in self.steppers if stepper.name in found]

    def _sleep(self) -> None:
        now = time.monotonic()
        due = min((stepper.next_due(now) for stepper in self.steppers), default=now + TICK_S)
        fds = [self._self_pipe[0], *(fd for stepper in self.steppers for fd in stepper.watch_fds())]
        if self._wake_fd >= 0:
            fds.append(self._wake_fd)
        readable, _, _ = select.select(fds, [], [], max(0.0, min(due - now, TICK_S)))
        for fd in readable:
            if fd in (self._self_pipe[0], self._wake_fd):
                with contextlib.suppress(BlockingIOError):
                    os.read(fd, 4096)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            side.reaped(pid)
            for stepper in self.steppers:
                if stepper.take_exit(pid, status):
                    break

    def _install_signals(self) -> None:
        read_fd, write_fd = os.pipe()
        for fd in (read_fd, write_fd):
            os.set_blocking(fd, False)
        self._self_pipe = (read_fd, write_fd)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        # Handlers, not SIG_IGN: an ignored signal would be inherited by the job, and SIGINT would never reach it.
        from_slurm = (signal.SIGUSR1, signal.SIGUSR2) if self.allocation is not None else ()
        for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, *from_slurm):
            signal.signal(signum, lambda number, _frame: self._shot_at.append(number))
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)

    def _report_signals(self) -> None:
        while self._shot_at:
            number = self._shot_at.pop(0)
            if self.allocation is not None and self.allocation.on_signal(number):
                continue
            name = procs.signal_name(number)
            text = "someone sent SIG{} to the supervisor; it goes on (use: orch stop {})".format(name, self.spec.id)
            self.emit(EventKind.NOTE, text=text)

    # ----------------------------------------------------------------------------------------------------------- end

    def _all_gone(self) -> bool:
        """End what is left of the job in spite of everything (env -i, setsid): nothing outlives the final event."""
        left = procs.find_job(self.spec.id, supervisor=os.getpid(), exclude=side.unreaped())
        for proc in left:
            procs.send_signal(proc, signal.SIGKILL)
        return not left

    def _finish(self) -> str:
        states = [self.fold.step(stepper.spec.name)["state"] for stepper in self.steppers]
        if "failed" in states or "lost" in states:
            final = "failed"
        elif "stopped" in states:
            final = "stopped"
        else:
            final = "succeeded"
        if self.fold.state["stop_requested"] and final == "failed":
            final = "stopped"
        self.usage.disk.say()
        self.record.forget_secrets()  # before any sign of the end: who is told of it need not wonder
        self.emit(EventKind.FINISHED, state=final)
        while self.record.pending:  # the disk is full: the final event is worth waiting for
            time.sleep(TICK_S)
            self.record.flush()
        self.record.write_result(final)  # before the state: who sees the end finds the result
        self.write_state(durable=True)
        self.record.close()
        self.notifier.close()
        return final
