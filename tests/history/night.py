"""A night of a pipeline on eight GPUs, as a host reports it: for tests of what is drawn from it."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any

from orchestrator.core.timeline import Timeline, of_view
from tests.cli.samples import OOM, attempt, bar, job, step

START = datetime(2026, 11, 29, 20, 0, tzinfo=UTC)
NOW = START + timedelta(hours=9)
HOSTILE = "</pre><script>alert(1)</script>\x1b[31m & <b>"


def at(minutes: float) -> str:
    return (START + timedelta(minutes=minutes)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def phase(name: str, start: float, end: float, state: str = "done") -> dict[str, Any]:
    return {"name": name, "state": state, "started_at": at(start), "took_s": (end - start) * 60}


def view() -> dict[str, Any]:
    """serve, generate, extract (fails once with kept work, once without), train."""
    gpus = list(range(8))
    served = attempt(
        1, state="succeeded", started_at=at(0), ended_at=at(150), exit_status=-15, gpus=gpus,
        phases=[phase("start", 0, 1), phase("load_weights", 1, 19), phase("compile", 19, 27), phase("serve", 27, 150)],
    )  # fmt: skip
    generated = attempt(1, state="succeeded", started_at=at(28), ended_at=at(149), exit_status=0)
    crashed = attempt(
        1, state="failed", started_at=at(151), ended_at=at(271), exit_status=1, gpus=gpus, kept=3200, verdict=OOM,
        phases=[phase("load_weights", 151, 171), phase("extract", 171, 271, "failed")],
        bars=[bar(label="Extracting hidden states", done=3200, total=10000)],
    )  # fmt: skip
    vain = attempt(
        2, state="failed", started_at=at(272), ended_at=at(292), exit_status=-9, gpus=gpus, kept=3200,
        verdict={**OOM, "class": "killed", "summary": HOSTILE}, phases=[phase("load_weights", 272, 291, "failed")],
    )  # fmt: skip
    good = attempt(
        3, state="succeeded", started_at=at(293), ended_at=at(480), exit_status=0, gpus=gpus,
        changes={"gpu_memory_utilization": {"from": 0.9, "to": 0.85}},
        phases=[phase("load_weights", 293, 312), phase("extract", 312, 480)],
        bars=[bar(label="Extracting hidden states", done=10000, total=10000)],
    )  # fmt: skip
    trained = attempt(
        1, state="running", started_at=at(482), gpus=gpus[:4], phases=[phase("train", 483, 540, "running") | {"took_s": None}]
    )
    return job(
        created_at=at(0), started_at=at(0), state="running", notes=[{"at": at(272), "text": HOSTILE}],
        steps=[
            step("serve", "succeeded", [served], service=True),
            step("generate", "succeeded", [generated], needs=["serve"]),
            step("extract", "succeeded", [crashed, vain, good], needs=["generate"]),
            step("train", "running", [trained], needs=["extract"]),
        ],
    )  # fmt: skip


def readings() -> list[dict[str, Any]]:
    """One a minute while GPUs were held; GPU 7 has no utilisation counter."""
    found: list[dict[str, Any]] = []
    for minute in range(540):
        idle = any(start <= minute < end for start, end in ((150, 152), (271, 273), (292, 294), (480, 483)))
        if not idle:
            use = 5 if minute % 150 < 20 else 80 + 15 * math.sin(minute / 9)
            rows = [[gpu, None if gpu == 7 else round(use - gpu), 60000, 81559] for gpu in range(8)]
            found.append({"at": at(minute), "gpus": rows})
    return found


def timeline() -> Timeline:
    return of_view(view(), NOW, readings())
