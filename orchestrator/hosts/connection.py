"""One SSH connection to one host, through its jump hosts: strict, bounded in time, shared by threads.

fabric's Connection and paramiko below it do the protocol; what they leave open is set here for every connection
(measured, see docs/decisions): host keys judged by `trust`, TCP_NODELAY (saves a round trip per exec), keepalives with
TCP_USER_TIMEOUT (paramiko alone never notices a dead peer), and a channel timeout (paramiko's default is an hour).
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import fabric
import paramiko

from orchestrator.core.errors import ChannelTimeout
from orchestrator.hosts.authentication import Ask, UserAuth
from orchestrator.hosts.errors import mapped
from orchestrator.hosts.prompt import Memory
from orchestrator.hosts.ssh_config import ResolvedHost
from orchestrator.hosts.stream import HandshakeDropped
from orchestrator.hosts.trust import HostTrust

CHANNEL_TIMEOUT_S = 15.0
BANNER_TIMEOUT_S = 15.0
AUTH_TIMEOUT_S = 130.0
"""A person may have to type a code; sshd itself gives up after LoginGraceTime (120 s)."""
WINDOW_BYTES = 4 * 1024 * 1024
_TCP_USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", 18 if hasattr(socket, "TCP_KEEPIDLE") else None)


class StrictKeys(paramiko.MissingHostKeyPolicy):  # type: ignore[misc]  # paramiko is untyped
    """Host keys are judged by our own reading of the user's files; with ``accept_new`` an unknown one is remembered."""

    def __init__(self, trust: HostTrust, *, accept_new: bool) -> None:
        self.trust, self.accept_new = trust, accept_new
        self.accepted = ""

    def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
        """Called by paramiko for every key, since its own lists stay empty."""
        if self.accept_new:
            self.accepted = self.trust.accept(key.get_name(), key.asbytes())
        else:
            self.trust.verify(key.get_name(), key.asbytes())


