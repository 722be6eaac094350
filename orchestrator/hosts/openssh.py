"""`transport: openssh`: the same agent protocol through the user's own `ssh` program.

For what paramiko cannot do: Kerberos, FIDO keys, ControlMaster, host certificates.  Nothing is configured here beyond
what keeps a dead link from hanging for ever; ControlMaster is left to the user's configuration.
"""

from __future__ import annotations

import contextlib
import os
import shlex
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
from orchestrator.hosts.ssh_config import ALIVE_COUNT, ALIVE_INTERVAL_S, SSH_CONFIG_ENV, parse_destination


def command_line(ssh: str, remote: str, *, identity_file: str | None, known_hosts: str | None) -> list[str]:
    """Argv of `ssh` for a host and a remote command line.

    Raises:
        ConfigError: there is no ssh program, or the destination is malformed.
    """
    binary = shutil.which("ssh")
    if binary is None:
        raise ConfigError(
            "`transport: openssh` needs the ssh program on the PATH", "install the OpenSSH client"
        )
    where = parse_destination(ssh)
    argv = [
        binary,
        "-T",
        "-o",
        f"ServerAliveInterval={ALIVE_INTERVAL_S}",
        "-o",
        f"ServerAliveCountMax={ALIVE_COUNT}",
    ]
    argv += ["-o", "StrictHostKeyChecking=yes"]
    if not sys.stdin or not sys.stdin.isatty():
        argv += ["-o", "BatchMode=yes"]
    if os.environ.get(SSH_CONFIG_ENV):
        argv += ["-F", os.environ[SSH_CONFIG_ENV]]
    if identity_file:
        argv += ["-i", identity_file, "-o", "IdentitiesOnly=yes"]
    if known_hosts:
        argv += ["-o", f'UserKnownHostsFile="{known_hosts}"', "-o", "GlobalKnownHostsFile=none"]
    if where.port:
        argv += ["-p", str(where.port)]
    return [*argv, "--", f"{where.user}@{where.host}" if where.user else where.host, remote]


class ProcessStream:
    """`ByteStream` over an `ssh` process."""

    def __init__(self, host: str, argv: list[str]) -> None:
        self.host = host
        # A group of its own: Ctrl-C at the terminal ends the watching, not the connection under it.
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            process_group=0 if os.name == "posix" else None,
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

    def explain_end(self, stderr: str) -> OrchError | None:
        """Ssh's own words, sorted into our errors."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2.0)
        said = " ".join(stderr.split())[-600:] or f"ssh ended with status {self._process.returncode}"
        low = stderr.lower()
        if "remote host identification has changed" in low or "revoked" in low:
            return HostKeyChanged(
                f"{self.host}: {said}", "if you know why: ssh-keygen -R HOST", host=self.host
            )
        if "host key verification failed" in low or "no matching host key" in low:
            hint = f"compare the fingerprint, then: orch hosts check --accept-new {shlex.quote(self.host)}"
            return HostKeyUnknown(f"{self.host}: {said}", hint, host=self.host)
        if "permission denied" in low or "too many authentication failures" in low:
            return AuthRefused(f"{self.host}: {said}", "check with: ssh -v HOST true", host=self.host)
        if self._process.returncode == 255:
            return Unreachable(f"{self.host}: {said}", host=self.host)
        return None
