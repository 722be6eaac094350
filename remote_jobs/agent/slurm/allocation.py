"""The supervisor's view of the Slurm allocation that it runs in: its GPUs, its nodes, and its end.

Before the time limit the steps are told to save and end, and the job is submitted again when it kept something in this
allocation.  A SIGTERM to the batch script means that Slurm takes the allocation away (scancel, preemption, limit): Slurm
has told every process itself, and afterwards the agent records what Slurm calls it.  Standard library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import socket
import time
import zlib
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Sequence, Tuple

from remote_jobs import protocol
from remote_jobs.agent.side import SideTask
from remote_jobs.agent.slurm import client, script, submissions, verdicts
from remote_jobs.protocol import EventKind

if TYPE_CHECKING:
    from remote_jobs.agent.attempt import Attempt
    from remote_jobs.agent.supervisor import Supervisor

STOP_KIND = "slurm"
"""`stop_kind` of an attempt that ends because its allocation does: no failure, and no try used up."""
ASK_AGAIN_S = 600.0
REPLACED_EVERY_S = 10.0
TERM_SPREAD_S = 1.0
_BY_TERM = (-int(signal.SIGTERM), 128 + int(signal.SIGTERM))


class Allocation:
    """Made once per supervisor that runs inside an allocation."""

    def __init__(self, boss: "Supervisor", environ: Mapping[str, str]) -> None:
        self.boss = boss
        self.id = job_id(environ)
        self.restarts = int(environ.get("SLURM_RESTART_COUNT") or 0)
        self.nodelist = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURMD_NODENAME") or "?"
        newest = submissions.newest(boss.job)
        self.submission = newest.n if newest is not None else 1
        self.claimer = AllocatedGpus(gpu_indices(environ, boss.job.spec().host_gpus))
        self.ends_at: Optional[float] = None
        """Epoch seconds at which the allocation ends; None without a limit."""
        self._asking: Optional[SideTask] = None
        self._ask_at = 0.0
        self._replaced_at = 0.0
        self._leaving: Optional[str] = None
        self._reason = ""
        self._left_at = 0.0
        self._given_up = False
        self._first_seq = boss.events.seq

    def words(self) -> str:
        """Where the job runs, for its notes."""
        again = ", requeued" if self.restarts else ""
        return "runs as Slurm job {} on {}{}".format(self.id, self.nodelist, again)

    def epitaph(self) -> Optional[Dict[str, Any]]:
        """Verdict of what an earlier start of this same Slurm job left unfinished."""
        return verdicts.requeued(self.id, self.restarts) if self.restarts else None

    # ------------------------------------------------------------------------------------------------------------- end

    def on_signal(self, number: int) -> bool:
        """Take a signal that Slurm sent to the batch script; False when it means nothing here."""
        if number == signal.SIGUSR1:
            return True  # only to wake the loop: a request waits
        if number == signal.SIGUSR2:
            self._ask_at = 0.0  # the limit is near, or was moved: ask for the end, then decide
            return True
        if number == signal.SIGTERM:
            self._leave("taken", "Slurm takes the allocation away (SIGTERM)")
            return True
        return False

    def turn(self, now: float) -> bool:
        """One turn of the supervisor's loop; True when it shall end without a final event."""
        if now >= self._replaced_at:
            self._replaced_at = now + REPLACED_EVERY_S
            newest = submissions.newest(self.boss.job)
            if newest is not None and newest.n > self.submission:
                # Slurm gave this node up and the job went on elsewhere: whatever is written here now would be a lie.
                for stepper in self.boss.steppers:
                    if stepper.attempt is not None:
                        stepper.attempt.kill_all([])
                return True
        if self._leaving is None:
            self._watch_clock(now)
            return False
        if self._given_up:
            return False
        steppers = self.boss.steppers
        for stepper in steppers:
            attempt = stepper.attempt
            if attempt is not None and not attempt.stopping and attempt.exit_status is None:
                attempt.request_stop(STOP_KIND, self._reason, told=self._leaving == "taken")
        if all(stepper.finished for stepper in steppers):
            return False
        if any(s.attempt is not None and not (s.attempt.exit_status is not None and self.takes(s.attempt, now)) for s in steppers):
            return False
        return self._left()

    def takes(self, attempt: "Attempt", now: float) -> bool:
        """True when an ended attempt is not to be judged here: Slurm took the allocation, and says why afterwards.

        Slurm's TERM reaches the step and us in any order, so one that a TERM ended is kept back for a moment.
        """
        ended = attempt.ended_mono or now
        if attempt.stop_kind not in (None, STOP_KIND):
            return False
        if self._leaving == "taken":
            return ended >= self._left_at - TERM_SPREAD_S
        return self._leaving is None and attempt.exit_status in _BY_TERM and now - ended < TERM_SPREAD_S

    def _watch_clock(self, now: float) -> None:
        if self._asking is None:
            if now < self._ask_at:
                return
            job = self.id
            self._asking = SideTask(lambda: client.end_time(job), timeout_s=client.TIMEOUT_S + 5)
            return
        if not self._asking.ready():
            return
        answered, self._asking = self._asking, None
        if answered.error is None and answered.result is not None:
            self.ends_at = float(answered.result)
        self._ask_at = now + ASK_AGAIN_S
        if self.ends_at is None:
            return
        left_s = self.ends_at - time.time() - script.margin_s(self.boss.spec)
        if left_s <= 0:
            self._leave("time_limit", "Slurm's time limit is near")
        else:
            self._ask_at = now + min(ASK_AGAIN_S, left_s)  # asked once more then: a limit can be moved

    def _leave(self, kind: str, reason: str) -> None:
        if self._leaving is None or kind == "taken":
            self._leaving, self._reason, self._left_at = kind, reason, time.monotonic()
            self.boss.may_start = False
            self.boss.emit(EventKind.NOTE, text="{}: running steps are told to save and end".format(reason), slurm=self.id)

    def _left(self) -> bool:
        """Everything has ended: hand the job on."""
        boss = self.boss
        if self._leaving == "taken":
            boss.emit(EventKind.NOTE, text="the allocation ended; Slurm says what became of it", left="taken")
        elif not made_progress(boss.job.read_events(), self._first_seq):
            self._given_up = True
            verdict = verdicts.no_progress(self.id)
            for stepper in boss.steppers:
                stepper.give_up(verdict)
            return False
        else:
            boss.emit(EventKind.NOTE, text="goes on in a follow-on submission", left="time_limit")
            try:
                submissions.submit(boss.layout, boss.job, boss.job.spec(), n=self.submission + 1)
            except (client.Refused, client.Unanswered, OSError) as exc:
                # Compute nodes of some sites may not submit: the agent does it at the next look.
                boss.emit(EventKind.NOTE, text="the follow-on is submitted at the next look: {}".format(exc))
        boss.write_state(durable=True)
        return True

    # ----------------------------------------------------------------------------------------------------------- nodes

    def across_nodes(
        self, step: protocol.StepSpec, argv: Sequence[str], attempt: int, folder: str
    ) -> Tuple[List[str], Dict[str, str]]:
        """(argv, environment) of a step with `nodes: N`: a `run` line runs on every node, a built-in step starts its own.

        MASTER_ADDR and MASTER_PORT are what torchrun (c10d rendezvous) and vLLM take; ORCH_SRUN is the command, as JSON,
        that starts one process on each node, and ORCH_STOP_FILE, in the attempt's ``folder``, stops those.
        """
        if step.nodes <= 1:
            return list(argv), {}
        hosts = script.first_hosts(self.nodelist)
        seed = "{}/{}/{}/{}".format(self.boss.spec.id, step.name, self.id, attempt)
        env = {
            "ORCH_NODES": str(step.nodes),
            "ORCH_NODELIST": ",".join(hosts[: step.nodes]),
            "ORCH_SRUN": json.dumps(script.srun_prefix(step.nodes)),
            "ORCH_STOP_FILE": os.path.join(folder, "stop"),
            "MASTER_ADDR": _address(),
            "MASTER_PORT": str(20000 + zlib.crc32(seed.encode("utf-8")) % 20000),  # another one at each try
        }
        if step.run is not None:
            return script.spread_argv(step.nodes, argv), env
        if step.uses in protocol.TWO_TERM_STEPS and "transformers" not in argv:
            over_ray = os.path.join(os.path.dirname(argv[1]), "nodes.py")
            return [argv[0], over_ray, *argv, "--distributed-executor-backend", "ray"], env
        return list(argv), env


