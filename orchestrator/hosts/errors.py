"""Translation of what paramiko, fabric, invoke and the socket layer raise into our own errors.

One table, most specific class wins; a test walks the libraries' exception classes and fails on one that the table
does not name.  Nothing above this package ever sees a foreign exception.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping

import fabric.exceptions
import invoke.exceptions
import paramiko
import paramiko.auth_strategy
import paramiko.ber
import paramiko.buffered_pipe
import paramiko.hostkeys
import paramiko.packet
import paramiko.pkey
import paramiko.proxy
import paramiko.sftp
import paramiko.ssh_exception as ssh

from orchestrator.core.errors import (
    AuthRefused,
    ConfigError,
    HostError,
    HostKeyChanged,
    OrchError,
    ProtocolError,
    Unreachable,
)
from orchestrator.hosts.stream import HandshakeDropped

Make = Callable[[BaseException, str, str], OrchError]
"""(foreign exception, host name, what was being done) -> our error."""

OPENSSH_HINT = "set `transport: openssh` for this host in the inventory: the ssh program may still manage"
AUTH_HINT = "check user and key with: ssh -v {host} true"


def seen(exc: BaseException) -> str:
    """The exception's own words, with its class when it has none."""
    text = " ".join(str(exc).split()) or type(exc).__name__
    return text[:500]


def _unreachable(exc: BaseException, host: str, doing: str) -> OrchError:
    return Unreachable(f"{host}: {doing}: {seen(exc)}", host=host)


def _timed_out(_exc: BaseException, host: str, doing: str) -> OrchError:
    return Unreachable(
        f"{host}: {doing}: no answer in time",
        "is the host up, and the VPN? a firewall may drop packets",
        host=host,
    )


def _refused(_exc: BaseException, host: str, doing: str) -> OrchError:
    return Unreachable(
        f"{host}: {doing}: connection refused",
        "nothing listens on that port: is sshd running, is the port right?",
        host=host,
    )


def _no_name(exc: BaseException, host: str, doing: str) -> OrchError:
    return Unreachable(
        f"{host}: {doing}: the name cannot be resolved ({seen(exc)})",
        "check how it is spelt, your ssh config, and that you are online",
        host=host,
    )


def _dropped(exc: BaseException, host: str, doing: str) -> OrchError:
    return HandshakeDropped(f"{host}: {doing}: the connection was closed ({seen(exc)})", host=host)


def _auth(exc: BaseException, host: str, doing: str) -> OrchError:
    text = seen(exc)
    if "timeout" in text.lower():  # paramiko files a silent server under authentication
        return _timed_out(exc, host, doing)
    if "transport shut down" in text or "EOF" in text:
        return _dropped(exc, host, doing)
    return AuthRefused(f"{host}: {doing}: {text}", AUTH_HINT.format(host=host), host=host)


def _ssh(exc: BaseException, host: str, doing: str) -> OrchError:
    """Plain SSHException: paramiko tells many things apart by text only."""
    text = seen(exc).lower()
    if "timeout" in text or "timed out" in text or "no existing session" in text:
        return _timed_out(exc, host, doing)
    if (
        "banner" in text
        or "eof" in text
        or "closed" in text
        or "not active" in text
        or "negotiation failed" in text
    ):
        return _dropped(exc, host, doing)
    return _unreachable(exc, host, doing)


def _channel(exc: BaseException, host: str, doing: str) -> OrchError:
    code = getattr(exc, "code", None)
    if code == 1:
        return HostError(f"{host}: {doing}: the server forbids it ({seen(exc)})", host=host, transient=False)
    return HostError(
        f"{host}: {doing}: the server opens no further channel ({seen(exc)})",
        "sshd's MaxSessions may be reached, or the jump host cannot reach the target",
        host=host,
        transient=True,
    )


def _changed(exc: BaseException, host: str, doing: str) -> OrchError:
    return HostKeyChanged(f"{host}: {doing}: {seen(exc)}", host=host)


def _incompatible(exc: BaseException, host: str, doing: str) -> OrchError:
    return HostError(
        f"{host}: {doing}: no common algorithm ({seen(exc)})", OPENSSH_HINT, host=host, transient=False
    )


