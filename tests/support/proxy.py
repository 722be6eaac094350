"""A TCP proxy on loopback that misbehaves on command: cuts after N bytes, freezes, delays, counts.

Stands between `orch` and sshd. Bytes are what a cable carries, so a cut can fall inside any message. A freeze is a
black hole as far as both ends' programs can tell, but the kernels still acknowledge: whoever needs lost packets
takes network namespaces instead.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import Self

UP, DOWN = "up", "down"
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(eq=False)
class Link:
    """One accepted connection and its other half."""

    client: socket.socket
    server: socket.socket
    carried: dict[str, int] = field(default_factory=lambda: {UP: 0, DOWN: 0})
    ended: threading.Event = field(default_factory=threading.Event)

    def reset(self) -> None:
        """End both halves as a dying router would: RST, no farewell."""
        self.ended.set()
        for sock in (self.client, self.server):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that is blocked in recv
            with contextlib.suppress(OSError):
                sock.close()


class Proxy:
    """Forward 127.0.0.1:``port`` to ``target``; use as a context manager.

    Attributes:
        connections: how many connections were ever accepted.
        delay_s: one-way delay added in each direction (half a round trip).
    """

    def __init__(self, target: tuple[str, int], *, delay_s: float = 0.0) -> None:
        self.target = target
        self.delay_s = delay_s
        self.connections = 0
        self.links: list[Link] = []
        self.cuts = 0
        self._cut: tuple[str, int] | None = None
        self._freeze: tuple[str, int] | None = None
        self._refusing = False
        self._flowing = threading.Event()
        self._flowing.set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="proxy-accept", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening and reset every connection."""
        self._flowing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut_now()

    def cut_after(self, num_bytes: int, direction: str = UP) -> None:
        """Reset the next connection once it has carried ``num_bytes`` that way (counted per connection), one time."""
        with self._lock:
            self._cut = (direction, num_bytes)

    def cut_now(self) -> None:
        """Reset every open connection."""
        with self._lock:
            links = list(self.links)
        for link in links:
            link.reset()

    def disarm(self) -> None:
        """Forget a cut or a freeze that was ordered and has not happened."""
        with self._lock:
            self._cut = self._freeze = None

    def refuse(self, refusing: bool) -> None:
        """Accept and reset at once (True), or serve again (False)."""
        self._refusing = refusing

    def freeze(self) -> None:
        """Carry nothing more, on open and on new connections; nobody is told."""
        self._flowing.clear()

    def freeze_after(self, num_bytes: int, direction: str = UP) -> None:
        """Freeze everything once some connection has carried ``num_bytes`` that way, one time."""
        with self._lock:
            self._freeze = (direction, num_bytes)

    @property
    def frozen(self) -> bool:
        """True while nothing is carried."""
        return not self._flowing.is_set()

    def thaw(self) -> None:
        """Carry again what has waited."""
        self._flowing.set()

    def carried(self, direction: str) -> int:
        """Bytes carried that way by the newest connection."""
        with self._lock:
            return self.links[-1].carried[direction] if self.links else 0

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            try:
                if self._refusing:
                    raise ConnectionRefusedError
                server = socket.create_connection(self.target, timeout=10)
                server.settimeout(None)
            except OSError:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                client.close()
                continue
            link = Link(client, server)
            with self._lock:
                self.links.append(link)
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for direction, source, sink in ((UP, client, server), (DOWN, server, client)):
                waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                threading.Thread(target=self._read, args=(link, source, waiting), daemon=True).start()
                threading.Thread(target=self._write, args=(link, direction, sink, waiting), daemon=True).start()

    def _read(self, link: Link, source: socket.socket, waiting: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        while True:
            try:
                chunk = source.recv(65536)
            except OSError:
                chunk = b""
            waiting.put((time.monotonic() + self.delay_s, chunk))
            if not chunk:
                return

    def _write(
        self, link: Link, direction: str, sink: socket.socket, waiting: queue.SimpleQueue[tuple[float, bytes]]
    ) -> None:
        while not link.ended.is_set():
            due, chunk = waiting.get()
            pause = due - time.monotonic()
            if pause > 0:
                time.sleep(pause)
            while not self._flowing.wait(0.2):
                if link.ended.is_set():
                    return
            with self._lock:
                freeze = self._freeze
                if freeze and freeze[0] == direction and link.carried[direction] + len(chunk) >= freeze[1]:
                    self._freeze = None
                    self._flowing.clear()
            allowed = self._allowance(link, direction, len(chunk))
            try:
                if not chunk:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(chunk if allowed is None else chunk[:allowed])
            except OSError:
                link.reset()
                return
            link.carried[direction] += len(chunk) if allowed is None else allowed
            if allowed is not None:
                time.sleep(0.01)  # the bytes before the cut do arrive: loopback delivers them before the RST
                link.reset()

    def _allowance(self, link: Link, direction: str, size: int) -> int | None:
        """How many of these bytes may still pass before a cut is due; None when none is."""
        with self._lock:
            if self._cut is None or self._cut[0] != direction:
                return None
            left = self._cut[1] - link.carried[direction]
            if left > size:
                return None
            self._cut = None
            self.cuts += 1
            return max(0, left)
