"""What an agent client needs from a transport, and the framing on top of it: JSON lines with raw payloads.

Both transports (paramiko channel, `ssh` subprocess) offer a `ByteStream`; everything above is the same code.
Sizes are bounded here: a hostile or confused host may cost a refused answer, never the laptop's memory.

Must not import fabric or paramiko.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

from orchestrator.core.errors import ProtocolError, Unreachable
from orchestrator.hosts.forward import Tunnel

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_FIRST_BYTES = 1024 * 1024
"""Before the agent has spoken nothing long is expected: a login that prints without newline ends here."""
MAX_ELEMENTS = 3_000_000
"""Values in one answer (the longest honest one lists 200 000 files with six fields each). JSON of `[],[],[]...` grows
20-fold when it is parsed, so the bytes alone are no bound for memory."""
MAX_NOISE_BYTES = 64 * 1024
"""How much a login may print before the agent speaks (~/.bashrc, motd)."""
RECV_BYTES = 65536


class HandshakeDropped(Unreachable):
    """The server closed the line before the login was done: full (MaxStartups), restarting, or a hop fell over."""


class ByteStream(Protocol):
    """One started command on the host: its stdin, stdout and stderr. Blocking calls end when another thread closes."""

    def send(self, data: bytes) -> None:
        """Write all of ``data``; OSError or EOFError when the stream is gone."""

    def recv(self, size: int) -> bytes:
        """Up to ``size`` bytes of stdout; b"" at its end."""

    def recv_stderr(self, size: int) -> bytes:
        """Up to ``size`` bytes of stderr; b"" at its end."""

    def close(self) -> None:
        """End the stream and what carries it. Never blocks for long, safe to call twice and from any thread."""

    def tunnel(self, address: str, port: int) -> Tunnel:
        """A connection to an address that the host can reach, beside the command.

        Raises:
            HostError: the host forbids it, or nothing listens there.
        """

    def explain_end(self, stderr: str) -> Exception | None:
        """A better error than "the stream ended", from exit status and stderr, if the transport knows one."""


class Framing:
    """Reads lines and payloads from a byte source, holding at most one message in memory."""

    def __init__(self, recv: Callable[[int], bytes]) -> None:
        self._recv = recv
        self._buffer = bytearray()

    def line(self, limit: int = MAX_MESSAGE_BYTES) -> bytes:
        """The next line without its newline.

        Raises:
            EOFError: the stream ended (an unfinished line is dropped: it is torn).
            ProtocolError: the line is longer than ``limit`` bytes.
        """
        start = 0
        while (end := self._buffer.find(b"\n", start)) < 0:
            if len(self._buffer) > limit:
                break
            start = len(self._buffer)
            self._fill()
        if end < 0 or end > limit:
            raise ProtocolError(f"an answer of more than {limit} bytes was refused")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def payload(self, size: int, limit: int = MAX_MESSAGE_BYTES) -> bytes:
        """Exactly ``size`` raw bytes.

        Raises:
            EOFError: the stream ended before.
            ProtocolError: ``size`` is negative or over ``limit``.
        """
        if not 0 <= size <= limit:
            raise ProtocolError(f"a payload of {size} bytes was refused")
        while len(self._buffer) < size:
            self._fill()
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    def _fill(self) -> None:
        data = self._recv(RECV_BYTES)
        if not data:
            raise EOFError("the stream ended")
        self._buffer += data

    def message(self, limit: int = MAX_MESSAGE_BYTES) -> dict[str, Any] | bytes:
        """The next message with its payload under ``payload``, or the raw line when it is no JSON object (noise).

        Raises:
            EOFError: the stream ended.
            ProtocolError: too long, or a nonsensical payload size.
        """
        line = self.line(limit)
        message = parse_object(line)
        if message is None:
            return line
        size = message.get("payload_bytes")
        if size is not None:
            if not isinstance(size, int) or isinstance(size, bool):
                raise ProtocolError(f"payload_bytes is {size!r}, not a number")
            message["payload"] = self.payload(size)
        return message


def parse_object(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line, or None when it is anything else.

    Raises:
        ProtocolError: it holds more values than any honest answer.
    """
    if not line.lstrip().startswith(b"{"):
        return None
    if line.count(b",") + line.count(b"[") + line.count(b"{") > MAX_ELEMENTS:
        raise ProtocolError(f"an answer of more than {MAX_ELEMENTS} values was refused")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def encode(message: dict[str, Any], payload: bytes | None = None) -> bytes:
    """Wire form of a request; ``payload`` travels raw behind the line."""
    if payload is not None:
        message = {**message, "payload_bytes": len(payload)}
    return (
        json.dumps(message, ensure_ascii=True, separators=(",", ":")).encode("ascii")
        + b"\n"
        + (payload or b"")
    )
