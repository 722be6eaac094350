"""Noticing that an attempt no longer moves, from several signals, and saying where it stands still.

The decision itself is remote_jobs.logs.stall (pure); here the signals are read: log bytes, bar progress, bytes
read by the processes, D state, GPU use.  Standard library only.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence

from remote_jobs import protocol
from remote_jobs.agent import incident, procs
from remote_jobs.agent.jobdir import write_json

if TYPE_CHECKING:
    from remote_jobs.agent.attempt import Attempt

_LOOK_EVERY_S = 5.0
# A prompt that stays the last thing printed: stdin is /dev/null, so whoever waits reads from elsewhere, for ever.
_PROMPT_QUIET_S = 3.0


class HangWatch:
    """Watches one attempt. Built anew for each."""

    def __init__(self) -> None:
        self._next_at = 0.0
        self._read_bytes = -1
        self._cpu_ticks = -1
        self._io_mono = 0.0
        self._cpu_mono = 0.0

    def look(
        self, now: float, attempt: "Attempt", step: protocol.StepSpec, side_pids: Sequence[int]
    ) -> Optional[Dict[str, Any]]:
        """A verdict (explain's failure shape) when the attempt hangs, else None. ``now`` is monotonic, in s."""
        waiting = attempt.waiting_for_input()
        if waiting is not None and now - attempt.last_log_mono > _PROMPT_QUIET_S:
            return {
                "class": "waiting_for_input", "retry": "no", "root_cause": waiting, "signature": "prompt_at_end",
                "summary": "the program waits for an answer on its standard input",
                "advice": "pass the answer as a flag (such as --yes), or in the plan's env", "evidence": [],
            }  # fmt: skip
        if now < self._next_at or step.hang_s == 0:
            return None
        self._next_at = now + _LOOK_EVERY_S
        from remote_jobs.logs import stall

        if now - attempt.last_log_mono < stall.MIN_QUIET_S:
            return None
        pids = self._pids(attempt)
        self._sample_activity(now, pids)
        decision = stall.judge(
            quiet_s=now - attempt.last_log_mono,
            bar_quiet_s=attempt.bar_quiet_s(now),
            read_quiet_s=now - self._io_mono,
            cpu_quiet_s=now - self._cpu_mono,
            states=[row.state for row in (procs.read_proc(pid) for pid in pids) if row is not None],
            phase=attempt.current_phase(),
            item_s=attempt.median_item_s(),
            limit_s=step.hang_s,
        )
        if not decision.hung:
            return None
        return {
            "class": "unknown", "retry": "yes", "root_cause": None, "signature": "hang",
            "summary": decision.reason, "advice": "stacks are in the incident bundle: orch why JOB",
            "evidence": list(decision.evidence),
        }  # fmt: skip

    def _pids(self, attempt: "Attempt") -> List[int]:
        if attempt.process is None:
            return []
        rows = procs.table()
        return [attempt.process.pid, *procs.descendants(attempt.process.pid, rows)]

    def _sample_activity(self, now: float, pids: Sequence[int]) -> None:
        read = sum(procs.read_bytes(pid) or 0 for pid in pids)
        ticks = sum(row.cpu_ticks for row in (procs.read_proc(pid) for pid in pids) if row is not None)
        if abs(read - self._read_bytes) > 65536 or self._read_bytes < 0:
            self._read_bytes, self._io_mono = read, now
        if abs(ticks - self._cpu_ticks) > 10 or self._cpu_ticks < 0:
            self._cpu_ticks, self._cpu_mono = ticks, now


def write_stacks(attempt: "Attempt", left: Sequence[procs.Proc]) -> None:
    """Stacks of a hanging attempt, before it is stopped."""
    folder = os.path.join(attempt.dir, protocol.INCIDENT_DIR)
    with contextlib.suppress(OSError):
        os.makedirs(folder, mode=0o700, exist_ok=True)
        write_json(os.path.join(folder, incident.STACKS_FILE), incident.stacks(left), durable=False)
