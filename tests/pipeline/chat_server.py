"""A chat server that answers as vLLM does, and misbehaves on request: for what a real engine cannot be made to do."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Reply = Callable[[dict[str, Any], int], tuple[int, dict[str, Any]] | None]


def answer(body: dict[str, Any], **changes: Any) -> tuple[int, dict[str, Any]]:
    """A whole answer: prompt ids by length of the prompt, five generated ids."""
    text = body["messages"][-1]["content"]
    message = {"role": "assistant", "content": "an answer", **changes.pop("message", {})}
    choice = {
        "message": message,
        "token_ids": [7, 8, 9, 10, 2],
        "finish_reason": "stop",
        **changes.pop("choice", {}),
    }
    return 200, {"choices": [choice], "prompt_token_ids": [1] * (len(text) % 7 + 3), **changes}


class ChatServer:
    """Context manager. `reply(body, n)` gives (status, JSON) of the n-th request, or None to drop the connection."""

    def __init__(self, reply: Reply) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.send({"data": [{"id": "tiny"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    outer.bodies.append(body)
                    number = len(outer.bodies)
                made = reply(body, number)
                if made is None:
                    self.close_connection = True
                    return
                self.send(made[1], made[0])

            def send(self, content: dict[str, Any], status: int = 200) -> None:
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Refuse connections from now on."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
