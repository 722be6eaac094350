"""A step's wait for its GPUs: the claim against other orch jobs, then the gate against everybody else.

One `GpuWait` per step, asked by the stepper until it answers.  It keeps the claim (also between attempts) and says in
events what is waited for; starting, shrinking and failing are the stepper's.  Nothing here blocks: readings of the GPUs
are side tasks.  Standard library only; must not import stepper.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Sequence

from remote_jobs import protocol
from remote_jobs.agent import fewer_gpus, gpu_access, judge, procs, recovery
from remote_jobs.agent.side import SideTask
from remote_jobs.protocol import EventKind

if TYPE_CHECKING:
    from remote_jobs.agent.supervisor import Supervisor

GATE_WAIT_S = 1800.0
GATE_EVERY_S = 1.0
GATE_EVERY_LATER_S = 15.0
GATE_OFTEN_S = 600.0
"""After this the driver is asked less often, and at once when one of the processes it named has ended."""
BROKEN_READS = 3
"""Readings in a row that no waiting can heal (a GPU is missing or broken) before the step fails."""
CLAIM_EVERY_S = 1.0
SURVEY_EVERY_S = 5.0
BACK_WITHIN_S = 120.0
"""How long an ended attempt's GPU memory may take to come back before the next thing happens all the same."""
READING_TIMEOUT_S = 180.0


class Answer:
    """What a look at the GPUs came to; with nothing set, go on waiting."""

    # Written out: a NamedTuple or dataclass is compiled at import, for which every start of a supervisor would pay.
    def __init__(
        self,
        *,
        is_open: bool = False,
        changes: Optional[Mapping[str, Any]] = None,
        why: str = "",
        verdict: Optional[Dict[str, Any]] = None,
    ) -> None:
        self.is_open = is_open
        """They are ours and free: start."""
        self.changes, self.why = changes or {}, why
        """Go on with these instead: fewer GPUs, without the broken ones."""
        self.verdict = verdict
        """Waiting is over, in vain."""


_WAIT = Answer()


