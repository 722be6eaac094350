"""What attempts took on this host, kept for forecasts and timers, and the scores of the forecasts themselves.

<root>/history/runs.jsonl holds one line per ended attempt: durations of step, phases and bars for this model.
The supervisor appends, forecasts and preflight read.  Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from remote_jobs import protocol
from remote_jobs.agent.jobdir import Layout
from remote_jobs.agent.times import epoch

FILE = "runs.jsonl"
MARKS = (25, 50, 75)
"""Per cent of a bar at which its forecast is kept, to be scored when the bar is full."""
_MAX_FILE_BYTES = 8 << 20
_NEWEST = 50
_SPREAD = 0.25
_JOIN_S = (1.0, 60.0)
"""Joining the ranges of a split where it was never timed: ten thousand files are checked in seconds."""


def path(layout: Layout) -> str:
    """The history file."""
    return os.path.join(layout.history, FILE)


def append(layout: Layout, row: Mapping[str, Any]) -> None:
    """Add one line; the file is halved when it has grown large. A full disk loses only history."""
    target = path(layout)
    with contextlib.suppress(OSError):
        os.makedirs(layout.history, mode=0o700, exist_ok=True)
        if os.path.exists(target) and os.stat(target).st_size > _MAX_FILE_BYTES:
            with open(target, "rb") as file:
                file.seek(-_MAX_FILE_BYTES // 2, os.SEEK_END)
                file.readline()
                kept = file.read()
            with open(target + ".tmp", "wb") as file:
                file.write(kept)
            os.replace(target + ".tmp", target)
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(fd, protocol.dumps(row))
        finally:
            os.close(fd)


def read(layout: Layout, limit: int = 5000) -> List[Dict[str, Any]]:
    """Newest rows, oldest first; broken lines are left out."""
    rows: List[Dict[str, Any]] = []
    with contextlib.suppress(OSError), open(path(layout), "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                row = json.loads(line.decode("utf-8"))
                if isinstance(row, dict):
                    rows.append(row)
    return rows[-limit:]


def row_of(
    spec: protocol.JobSpec,
    step: protocol.StepSpec,
    attempt: Mapping[str, Any],
    took_s: float,
    scores: Sequence[Mapping[str, Any]],
) -> Dict[str, Any]:
    """One line of the history from an ended attempt (its state object)."""
    return {
        "v": protocol.VERSION,
        "at": attempt.get("ended_at"),
        "job": spec.id,
        "plan": spec.name,
        "step": step.name,
        "uses": _uses(step),
        "model": step.params.get("model"),
        "gpus": step.gpus,
        "attempt": attempt.get("n"),
        "state": attempt.get("state"),
        "class": (attempt.get("verdict") or {}).get("class"),
        "took_s": round(took_s, 3),
        "phases": {
            str(phase["name"]): phase["took_s"]
            for phase in attempt.get("phases") or []
            if phase.get("state") == "done" and phase.get("took_s") is not None
        },
        "bars": [
            {"label": bar["label"], "total": bar["total"], "elapsed_s": bar["elapsed_s"]}
            for bar in (attempt.get("bars") or [])[:20]
            if bar.get("total") and bar.get("done") == bar.get("total")
        ],
        "forecasts": list(scores),
    }


def _uses(step: protocol.StepSpec) -> Optional[str]:
    """The built-in step whose times this one's are like: joining the ranges of a split takes seconds, not hours."""
    return "merge" if step.split > 1 else step.uses


class ForecastKeeper:
    """Keeps what was forecast for each bar at 25, 50 and 75 %, and scores it when the bar is full."""

    def __init__(self) -> None:
        self._kept: Dict[Tuple[Any, ...], Dict[int, Tuple[float, float, Optional[float]]]] = {}
        self.scores: List[Dict[str, Any]] = []

    def take(self, bars: Sequence[Mapping[str, Any]], now: float) -> None:
        """Look at the newest state of every bar; ``now`` is monotonic, in s."""
        for bar in bars:
            total, done = bar.get("total"), bar.get("done")
            if not total or done is None:
                continue
            key = (bar.get("label"), bar.get("worker"), bar.get("instance"))
            kept = self._kept.setdefault(key, {})
            if done >= total:
                self._score(str(bar.get("label")), kept, now)
                kept.clear()
                continue
            percent = 100.0 * done / total
            for mark in MARKS:
                if mark not in kept and mark <= percent < mark + 25 and bar.get("eta_s") is not None:
                    kept[mark] = (now, float(bar["eta_s"]), bar.get("remaining_s"))
        if len(self._kept) > 256:
            self._kept.clear()

    def _score(self, label: str, kept: Mapping[int, Tuple[float, float, Optional[float]]], now: float) -> None:
        for mark, (at, eta_s, printed_s) in kept.items():
            if len(self.scores) < 60:
                self.scores.append(
                    {
                        "label": label,
                        "at_percent": mark,
                        "forecast_s": round(eta_s, 1),
                        "printed_s": printed_s,
                        "true_s": round(now - at, 1),
                    }
                )


def _median(values: List[float]) -> float:
    # Here: it brings decimal and fractions, for which every start of a supervisor would pay.
    from statistics import median

    return float(median(values))


