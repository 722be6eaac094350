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

_LOOK_EVERY_S = 15.0
_MIN_QUIET_S = 60.0
_MOVED_BYTES = 1 << 16
# One tick of processor time (10 ms) counts as 4 KiB moved: a fifth of a second of work is a sign of life.
_TICK_WEIGHT = 4096
# A prompt that stays the last thing printed: stdin is /dev/null, so whoever waits reads from elsewhere, for ever.
_PROMPT_QUIET_S = 3.0


class HangWatch:
    """Watches one attempt. Built anew for each."""

    def __init__(self) -> None:
        self._next_at = 0.0
        self._read_bytes = -1
        self._io_mono: Optional[float] = None

    def look(
        self, now: float, attempt: "Attempt", step: protocol.StepSpec, *, service_ready: bool
    ) -> Optional[Dict[str, Any]]:
        """A verdict (explain's failure shape) when the attempt hangs, else None. ``now`` is monotonic, in s."""
        quiet_s = now - attempt.last_log_mono
        prompt = attempt.waiting_for_input()
        if prompt is not None and quiet_s > _PROMPT_QUIET_S:
            return _waiting_verdict(prompt)
        if now < self._next_at or step.hang_s == 0 or quiet_s < min(step.hang_s or _MIN_QUIET_S, _MIN_QUIET_S):
            return None
        self._next_at = now + min(_LOOK_EVERY_S, (step.hang_s or 60.0) / 4)
        from remote_jobs.logs import stall

        pids = self._pids(attempt)
        self._sample(now, pids)
        rows = [row for row in (procs.read_proc(pid) for pid in pids) if row is not None]
        signals = stall.Signals(
            now_s=now,
            log_grew_at_s=attempt.last_log_mono,
            bar_moved_at_s=attempt.bar_moved_at(),
            read_bytes_moved_at_s=self._io_mono,
            io_wait=any(row.state == "D" for row in rows),
            phase=attempt.current_phase(),
            service_ready=service_ready,
        )
        standing = stall.judge_stall(signals, attempt.bar_samples(), hang_s=step.hang_s)
        if standing.state != "hung":
            return None
        return {
            "class": "unknown", "retry": "yes", "root_cause": None, "signature": "hang",
            "summary": "the job hangs: {}".format(standing.reason),
            "advice": "its stacks are in the incident bundle, and in: orch why JOB",
            "evidence": ["limit {:.0f} s, quiet {:.0f} s".format(standing.limit_s, standing.quiet_s)],
        }  # fmt: skip

    def _pids(self, attempt: "Attempt") -> List[int]:
        if attempt.process is None:
            return []
        return [attempt.process.pid, *procs.descendants(attempt.process.pid, procs.table())]

    def _sample(self, now: float, pids: Sequence[int]) -> None:
        """Note when the processes last read or wrote, or used the processor (a compile reads nothing)."""
        moved = sum(procs.io_bytes(pid) or 0 for pid in pids)
        moved += sum(row.cpu_ticks for row in (procs.read_proc(pid) for pid in pids) if row is not None) * _TICK_WEIGHT
        if abs(moved - self._read_bytes) > _MOVED_BYTES or self._read_bytes < 0:
            self._read_bytes, self._io_mono = moved, now


def _waiting_verdict(prompt: Dict[str, Any]) -> Dict[str, Any]:
    return {
        "class": "waiting_for_input", "retry": "no", "root_cause": prompt, "signature": "prompt_at_end",
        "summary": "the program waits for an answer: {}".format(prompt.get("text")),
        "advice": "pass the answer as a flag (such as --yes) or in the plan's env", "evidence": [],
    }  # fmt: skip


def write_stacks(attempt_dir: str, left: Sequence[procs.Proc], secrets: Sequence[str]) -> None:
    """Stacks of what runs, before it is ended; the first ones stay, they show more. Blocks: for a side task."""
    folder = os.path.join(attempt_dir, protocol.INCIDENT_DIR)
    if os.path.exists(os.path.join(folder, incident.STACKS_FILE)):
        return
    with contextlib.suppress(OSError):
        os.makedirs(folder, mode=0o700, exist_ok=True)
        rows = incident.scrubbed(incident.stacks(left), secrets)
        write_json(os.path.join(folder, incident.STACKS_FILE), rows, durable=False)
