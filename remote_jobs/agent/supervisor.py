"""The supervisor: one small process per job that starts, watches, retries and ends its steps.

It is the only writer of events.jsonl, state.json and result.json, holds the job's lock for its life and needs
no controller.  This file is the loop: signals, child exits, control files, records.  What a step does next is
in stepper.py.  Nothing here blocks for long: whatever may hang runs in a side task.  Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional

from remote_jobs import protocol
from remote_jobs.agent import control, gpu_access, history, notify, procs, reboot, recovery, usage
from remote_jobs.agent.attempt import utc_now
from remote_jobs.agent.command import Places
from remote_jobs.agent.fold import Fold
from remote_jobs.agent.jobdir import EventLog, JobDir, Layout, Lock, write_atomic, write_json
from remote_jobs.agent.stepper import Stepper
from remote_jobs.protocol import EventKind

if TYPE_CHECKING:
    from remote_jobs.agent.slurm.allocation import Allocation

TICK_S = 1.0
_BEAT_EVERY_S = 20.0
_RESERVE_BYTES = 1 << 20


class Supervisor:
    """Runs one job from its spec to its final event."""

    def __init__(
        self, layout: Layout, job: JobDir, spec: protocol.JobSpec, secrets: Mapping[str, Any], lock: Lock
    ) -> None:
        self.layout, self.job, self.spec, self._lock = layout, job, spec, lock
        self.places = Places(spec, job)
        self.secrets = secrets
        self._claimer: Any = None
        self._runs: Optional[List[Dict[str, Any]]] = None
        self.fold = Fold(spec)
        self.overrides: Dict[str, Any] = {}
        self._pending_events: List[Dict[str, Any]] = []
        self._dirty = True
        self._urgent = False
        self._written_at = 0.0
        self._acknowledged: set[str] = set()
        self._shot_at: List[int] = []
        self._wake_fd = -1
        self.may_start = True
        """False where or when no attempt may begin: on a login node, and before an allocation ends."""
        self.allocation: Optional[Allocation] = None
        self.epitaph: Optional[Dict[str, Any]] = None
        """What attempts died of that an earlier supervisor left unfinished, where that is known from elsewhere."""
        self.cancelled = False
        """Those were ended because somebody wanted the job to stop."""
        events = list(job.read_events())
        self.events = EventLog(job)
        for event in events:
            self._fold_one(event)
        self.recovered_from = len(events)
        self.replayed: List[Dict[str, Any]] = events
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
        last = self._pending_events[-1]["seq"] if self._pending_events else self.events.seq
        event = protocol.Event(
            seq=last + 1, at=utc_now(), mono=round(time.monotonic(), 3), kind=kind.value, step=step, attempt=attempt,
            data=data,
        )  # fmt: skip
        record = protocol.to_dict(event)
        self._fold_one(record)
        self._pending_events.append(record)
        self._flush_events()
        self.notifier.take(record)
        self._urgent = True  # the state follows once per turn of the loop: it is derived, the event is on disk

    def _fold_one(self, record: Mapping[str, Any]) -> None:
        try:
            self.fold.apply(record)
        except protocol.IllegalTransition as exc:
            # An older or newer supervisor may have ordered its events otherwise: keep going, and say so.
            print("ignored: {}".format(exc), file=sys.stderr, flush=True)
        data = record.get("data") or {}
        if data.get("control"):
            self._acknowledged.add(str(data["control"]))
        if record.get("kind") in ("reopened", "retry_requested"):
            self.overrides.update(data.get("set") or {})

    def _flush_events(self) -> None:
        while self._pending_events:
            try:
                self.events.append(protocol.from_dict(protocol.Event, self._pending_events[0]))
            except OSError as exc:
                print("events.jsonl: {}".format(exc), file=sys.stderr, flush=True)
                if not self._free_reserve():
                    return  # stays pending and is tried again at every tick
                continue
            self._pending_events.pop(0)

    def _free_reserve(self) -> bool:
        """Give up the reserve file so that the last records fit on a full disk."""
        try:
            os.unlink(self.job.at(protocol.RESERVE_FILE))
        except OSError:
            return False
        return True

    def _make_reserve(self) -> None:
        path = self.job.at(protocol.RESERVE_FILE)
        if not os.path.exists(path):
            with contextlib.suppress(OSError):
                write_atomic(path, os.urandom(4096) * (_RESERVE_BYTES // 4096), durable=False)

    # --------------------------------------------------------------------------------------------------------- files

    def write_state(self, *, durable: bool = False) -> None:
        """Replace state.json; without ``durable`` at most once a second."""
        now = time.monotonic()
        if not durable and now - self._written_at < TICK_S:
            return
        state = dict(self.fold.state)
        for stepper in self.steppers:
            stepper.add_progress(self.fold.step(stepper.spec.name))
        state["eta"] = self._eta(state)
        self.notifier.look(state)
        state["beat_at"] = utc_now()
        state["beat_mono"] = round(now, 3)
        state["boot_id"] = procs.boot_id()
        state["supervisor"] = {"pid": os.getpid()}
        try:
            write_json(self.job.state_path, state, durable=durable)
        except OSError as exc:
            print("state.json: {}".format(exc), file=sys.stderr, flush=True)
            return
        self._dirty = self._urgent = False
        self._written_at = now
        self._lock.touch()  # the heartbeat keeps cleaners of temporary folders away from a node-local lock

    def _eta(self, state: Mapping[str, Any]) -> Optional[Dict[str, Any]]:
        return history.job_eta(state, self.spec, self.runs(), time.time())

    def runs(self) -> List[Dict[str, Any]]:
        """What earlier attempts on this host took; read once."""
        if self._runs is None:
            self._runs = history.read(self.layout)
        return self._runs

    def _write_result(self, state: str) -> None:
        result = {"v": protocol.VERSION, "id": self.spec.id, "state": state, "seq": self.events.seq, "at": utc_now()}
        for _ in range(50):
            try:
                write_json(self.job.result_path, result)
            except OSError as exc:
                print("result.json: {}".format(exc), file=sys.stderr, flush=True)
                if not self._free_reserve():
                    return  # the final event is the commit; any agent rewrites result.json
            else:
                return

    # ------------------------------------------------------------------------------------------------------- control

    def _read_control(self) -> None:
        for request in control.pending(self.job):
            if request["id"] not in self._acknowledged:
                self._obey(request)
            control.done(self.job, request["id"])

    def _meant(self, step: Optional[str]) -> List[Stepper]:
        """The steps that a request names: one, the ranges of a split one, or all."""
        return [one for one in self.steppers if step in (None, one.name, (one.spec.part or {}).get("of"))]

    def _obey(self, request: Mapping[str, Any]) -> None:
        args = request.get("args") or {}
        action = request.get("action")
        step = args.get("step")
        if step is not None and step not in self.by_name:
            self.emit(EventKind.NOTE, control=request["id"], text="{}: no step named {!r}".format(action, step))
        elif action == "stop":
            reason = str(args.get("reason") or "stopped on request")
            self.emit(EventKind.STOP_REQUESTED, control=request["id"], step=step, reason=reason)
            for stepper in self._meant(step):
                stepper.stop("user", reason)
        elif action == "retry":
            self.emit(EventKind.RETRY_REQUESTED, control=request["id"], set=args.get("set") or {})
            for stepper in self.steppers:
                stepper.apply_overrides(args.get("set"))
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
        self._make_reserve()
        self._begin()
        while self.allocation is None or not self.allocation.turn(time.monotonic()):
            self._reap()
            self._read_control()
            for stepper in self.steppers:
                self._tick(stepper)
            self._report_signals()
            self.notifier.tick(time.monotonic())
            self.usage.tick(time.monotonic())
            self._flush_events()
            if self._urgent:
                self.write_state(durable=True)
            if all(stepper.finished for stepper in self.steppers) and not self._pending_events:
                if self._all_gone():
                    return self._finish()
            elif time.monotonic() - self._written_at > _BEAT_EVERY_S:
                self._dirty = True
            if self._dirty or any(stepper.progressed for stepper in self.steppers):
                self.write_state()
            self._sleep()
        self._flush_events()
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
        self._flush_events()
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
        if self.recovered_from == 0:
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
        final = self.fold.state["state"] in protocol.JOB_TERMINAL
        if not final:
            self.emit(
                EventKind.RECOVERED,
                supervisor=who,
                text=self._taken_over(),
            )
        for stepper in self.steppers:
            stepper.recover(by_itself=not requests and not self.fold.state["stop_requested"])
        self.replayed = []
        self._end_unrecorded()
        if retry is not None:
            self._reopen(retry, was_final=final)
        elif self.fold.state["stop_requested"]:
            for stepper in self.steppers:  # a stop is final, also when its supervisor was killed half-way
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
            for k in range(1, 10000):
                target = self.job.at("result.{}.json".format(k))
                if not os.path.exists(target):
                    with contextlib.suppress(OSError):
                        os.rename(self.job.result_path, target)
                    break
        for stepper in self.steppers:
            stepper.apply_overrides(args.get("set"))
            if again is None or stepper.name in again:
                stepper.reopen()

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

    def side_pids(self) -> List[int]:
        """Pids of side tasks: children of ours that are not the job's."""
        allocation = self.allocation.side_pids() if self.allocation is not None else []
        own = [*allocation, *self.notifier.side_pids(), *self.usage.side_pids()]
        return [*own, *(pid for stepper in self.steppers for pid in stepper.side_pids())]

    def _all_gone(self) -> bool:
        """End what is left of the job in spite of everything (env -i, setsid): nothing outlives the final event."""
        left = procs.find_job(self.spec.id, supervisor=os.getpid(), exclude=self.side_pids())
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
        self.emit(EventKind.FINISHED, state=final)
        while self._pending_events:  # the disk is full: the final event is worth waiting for
            time.sleep(TICK_S)
            self._flush_events()
        self._write_result(final)  # before the state: who sees the end finds the result
        self.write_state(durable=True)
        with contextlib.suppress(OSError):
            os.unlink(self.job.at(protocol.RESERVE_FILE))
        with contextlib.suppress(OSError):
            os.unlink(self.job.at(protocol.SECRETS_FILE))
        self.notifier.close()
        return final


