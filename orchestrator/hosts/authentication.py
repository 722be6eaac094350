"""Logging in: keys, certificates, agent, keyboard-interactive (OTP) and password, in ssh's order and by its settings.

Why own code: paramiko's default tries every key it finds (MaxAuthTries), prints prompts to stdout and blocks, and
handles a second factor only by accident.  Nothing secret is ever logged or kept on disk.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import paramiko
import paramiko.agent
import paramiko.pkey
from paramiko.auth_strategy import AuthStrategy
from paramiko.ssh_exception import AuthenticationException, BadAuthenticationType, SSHException

from orchestrator.core.errors import AuthRefused
from orchestrator.hosts.prompt import ANSWER_WITHIN_S, Memory, NoTerminal
from orchestrator.hosts.ssh_config import ResolvedHost
from orchestrator.hosts.stream import HandshakeDropped

ANSWER_S = 20.0
"""How long the server may take to answer one login attempt (PAM modules delay failures by some seconds)."""
AGENT_ANSWER_S = 60.0
"""A hardware key or a password manager may wait for a touch."""
NO_TERMINAL_HINT = (
    "run it in a terminal to be asked, load the key into ssh-agent, or open a ControlMaster by hand "
    "and set `transport: openssh` for this host"
)


LOCKED = "locked"
"""What `_load` says of a key that needs a (better) passphrase."""
METHODS = ("publickey", "keyboard-interactive", "password")


class Ask(Protocol):
    """Puts a question to a person."""

    def __call__(self, text: str, *, secret: bool) -> str:
        """The answer; raises NoTerminal when there is nobody."""


class _AgentAt(paramiko.agent.AgentSSH):  # type: ignore[misc]  # paramiko is untyped
    """An ssh-agent at the socket that IdentityAgent names."""

    def __init__(self, path: str) -> None:
        super().__init__()
        conn = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        conn.settimeout(AGENT_ANSWER_S)
        conn.connect(path)
        self._connect(conn)

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


class UserAuth(AuthStrategy):  # type: ignore[misc]  # paramiko is untyped
    """paramiko's hook for a login of one's own, following the resolved ssh configuration.

    Args:
        host: inventory name, for messages.
        resolved: what `ssh -G` said.
        ask: puts a question to the person; raises NoTerminal.
        memory: passwords and passphrases that worked before in this run.
    """

    def __init__(self, host: str, resolved: ResolvedHost, ask: Ask, memory: Memory) -> None:
        super().__init__(ssh_config=None)
        self.host = host
        self.resolved = resolved
        self._ask = ask
        self.memory = memory
        self._tried = Tried()
        self._unanswered: str | None = None

    def authenticate(self, transport: paramiko.Transport) -> Any:
        """Log in, or raise.

        Raises:
            AuthRefused: the server accepts nothing we have; the message lists what was tried.
            HandshakeDropped: the server hung up.
        """
        transport.auth_timeout = ANSWER_S
        allowed = self._publickey(transport) if self._may("publickey") else None
        if allowed is None:
            allowed = self._which_methods(transport)
        # A second factor: after a partial success the server names what it still wants.
        while allowed:
            method = next(
                (m for m in self.resolved.preferred_authentications if m in allowed and self._may(m)), None
            )
            if method == "publickey":
                left = self._publickey(transport)
            elif method == "keyboard-interactive":
                left = self._interactive(transport)
            elif method == "password":
                left = self._password(transport)
            else:
                break
            allowed = [m for m in allowed if m != method] if left is None else left
        if not transport.is_authenticated():
            self._refuse(allowed or [])
        return []

    def _may(self, method: str) -> bool:
        return method not in self.resolved.disabled_authentications and (
            method in self.resolved.preferred_authentications
        )

    def _refuse(self, allowed: list[str]) -> None:
        message = f"{self.host}: {self.resolved.label} accepts none of our logins; tried: {self._tried}"
        if allowed:
            message += f"; the server takes: {', '.join(allowed)}"
        if self._unanswered:
            raise AuthRefused(f"{message}. {self._unanswered}", NO_TERMINAL_HINT, host=self.host)
        raise AuthRefused(
            message, f"see what ssh does with: ssh -v {self.resolved.asked} true", host=self.host
        )

    def _attempt(
        self, transport: paramiko.Transport, what: str, call: Callable[[], list[str]]
    ) -> list[str] | None:
        """One attempt: [] when logged in, the list of what is still wanted after a part, None when refused."""
        try:
            left = call()
        except BadAuthenticationType as error:
            self._tried.add(what, f"not offered; the server takes {', '.join(error.allowed_types)}")
            return None
        except AuthenticationException as error:
            if "timeout" in str(error).lower() or not transport.is_active():
                raise self._hung_up(transport, error) from error
            self._tried.add(what, "refused")
            return None
        except (SSHException, EOFError) as error:
            if not transport.is_active():
                raise self._hung_up(transport, error) from error
            self._tried.add(what, str(error) or type(error).__name__)
            return None
        if left:
            self._tried.add(what, "accepted, but more is wanted")
        return left

    def _hung_up(self, transport: paramiko.Transport, error: Exception) -> Exception:
        text = str(error)
        if "too many" in text.lower() or len(self._tried.lines) >= 4:
            return AuthRefused(
                f"{self.host}: {self.resolved.label} hung up after too many keys; tried: {self._tried}",
                "name the right key: IdentityFile and IdentitiesOnly yes in your ssh config, or identity_file in the "
                "inventory",
                host=self.host,
            )
        return HandshakeDropped(
            f"{self.host}: {self.resolved.label} hung up during login ({text})", host=self.host
        )

    def _which_methods(self, transport: paramiko.Transport) -> list[str]:
        """Ask with the method "none" (one round trip, only when keys did not do)."""
        try:
            transport.auth_none(self.resolved.user)
        except BadAuthenticationType as error:
            return list(error.allowed_types)
        except AuthenticationException as error:
            if not transport.is_active():
                raise self._hung_up(transport, error) from error
        return []

    # ------------------------------------------------------------------ keys

    def _publickey(self, transport: paramiko.Transport) -> list[str] | None:
        agents: list[Any] = []
        try:
            for what, key in self._keys(agents):
                left = self._attempt(
                    transport, what, partial(transport.auth_publickey, self.resolved.user, key)
                )
                if left is not None:
                    return left
        finally:
            for agent in agents:
                agent.close()
        return None

    def _keys(self, agents: list[Any]) -> Iterator[tuple[str, paramiko.PKey]]:
        """Keys in ssh's order: configured ones that the agent holds, other agent keys, files; encrypted files last."""
        files = [path for path in dict.fromkeys(self.resolved.identity_files) if Path(path).is_file()]
        for path in self.resolved.identity_files:
            if self.resolved.identities_only and path not in files and not Path(path + ".pub").is_file():
                self._tried.add(f"key {path}", "no such file")
        publics = {path: blob for path in self.resolved.identity_files if (blob := _public_blob(path))}
        held = {key.asbytes(): key for key in self._agent_keys(agents)}
        from_agent: set[str] = set()
        for path, blob in publics.items():
            if blob in held:
                from_agent.add(path)
                yield from self._with_certificates(f"agent key {path}", held.pop(blob), path)
        if not self.resolved.identities_only:
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

    def _agent_keys(self, agents: list[Any]) -> list[paramiko.agent.AgentKey]:
        where = self.resolved.identity_agent
        if where is None:
            return []
        try:
            if where == "SSH_AUTH_SOCK":
                agent: Any = paramiko.Agent()
                if conn := getattr(agent, "_conn", None):
                    conn.settimeout(AGENT_ANSWER_S) if hasattr(conn, "settimeout") else None
            else:
                agent = _AgentAt(os.environ.get(where[1:], "") if where.startswith("$") else where)
            agents.append(agent)
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
            (*self.resolved.certificate_files, path.removesuffix(".pub") + "-cert.pub")
        ):
            if not Path(file).is_file():
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
        for attempt in range(self.resolved.password_prompts):
            passphrase = self.memory.get(memory_key) if attempt == 0 else None
            if passphrase is None:
                passphrase = self.question(
                    f"Passphrase for {path} (host {self.host}): ", f"the key {path} is encrypted"
                )
            if not passphrase:
                break
            loaded = self._load(path, passphrase)
            if isinstance(loaded, paramiko.PKey):
                self.memory.put(memory_key, passphrase)
                return loaded
            self.memory.forget(memory_key)
        self._tried.add(f"key {path}", "encrypted, no right passphrase given")
        return None

    # ------------------------------------------------------------------ what a person types

    def question(self, text: str, wants: str, *, secret: bool = True) -> str | None:
        """Ask a person; None, with the reason kept for the final message, when that is impossible."""
        try:
            return self._ask(text, secret=secret)
        except NoTerminal as error:
            self._unanswered = f"{wants[0].upper()}{wants[1:]}, and nobody could be asked: {error}"
            return None

    def _password(self, transport: paramiko.Transport) -> list[str] | None:
        memory_key = f"password {self.resolved.label}"
        for attempt in range(self.resolved.password_prompts):
            password = self.memory.get(memory_key) if attempt == 0 else None
            if password is None:
                text = f"Password for {self.resolved.label} (host {self.host}): "
                password = self.question(text, "the server wants a password")
            if password is None:
                return None
            login = partial(transport.auth_password, self.resolved.user, password, fallback=False)
            left = self._attempt(transport, "password", login)
            if left is not None:
                self.memory.put(memory_key, password)
                return left
            self.memory.forget(memory_key)
        return None

    def _interactive(self, transport: paramiko.Transport) -> list[str] | None:
        """Keyboard-interactive: whatever the server asks. Passwords are remembered, codes are not."""
        for attempt in range(self.resolved.password_prompts):
            dialogue = _Dialogue(self, use_memory=attempt == 0)
            transport.auth_timeout = ANSWER_S + ANSWER_WITHIN_S
            try:
                call = partial(transport.auth_interactive, self.resolved.user, dialogue)
                left = self._attempt(transport, "keyboard-interactive", call)
            except HandshakeDropped:
                if self._unanswered:
                    self._refuse(
                        []
                    )  # nobody to ask: our own handler ended the dialogue, and the transport with it
                raise
            finally:
                transport.auth_timeout = ANSWER_S
            if left is not None:
                dialogue.remember()
                return left
            self.memory.forget(f"password {self.resolved.label}")
            if not dialogue.asked:  # refused without a question: not wanted, or not now
                return None
        return None


