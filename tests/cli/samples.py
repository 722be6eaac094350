"""Views as the host writes them, for tests of pure renderers. Times are fixed; NOW is the reader's clock."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from orchestrator.services.views import HostView, LogTail, WatchView
from orchestrator.ui.job import Moment

NOW = datetime(2026, 11, 29, 14, 0, 0, tzinfo=UTC)
MOMENT = Moment(NOW, UTC)

OOM = {
    "class": "gpu_oom",
    "retry": "after_change",
    "root_cause": {"line": 120, "text": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"},
    "signature": "cuda-oom",
    "summary": "CUDA out of memory while loading weights",
    "advice": "lower gpu_memory_utilization",
    "evidence": ["worker TP3 died first"],
}


def attempt(n: int = 1, **changes: Any) -> dict[str, Any]:
    """A running attempt, changed as asked."""
    return {
        "n": n,
        "state": "running",
        "started_at": "2026-11-29T13:40:00Z",
        "ended_at": None,
        "exit_status": None,
        "verdict": None,
        "phases": [],
        "bars": [],
        "pid": 4711,
        "changes": None,
        "gpus": None,
        **changes,
    }


def step(name: str, state: str, attempts: list[dict[str, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    """A step, changed as asked."""
    return {
        "name": name,
        "uses": None,
        "needs": [],
        "service": False,
        "state": state,
        "waiting": None,
        "retry_at": None,
        "attempts": attempts or [],
        **changes,
    }


def bar(**changes: Any) -> dict[str, Any]:
    """A bar half-way, changed as asked."""
    return {
        "label": "Loading safetensors checkpoint shards",
        "instance": 1,
        "worker": None,
        "pid": None,
        "done": 28,
        "total": 64,
        "percent": 44,
        "elapsed_s": 676,
        "remaining_s": 862,
        "s_per_item": 22.35,
        "eta_s": 815.0,
        "line": 12,
        "seg": 0,
        **changes,
    }


def job(**changes: Any) -> dict[str, Any]:
    """A pipeline in its third step, second attempt."""
    failed = attempt(
        1,
        state="failed",
        started_at="2026-11-29T13:20:00Z",
        ended_at="2026-11-29T13:32:00Z",
        exit_status=1,
        verdict=OOM,
    )
    running = attempt(
        2,
        changes={"gpu_memory_utilization": {"from": 0.9, "to": 0.85}},
        phases=[
            {"name": "import", "state": "done", "took_s": 12.0},
            {"name": "load_weights", "state": "running", "took_s": None, "started_at": "2026-11-29T13:48:00Z"},
        ],
        bars=[bar()],
        processes=[
            {
                "pid": 4711,
                "ppid": 1,
                "user": "me",
                "state": "S",
                "cpu_pct": 98.5,
                "rss_mib": 2150.0,
                "command": "python extract.py\x1b[31m --evil",
            }
        ],
    )
    return {
        "id": "eagle3-20261129-abc234",
        "name": "eagle3",
        "host": "gpubox",
        "reachable": True,
        "age_s": 0.0,
        "state": "running",
        "seq": 17,
        "eta": {"at": "2026-11-29T14:35:00Z", "low_s": 1920.0, "high_s": 2280.0},
        "created_at": "2026-11-29T12:00:00Z",
        "started_at": "2026-11-29T12:00:01Z",
        "ended_at": None,
        "stop_requested": False,
        "alive": True,
        "lost": None,
        "unfinished": False,
        "workdir": "/data/eagle3",
        "plan_sha256": "0" * 64,
        "notes": [],
        "steps": [
            step("serve", "succeeded", [attempt(1, state="succeeded", started_at="2026-11-29T12:00:01Z", ended_at="2026-11-29T13:00:01Z", exit_status=0)], service=True),
            step("generate", "succeeded", [attempt(1, state="succeeded", started_at="2026-11-29T12:20:00Z", ended_at="2026-11-29T13:00:00Z", exit_status=0)], needs=["serve"]),
            step("extract", "running", [failed, running], needs=["generate"]),
            step("train", "queued", needs=["extract"]),
        ],
        **changes,
    }


def watch_view(*jobs: dict[str, Any], log: bytes | None = None) -> WatchView:
    """A whole view with one connected host and eight GPUs."""
    gpus = [
        {
            "index": index,
            "uuid": f"GPU-{index}",
            "name": "NVIDIA H100",
            "memory_used_mib": 70000 + index,
            "memory_total_mib": 81559,
            "utilization_pct": 97,
            "processes": [{"pid": 4711, "name": "python", "memory_mib": 70000, "kind": "compute", "owner": "job:eagle3-20261129-abc234"}],
            "health": "ok",
            "clean": False,
            "why": "held",
        }
        for index in range(8)
    ]
    host = HostView(
        "gpubox", link="connected", looked_at=NOW, next_look_at=NOW, round_trip_s=0.021, skew_s=0.1,
        gpus={"gpus": gpus, "clean": False, "age_s": 4.0},
    )  # fmt: skip
    return WatchView(
        hosts={"gpubox": host},
        jobs={str(item["id"]): item for item in jobs or (job(),)},
        log=LogTail("eagle3-20261129-abc234", "extract", 2, log) if log is not None else None,
    )