def _address() -> str:
    """This node's name where it resolves, else its address on the way out."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        if not socket.gethostbyname(name).startswith("127."):
            return name
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: asks for the route
        return str(probe.getsockname()[0])
    return name


def made_progress(events: Sequence[Mapping[str, Any]], since: int) -> bool:
    """True when a step ended well, or an attempt kept more than any before it, after event number ``since``. Pure."""
    most: Dict[Any, int] = {}
    for event in events:
        kind, data, new = event.get("kind"), event.get("data") or {}, int(event["seq"]) > since
        if new and kind == EventKind.STEP_SUCCEEDED.value:
            return True
        if kind == EventKind.ATTEMPT_JUDGED.value:
            kept = int(data.get("progress") or 0)
            if new and kept > most.get(event.get("step"), 0):
                return True
            most[event.get("step")] = max(kept, most.get(event.get("step"), 0))
    return False


def job_id(environ: Mapping[str, str]) -> str:
    """Slurm's id of this allocation; of a task of an array as the queue shows it, ``17_2``. Pure."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return "{}_{}".format(array, task) if array and task else environ.get("SLURM_JOB_ID") or "?"


def gpu_indices(environ: Mapping[str, str], host_gpus: Optional[int]) -> List[int]:
    """GPUs of this node that are ours, by Slurm's variables; all of the host's where it says nothing. Pure."""
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        words = [word for word in (environ.get(name) or "").split(",") if word]
        if words and all(word.isdigit() for word in words):
            return [int(word) for word in words]
    count = environ.get("SLURM_GPUS_ON_NODE") or ""
    return list(range(int(count) if count.isdigit() else host_gpus or 0))


