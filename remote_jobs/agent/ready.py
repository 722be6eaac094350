"""Is a service ready? Probes that a side task runs once a second, and marks that the log reader saw.

Standard library only.
"""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Any, Mapping
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from remote_jobs.agent.attempt import Attempt

_TIMEOUT_S = 3.0
_TAIL_BYTES = 1 << 20


def probe(rule: Mapping[str, Any]) -> bool:
    """True when ``{http: URL}`` answers 200..399 or ``{port: N}`` accepts on loopback.

    A connection refused or a 503 is the usual "not yet" and no error.
    """
    if "port" in rule:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(rule["port"])), _TIMEOUT_S):
            return True
        return False
    if "http" in rule:
        import http.client

        url = urlsplit(str(rule["http"]))
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(url.hostname or "127.0.0.1", url.port, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", (url.path or "/") + ("?" + url.query if url.query else ""))
            return 200 <= connection.getresponse().status < 400
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
    return False


def in_log(rule: Mapping[str, Any], attempt: "Attempt") -> bool:
    """True when the log holds the text of ``{log: TEXT}`` or a `::orch` marker with the state of ``{marker: STATE}``."""
    if "marker" in rule:
        wanted = str(rule["marker"])
        return any(marker.get("state") == wanted for marker in attempt.markers.newest())
    text = str(rule.get("log", "")).encode("utf-8")
    return bool(text) and attempt.saw(text)
