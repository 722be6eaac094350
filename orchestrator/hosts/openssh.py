"""`transport: openssh`: the same agent protocol through the user's own `ssh` program.

For what paramiko cannot do: Kerberos, FIDO keys, ControlMaster, host certificates.  Nothing is configured here beyond
what keeps a dead link from hanging for ever; ControlMaster is left to the user's configuration.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading

from orchestrator.core.errors import (
    AuthRefused,
    ConfigError,
    HostKeyChanged,
    HostKeyUnknown,
    OrchError,
    Unreachable,
)
from orchestrator.hosts.ssh_config import SSH_CONFIG_ENV, given_arguments, parse_destination, resolve
from orchestrator.hosts.stream import HandshakeDropped
from orchestrator.hosts.trust import accepting


def command_line(ssh: str, remote: str, *, identity_file: str | None, known_hosts: str | None) -> list[str]:
    """Argv of `ssh` for a host and a remote command line.

    ControlMaster, keys and proxies stay the user's; what is set here bounds waiting and keeps the channel clean.

    Raises:
        ConfigError: there is no ssh program, the destination is malformed, or the configuration is.
    """
    binary = shutil.which("ssh")
    if binary is None:
        raise ConfigError(
            "`transport: openssh` needs the ssh program on the PATH", "install the OpenSSH client"
        )
    where, resolved = parse_destination(ssh), resolve(ssh)
    options = {
        "ConnectTimeout": f"{resolved.connect_timeout_s:.0f}",
        "ServerAliveInterval": str(resolved.alive_interval_s),
        "ServerAliveCountMax": str(resolved.alive_count),
        "StrictHostKeyChecking": "yes",
        "BatchMode": "no" if on_terminal() else "yes",
        "RemoteCommand": "none",
        "RequestTTY": "no",
        "ClearAllForwardings": "yes",
        "PermitLocalCommand": "no",
        "EscapeChar": "none",
    }
    argv = [binary, "-T"]
    if os.environ.get(SSH_CONFIG_ENV):
        argv += ["-F", os.environ[SSH_CONFIG_ENV]]
    for key, value in options.items():
        argv += ["-o", f"{key}={value}"]
    argv += given_arguments(identity_file, known_hosts)
    if where.port:
        argv += ["-p", str(where.port)]
    return [*argv, "--", f"{where.user}@{where.host}" if where.user else where.host, remote]


def on_terminal() -> bool:
    """Can ssh ask a person?"""
    return bool(sys.stdin and sys.stdin.isatty())


class ProcessTunnel:
    """`orchestrator.hosts.forward.Tunnel` over `ssh -W`; with the user's ControlMaster it shares the connection."""

    def __init__(self, argv: list[str], address: str, port: int) -> None:
        end = argv.index("--")
        far = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        self._process = subprocess.Popen(
            [*argv[:end], "-W", far, *argv[end:-1]],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
            process_group=0 if os.name == "posix" and not on_terminal() else None,
        )  # fmt: skip

    def send(self, data: bytes) -> None:
        """See `Tunnel.send`."""
        assert self._process.stdin is not None
        view = memoryview(data)
        while view:
            view = view[self._process.stdin.write(view) or 0 :]

    def recv(self, size: int) -> bytes:
        """See `Tunnel.recv`."""
        assert self._process.stdout is not None
        return self._process.stdout.read(size) or b""

    def end_of_input(self) -> None:
        """See `Tunnel.end_of_input`."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self) -> None:
        """See `Tunnel.close`."""
        with contextlib.suppress(OSError):
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2.0)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


class ProcessStream:
    """`ByteStream` over an `ssh` process."""

    def __init__(self, host: str, argv: list[str]) -> None:
        self.host = host
        self._argv = argv
        # A group of its own: Ctrl-C ends the watching, not the connection under it. But a background group may not
        # read the terminal, so where ssh may have to ask, it stays in ours.
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            process_group=0 if os.name == "posix" and not on_terminal() else None,
        )  # fmt: skip
        self._lock = threading.Lock()

    def send(self, data: bytes) -> None:
        """See `ByteStream.send`."""
        assert self._process.stdin is not None
        view = memoryview(data)
        with self._lock:
            while view:
                view = view[self._process.stdin.write(view) or 0 :]

    def recv(self, size: int) -> bytes:
        """See `ByteStream.recv`."""
        assert self._process.stdout is not None
        return self._process.stdout.read(size) or b""

    def recv_stderr(self, size: int) -> bytes:
        """See `ByteStream.recv_stderr`."""
        assert self._process.stderr is not None
        return self._process.stderr.read(size) or b""

    def close(self) -> None:
        """See `ByteStream.close`."""
        with contextlib.suppress(OSError):
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2.0)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def tunnel(self, address: str, port: int) -> ProcessTunnel:
        """See `ByteStream.tunnel`. Whether anything listens there shows only when bytes are wanted."""
        return ProcessTunnel(self._argv, address, port)

    def explain_end(self, stderr: str) -> OrchError | None:
        """Ssh's own words, sorted into our errors."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2.0)
        said = " ".join(stderr.split())[-600:] or f"ssh ended with status {self._process.returncode}"
        low, host = stderr.lower(), self.host
        if "remote host identification has changed" in low or "revoked" in low:
            hint = "ask the host's administrator; then remove the old key with ssh-keygen -R, as ssh says"
            return HostKeyChanged(f"{host}: {said}", hint, host=host)
        if "host key verification failed" in low or "no matching host key" in low:
            return HostKeyUnknown(f"{host}: {said}", f"compare the fingerprint, then: {accepting(host)}", host=host)
        if "permission denied" in low or "too many authentication failures" in low:
            return AuthRefused(f"{host}: {said}", "see what ssh does with: ssh -v (the host) true", host=host)
        if (
            self._process.returncode == 255
            or self._process.returncode is None
            or self._process.returncode < 0
        ):
            dropped = (
                "kex_exchange_identification" in low or "connection closed" in low or "broken pipe" in low
            )
            kind = HandshakeDropped if dropped or not stderr.strip() else Unreachable
            return kind(f"{host}: {said}", host=host)
        return None
