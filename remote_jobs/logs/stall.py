"""Does a job stand still? Decide from several signals; slow storage is not a hang.

Why this file exists: one silent signal proves little (a compile prints nothing for minutes, an NFS read prints nothing
but moves bytes). Limits are learned from the bar's own pace: at least 5 times its median item and 120 s. Pure.

Must not import anything but the standard library and its siblings; no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, NamedTuple, Optional, Sequence, Tuple

MIN_LIMIT_S = 120.0
TIMES_MEDIAN = 5.0
QUIET_PHASES_S = {
    "start": 300.0,
    "engine_start": 600.0,
    "load_weights": 600.0,
    "load_drafter": 600.0,
    "compile": 1800.0,
    "profile": 900.0,
    "warmup": 1800.0,
    "graph_capture": 900.0,
    "save_checkpoint": 1800.0,
}
"""Seconds of silence that are usual in a phase without a moving bar (first compile and kernel warm-up take longest)."""
DEFAULT_QUIET_S = 900.0
IDLE_GPU_PCT = 2.0


@dataclass(frozen=True)
class Signals:
    """What is known at one moment; None: not known on this host."""

    now_s: float
    log_grew_at_s: float
    bar_moved_at_s: Optional[float] = None  # None: no unfinished bar
    read_bytes_moved_at_s: Optional[float] = None  # any process of the job read or wrote (/proc/PID/io)
    io_wait: bool = False  # a process of the job is in state D
    gpu_utilization_pct: Optional[Sequence[float]] = None  # of the job's GPUs
    waits_for_input: Optional[str] = None
    phase: Optional[str] = None
    service_ready: bool = False  # a ready server may rest


class Standing(NamedTuple):
    """``state``: moving, slow, suspect, hung or waiting_for_input; ``limit_s`` is the one that was applied."""

    state: str
    reason: str
    quiet_s: float
    limit_s: float


def bar_limit_s(samples: Sequence[Tuple[float, int]]) -> Optional[float]:
    """Longest pause that is usual for a bar: 5 times its median item, at least 120 s; None with fewer than 2 items.

    Args:
        samples: (elapsed_s, done), rising.
    """
    paces: List[float] = []
    for (start_s, start_n), (end_s, end_n) in zip(samples, samples[1:]):
        if end_n > start_n:
            paces.append((end_s - start_s) / (end_n - start_n))
    if len(paces) < 2:
        return None
    paces.sort()
    return max(MIN_LIMIT_S, TIMES_MEDIAN * paces[len(paces) // 2])


def judge_stall(
    signals: Signals,
    samples: Sequence[Tuple[float, int]] = (),
    *,
    usual_phase_s: Optional[float] = None,
    hang_s: Optional[float] = None,
) -> Standing:
    """Weigh the signals.

    Args:
        signals: see Signals; all times on one clock.
        samples: the unfinished bar's samples, when there is one.
        usual_phase_s: how long this phase took on this host and model before.
        hang_s: the step's own silence limit: None = learned, 0 = never judge.

    A question is reported at once. A job whose log and bar are silent beyond the limit is ``slow`` while its processes
    move bytes or wait in the kernel for storage, ``suspect`` while only the log is silent, and ``hung`` when nothing
    moves: no log, no bar, no bytes, GPU idle (or at full spin with nothing else, the picture of a stuck collective,
    after twice the limit).
    """
    if signals.waits_for_input:
        return Standing("waiting_for_input", "asks: {}".format(signals.waits_for_input), 0.0, 0.0)
    moved_at = signals.log_grew_at_s
    learned = bar_limit_s(samples)
    if signals.bar_moved_at_s is not None and learned is not None:
        moved_at = signals.bar_moved_at_s  # other lines (heartbeats, throughput) do not count as progress of the bar
        limit_s = learned
    else:
        limit_s = QUIET_PHASES_S.get(signals.phase or "", DEFAULT_QUIET_S)
        if usual_phase_s is not None:
            limit_s = max(limit_s, 2.0 * usual_phase_s)
    if hang_s is not None and hang_s > 0:
        limit_s = hang_s
        moved_at = max(moved_at, signals.log_grew_at_s)
    quiet_s = max(0.0, signals.now_s - moved_at)
    if hang_s == 0 or signals.service_ready:
        return Standing("moving", "not judged", quiet_s, limit_s)
    if quiet_s < limit_s:
        return Standing("moving", "progress {:.0f} s ago".format(quiet_s), quiet_s, limit_s)
    io_quiet_s = None if signals.read_bytes_moved_at_s is None else signals.now_s - signals.read_bytes_moved_at_s
    if signals.io_wait or (io_quiet_s is not None and io_quiet_s < min(MIN_LIMIT_S, limit_s)):
        what = "a process waits for storage (state D)" if signals.io_wait else "bytes still move"
        return Standing("slow", "no progress for {:.0f} s, but {}".format(quiet_s, what), quiet_s, limit_s)
    log_quiet_s = signals.now_s - signals.log_grew_at_s
    if log_quiet_s < limit_s:
        return Standing("suspect", "the bar stands still for {:.0f} s, the log goes on".format(quiet_s), quiet_s, limit_s)
    gpus = signals.gpu_utilization_pct
    idle = gpus is not None and all(value <= IDLE_GPU_PCT for value in gpus)
    if gpus is None or idle:
        gpu = "GPU idle" if idle else "GPU use unknown"
        if gpus is None and quiet_s < 2.0 * limit_s and io_quiet_s is None:
            return Standing("suspect", "silent for {:.0f} s".format(quiet_s), quiet_s, limit_s)
        return Standing("hung", "nothing moves for {:.0f} s: no log, no bar, no bytes, {}".format(quiet_s, gpu), quiet_s, limit_s)
    if quiet_s >= 2.0 * limit_s and all(value >= 95.0 for value in gpus):
        return Standing("hung", "silent for {:.0f} s with all GPUs spinning: a stuck collective".format(quiet_s), quiet_s, limit_s)
    return Standing("suspect", "silent for {:.0f} s, GPUs busy".format(quiet_s), quiet_s, limit_s)
