"""A local port whose connections come out at an address that the host can reach, over the connection that is there.

Listens on the loopback interface only.  What carries a connection (a channel of the SSH connection, or `ssh -W`) is given
by the transport; here are only the listener and the two copying threads of each connection.

Must not import fabric or paramiko.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from orchestrator.core.errors import HostError, LocalError, OrchError

LOOPBACK = "127.0.0.1"
CHUNK_BYTES = 65536
MAX_CONNECTIONS = 200


class Tunnel(Protocol):
    """One connection through the host: bytes both ways. Blocking calls end when another thread closes it."""

    def send(self, data: bytes) -> None:
        """Write all of ``data``; OSError or EOFError when it is gone."""

    def recv(self, size: int) -> bytes:
        """Up to ``size`` bytes; b"" at the end."""

    def end_of_input(self) -> None:
        """Tell the far side that nothing more will be sent."""

    def close(self) -> None:
        """End it; safe to call twice."""


class Forward:
    """A context manager; ``port`` is the local port while it is open.

    Args:
        open_tunnel: makes the far half of a connection (raises OrchError).
        port: wanted local port; 0 takes any.
        say: hears when a connection could not be made, once per reason.

    Raises:
        LocalError: the port cannot be had.
    """

    def __init__(self, open_tunnel: Callable[[], Tunnel], port: int, say: Callable[[str], None]) -> None:
        self._open, self._say = open_tunnel, say
        self._said: set[str] = set()
        self._lock = threading.Lock()
        self._open_now: set[tuple[socket.socket, Tunnel]] = set()
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._closed = threading.Event()
        try:
            self._listener = socket.create_server((LOOPBACK, port), reuse_port=False)
        except OSError as error:
            raise LocalError(
                f"port {port} of this laptop cannot be used: {error.strerror or error}", "choose one: --local PORT"
            ) from error
        self.port = int(self._listener.getsockname()[1])

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="forward", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            pairs = list(self._open_now)
        for near, far in pairs:
            _end(near, far)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if not self._free.acquire(blocking=False):
                near.close()
                self._tell(f"orch: more than {MAX_CONNECTIONS} connections at once: one was refused")
                continue
            threading.Thread(target=self._serve, args=(near,), name="forward", daemon=True).start()

    def _tell(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)

    def _serve(self, near: socket.socket) -> None:
        try:
            far = self._open()
        except OrchError as error:
            near.close()
            self._free.release()
            self._tell(f"orch: {error.message}")
            return
        with self._lock:
            self._open_now.add((near, far))
        try:
            outward = threading.Thread(target=_copy_out, args=(near, far), name="forward out", daemon=True)
            outward.start()
            _copy_in(near, far)
            outward.join()
        finally:
            _end(near, far)
            with self._lock:
                self._open_now.discard((near, far))
            self._free.release()


def no_tunnel(host: str, address: str, port: int, *, forbidden: bool) -> HostError:
    """The error of a host that makes no such connection."""
    if forbidden:
        return HostError(
            f"{host}: its SSH server forbids port forwarding",
            "ask its administrator for AllowTcpForwarding (local is enough)",
            host=host,
        )
    return HostError(
        f"{host}: nothing answers on {address}:{port} there",
        "is the service up? see: orch status; another port or machine: orch forward JOB PORT --to ADDRESS",
        host=host,
    )


def _copy_out(near: socket.socket, far: Tunnel) -> None:
    """Laptop to host; a half-closed connection stays open the other way."""
    with contextlib.suppress(OSError, EOFError, ValueError):
        while data := near.recv(CHUNK_BYTES):
            far.send(data)
        far.end_of_input()
        return
    far.close()


def _copy_in(near: socket.socket, far: Tunnel) -> None:
    """Host to laptop; when the far side has ended, nothing can be wanted from the near one any more but its rest."""
    with contextlib.suppress(OSError, EOFError, ValueError):
        while data := far.recv(CHUNK_BYTES):
            near.sendall(data)
    with contextlib.suppress(OSError):
        near.shutdown(socket.SHUT_RDWR)


def _end(near: socket.socket, far: Tunnel) -> None:
    with contextlib.suppress(OSError):
        near.shutdown(socket.SHUT_RDWR)
    near.close()
    far.close()