class GpuWait:
    """Claims GPUs for one step and waits until they are free."""

    def __init__(self, boss: "Supervisor", name: str) -> None:
        self._boss, self._name = boss, name
        self.claim: Any = None
        self._queued = False
        self._task: Optional[SideTask] = None
        self.begin()

    def begin(self) -> None:
        """Wait anew, from the claim on; a claim that is held stays."""
        self.cancel()
        self.due = 0.0
        """When to be asked next (monotonic, s)."""
        self._at_gate = False
        self._since: Optional[float] = None
        self._waiting: Optional[str] = None
        self._read_again_at = 0.0
        self._holders: List[protocol.ProcessId] = []
        self._broken = 0

    @property
    def indices(self) -> Optional[List[int]]:
        """The claimed GPUs; None without a claim."""
        return list(self.claim.indices) if self.claim is not None else None

    @property
    def fds(self) -> Sequence[int]:
        """Descriptors of the claim, which the job's main process inherits."""
        return tuple(self.claim.fds) if self.claim is not None else ()

    def tasks(self) -> List[SideTask]:
        """The reading under way."""
        return [self._task] if self._task is not None else []

    def tick(self, now: float, step: protocol.StepSpec, params: Mapping[str, Any], without: Sequence[str]) -> Answer:
        """One look, as far as one is due.

        Args:
            now: monotonic, in s.
            step: as it runs now.
            params: the parameters that it would run with.
            without: GPUs that failed it before and are never claimed again.
        """
        if step.gpus <= 0:
            return Answer(is_open=True)
        if self._task is None and now < self.due:
            return _WAIT
        if not self._at_gate:
            refused = self._claim(now, step, without)
            if refused is not None:
                can_wait = len(refused["survey"]["healthy"]) >= step.gpus
                return self._closed(now, step, params, without, {**refused, "can_wait": can_wait})
            if self.claim is None:
                return _WAIT
            self.begin()
            self._at_gate, self._since = True, now
        return self._look_at_gate(now, step, params, without)

    def _claim(self, now: float, step: protocol.StepSpec, without: Sequence[str]) -> Optional[Dict[str, Any]]:
        """Try to get the claim; a reading of the GPUs when it shows that too few of them may be claimed."""
        if self.claim is not None:
            return None
        among = None
        if 0 < step.gpus < (self._boss.spec.host_gpus or 0) or without:  # else all of them are needed, whatever they do
            reading = self._reading(now)
            if reading is None:
                return None
            among = gpu_access.usable(reading, without)
            if among is not None and len(among) < step.gpus:  # foreign work or a fault: as at a closed gate
                self._since = self._since or now
                return reading
        self.claim, reason = gpu_access.claim_gpus(self._boss.claimer, self._boss.spec, step, among)
        self._queued = self.claim is None
        if self._queued:
            self.due = now + (CLAIM_EVERY_S if among is None else SURVEY_EVERY_S)
            if reason != self._waiting:
                self._waiting = reason
                self._boss.emit(EventKind.STEP_QUEUED, self._name, reason=reason)
        return None

    def _look_at_gate(
        self, now: float, step: protocol.StepSpec, params: Mapping[str, Any], without: Sequence[str]
    ) -> Answer:
        if self._task is None and now < self._read_again_at and all(procs.is_alive(one) for one in self._holders):
            self.due = now + GATE_EVERY_S
            return _WAIT
        reading = self._reading(now)
        if reading is None:
            return _WAIT
        if reading.get("reaped"):
            self._boss.emit(
                EventKind.REAPED, self._name, processes=reading["reaped"], text=reading.get("reaped_text")
            )
        if reading.get("open"):
            return Answer(is_open=True)
        return self._closed(now, step, params, without, reading)

    def _closed(
        self,
        now: float,
        step: protocol.StepSpec,
        params: Mapping[str, Any],
        without: Sequence[str],
        reading: Mapping[str, Any],
    ) -> Answer:
        """The GPUs cannot be had now: wait, go on with fewer where the plan allows that, or give up."""
        reasons = reading.get("reasons") or ["too few GPUs may be used"]
        waited = now - (self._since or now)
        given = self._boss.spec.gate.get("wait_s")
        limit = GATE_WAIT_S if given is None else float(given)
        self._broken = 0 if reading.get("can_wait", True) else self._broken + 1
        if self._broken >= BROKEN_READS:
            changes, why = fewer_gpus.change(step, params, reading.get("survey") or {}, without)
            if changes:
                return Answer(changes=changes, why=why)
        if waited > limit or self._broken >= BROKEN_READS:
            answers = (reading.get("gpus") or {}).get("gpus")
            broken = ("gpu_hardware" if answers else "driver") if self._broken >= BROKEN_READS else None
            return Answer(verdict=judge.gate_verdict(reasons, waited, broken=broken))
        text = "; ".join(reasons)
        if text != self._waiting:
            self._waiting = text
            self._boss.emit(EventKind.STEP_GATED, self._name, reasons=reasons, wait_s=limit)
        self._holders = recovery.identities(reading.get("holders") or [])
        self._read_again_at = now + (GATE_EVERY_LATER_S if waited > GATE_OFTEN_S and self._holders else 0.0)
        self.due = now + (GATE_EVERY_S if self._at_gate or self._broken else SURVEY_EVERY_S)
        return _WAIT

    def _reading(self, now: float) -> Optional[Dict[str, Any]]:
        """Start a reading of our GPUs (without a claim: of all), or take its answer; None until that is there."""
        if self._task is None:
            spec, layout, indices = self._boss.spec, self._boss.layout, self.indices
            self._task = SideTask(
                lambda: gpu_access.read_gate(layout, spec, indices), timeout_s=READING_TIMEOUT_S, memory_mib=None
            )
        if not self._task.ready():
            self.due = now + 0.1
            return None
        task, self._task = self._task, None
        return task.result or {"reasons": ["the GPUs could not be read: {}".format(task.error)]}

    def memory_is_back(self, now: float, since: float) -> bool:
        """Whether an attempt that ended at ``since`` holds no memory of the claimed GPUs any more (or for too long)."""
        if self.claim is None:
            return True
        if self._task is None and now < self.due:
            return False
        reading = self._reading(now)
        if reading is None:
            return False
        self.due = now + GATE_EVERY_S
        # A holder is somebody else's process: ours is back then, and waiting for theirs is the gate's business.
        ours_back = reading.get("open") or reading.get("holders") or not reading.get("can_wait", True)
        return bool(ours_back) or now - since > BACK_WITHIN_S

    def cancel(self) -> None:
        """End a reading that nobody waits for any more."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def release(self) -> None:
        """Give the claim back, or the place in the queue; a reading under way has nothing to tell any more."""
        self.cancel()
        if self._queued:
            self._boss.claimer.forget(self._boss.spec.id, self._name)
            self._queued = False
        if self.claim is not None:
            self.claim.release()
            self.claim = None
