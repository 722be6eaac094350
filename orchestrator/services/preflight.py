"""The checks before a launch: run on the host, for the plan as it would be sent, GPUs of the first step only."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.core.times import iso

if TYPE_CHECKING:
    from orchestrator.services.launch import Prepared
    from orchestrator.services.session import Session

QUICK_TIMEOUT_S = 180.0
DEEP_TIMEOUT_S = 1800.0


def preflight(
    session: Session,
    plan: Path,
    *,
    host: str | None = None,
    usual_host: str | None = None,
    sets: Sequence[str] = (),
    deep: bool = False,
) -> dict[str, Any]:
    """``{"ok", "checks": [...]}`` of the design. Nothing is started, nothing but the release is uploaded.

    Raises:
        ConfigError, UsageError: plan, inventory or ``--set``. HostError: the host could not be asked.
    """
    from orchestrator.core.ids import new_job_id
    from orchestrator.services.launch import build, load_for

    loaded, names = load_for(session, plan, host=host, usual_host=usual_host, sets=sets)
    checks: list[dict[str, Any]] = []
    for name in names:
        now = session.now()
        prepared = build(session, loaded, name, job=new_job_id(loaded.plan.name, now), created_at=iso(now))
        found = run_checks(session, prepared, deep=deep)["checks"]
        checks += found if len(names) == 1 else [{**row, "found": f"{name}: {row['found']}"} for row in found]
    return {"ok": not any(check.get("verdict") == "fail" for check in checks), "checks": checks}


def run_checks(
    session: Session,
    prepared: Prepared,
    *,
    deep: bool,
    wait_gate: bool = False,
    only: Sequence[str] | None = None,
    no_queue: bool = False,
) -> dict[str, Any]:
    """Ask the host's checks about a spec; a file that is only on the laptop gets the line that ships it.

    With ``wait_gate`` (`launch --wait`) held GPUs are a warning: the job will wait for them. With ``no_queue`` they are
    a failure also when another orch job holds them. ``only`` names the checks to run.
    """
    agent = session.agent(prepared.host)
    answer = agent.request(
        "preflight",
        timeout_s=DEEP_TIMEOUT_S if deep else QUICK_TIMEOUT_S,
        spec={**prepared.spec, "release": agent.hello()["release"]},
        deep=deep,
        wall=time.time(),  # compared with the host's clock
        wait_gate=wait_gate,
        laptop_files=_local_candidates(prepared),
        checks=None if only is None else list(only),
        no_queue=no_queue,
    )
    checks = list(answer.get("checks") or [])
    return {"ok": not any(check.get("verdict") == "fail" for check in checks), "checks": checks}


def _local_candidates(prepared: Prepared) -> list[str]:
    """Names in `with:` values and commands that exist beside the plan: if the host lacks them, `files:` is the fix."""
    found: set[str] = set()
    for step in prepared.spec["steps"]:
        words = [value for value in (step.get("params") or {}).values() if isinstance(value, str)]
        words.extend(str(step.get("run") or "").split())
        for word in words:
            text = word.strip("'\"")
            if text and len(text) < 512 and not text.startswith(("/", "{", "-", "~")) and "\0" not in text:
                path = prepared.plan.base_dir / text
                if os.path.isfile(path):
                    found.add(text)
    return sorted(found)
