"""One SSH connection through any number of jump hosts: fabric and paramiko with the strictness and limits they lack.

A `Connection` is used once: opened, shared by threads, closed; to reconnect, make a new one.  Every step has a limit:
resolving, connecting, banner, key exchange, login, opening a channel, starting a command.  Why so explicit: paramiko's
own limits are "none" or an hour, and a silently dropped packet must never hang a command.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import fabric
import paramiko
from fabric.config import Config
from paramiko.auth_strategy import AuthStrategy

from orchestrator.core.errors import ChannelTimeout, ConfigError, HostError, Unreachable
from orchestrator.hosts.authentication import UserAuth
from orchestrator.hosts.errors import mapped
from orchestrator.hosts.forward import Tunnel, no_tunnel
from orchestrator.hosts.prompt import Ask, Memory
from orchestrator.hosts.sockets import ProxyProcess, dial, end
from orchestrator.hosts.ssh_config import ResolvedHost
from orchestrator.hosts.stream import HandshakeDropped
from orchestrator.hosts.trust import HostTrust

CHANNEL_TIMEOUT_S = 15.0
SSH_KEEPALIVE_S = 15
"""Traffic that keeps firewalls from forgetting us; detection of a dead peer is the kernel's (TCP options below)."""
logging.getLogger("paramiko").addHandler(logging.NullHandler())  # else its tracebacks go to stderr


class _Transport(paramiko.Transport):  # type: ignore[misc]  # paramiko is untyped
    # paramiko wakes up ten times a second to see whether it was closed; `_end` wakes it by closing the socket.
    _active_check_timeout = 1.0
    goodbye = ""
    """What the server said when it hung up (paramiko only logs it)."""

    def offer(self, trust: HostTrust) -> None:
        """Choose the host key algorithms (paramiko's SecurityOptions knows none for certificates)."""
        self._preferred_keys = trust.algorithms(tuple(self.preferred_keys))

    def _parse_disconnect(self, message: paramiko.Message) -> None:
        code, text = message.get_int(), message.get_text()
        self.goodbye = f"{text[:200]} (code {code})"


class _StrictKeys(paramiko.MissingHostKeyPolicy):  # type: ignore[misc]
    """paramiko is given no known keys, so that every key comes to our own judgement."""

    def __init__(self, trust: HostTrust, *, accept_new: bool) -> None:
        self.trust, self.accept_new = trust, accept_new
        self.accepted = ""

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        """Called by paramiko once the key exchange has proved that the server holds ``key``."""
        certificate = getattr(key, "public_blob", None)
        kind, blob = (
            (certificate.key_type, certificate.key_blob) if certificate else (key.get_name(), key.asbytes())
        )
        if self.accept_new:
            self.accepted = self.trust.accept(kind, blob)
        else:
            self.trust.verify(kind, blob)


class _NoLogin(AuthStrategy):  # type: ignore[misc]
    """For learning a host key: no login, so no question and no failed attempt in the server's log."""

    def __init__(self) -> None:
        super().__init__(ssh_config=None)

    def authenticate(self, transport: paramiko.Transport) -> Any:
        """Do nothing."""
        return []


