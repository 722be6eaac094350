"""The agent's answer to `orch patch list|check|apply|revert`: the host's own interpreter is asked, and says.

Standard library only, Python 3.8: imported by the agent.
"""

from __future__ import annotations

import os
from typing import Any, Dict, Mapping

from remote_jobs.patches.overlay import ask, user_folders

ACTIONS = ("list", "check", "apply", "revert")


def answer(root: str, request: Mapping[str, Any]) -> Dict[str, Any]:
    """Answer {action, python?, sets?, in_place?}.

    Raises:
        AgentError: bad_request: unknown action, or what the patch command says in words for people.
    """
    from remote_jobs.agent.launching import AgentError

    action = str(request.get("action") or "check")
    if action not in ACTIONS:
        raise AgentError("bad_request", "unknown patch action {!r}: one of {}".format(action, ", ".join(ACTIONS)))
    extra = ["--in-place"] if request.get("in_place") else []
    sets = request.get("sets") or []
    try:
        return ask(action, request.get("python"), root, sets, dict(os.environ), user_folders(root), extra)
    except ValueError as error:
        raise AgentError("bad_request", str(error)) from None