def usual_s(rows: Sequence[Mapping[str, Any]], spec: protocol.JobSpec, step: protocol.StepSpec) -> Optional[float]:
    """Median duration of this step's successful attempts on this host: of this plan first, else of this model."""
    good = [row for row in rows if row.get("state") == "succeeded" and row.get("took_s")]
    uses, model = _uses(step), step.params.get("model")
    same_plan = [
        row["took_s"]
        for row in good
        if row.get("plan") == spec.name and row.get("step") == step.name and row.get("uses") == uses
    ]
    same_model = [row["took_s"] for row in good if uses and row.get("uses") == uses and row.get("model") == model]
    chosen = (same_plan or same_model)[-_NEWEST:]
    return _median(chosen) if chosen else None


def _of_this_kind(rows: Sequence[Mapping[str, Any]], step: protocol.StepSpec) -> List[Mapping[str, Any]]:
    """Rows of this step, or of the same built-in step, with the same model."""
    uses, model = _uses(step), step.params.get("model")
    return [
        row
        for row in rows
        if row.get("model") == model and row.get("uses") == uses and (row.get("step") == step.name or uses)
    ]


def usual_paces(rows: Sequence[Mapping[str, Any]], step: protocol.StepSpec) -> Dict[str, Any]:
    """Usual pace of each bar of this kind of step with this model: label -> logs.History, to be blended into ETAs."""
    from remote_jobs.logs.eta import learn

    paces: Dict[str, List[float]] = {}
    for row in _of_this_kind(rows, step):
        for bar in row.get("bars") or []:
            if bar.get("total") and bar.get("elapsed_s"):
                paces.setdefault(str(bar["label"]), []).append(float(bar["elapsed_s"]) / float(bar["total"]))
    found = {label: learn(values) for label, values in paces.items()}
    return {label: pace for label, pace in found.items() if pace is not None}


def usual_phases(rows: Sequence[Mapping[str, Any]], step: protocol.StepSpec) -> Dict[str, float]:
    """Median duration of each phase of this kind of step with this model on this host."""
    found: Dict[str, List[float]] = {}
    for row in _of_this_kind(rows, step):
        for name, took_s in (row.get("phases") or {}).items():
            found.setdefault(name, []).append(float(took_s))
    return {name: _median(values[-_NEWEST:]) for name, values in found.items()}


def job_eta(
    state: Mapping[str, Any], spec: protocol.JobSpec, rows: Sequence[Mapping[str, Any]], now_wall: float
) -> Optional[Dict[str, Any]]:
    """When the job will be over: {at, low_s, high_s, confidence}, or None when a part of it is unknown.

    Sum over the steps still to run: what the newest bar of a running step forecasts plus the usual time of the phases
    behind it, else the step's usual duration less what it has run. The ranges of a split run side by side.
    """
    if state.get("state") not in ("running", "gated", "retry_wait", "queued"):
        return None
    low = high = 0.0
    confident = True
    ranges: Dict[str, List[Tuple[Mapping[str, Any], Tuple[float, float]]]] = {}
    for item, step in zip(state["steps"], spec.step_specs()):
        if item["service"] or item["state"] in protocol.STEP_TERMINAL:
            continue
        left = _step_left_s(item, spec, step, rows, now_wall)
        if left is None and step.part:
            left = max((known for _, known in ranges.get(step.part["of"], [])), default=None)
        if left is None:
            if step.split < 2:
                return None
            left = _JOIN_S
        if step.part:
            ranges.setdefault(step.part["of"], []).append((item, left))
            continue
        low, high = low + left[0], high + left[1]
        confident = confident and left[1] - left[0] < 0.5 * max(left[1], 60.0)
    for group in ranges.values():
        at_once = max(1, sum(item["state"] in ("running", "stopping") for item, _ in group))
        low += max([sum(left[0] for _, left in group) / at_once, *(left[0] for _, left in group)])
        high += max([sum(left[1] for _, left in group) / at_once, *(left[1] for _, left in group)])
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now_wall + (low + high) / 2))
    return {
        "at": at, "low_s": round(low, 1), "high_s": round(high, 1), "confidence": "good" if confident else "rough",
    }  # fmt: skip


def _step_left_s(
    item: Mapping[str, Any],
    spec: protocol.JobSpec,
    step: protocol.StepSpec,
    rows: Sequence[Mapping[str, Any]],
    now_wall: float,
) -> Optional[Tuple[float, float]]:
    attempt = item["attempts"][-1] if item["attempts"] else None
    usual = usual_s(rows, spec, step)
    if attempt is None or attempt["state"] not in ("running", "stopping"):
        return None if usual is None else (usual * (1 - _SPREAD), usual * (1 + _SPREAD))
    phases = usual_phases(rows, step)
    behind = [name for name in phases if name not in {phase["name"] for phase in attempt.get("phases") or []}]
    later_s = sum(phases[name] for name in behind)
    bar = next((bar for bar in reversed(attempt.get("bars") or []) if bar.get("eta_s") is not None), None)
    if bar is not None and (bar.get("done") or 0) < (bar.get("total") or 0):
        eta_s = float(bar["eta_s"])
        low, high = bar.get("eta_low_s", eta_s * (1 - _SPREAD)), bar.get("eta_high_s", eta_s * (1 + _SPREAD))
        return float(low) + later_s * (1 - _SPREAD), float(high) + later_s * (1 + _SPREAD)
    if usual is None:
        return None
    started = epoch(attempt.get("started_at"))
    left = max(0.0, usual - (now_wall - started)) if started else usual
    return left * (1 - _SPREAD), left * (1 + _SPREAD)