@contextlib.contextmanager
def limit(seconds: float, stop: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Call ``stop`` from another thread when the block takes longer; yields a function that says whether it did."""
    fired = threading.Event()

    def on_time() -> None:
        fired.set()
        stop()

    timer = threading.Timer(seconds, on_time)
    timer.daemon = True
    timer.start()
    try:
        yield fired.is_set
    finally:
        timer.cancel()


class ChannelStream:
    """A command on a channel of its own, as `orchestrator.hosts.stream.ByteStream`; closing it closes the connection."""

    def __init__(self, connection: Connection, channel: paramiko.Channel) -> None:
        self._connection = connection
        self._channel = channel

    def send(self, data: bytes) -> None:
        """Write all of ``data`` to the command's stdin."""
        self._channel.sendall(data)

    def recv(self, size: int) -> bytes:
        """Bytes of stdout; b"" at its end."""
        return bytes(self._channel.recv(size))

    def recv_stderr(self, size: int) -> bytes:
        """Bytes of stderr; b"" at its end."""
        return bytes(self._channel.recv_stderr(size))

    def close(self) -> None:
        """Close the channel and the connection that carries it."""
        self._connection.close()

    def tunnel(self, address: str, port: int) -> Tunnel:
        """See `ByteStream.tunnel`: one more channel of the same connection."""
        return self._connection.tunnel(address, port)

    def explain_end(self, stderr: str) -> Exception | None:
        """See `ByteStream.explain_end`: without an exit status it was the link, or somebody's SIGKILL, that ended it."""
        transport = self._connection.transport
        if transport is None or not transport.is_active():
            error = transport.get_exception() if transport else None
            what = f" ({error})" if error is not None and str(error) else ""
            return HandshakeDropped(
                f"{self._connection.host}: the link was dropped{what}", host=self._connection.host
            )
        self._channel.status_event.wait(2.0)
        if self._channel.exit_status == -1:
            return HandshakeDropped(
                f"{self._connection.host}: the session was killed", host=self._connection.host
            )
        return None


class _JumpSocket:
    """A jump host's channel, as the socket of the next hop's transport.

    That transport closes it from its own thread, also when the jump host is gone: what the closing then cannot send is no
    news, and would be printed as an unhandled exception of a thread.
    """

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def close(self) -> None:
        """Close the channel as far as that is possible."""
        with contextlib.suppress(EOFError, OSError, paramiko.SSHException):
            self._channel.close()


class ChannelTunnel:
    """A `direct-tcpip` channel as `orchestrator.hosts.forward.Tunnel`."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel

    def send(self, data: bytes) -> None:
        """See `Tunnel.send`."""
        self._channel.sendall(data)

    def recv(self, size: int) -> bytes:
        """See `Tunnel.recv`."""
        return bytes(self._channel.recv(size))

    def end_of_input(self) -> None:
        """See `Tunnel.end_of_input`."""
        self._channel.shutdown_write()

    def close(self) -> None:
        """See `Tunnel.close`."""
        self._channel.close()


class Connection:
    """A login on the last host of ``chain``, reached through the others.

    Args:
        host: inventory name, for messages.
        chain: resolved hosts, outermost jump first.
        ask: puts a question to a person (raises prompt.NoTerminal).
        memory: answers that may be used again.
    """

    def __init__(self, host: str, chain: Sequence[ResolvedHost], ask: Ask, memory: Memory) -> None:
        self.host = host
        self.chain = list(chain)
        self.accepted: list[str] = []
        self._accept_new = False
        self._ask = ask
        self._memory = memory
        self._hops: list[fabric.Connection] = []
        self._socket: socket.socket | None = None
        self._proxy: ProxyProcess | None = None
        self._closed = False

    @property
    def transport(self) -> paramiko.Transport | None:
        """The innermost transport, once open."""
        return self._hops[-1].transport if self._hops else None

    @property
    def is_open(self) -> bool:
        """Is the connection usable, as far as is known without asking the host?"""
        return bool(self.transport and self.transport.is_active() and not self._closed)

    def open(self) -> Connection:
        """Connect and log in, hop by hop.

        Raises:
            Unreachable, HostKeyUnknown, HostKeyChanged, AuthRefused, HostError, ConfigError.
        """
        try:
            for resolved in self.chain:
                self._open_hop(resolved)
        except BaseException:
            self.close()
            raise
        return self

    def learn_keys(self) -> list[str]:
        """Remember the unknown host keys on the way to the host, whose own login is not tried; then close.

        Returns:
            what was written, one entry per key; empty when all were known.

        Raises:
            HostKeyChanged: a changed key is never accepted. As `open` otherwise; jump hosts do need a login.
        """
        self._accept_new = True
        self.open()
        self.close()
        return self.accepted

    def _open_hop(self, resolved: ResolvedHost) -> None:
        last = resolved is self.chain[-1]
        name = self.host if last else f"{self.host} (jump host {resolved.asked})"
        trust = HostTrust(self.host, resolved)
        policy = _StrictKeys(trust, accept_new=self._accept_new)
        login = UserAuth(name, resolved, self._ask, self._memory)
        doing = f"connecting to {resolved.label}"
        with mapped(name, doing):
            kwargs: dict[str, Any] = {
                "auth_strategy": _NoLogin() if last and self._accept_new else login,
                "transport_factory": lambda sock, disabled_algorithms=None: self._make_transport(
                    sock, resolved, trust
                ),
            }
            gateway = self._hops[-1] if self._hops else None
            if gateway is None:
                kwargs["sock"] = self._socket = self._dial(resolved)
            hop = fabric.Connection(
                resolved.hostname,
                user=resolved.user,
                port=resolved.port,
                gateway=gateway,
                # the user's ssh and fabric files are not fabric's business: `ssh -G` has spoken
                config=Config(lazy=True, ssh_config=paramiko.SSHConfig()),
                connect_timeout=resolved.connect_timeout_s,
                connect_kwargs=kwargs,
            )
            hop.client.set_missing_host_key_policy(policy)
            self._hops.append(hop)
            try:
                hop.open()
            finally:
                self.accepted += [policy.accepted] if policy.accepted else []
            hop.transport.set_keepalive(max(SSH_KEEPALIVE_S, resolved.alive_interval_s))

    def _dial(self, resolved: ResolvedHost) -> socket.socket:
        if resolved.proxy_use_fdpass:
            raise ConfigError(
                f"{self.host}: ProxyUseFdpass is not supported here", "set `transport: openssh`"
            )
        if resolved.proxy_command:
            self._proxy = ProxyProcess(resolved.proxy_command)
            return self._proxy.socket
        return dial(resolved)

    @staticmethod
    def _make_transport(sock: Any, resolved: ResolvedHost, trust: HostTrust) -> paramiko.Transport:
        transport = _Transport(_JumpSocket(sock) if isinstance(sock, paramiko.Channel) else sock)
        transport.offer(trust)
        transport.banner_timeout = transport.handshake_timeout = resolved.connect_timeout_s
        transport.channel_timeout = CHANNEL_TIMEOUT_S
        return transport

    def start(self, command: str, timeout_s: float = CHANNEL_TIMEOUT_S) -> ChannelStream:
        """Start a command without a terminal.

        Args:
            command: a shell command line for the user's login shell.
            timeout_s: for opening the channel and for the server's word that the command started, each.

        Raises:
            Unreachable, ChannelTimeout: the link is gone, or the server is silent.
            HostError: the server opens no further channel (MaxSessions) or runs no commands.
        """
        doing = "starting a command"
        transport = self.transport
        if transport is None or not self.is_open:
            raise Unreachable(f"{self.host}: {doing}: not connected", host=self.host)
        with mapped(self.host, doing):
            channel = transport.open_session(timeout=timeout_s)
            # exec_command waits for the server's answer without any limit of its own
            with limit(timeout_s, channel.close) as too_late:
                try:
                    channel.exec_command(command)
                except paramiko.SSHException as error:
                    if too_late():
                        raise ChannelTimeout(
                            f"{self.host}: {doing}: no answer within {timeout_s:g} s", host=self.host
                        ) from error
                    if self.is_open:
                        raise HostError(
                            f"{self.host}: the server refuses to run commands for {self.chain[-1].user}",
                            "the account may be restricted (ForceCommand, nologin); try: ssh "
                            f"{self.chain[-1].typed} true",
                            host=self.host,
                        ) from error
                    raise
        return ChannelStream(self, channel)

    def tunnel(self, address: str, port: int, timeout_s: float = CHANNEL_TIMEOUT_S) -> ChannelTunnel:
        """A connection from the host to ``address``.

        Raises:
            Unreachable: the link is gone. HostError: the server forbids forwarding, or nothing listens there.
        """
        transport = self.transport
        if transport is None or not self.is_open:
            raise Unreachable(f"{self.host}: not connected", host=self.host)
        with mapped(self.host, "forwarding a port"):
            try:
                return ChannelTunnel(
                    transport.open_channel(
                        "direct-tcpip", (address, port), ("127.0.0.1", 0), timeout=timeout_s
                    )
                )
            except paramiko.ChannelException as error:
                forbidden = error.code == 1  # RFC 4254, 5.1: administratively prohibited
                raise no_tunnel(self.host, address, port, forbidden=forbidden) from error

    def close(self) -> None:
        """Close every hop. Never blocks for long; safe from any thread and twice."""
        self._closed = True
        end(self._socket)  # wakes the outermost transport, whose end wakes the inner ones
        transports = [
            found for hop in reversed(self._hops) if (found := hop.client.get_transport()) is not None
        ]
        for transport in transports:
            transport.active = False  # else closing an inner one would still write through the dead outer one
        for transport in transports:
            with contextlib.suppress(Exception):
                transport.packetizer.close()
        for hop in reversed(self._hops):
            with contextlib.suppress(Exception):
                hop.client.close()
        if self._proxy:
            self._proxy.close()