def _load_secrets(job: JobDir, given: Mapping[str, Any]) -> Dict[str, Any]:
    """Secrets of this start, kept in a 0600 file because a later attempt needs them; deleted at the end."""
    path = job.at(protocol.SECRETS_FILE)
    kept: Dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
        loaded = json.loads(file.read().decode("utf-8"))
        kept = loaded if isinstance(loaded, dict) else {}
    if given:
        kept = {**kept, **given}
        write_json(path, kept)
    return kept


class _SupervisorLog:
    """stdout and stderr of a supervisor: what cannot be written (a full disk) is dropped, and never raises."""

    def write(self, text: str) -> int:
        """Write through, without a buffer that would be tried again for ever."""
        with contextlib.suppress(OSError):
            os.write(2, text.encode("utf-8", "replace"))
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""


def _detach(job: JobDir) -> None:
    """Double fork into a session of our own; stdio to the supervisor's log, so that no channel is held open."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    os.chdir("/")
    os.umask(0o077)
    nothing = os.open(os.devnull, os.O_RDWR)
    log = os.open(job.at(protocol.SUPERVISOR_LOG), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for fd in (nothing, log):
        if fd > 2:
            os.close(fd)
    sys.stdout = sys.stderr = _SupervisorLog()


def _log_to(job: JobDir) -> None:
    """Stdio to the supervisor's log, without leaving the process tree: an allocation ends with its batch script."""
    os.chdir("/")
    log = os.open(job.at(protocol.SUPERVISOR_LOG), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = sys.stderr = _SupervisorLog()


def main_in_slurm(root: str, job_id: str) -> int:
    """Entry of `supervise --slurm`: the batch script of an allocation. Runs until the job or the allocation ends."""
    from remote_jobs.agent.slurm.allocation import Allocation, local_spec

    layout = Layout(root)
    job = layout.job(job_id)
    lock = Lock(job.lock_path())
    if not lock.acquire(patience_s=30.0):
        sys.stderr.write("another supervisor of this job runs on this node\n")
        return 1
    _log_to(job)
    os.register_at_fork(after_in_child=lock.release)
    procs.become_subreaper()
    supervisor = Supervisor(layout, job, local_spec(job.spec()), _load_secrets(job, {}), lock)
    if supervisor.fold.state["state"] in protocol.JOB_TERMINAL and not control.pending(job):
        return 0
    supervisor.allocation = Allocation(supervisor, os.environ)
    supervisor.epitaph = supervisor.allocation.epitaph()
    supervisor.run()
    lock.release()
    return 0


def main_settle(root: str, job_id: str) -> int:
    """Entry of `supervise --settle`: reads {verdict} from stdin, writes records, starts nothing, prints `ok` or `held`."""
    layout = Layout(root)
    job = layout.job(job_id)
    given = json.loads(sys.stdin.buffer.readline() or b"{}")
    lock = Lock(job.lock_path())
    if not lock.acquire(patience_s=2.0):
        print("held")
        return 0
    supervisor = Supervisor(layout, job, job.spec(), _load_secrets(job, {}), lock)
    supervisor.epitaph = given.get("verdict")
    supervisor.cancelled = bool(given.get("cancelled"))
    supervisor.settle()
    lock.release()
    print("ok")
    return 0


def main(root: str, job_id: str) -> int:
    """Entry of `supervise`: reads {secrets} from stdin, detaches, says `ok` on the pipe in ORCH_ACK_FD, runs.

    The acknowledgement comes after the lock is held and the first state is on disk, so "launched" is true.
    """
    layout = Layout(root)
    job = layout.job(job_id)
    given = json.loads(sys.stdin.buffer.readline() or b"{}")
    ack_fd = int(os.environ.pop("ORCH_ACK_FD", "-1"))

    def acknowledge(text: str) -> None:
        if ack_fd >= 0:
            with contextlib.suppress(OSError):
                os.write(ack_fd, (text + "\n").encode("utf-8", "replace"))
                os.close(ack_fd)

    _detach(job)
    lock = Lock(job.lock_path())
    if not lock.acquire():
        acknowledge("held")
        return 0
    # A side task that hangs in a driver must not look like a living supervisor when we are killed.
    os.register_at_fork(after_in_child=lock.release)
    try:
        procs.become_subreaper()
        supervisor = Supervisor(layout, job, job.spec(), _load_secrets(job, given.get("secrets") or {}), lock)
        if supervisor.fold.state["state"] in protocol.JOB_TERMINAL and not control.pending(job):
            acknowledge("ok")  # over, and nobody asks for a retry: a start at boot must not touch it
            return 0
        supervisor.write_state(durable=True)
    except Exception as exc:
        acknowledge("error {}: {}".format(type(exc).__name__, exc))
        raise
    acknowledge("ok")
    supervisor.run()
    lock.release()
    return 0