class _Dialogue:
    """Answers one keyboard-interactive exchange; called by paramiko's thread."""

    def __init__(self, login: UserAuth, *, use_memory: bool) -> None:
        self._login, self._use_memory = login, use_memory
        self._key = f"password {login.resolved.label}"
        self._password: str | None = None
        self.asked = False

    def __call__(self, title: str, instructions: str, prompts: list[tuple[str, bool]]) -> list[str]:
        return [self._answer(title, instructions, text, echo=echo) for text, echo in prompts]

    def _answer(self, title: str, instructions: str, text: str, *, echo: bool) -> str:
        self.asked = True
        login = self._login
        is_password = not echo and "password" in text.lower()
        answer = login.memory.get(self._key) if is_password and self._use_memory else None
        if answer is None:
            lead = "".join(f"{line.strip()}\n" for line in (title, instructions) if line.strip())
            shown = _printable(f"{lead}({login.host}, {login.resolved.label}) {text}")
            answer = login.question(shown, f"the server asks {_printable(text.strip())!r}", secret=not echo)
        if answer is None:
            raise AuthenticationException("nobody could be asked")
        if is_password:
            self._password = answer
        return answer

    def remember(self) -> None:
        """The answers were right."""
        if self._password is not None:
            self._login.memory.put(self._key, self._password)


def _printable(text: str) -> str:
    """A server's prompt without control characters: it must not drive the terminal."""
    return "".join(char for char in text if char.isprintable() or char == "\n")


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
