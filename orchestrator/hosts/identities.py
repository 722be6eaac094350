"""The keys to offer a host, in ssh's order: from the agent, from files, under certificates; locked files last.

Keys are loaded one by one, as they are tried: nobody is asked for the passphrase of a key that is not needed.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import paramiko
import paramiko.agent
import paramiko.pkey
from paramiko.ssh_exception import SSHException

from orchestrator.hosts.prompt import Memory
from orchestrator.hosts.ssh_config import ResolvedHost

AGENT_ANSWER_S = 60.0
"""A hardware key or a password manager may wait for a touch."""
LOCKED = "locked"
"""What `_load` says of a key that needs a (better) passphrase."""


class _AgentAt(paramiko.agent.AgentSSH):  # type: ignore[misc]  # paramiko is untyped
    """An ssh-agent at the socket that IdentityAgent names."""

    def __init__(self, path: str) -> None:
        super().__init__()
        conn = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        conn.settimeout(AGENT_ANSWER_S)
        try:
            conn.connect(path)
            self._connect(conn)
        except BaseException:
            conn.close()
            raise

    def close(self) -> None:
        """Let go of the agent."""
        self._close()


@dataclass
class Tried:
    """What was offered and how the server took it, for the message of a refused login."""

    lines: list[str] = field(default_factory=list)

    def add(self, what: str, outcome: str) -> None:
        """Note one outcome."""
        self.lines.append(f"{what} ({outcome})")

    def __str__(self) -> str:
        return ", ".join(self.lines) or "nothing: no usable key was found"


class Identities:
    """The keys for one login.

    Args:
        host: inventory name, for questions.
        resolved: what `ssh -G` said.
        tried: collects what could not be used, and why.
        memory: passphrases that worked before in this run.
        question: (text, what is wanted) -> answer, or None when nobody can be asked.
    """

    def __init__(
        self,
        host: str,
        resolved: ResolvedHost,
        tried: Tried,
        memory: Memory,
        question: Callable[[str, str], str | None],
    ) -> None:
        self._host, self._resolved, self._tried = host, resolved, tried
        self._memory, self._question = memory, question
        self._agents: list[Any] = []

    def close(self) -> None:
        """Let go of the agent; its keys sign no more."""
        for agent in self._agents:
            agent.close()

    def offers(self) -> Iterator[tuple[str, paramiko.PKey]]:
        """Keys in ssh's order: configured ones that the agent holds, other agent keys, files; encrypted files last."""
        files = [path for path in dict.fromkeys(self._resolved.identity_files) if os.path.isfile(path)]
        for path in self._resolved.identity_files:
            if self._resolved.identities_only and path not in files and not os.path.isfile(path + ".pub"):
                self._tried.add(f"key {path}", "no such file")
        publics = {path: blob for path in self._resolved.identity_files if (blob := _public_blob(path))}
        held = {key.asbytes(): key for key in self._agent_keys()}
        from_agent: set[str] = set()
        for path, blob in publics.items():
            if blob in held:
                from_agent.add(path)
                yield from self._with_certificates(f"agent key {path}", held.pop(blob), path)
        if not self._resolved.identities_only:
            for key in held.values():
                yield f"agent key {key.comment or key.get_name()}", key
        locked = []
        for path in files:
            if path in from_agent or path.endswith(".pub"):
                continue
            loaded = self._load(path, None)
            if isinstance(loaded, paramiko.PKey):
                yield from self._with_certificates(f"key {path}", loaded, path)
            elif loaded == LOCKED:
                locked.append(path)
            else:
                self._tried.add(f"key {path}", loaded)
        for path in locked:
            if unlocked := self._unlock(path):
                yield from self._with_certificates(f"key {path}", unlocked, path)

    def _agent_keys(self) -> list[paramiko.agent.AgentKey]:
        where = self._resolved.identity_agent
        if where is None:
            return []
        try:
            if where == "SSH_AUTH_SOCK":
                agent: Any = paramiko.Agent()
                if conn := getattr(agent, "_conn", None):
                    conn.settimeout(AGENT_ANSWER_S) if hasattr(conn, "settimeout") else None
            else:
                agent = _AgentAt(os.environ.get(where[1:], "") if where.startswith("$") else where)
            self._agents.append(agent)
            return list(agent.get_keys())
        except (OSError, SSHException, AttributeError) as error:
            self._tried.add(f"agent {where}", str(error))
            return []

    def _with_certificates(
        self, what: str, key: paramiko.PKey, path: str
    ) -> Iterator[tuple[str, paramiko.PKey]]:
        """The key under each certificate that certifies it, then bare."""
        bare_blob = key.asbytes()
        for file in dict.fromkeys(
            (*self._resolved.certificate_files, path.removesuffix(".pub") + "-cert.pub")
        ):
            if not os.path.isfile(file):
                continue
            try:
                certificate = paramiko.pkey.PublicBlob.from_file(file)
                if _certifies(certificate.key_blob, bare_blob):
                    key.public_blob = certificate
                    yield f"certificate {file}", key
            except (OSError, ValueError, SSHException) as error:
                self._tried.add(f"certificate {file}", str(error))
        key.public_blob = None
        yield what, key

    def _load(self, path: str, passphrase: str | None) -> paramiko.PKey | str:
        """The key, LOCKED when it needs a (better) passphrase, or why it cannot be used."""
        try:
            return paramiko.PKey.from_path(
                path, passphrase.encode("utf-8") if passphrase is not None else None
            )
        except (TypeError, paramiko.PasswordRequiredException):
            return LOCKED
        except OSError as error:
            return error.strerror or str(error)
        except Exception as error:  # cryptography has no common base class for "not a key I can read"
            text = str(error)
            locked = re.search(r"encrypted|passphrase|password|decrypt", text, re.IGNORECASE)
            if passphrase is not None or locked:
                return LOCKED
            return f"unreadable: {text[:120] or type(error).__name__}"

    def _unlock(self, path: str) -> paramiko.PKey | None:
        memory_key = f"passphrase {path}"
        for attempt in range(self._resolved.password_prompts):
            passphrase = self._memory.get(memory_key) if attempt == 0 else None
            if passphrase is None:
                passphrase = self._question(
                    f"Passphrase for {path} (host {self._host}): ", f"the key {path} is encrypted"
                )
            if not passphrase:
                break
            loaded = self._load(path, passphrase)
            if isinstance(loaded, paramiko.PKey):
                self._memory.put(memory_key, passphrase)
                return loaded
            self._memory.forget(memory_key)
        self._tried.add(f"key {path}", "encrypted, no right passphrase given")
        return None


def _public_blob(path: str) -> bytes | None:
    """Wire form of the public half of an identity, from ``path``.pub or from ``path`` itself if that is public."""
    for file in (path, path + ".pub") if path.endswith(".pub") else (path + ".pub", path):
        try:
            with open(file, "rb") as handle:
                head = handle.read(16384)
            if head.startswith((b"ssh-", b"ecdsa-", b"sk-")):
                return bytes(paramiko.pkey.PublicBlob.from_string(head.decode("utf-8", "replace")).key_blob)
        except (OSError, ValueError, SSHException):
            continue
    return None


def _certifies(certificate_blob: bytes, key_blob: bytes) -> bool:
    """Is this the certificate of that key? Both hold the key's own fields in the same order (PROTOCOL.certkeys)."""
    message, plain = paramiko.Message(certificate_blob), paramiko.Message(key_blob)
    if message.get_text().removesuffix("-cert-v01@openssh.com") != plain.get_text():
        return False
    message.get_string()  # the certificate's nonce
    return bool(message.get_remainder().startswith(plain.get_remainder()))
