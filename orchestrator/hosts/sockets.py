"""The socket under an SSH connection: TCP with options that bound every wait, or the user's ProxyCommand.

Must not import fabric or paramiko.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time

from orchestrator.hosts.ssh_config import ResolvedHost

# Option numbers that the socket module does not name everywhere: (level is IPPROTO_TCP) -> unit per second.
DEAD_PEER_OPTION = {"linux": (18, 1000), "darwin": (0x80, 1), "win32": (5, 1)}
"""TCP_USER_TIMEOUT (ms), TCP_RXT_CONNDROPTIME (s), TCP_MAXRT (s): how long sent data may stay unacknowledged."""


def end(sock: socket.socket | None) -> None:
    """Close a socket so that whoever reads from it wakes up."""
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()


def dial(resolved: ResolvedHost) -> socket.socket:
    """A TCP connection with our options; addresses are tried in turn within the connect timeout.

    Raises:
        OSError: of the last address tried (gaierror when the name has none).
    """
    family = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}.get(resolved.address_family, socket.AF_UNSPEC)
    addresses = socket.getaddrinfo(resolved.hostname, resolved.port, family, socket.SOCK_STREAM)
    deadline = time.monotonic() + resolved.connect_timeout_s
    last: OSError = OSError("no address to connect to")
    for left, (af, kind, proto, _, address) in zip(range(len(addresses), 0, -1), addresses, strict=True):
        sock = socket.socket(af, kind, proto)
        try:
            set_options(sock, resolved)
            if resolved.bind_address:
                sock.bind((resolved.bind_address, 0))
            sock.settimeout(max(1.0, (deadline - time.monotonic()) / left))
            sock.connect(address)
        except OSError as error:
            sock.close()
            last = error
        else:
            return sock
    raise last


def set_options(sock: socket.socket, resolved: ResolvedHost) -> None:
    """TCP_NODELAY, kernel keepalive and a limit for unacknowledged data, as far as this system has them.

    Keepalive alone does not act while data is in flight, the limit alone not on an idle line: both are needed.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle_option = "TCP_KEEPALIVE" if sys.platform == "darwin" else "TCP_KEEPIDLE"
    wanted = {
        idle_option: resolved.alive_interval_s,
        "TCP_KEEPINTVL": resolved.alive_interval_s,
        "TCP_KEEPCNT": resolved.alive_count,
    }
    for name, value in wanted.items():
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if sys.platform in DEAD_PEER_OPTION:
        option, per_second = DEAD_PEER_OPTION[sys.platform]
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, option, resolved.dead_after_s * per_second)


class ProxyProcess:
    """The user's ProxyCommand, behind an ordinary socket (paramiko's own wrapper cannot work on Windows)."""

    def __init__(self, command: str) -> None:
        self.socket, self._far = socket.socketpair()
        self._process = subprocess.Popen(  # noqa: S602 - ssh_config(5): a command line for the user's own shell
            command,
            shell=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        for pump in (self._outward, self._inward):
            threading.Thread(target=pump, name="proxy-command", daemon=True).start()

    def _outward(self) -> None:
        assert self._process.stdin
        with contextlib.suppress(OSError, ValueError):
            while data := self._far.recv(65536):
                view = memoryview(data)
                while view:
                    view = view[self._process.stdin.write(view) :]
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _inward(self) -> None:
        assert self._process.stdout
        with contextlib.suppress(OSError, ValueError):
            while data := self._process.stdout.read(65536):
                self._far.sendall(data)
        self._process.stdout.close()
        end(self._far)

    def close(self) -> None:
        """End the command."""
        end(self.socket)
        end(self._far)
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(2)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
