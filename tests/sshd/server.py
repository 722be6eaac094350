"""A private, real OpenSSH server for tests: own keys, free loopback port, nothing of the machine's is touched.

Why: the product's promises are about real sshd behaviour (MaxSessions, exit-signal, dropped sessions), which no
embedded server reproduces.  Works as root or as an ordinary user (who can then log in as themself only).
Must not import the product: it is the other side.

    with Sshd(tmp_path / "sshd") as sshd:
        subprocess.run(["ssh", "-F", sshd.ssh_config, "box", "true"], check=True)
        sshd.connections()      # accepted TCP connections so far, from the server's own log
        sshd.kill_sessions()    # every logged-in connection gets a RST; the listener lives on
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


def wait_until(
    condition: Callable[[], object], what: str, timeout_s: float = 10.0, every_s: float = 0.02
) -> None:
    """Poll until ``condition()`` is true; fail with a sentence naming ``what`` after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s * 4  # a bound for what is broken, not for a busy machine
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"gave up after {timeout_s:g} s waiting until {what}")
        time.sleep(every_s)


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def make_key(path: Path, kind: str = "ed25519", passphrase: str = "", comment: str = "orch-test") -> Path:
    """Create a key pair with ssh-keygen; returns the private key's path (public: same name + .pub)."""
    bits = ["-b", "2048"] if kind == "rsa" else []
    command = ["ssh-keygen", "-q", "-t", kind, *bits, "-N", passphrase, "-C", comment, "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    return path


class Sshd:
    """One sshd process with its folder of keys, configuration and log.

    The login's HOME is the empty ``<folder>/home`` (sshd SetEnv), so ``~/.orchestrator`` of the account that runs the
    tests stays untouched and its ~/.bashrc costs nothing.

    Args:
        folder: created; holds keys, sshd_config, log, known_hosts and an ssh_config with the alias ``box``.
        address: address to listen on.
        host_key_types: one host key per type, in the server's order of preference.
        options: extra or overriding sshd_config keywords, e.g. {"MaxSessions": "2"}.
        command_prefix: put before sshd, e.g. ["ip", "netns", "exec", "far"].
        port: fixed port, else a free one (which is kept over restarts).
    """

    alias = "box"

    def __init__(
        self,
        folder: Path,
        *,
        address: str = "127.0.0.1",
        host_key_types: Sequence[str] = ("ed25519",),
        options: Mapping[str, str] | None = None,
        command_prefix: Sequence[str] = (),
        port: int | None = None,
        user: str | None = None,
    ) -> None:
        self.folder = folder
        self.address = address
        self.port = port or free_port()
        self.user = user or getpass.getuser()
        self.host_key_types = tuple(host_key_types)
        self.options = dict(options or {})
        self.command_prefix = tuple(command_prefix)
        self.log = folder / "log"
        self.client_key = folder / "id"
        self.authorized_keys = folder / "authorized_keys"
        self.known_hosts = folder / "known_hosts"
        self.ssh_config = folder / "ssh_config"
        self.home = folder / "home"
        self.process: subprocess.Popen[bytes] | None = None

    # ------------------------------------------------------------------ what a client needs to know

    @property
    def destination(self) -> str:
        """The ``user@host:port`` form of the inventory's ``ssh`` key."""
        return f"{self.user}@{self.address}:{self.port}"

    def host_key(self, kind: str | None = None) -> Path:
        """Private host key file of a type (default: the first)."""
        return self.folder / f"host_{kind or self.host_key_types[0]}"

    def known_hosts_line(self, kind: str | None = None) -> str:
        """``[address]:port type base64`` of one host key."""
        fields = self.host_key(kind).with_suffix(".pub").read_text().split()
        return f"[{self.address}]:{self.port} {fields[0]} {fields[1]}\n"

    def inventory_entry(self, **more: object) -> dict[str, object]:
        """Mapping for ``hosts:`` of an inventory; needs no ssh configuration of the user."""
        entry: dict[str, object] = {
            "ssh": self.destination,
            "identity_file": str(self.client_key),
            "known_hosts": str(self.known_hosts),
            "gpus": 0,
        }
        return {**entry, **more}

    def write_ssh_config(self, extra: str = "") -> Path:
        """(Re)write the client configuration with the alias ``box``; ``extra`` goes into its Host block."""
        lines = [
            f"Host {self.alias}",
            f"  HostName {self.address}",
            f"  Port {self.port}",
            f"  User {self.user}",
            f'  IdentityFile "{self.client_key}"',
            "  IdentitiesOnly yes",
            f'  UserKnownHostsFile "{self.known_hosts}"',
            *(f"  {line.strip()}" for line in extra.splitlines()),
        ]
        self.ssh_config.write_text("\n".join(lines) + "\n")
        return self.ssh_config

    # ------------------------------------------------------------------ life

    def _prepare(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        for kind in self.host_key_types:
            if not self.host_key(kind).exists():
                make_key(self.host_key(kind), kind)
        if not self.client_key.exists():
            make_key(self.client_key)
            shutil.copy(self.client_key.with_suffix(".pub"), self.authorized_keys)
        if not self.known_hosts.exists():
            self.known_hosts.write_text("".join(self.known_hosts_line(kind) for kind in self.host_key_types))
        self.write_ssh_config()
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        options = {
            "Port": str(self.port),
            "ListenAddress": self.address,
            "PidFile": "none",
            "AuthorizedKeysFile": f'"{self.authorized_keys}"',
            "StrictModes": "no",
            "UsePAM": "no",
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "PermitRootLogin": "yes",
            "Subsystem": "sftp internal-sftp",
            "UseDNS": "no",
            "PrintMotd": "no",
            "PrintLastLog": "no",
            "MaxStartups": "100:30:200",
            "SetEnv": f'"HOME={self.home}"',
            "LogLevel": "VERBOSE",
            **self.options,
        }
        if _openssh_version() >= (9, 8):
            options.setdefault("PerSourcePenalties", "no")  # else failed logins in one test starve the next
        lines = [f'HostKey "{self.host_key(kind)}"' for kind in self.host_key_types]
        lines += [f"{key} {value}" for key, value in options.items()]
        (self.folder / "sshd_config").write_text("\n".join(lines) + "\n")

    def start(self) -> Sshd:
        """Start the server and wait for its banner."""
        assert self.process is None, "already started"
        self._prepare()
        # The job's environment must be that of a login, not of the test run (PYTHONUNBUFFERED would hide bugs).
        environment = {
            key: os.environ[key] for key in ("PATH", "HOME", "USER", "LANG", "TZ") if key in os.environ
        }
        command = [*self.command_prefix, SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config")]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        wait_until(self._listening, f"sshd listens on port {self.port} ({self.log.read_text()[-500:]})")
        return self

    def _listening(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"sshd ended with {self.process.returncode}: {self.log.read_text()[-2000:]}")
        if self.command_prefix:  # another network namespace: the log is all that can be seen from here
            return "Server listening on" in self.log.read_text()
        try:
            with socket.create_connection((self.address, self.port), timeout=1) as sock:
                sock.settimeout(2)
                return sock.recv(4) == b"SSH-"
        except OSError:
            return False

    def stop(self) -> None:
        """Stop listener and sessions. Safe to call twice."""
        if self.process is None:
            return
        sessions = self.sessions()
        self.process.kill()
        self.process.wait()
        self.process = None
        for pid in sessions:
            _kill(pid)

    def restart(self) -> None:
        """A new server process on the same port with the same keys; sessions are cut."""
        self.stop()
        self.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ------------------------------------------------------------------ what happened, and mischief

    def sessions(self) -> list[int]:
        """Pids of the sshd processes that serve one connection each (children and privilege-separated grandchildren)."""
        if self.process is None:
            return []
        found: list[int] = []
        parents = [self.process.pid]
        while parents:
            children = [
                pid for parent in parents for pid in _children(parent) if _command_name(pid) in SSHD_NAMES
            ]
            found += children
            parents = children
        return found

    def kill_sessions(self) -> int:
        """SIGKILL every connection's sshd, as an administrator or the OOM killer would; returns how many."""
        pids = self.sessions()
        for pid in pids:
            _kill(pid)
        return len(pids)

    def freeze(self, *, frozen: bool) -> None:
        """SIGSTOP or SIGCONT every connection's sshd: the TCP peer is there, but nobody answers any more."""
        for pid in self.sessions():
            with contextlib.suppress(ProcessLookupError):  # its client has just left
                os.kill(pid, signal.SIGSTOP if frozen else signal.SIGCONT)

    def count(self, text: str) -> int:
        """How often a text occurs in the server's log."""
        return self.log.read_text(errors="replace").count(text)

    def connections(self) -> int:
        """Authenticated connections so far (the banner probe of `start` and refused logins do not count)."""
        return len(re.findall(r"^Accepted \S+ for ", self.log.read_text(errors="replace"), re.MULTILINE))

    def executions(self) -> int:
        """Exec channels started so far."""
        return self.count("Starting session: command")


SSHD_NAMES = ("sshd", "sshd-session", "sshd-auth")


def _openssh_version() -> tuple[int, int]:
    text = subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=False).stderr
    match = re.search(r"OpenSSH_(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _command_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