class Connection:
    """A chain of logins, the last one being the host itself.

    Args:
        host: inventory name, for messages.
        chain: hosts to pass through, outermost first, the target last.
        ask: how to reach a person for passwords and codes.
        memory: answers that worked earlier in this run.
        accept_new: remember unknown host keys instead of refusing them.
    """

    def __init__(
        self, host: str, chain: Sequence[ResolvedHost], ask: Ask, memory: Memory, *, accept_new: bool = False
    ) -> None:
        self.host, self.chain, self.ask, self.memory, self.accept_new = host, chain, ask, memory, accept_new
        self.accepted: list[str] = []
        self._hops: list[fabric.Connection] = []
        self._lock = threading.Lock()

    @property
    def target(self) -> ResolvedHost:
        """The host itself."""
        return self.chain[-1]

    def open(self) -> None:
        """Connect and log in, hop by hop. Opened once, before any thread shares it.

        Raises:
            HostError: Unreachable, AuthRefused, HostKeyUnknown, HostKeyChanged.
        """
        with self._lock:
            if self._hops:
                return
            try:
                for resolved in self.chain:
                    self._hops.append(self._open_hop(resolved))
            except BaseException:
                self._close()
                raise

    def _open_hop(self, resolved: ResolvedHost) -> fabric.Connection:
        doing = f"connecting to {resolved.label}"
        trust = HostTrust(self.host, resolved)
        policy = StrictKeys(trust, accept_new=self.accept_new)
        with mapped(self.host, doing):
            sock = self._socket(resolved)
            try:
                hop = fabric.Connection(
                    resolved.hostname,
                    user=resolved.user,
                    port=resolved.port,
                    config=fabric.Config(lazy=True, overrides={"load_ssh_configs": False}),
                    connect_timeout=resolved.connect_timeout_s,
                    connect_kwargs={
                        "sock": sock,
                        "auth_strategy": UserAuth(self.host, resolved, self.ask, self.memory),
                        "transport_factory": _factory(trust),
                        "banner_timeout": max(BANNER_TIMEOUT_S, resolved.connect_timeout_s),
                        "auth_timeout": AUTH_TIMEOUT_S,
                        "channel_timeout": CHANNEL_TIMEOUT_S,
                    },
                )
                hop.client.set_missing_host_key_policy(policy)
                hop.open()
            except BaseException:
                with contextlib.suppress(Exception):
                    sock.close()
                raise
            finally:
                if policy.accepted:
                    self.accepted.append(policy.accepted)
            hop.transport.set_keepalive(resolved.alive_interval_s)
        return hop

    def _socket(self, resolved: ResolvedHost) -> Any:
        if self._hops:
            channel = self._hops[-1].transport.open_channel(
                "direct-tcpip", (resolved.hostname, resolved.port), ("127.0.0.1", 0), timeout=CHANNEL_TIMEOUT_S
            )
            channel.settimeout(resolved.connect_timeout_s)
            return channel
        if resolved.proxy_command:
            proxy = paramiko.ProxyCommand(resolved.proxy_command)
            proxy.settimeout(resolved.connect_timeout_s)
            return proxy
        return connect_tcp(resolved)

    def start(self, command: str) -> ChannelStream:
        """Start a command without a terminal.

        Raises:
            HostError: Unreachable when the link is gone, ChannelTimeout when the server does not answer.
        """
        doing = f"starting a command on {self.target.label}"
        with mapped(self.host, doing):
            transport = self._hops[-1].transport
            channel = transport.open_session(window_size=WINDOW_BYTES, timeout=CHANNEL_TIMEOUT_S)
            channel.settimeout(CHANNEL_TIMEOUT_S)
            channel.exec_command(command)
            channel.settimeout(None)
        return ChannelStream(channel, self)

    @property
    def active(self) -> bool:
        """True while the last hop's transport lives, as far as is known."""
        return bool(self._hops) and bool(self._hops[-1].transport and self._hops[-1].transport.is_active())

    def close(self) -> None:
        """Close all hops; safe to call twice and from any thread. Never waits for a dead peer."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        for hop in reversed(self._hops):
            with contextlib.suppress(Exception):
                sock = hop.transport.sock
                hop.client.close()
                sock.close()
        self._hops = []


def _factory(trust: HostTrust) -> Any:
    """Transports that prefer the algorithms of the keys we know, so that a second key is no false alarm."""

    def make(sock: Any, **options: Any) -> Any:
        transport = paramiko.Transport(sock, **options)
        security = transport.get_security_options()
        supported = tuple(security.key_types)
        security.key_types = [algo for algo in trust.algorithms(supported) if algo in supported]
        return transport

    return make


def connect_tcp(resolved: ResolvedHost) -> socket.socket:
    """A TCP connection with the options that keep every later wait bounded.

    Raises:
        OSError: of the last address that was tried.
    """
    family = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}.get(resolved.address_family, socket.AF_UNSPEC)
    addresses = socket.getaddrinfo(resolved.hostname, resolved.port, family, socket.SOCK_STREAM)
    last: OSError | None = None
    deadline = time.monotonic() + resolved.connect_timeout_s
    for kind, type_, protocol, _, address in addresses:
        sock = socket.socket(kind, type_, protocol)
        try:
            sock.settimeout(max(1.0, deadline - time.monotonic()))
            if resolved.bind_address:
                sock.bind((resolved.bind_address, 0))
            sock.connect(address)
        except OSError as error:
            sock.close()
            last = error
            continue
        _bound(sock, resolved.dead_after_s)
        return sock
    raise last or OSError("no address")


def _bound(sock: socket.socket, dead_after_s: int) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if _TCP_USER_TIMEOUT is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, dead_after_s * 1000)


class ChannelStream:
    """`ByteStream` over a paramiko channel."""

    def __init__(self, channel: Any, connection: Connection) -> None:
        self._channel, self._connection = channel, connection

    def send(self, data: bytes) -> None:
        """See `ByteStream.send`. A peer that takes nothing for the channel timeout counts as gone."""
        view = memoryview(data)
        self._channel.settimeout(CHANNEL_TIMEOUT_S)
        try:
            while view:
                sent = self._channel.send(view[:32768].tobytes())
                if sent == 0:
                    raise EOFError("the channel is closed")
                view = view[sent:]
        except TimeoutError:
            raise ChannelTimeout(f"{self._connection.host}: the host takes no data") from None
        finally:
            self._channel.settimeout(None)

    def recv(self, size: int) -> bytes:
        """See `ByteStream.recv`."""
        while True:
            try:
                data: bytes = self._channel.recv(size)
            except TimeoutError:  # another thread's send set a timeout for a moment
                continue
            return data

    def recv_stderr(self, size: int) -> bytes:
        """See `ByteStream.recv_stderr`."""
        while True:
            try:
                data: bytes = self._channel.recv_stderr(size)
            except TimeoutError:
                continue
            return data

    def close(self) -> None:
        """See `ByteStream.close`: the connection carries nothing else, so it goes along."""
        with contextlib.suppress(Exception):
            self._channel.close()
        self._connection.close()

    def explain_end(self, stderr: str) -> Exception | None:
        """See `ByteStream.explain_end`. Without an exit status it was the link, or somebody's SIGKILL, that ended it."""
        self._channel.status_event.wait(2.0)
        if self._channel.exit_status == -1:
            return HandshakeDropped(f"{self._connection.host}: the link was dropped", host=self._connection.host)
        return None
