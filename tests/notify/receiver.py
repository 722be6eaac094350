"""A real HTTP server that keeps every request it gets; its answers can be set, one after the other."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


@dataclass
class Got:
    """One request."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        found = json.loads(self.body)
        assert isinstance(found, dict)
        return found


class Receiver:
    """A context manager; ``got`` are the requests so far, ``statuses`` what the next ones are answered with (then 200)."""

    def __init__(self) -> None:
        self.got: list[Got] = []
        self.statuses: list[int] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def _take(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status = receiver.statuses.pop(0) if receiver.statuses else 200
                receiver.got.append(Got(self.command, self.path, dict(self.headers), body))
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST = _take  # noqa: N815 - names of the base class

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}/{path}"

    def at(self, path: str) -> list[Got]:
        """Requests to a path."""
        return [item for item in self.got if item.path == f"/{path}"]

    def kinds(self, path: str) -> list[str]:
        """What the webhook messages to a path were about."""
        return [str(item.json["kind"]) for item in self.at(path)]
