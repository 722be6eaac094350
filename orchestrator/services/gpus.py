"""The GPUs of a host, who holds them and whether they are clean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.services.session import Session


def gpus(session: Session, host: str | None) -> dict[str, Any]:
    """The design's `orch gpus` document. Without a host: the only one of the inventory.

    Raises:
        UsageError: several hosts and none named.
    """
    name = host or only_host(session, "orch gpus HOST")
    answer = session.agent(name).request("gpus", expected=session.host(name).gpus)
    return {key: value for key, value in answer.items() if key not in {"id", "ok"}}


def only_host(session: Session, how: str) -> str:
    """The inventory's only host.

    Raises:
        UsageError: there are several; the hint shows how to name one.
    """
    names = session.host_names()
    if len(names) != 1:
        raise UsageError(f"which host? the inventory has {', '.join(names) or 'none'}", f"say: {how}")
    return names[0]
