"""Is a service ready? Asked once a second: a probe in a side task, or marks that the log reader saw.

Standard library only.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any, List, Mapping, Optional, Tuple

from remote_jobs import protocol
from remote_jobs.agent.side import SideTask

if TYPE_CHECKING:
    from remote_jobs.agent.attempt import Attempt

EVERY_S = 1.0
TIMEOUT_S = 5.0
_CONNECT_S = 3.0


def is_service(step: protocol.StepSpec) -> bool:
    """A step that stays up until the steps that need it are done."""
    return step.service is not None or step.uses == "serve"


class ReadyWatch:
    """Watches one start of a service until it is ready."""

    def __init__(self) -> None:
        self._task: Optional[SideTask] = None
        self._next_at = 0.0
        self._answer = ""

    def said(self, step: protocol.StepSpec) -> str:
        """What was waited for, and what the last probe saw; for the verdict of a service that never was ready."""
        rule = _rule(step)
        if "marker" in rule:
            return "no `::orch` marker with the state {!r}".format(str(rule["marker"]))
        if "log" in rule:
            return "{!r} is not in its log".format(str(rule["log"]))
        what = rule.get("http") or "port {}".format(rule.get("port"))
        return "{}: {}".format(what, self._answer or "not asked yet")

    def tasks(self) -> List[SideTask]:
        """The probe under way."""
        return [self._task] if self._task is not None else []

    def tick(self, now: float, step: protocol.StepSpec, attempt: "Attempt") -> bool:
        """True when the service answered as its step says. ``now`` is monotonic, in s."""
        rule = _rule(step)
        if "marker" in rule or "log" in rule:
            return in_log(rule, attempt)
        if self._task is None:
            if now >= self._next_at:
                self._task = SideTask(lambda: probe(rule), timeout_s=TIMEOUT_S)
            return False
        if not self._task.ready():
            return False
        task, self._task = self._task, None
        self._next_at = now + EVERY_S
        is_ready, self._answer = task.result if task.error is None else (False, task.error)
        return is_ready


def _rule(step: protocol.StepSpec) -> Mapping[str, Any]:
    found: Mapping[str, Any] = (step.service or {}).get("ready") or {"marker": "ready"}
    return found


def probe(rule: Mapping[str, Any]) -> Tuple[bool, str]:
    """(True when ``{http: URL}`` answers 200..399 or ``{port: N}`` accepts on loopback, what was seen).

    A connection refused or a 503 is the usual "not yet" and no error.
    """
    if "port" in rule:
        try:
            with socket.create_connection(("127.0.0.1", int(rule["port"])), _CONNECT_S):
                return True, "accepts"
        except OSError as exc:
            return False, exc.strerror or str(exc)
    if "http" in rule:
        # Here: only side tasks probe, and every start of a supervisor would pay for it.
        import http.client
        from urllib.parse import urlsplit

        url = urlsplit(str(rule["http"]))
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(url.hostname or "127.0.0.1", url.port, timeout=_CONNECT_S)
        try:
            connection.request("GET", (url.path or "/") + ("?" + url.query if url.query else ""))
            status = connection.getresponse().status
            return 200 <= status < 400, "HTTP {}".format(status)
        except (OSError, http.client.HTTPException) as exc:
            return False, getattr(exc, "strerror", None) or str(exc) or type(exc).__name__
        finally:
            connection.close()
    return False, "no rule that is known"


def in_log(rule: Mapping[str, Any], attempt: "Attempt") -> bool:
    """True when the log holds the text of ``{log: TEXT}`` or a `::orch` marker with the state of ``{marker: STATE}``."""
    if "marker" in rule:
        wanted = str(rule["marker"])
        return any(marker.get("state") == wanted for marker in attempt.markers.newest())
    text = str(rule.get("log", "")).encode("utf-8")
    return bool(text) and attempt.saw(text)
