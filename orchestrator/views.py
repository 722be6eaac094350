"""Types of the JSON documents that `Client` returns; the same that the commands print with `--json`.

Must import nothing but typing: types cost nothing at run time.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

JobState = Literal["queued", "gated", "running", "retry_wait", "stopping", "succeeded", "failed", "stopped", "lost"]
StepState = Literal[
    "queued", "gated", "running", "ready", "retry_wait", "stopping", "succeeded", "failed", "stopped", "lost", "skipped"
]
AttemptState = Literal["running", "stopping", "succeeded", "failed", "stopped", "lost"]


class Eta(TypedDict, total=False):
    """When a job is expected to end: a time (ISO UTC) and a range in seconds from now."""

    at: str
    low_s: float
    high_s: float
    confidence: str


class RootCause(TypedDict):
    """The line of the log where it went wrong."""

    line: int
    text: str


Verdict = TypedDict(
    "Verdict",
    {
        "class": str,
        "retry": Literal["yes", "no", "after_change"],
        "root_cause": RootCause | None,
        "signature": str,
        "summary": str,
        "advice": str,
        "evidence": list[Any],
    },
    total=False,
)
"""What an attempt died of."""


class Bar(TypedDict, total=False):
    """One progress counter of a log."""

    label: str
    instance: int
    worker: str | None
    pid: int | None
    done: int | None
    total: int | None
    percent: float | None
    elapsed_s: float | None
    remaining_s: float | None
    s_per_item: float | None
    eta_s: float | None


class Phase(TypedDict, total=False):
    """A stretch inside an attempt."""

    name: str
    state: Literal["running", "done", "failed"]
    started_at: str
    took_s: float | None
    left_s: float


class AttemptView(TypedDict, total=False):
    """One try of one step; ``exit_status`` is negative for a signal."""

    n: int
    state: AttemptState
    started_at: str | None
    ended_at: str | None
    exit_status: int | None
    verdict: Verdict | None
    phases: list[Phase]
    bars: list[Bar]
    pid: int | None
    gpus: list[int] | None
    changes: dict[str, Any] | None
    kept: int


class StepView(TypedDict, total=False):
    """One step of a job."""

    name: str
    uses: str | None
    needs: list[str]
    service: bool
    state: StepState
    waiting: str | None
    retry_at: str | None
    attempts: list[AttemptView]


class JobView(TypedDict, total=False):
    """One job as last seen; ``age_s`` says how old that is, ``reachable`` whether its host answered just now."""

    id: str
    name: str
    host: str
    reachable: bool
    age_s: float | None
    state: JobState
    seq: int
    eta: Eta | None
    created_at: str | None
    started_at: str | None
    ended_at: str | None
    workdir: str | None
    notes: list[dict[str, str]]
    steps: list[StepView]
