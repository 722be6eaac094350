"""One try of one step: its start, its log, its processes, the stop ladder, its exit.

The supervisor owns attempts and calls `tick`; nothing here blocks.  Exit statuses are negative for a signal.
Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from datetime import datetime, timezone
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from remote_jobs import protocol
from remote_jobs.agent import procs, side
from remote_jobs.agent.jobdir import JobDir, write_json
from remote_jobs.agent.logfile import LogFile
from remote_jobs.agent.markers import Markers
from remote_jobs.agent.phasebars import PhaseBars
from remote_jobs.agent.phaseclock import PhaseClock

_SCAN_EVERY_S = 10.0
_SCAN_OFTEN_FOR_S = 30.0
_KILL_AGAIN_S = 5.0
_WORK_BARS = frozenset({"Extracting hidden states", "Generating responses"})


def utc_now() -> str:
    """Wall clock as ISO UTC with Z, milliseconds."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def ladder(step: protocol.StepSpec) -> List[Tuple[int, float]]:
    """Rungs of the stop ladder: (signal, seconds to wait before the next rung), KILL last."""
    if step.uses in protocol.TWO_TERM_STEPS and step.grace_s is None:
        return [(getattr(signal, "SIG" + name), wait_s) for name, wait_s in protocol.TWO_TERM_LADDER]
    grace_s = step.grace_s if step.grace_s is not None else protocol.GRACE_S.get(step.uses or "run", 15.0)
    return [(int(signal.SIGTERM), float(grace_s)), (int(signal.SIGKILL), _KILL_AGAIN_S)]