class AllocatedGpus:
    """Hands the allocation's GPUs to the steps of its one supervisor; same form as claims.Claimer, without locks."""

    def __init__(self, indices: Sequence[int]) -> None:
        self.free = sorted(indices)
        self.total = len(self.free)

    def claim(
        self, job: str, step: str, gpus: int, host_gpus: Optional[int] = None, among: Optional[Sequence[int]] = None
    ) -> Tuple[Optional["_Share"], str]:
        """(share, "") or (None, why not yet); arguments as in claims.Claimer.

        Raises:
            ValueError: the allocation never has that many.
        """
        if gpus > self.total:
            raise ValueError("step {} needs {} GPUs on this node, the allocation has {}".format(step, gpus, self.total))
        if gpus > len(self.free):
            return None, "{} of the allocation's {} GPUs are free, the others are held by this job's steps".format(
                len(self.free), self.total
            )
        taken, self.free = self.free[:gpus], self.free[gpus:]
        return _Share(self, taken), ""

    def forget(self, job: str, step: str) -> None:
        """Nothing is queued here."""


class _Share:
    """Some of the allocation's GPUs."""

    fds: Tuple[int, ...] = ()

    def __init__(self, owner: AllocatedGpus, indices: List[int]) -> None:
        self._owner, self.indices = owner, indices

    def release(self) -> None:
        """Give them back."""
        self._owner.free = sorted([*self._owner.free, *self.indices])
        self.indices = []


def local_spec(spec: protocol.JobSpec) -> protocol.JobSpec:
    """The job as the supervisor on the first node needs it: GPUs of a step on this node, none expected beyond ours. Pure."""
    steps = [{**step, "gpus": math.ceil(int(step.get("gpus") or 0) / max(1, int(step.get("nodes") or 1)))} for step in spec.steps]
    return dataclasses.replace(spec, steps=steps, host_gpus=None)