def _protocol(exc: BaseException, host: str, doing: str) -> OrchError:
    return ProtocolError(f"{host}: {doing}: the server broke the SSH protocol ({seen(exc)})", OPENSSH_HINT)


def _config(exc: BaseException, host: str, doing: str) -> OrchError:
    return ConfigError(f"{host}: {doing}: {seen(exc)}", "check your ssh config")


def _key(exc: BaseException, host: str, doing: str) -> OrchError:
    return AuthRefused(f"{host}: {doing}: a key cannot be used ({seen(exc)})", OPENSSH_HINT, host=host)


def _host(exc: BaseException, host: str, doing: str) -> OrchError:
    return HostError(f"{host}: {doing}: {seen(exc)}", host=host, transient=False)


def _os(exc: BaseException, host: str, doing: str) -> OrchError:
    if isinstance(exc, OSError) and exc.errno == errno.ETIMEDOUT:
        return _timed_out(exc, host, doing)
    return _unreachable(exc, host, doing)


def _nothing_listens(exc: BaseException, host: str, doing: str) -> OrchError:
    inner = list(getattr(exc, "errors", {}).values())
    return translate(inner[0], host, doing) if inner else _refused(exc, host, doing)


TABLE: Mapping[type[BaseException], Make] = {
    # the socket layer
    socket.gaierror: _no_name,
    TimeoutError: _timed_out,
    ConnectionRefusedError: _refused,
    ConnectionError: _dropped,
    EOFError: _dropped,
    OSError: _os,
    subprocess.SubprocessError: _host,
    # paramiko
    ssh.SSHException: _ssh,
    ssh.AuthenticationException: _auth,
    ssh.PasswordRequiredException: _auth,
    ssh.BadAuthenticationType: _auth,
    ssh.PartialAuthentication: _auth,
    ssh.UnableToAuthenticate: _auth,
    paramiko.auth_strategy.AuthFailure: _auth,
    ssh.ChannelException: _channel,
    ssh.BadHostKeyException: _changed,
    ssh.IncompatiblePeer: _incompatible,
    ssh.ProxyCommandFailure: _unreachable,
    ssh.NoValidConnectionsError: _nothing_listens,
    ssh.CouldNotCanonicalize: _no_name,
    ssh.ConfigParseError: _config,
    ssh.MessageOrderError: _protocol,
    paramiko.ber.BERException: _key,
    paramiko.buffered_pipe.PipeTimeout: _timed_out,
    paramiko.hostkeys.InvalidHostKey: _config,
    paramiko.packet.NeedRekeyException: _protocol,
    paramiko.pkey.UnknownKeyType: _key,
    paramiko.sftp.SFTPError: _host,
    # fabric and invoke, below which fabric builds
    fabric.exceptions.NothingToDo: _host,
    fabric.exceptions.GroupException: _host,
    fabric.exceptions.InvalidV1Env: _config,
    invoke.exceptions.CommandTimedOut: _timed_out,
    invoke.exceptions.Failure: _host,
}


def handler(kind: type[BaseException]) -> Make | None:
    """The table's entry for a class or its nearest base; None for classes that are not ours to translate."""
    return next((TABLE[base] for base in kind.__mro__ if base in TABLE), None)


def translate(exc: BaseException, host: str, doing: str) -> OrchError:
    """Our error for a foreign exception; the result is to be raised ``from`` it.

    Args:
        exc: what a library raised.
        host: inventory name of the host.
        doing: what was being done, as in "connecting to me@box:22".
    """
    if isinstance(exc, OrchError):
        return exc
    make = handler(type(exc)) or _host
    return make(exc, host, doing)


@contextlib.contextmanager
def mapped(host: str, doing: str) -> Iterator[None]:
    """Run a block of library calls; whatever they raise leaves as one of our errors.

    Raises:
        OrchError: one of `HostError`'s family, ConfigError or ProtocolError.
    """
    try:
        yield
    except OrchError:
        raise
    except Exception as exc:
        raise translate(exc, host, doing) from exc