class Attempt:
    """A running attempt. ``exit_status`` is None until the main process was reaped."""

    def __init__(
        self,
        job: JobDir,
        step: protocol.StepSpec,
        index: int,
        n: int,
        *,
        params: Mapping[str, Any],
        changes: Mapping[str, Any],
        gpus: Optional[List[int]],
        log_limit_bytes: int,
        usual: Optional[Callable[[], Dict[str, Any]]] = None,
        usual_phases: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self.step, self.n, self.index = step, n, index
        self.params, self.changes, self.gpus = dict(params), dict(changes), gpus
        self.dir = job.attempt_path(index, step.name, n)
        os.makedirs(self.dir, mode=0o700, exist_ok=True)
        self.job_id = job.id
        self.log = LogFile(os.path.join(self.dir, protocol.LOG_FILE), log_limit_bytes)
        self._follower: Any = None
        self.process: Optional[protocol.ProcessId] = None
        self.exit_status: Optional[int] = None
        self.started_mono = time.monotonic()
        self.started_at = utc_now()
        self.ended_mono: Optional[float] = None
        self.stop_reason: Optional[str] = None
        self.stop_kind: Optional[str] = None
        self.lost_service: Optional[str] = None
        self.last_log_mono = self.started_mono
        self.recorded: Dict[Tuple[int, int], protocol.ProcessId] = {}
        self._rungs: List[Tuple[int, float]] = []
        self._next_rung_at = 0.0
        self._next_scan_at = 0.0
        self.progress = 0
        self._usual = usual or dict
        self._clock = PhaseClock(usual_phases)
        self._phase_bars = PhaseBars()
        self.env: Dict[str, str] = {}
        self.patch_hash: Optional[str] = None
        self.oom_kills_before: Optional[int] = None
        self.markers = Markers()
        self.unreadable: Optional[str] = None
        """What went wrong when the log was read, from when on no bars and phases are known."""
        self._wanted_text = b""
        self._text_seen = False
        self._text_tail = b""
        self._bar_progress: Dict[Tuple[Any, ...], Any] = {}
        self._bar_mono = self.started_mono

    # ------------------------------------------------------------------------------------------------------- start

    def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: str, pass_fds: Sequence[int] = ()) -> None:
        """Start the main process in a session of its own.

        Raises:
            OSError: the program cannot be started (not found, no permission, no memory); nothing runs then.
        """
        with open(os.devnull, "rb") as nothing:
            child = subprocess.Popen(
                list(argv),
                stdin=nothing,
                stdout=self.log.write_fd,
                stderr=self.log.write_fd,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
                close_fds=True,
                pass_fds=tuple(pass_fds),
            )
        # Only the supervisor's own loop reaps; Popen must not wait in its destructor.
        child.returncode = 0
        self.env = dict(env)
        self.log.close_writer()
        found = procs.read_proc(child.pid)
        ticks = found.start_ticks if found else 0
        self.process = protocol.ProcessId(child.pid, ticks, procs.boot_id())
        self._remember(self.process)
        # The job, not the supervisor, is what the OOM killer should take.
        path = "/proc/{}/oom_score_adj".format(child.pid)
        with contextlib.suppress(OSError), open(path, "w", encoding="ascii") as file:
            file.write("500")

    def fail_to_start(self, text: str) -> None:
        """Write why the program could not be started where people look for it: into the log."""
        os.write(self.log.write_fd, (text + "\n").encode("utf-8", "replace"))
        self.log.close_writer()
        self.exit_status = 127
        self.ended_mono = time.monotonic()

    def record(self, argv: Sequence[str], **extra: Any) -> Dict[str, Any]:
        """Content of attempt.json."""
        return {
            "v": protocol.VERSION,
            "n": self.n,
            "step": self.step.name,
            "argv": list(argv),
            "params": self.params,
            "changes": self.changes,
            "gpus": self.gpus,
            "patches": self.patch_hash,
            "started_at": self.started_at,
            "process": protocol.to_dict(self.process) if self.process else None,
            **extra,
        }

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Write attempt.json durably.

        Raises:
            OSError: disk full and the like.
        """
        write_json(os.path.join(self.dir, protocol.ATTEMPT_FILE), record)

    # ------------------------------------------------------------------------------------------------------ follow

    @property
    def follower(self) -> Any:
        """The log reader. Loaded only after the job was started: its tables would delay every launch."""
        if self._follower is None:
            from remote_jobs.logs.follow import Follower

            self._follower = Follower(self._usual())
        return self._follower

    def read_log(self) -> bool:
        """Take in what the job printed since the last call; True when a bar, a phase or its count changed."""
        changed = False
        for chunk in self.log.new_chunks():
            self.last_log_mono = time.monotonic()
            self._search(chunk)
            if self.unreadable is None:
                changed = self._understand(chunk) or changed
        return changed

    def _understand(self, chunk: bytes) -> bool:
        """Bars, phases and markers of a piece of the log. Whatever a program prints, and whatever we make of it, it runs on."""
        try:
            self.markers.feed(chunk)
            updates = self.follower.feed(chunk)
            snapshot, mono = self.follower.snapshot(), time.monotonic()
            if updates:
                self._note_bar_progress(snapshot["bars"])
                self._clock.take(snapshot["phases"], mono, time.time())
            return self._phase_bars.take(snapshot["phases"], mono) or bool(updates)
        except Exception as exc:
            traceback.print_exc()
            sys.stderr.flush()
            self._follower = None
            self.unreadable = "{}: {}".format(type(exc).__name__, exc)[:200]
            return False

    def snapshot(self) -> Dict[str, Any]:
        """Bars and phases as in explain's JSON; the phases with their times, and as bars where they have none."""
        if self._follower is None:
            return {"bars": [], "phases": []}
        snapshot: Dict[str, Any] = self.follower.snapshot()
        bars, phases = snapshot["bars"], snapshot["phases"]
        return {
            **snapshot,
            # First, so that bars that the log really shows come before them where there is room for one.
            "bars": [*self._phase_bars.missing(phases, bars), *bars],
            "phases": self._clock.annotate(phases, time.monotonic()),
        }

    def _note_bar_progress(self, bars: Sequence[Mapping[str, Any]]) -> None:
        now = {(bar["label"], bar["worker"], bar["instance"]): bar["done"] for bar in bars}
        if now != self._bar_progress:
            self._bar_progress, self._bar_mono = now, time.monotonic()

    def saw(self, text: bytes) -> bool:
        """True once the log held this text; the first call says what to look for, from the start of the log."""
        if self._wanted_text != text:
            self._wanted_text, self._text_seen, self._text_tail = text, False, b""
            with open(self.log.path, "rb") as file:
                self._search(file.read(self.log.offset))
        return self._text_seen

    def _search(self, chunk: bytes) -> None:
        if self._wanted_text and not self._text_seen:
            data = self._text_tail + chunk
            self._text_seen = self._wanted_text in data
            self._text_tail = data[-len(self._wanted_text) :]

    def work_done(self) -> int:
        """Samples or checkpoints done so far: by the step's own markers, or by the bar of a built-in step's work.

        Shards of a load do not count, nor does any other bar: work that is gone at the next start is no progress.
        """
        bars = [int(bar["done"] or 0) for bar in self.snapshot().get("bars", []) if bar.get("label") in _WORK_BARS]
        return max([self.markers.work_done(), *bars])

    def _open_bar(self) -> Any:
        """The newest bar that is not full, or None."""
        bars = self._follower.bars if self._follower is not None else []
        unfinished = [bar for bar in bars if bar.update.total and (bar.update.done or 0) < bar.update.total]
        return unfinished[-1] if unfinished else None

    def bar_moved_at(self) -> Optional[float]:
        """Monotonic time at which a bar last moved; None without an unfinished bar."""
        return self._bar_mono if self._open_bar() is not None else None

    def bar_samples(self) -> List[Tuple[float, int]]:
        """(elapsed s, done) of the newest unfinished bar."""
        bar = self._open_bar()
        return list(bar.samples) if bar is not None else []

    def current_phase(self) -> Optional[str]:
        """Name of the newest phase that runs."""
        running = [phase["name"] for phase in self.snapshot().get("phases", []) if phase.get("state") == "running"]
        return str(running[-1]) if running else None

    def waiting_for_input(self) -> Optional[Dict[str, Any]]:
        """The prompt at the very end of the log, or None."""
        found = self._follower.waiting_for_input if self._follower is not None else None
        return dict(found) if found else None

    def _remember(self, process: protocol.ProcessId) -> None:
        self.recorded[(process.pid, process.start_ticks)] = process

    def scan(self, now: float, *, force: bool = False) -> None:
        """Write down who descends from the main process, so that orphans can be told apart later."""
        if self.process is None or (now < self._next_scan_at and not force):
            return
        young = now - self.started_mono < _SCAN_OFTEN_FOR_S
        self._next_scan_at = now + (2.0 if young else _SCAN_EVERY_S)
        for row in procs.tree(self.process.pid).values():
            self._remember(protocol.ProcessId(row.pid, row.start_ticks, self.process.boot_id))
        if len(self.recorded) > 4096:  # a job that forks for ever must not eat the supervisor
            live = {(row.pid, row.start_ticks) for row in procs.table().values()}
            self.recorded = {key: value for key, value in self.recorded.items() if key in live}

    def own_processes(self, others: Sequence["Attempt"] = ()) -> List[procs.Proc]:
        """Live processes of this attempt, the main one included; those of ``others`` are left out.

        What nobody can be shown to own (env -i, setsid and a dead parent within two scans) counts as ours.
        """
        if self.process is None:
            return []
        everything = procs.find_job(
            self.job_id,
            supervisor=os.getpid(),
            sessions=[self.process.pid],
            recorded=self.recorded.values(),
            exclude=side.unreaped(),
        )
        rows = procs.table() if others else {}
        foreign: set[int] = set()
        for other in others:
            if other.process is None:
                continue
            foreign |= {other.process.pid} | procs.descendants(other.process.pid, rows)
            foreign |= {proc.pid for proc in everything if proc.session == other.process.pid}
            foreign |= {proc.pid for proc in everything if (proc.pid, proc.start_ticks) in other.recorded}
        return [proc for proc in everything if proc.pid not in foreign]

    # -------------------------------------------------------------------------------------------------------- stop

    @property
    def stopping(self) -> bool:
        """True once the ladder was entered."""
        return self.stop_reason is not None

    def request_stop(self, kind: str, reason: str, *, told: bool = False) -> None:
        """Enter the ladder; ``kind`` says who asked: user, service, hang, timeout, straggler, supervisor, slurm.

        ``told``: somebody else has sent the first signal to every process already, so the first rung is only waited for.
        """
        if self.stopping:
            return
        self.stop_kind, self.stop_reason = kind, reason
        self._rungs = ladder(self.step)
        self._next_rung_at = time.monotonic() + self._rungs.pop(0)[1] if told else 0.0

    def climb(self, now: float, others: Sequence["Attempt"]) -> Optional[int]:
        """Send the next signal when it is due; the signal sent, or None."""
        if not self.stopping or now < self._next_rung_at or self.process is None:
            return None
        alive = self.own_processes(others)
        if not alive:
            return None
        if not self._rungs:
            self._rungs = [(int(signal.SIGKILL), _KILL_AGAIN_S)]
        signum, wait_s = self._rungs.pop(0)
        self._next_rung_at = now + wait_s
        self._signal(signum, alive)
        return signum

    def _signal(self, signum: int, alive: Sequence[procs.Proc]) -> None:
        main_alive = self.process is not None and procs.is_alive(self.process)
        if signum == signal.SIGKILL or not main_alive:
            for proc in alive:
                procs.send_signal(proc, signum)
            return
        assert self.process is not None
        # A training main process forwards TERM itself; its workers read a second TERM as "now, without saving".
        if self.step.uses == "train":
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signum)
        else:
            procs.signal_group(self.process.pid, signum)

    def kill_all(self, others: Sequence["Attempt"]) -> int:
        """SIGKILL whatever is left; how many were signalled."""
        return sum(procs.send_signal(proc, signal.SIGKILL) for proc in self.own_processes(others))

    # -------------------------------------------------------------------------------------------------------- exit

    def on_exit(self, wait_status: int) -> None:
        """Take the status that wait gave for the main process."""
        if os.WIFSIGNALED(wait_status):
            self.exit_status = -os.WTERMSIG(wait_status)
        else:
            self.exit_status = os.WEXITSTATUS(wait_status)
        self.ended_mono = time.monotonic()
