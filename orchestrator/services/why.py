"""What a failed attempt died of, as the host recorded it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.services.resolve import resolve

if TYPE_CHECKING:
    from orchestrator.services.session import Session


def why(session: Session, job: str, *, step: str | None = None, attempt: int | None = None) -> dict[str, Any]:
    """The design's `orch why` document without ``schema``; without step and attempt: the last attempt that failed."""
    found = resolve(session, job)
    request: dict[str, Any] = {"job": found.id}
    if step is not None:
        request["step"] = step
    if attempt is not None:
        request["attempt"] = attempt
    answer = session.agent(found.host).request("why", **request)
    return {"host": found.host, **{key: value for key, value in answer["why"].items() if key != "schema"}}
