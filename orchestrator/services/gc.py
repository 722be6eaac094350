"""House-keeping: what hosts may delete of ours, and the size of the local ledger. Says first, deletes when told to.

What may go is judged on the host (remote_jobs/agent/gc.py): only it knows what runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import OrchError, ProtocolError
from orchestrator.services.parallel import in_parallel

if TYPE_CHECKING:
    from orchestrator.services.session import Session

TIMEOUT_S = 600.0
"""Sizes are counted and trees deleted: minutes on a slow disk."""


def gc(session: Session, names: Sequence[str], *, older_than_s: float, apply: bool) -> dict[str, Any]:
    """``{"apply", "older_than_s", "hosts": [{name, reachable, error, items, kept, bytes}], "ledger": {...}}``.

    Raises:
        ConfigError, UsageError: the inventory, or a name that is not in it.
    """
    chosen = list(dict.fromkeys(names)) or session.host_names()
    for name in chosen:
        session.host(name)
    hosts = in_parallel(chosen, lambda name: _collect(session, name, older_than_s, apply))
    return {"apply": apply, "older_than_s": older_than_s, "hosts": hosts, "ledger": _ledger(session, apply)}


def _collect(session: Session, name: str, older_than_s: float, apply: bool) -> dict[str, Any]:  # noqa: FBT001
    answer: dict[str, Any] = {"name": name, "reachable": False, "error": None, "items": [], "kept": [], "bytes": 0}
    try:
        found = session.agent(name).request("gc", timeout_s=TIMEOUT_S, older_than_s=older_than_s, apply=apply)
        answer.update({key: found[key] for key in ("items", "kept", "bytes")}, reachable=True)
    except OrchError as error:
        answer["error"] = error.to_json()["error"]
        answer["reachable"] = isinstance(error, ProtocolError)
    return answer


def _ledger(session: Session, apply: bool) -> dict[str, Any]:  # noqa: FBT001
    ledger = session.ledger
    gone = ledger.trim(shrink=True) if apply else 0
    return {
        "path": str(ledger.path),
        "bytes": os.stat(ledger.path).st_size,
        "jobs": len(ledger.jobs()),
        "forgotten": gone,
    }
