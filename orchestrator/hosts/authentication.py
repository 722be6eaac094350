"""Logging in as the user's own `ssh` would: agent, key files, certificates, then questions to a person.

One strategy object per connection, handed to paramiko.  Keys are offered in OpenSSH's order and at most five, since
sshd hangs up after six tries (MaxAuthTries).  Passwords and passphrases are asked once and kept in memory for
reconnects; a one-time code is asked again each time.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paramiko
import paramiko.agent
from paramiko.auth_strategy import AuthStrategy
from paramiko.ssh_exception import (
    AuthenticationException,
    BadAuthenticationType,
    PasswordRequiredException,
    SSHException,
)

from orchestrator.core.errors import AuthRefused
from orchestrator.hosts.prompt import Memory, NoTerminal
from orchestrator.hosts.ssh_config import ResolvedHost

MAX_KEYS = 5
Ask = Callable[[str, bool], str]
"""(text, secret) -> answer; raises NoTerminal."""


class UserAuth(AuthStrategy):  # type: ignore[misc]  # paramiko is untyped
    """Tries what the configuration allows until the server is satisfied.

    Args:
        host: inventory name, for messages.
        resolved: the host (or jump host) to log in to.
        ask: how to reach a person.
        memory: answers that worked earlier in this run.
    """

    def __init__(self, host: str, resolved: ResolvedHost, ask: Ask, memory: Memory) -> None:
        super().__init__(ssh_config=None)
        self.host, self.resolved, self.ask, self.memory = host, resolved, ask, memory
        self._tried: list[str] = []
        self._locked: list[str] = []
        self._no_terminal: str | None = None

    def get_sources(self) -> Iterator[Any]:
        """Not used: `authenticate` needs to see partial successes."""
        return iter(())

    def authenticate(self, transport: Any) -> Any:
        """Log in.

        Raises:
            AuthRefused: nothing that was allowed worked; the message lists what was tried.
        """
        allowed: set[str] | None = None
        for method in self._methods():
            if allowed is not None and method not in allowed:
                continue
            try:
                missing = getattr(self, "_" + method.replace("-", "_"))(transport)
            except BadAuthenticationType as error:
                allowed = set(error.allowed_types)
                continue
            except AuthenticationException:
                continue
            except NoTerminal as error:
                self._no_terminal = str(error)
                continue
            if missing is None:
                continue
            if not missing:
                return []
            allowed = set(missing)  # partial success: the server wants one more factor
        raise AuthRefused(*self._refusal(transport, allowed), host=self.host)

    def _methods(self) -> list[str]:
        known = ("publickey", "keyboard-interactive", "password")
        wanted = [method for method in self.resolved.preferred_authentications if method in known]
        # A second factor may follow a key, so everything is gone through twice.
        return [method for method in wanted if method not in self.resolved.disabled_authentications] * 2

    def _refusal(self, transport: Any, allowed: set[str] | None) -> tuple[str, str]:
        tried = ", ".join(self._tried) or "no key was found"
        message = f"{self.host}: {self.resolved.label} does not let us in (tried: {tried})"
        if allowed:
            message += f"; it accepts {', '.join(sorted(allowed))}"
        if self._locked and self._no_terminal:
            return message, (
                f"the key {self._locked[0]} has a passphrase and nobody can be asked here: ssh-add {self._locked[0]}"
            )
        if self._no_terminal:
            return message, "a password or code is needed: run the command on a terminal, or install a key"
        return message, f"check user and key with: ssh -v {self.resolved.asked} true"

    # ----------------------------------------------------------------------------------------------------- publickey

    def _publickey(self, transport: Any) -> list[str] | None:
        offered = 0
        for label, key in self._keys():
            if offered >= MAX_KEYS or label in self._tried:
                continue
            offered += 1
            self._tried.append(label)
            try:
                missing: list[str] = transport.auth_publickey(self.resolved.user, key)
            except BadAuthenticationType:
                raise
            except AuthenticationException:
                continue
            return missing
        return None

    def _keys(self) -> Iterator[tuple[str, Any]]:
        """Keys in OpenSSH's order: agent keys that a file names, other agent keys, files; locked files last."""
        agent = self._agent_keys()
        named = [self._public_blob(path) for path in self.resolved.identity_files]
        in_agent = {key.asbytes() for key in agent}
        for key in agent:
            if key.asbytes() in named:
                yield f"agent key {key.get_name()}", key
        if not self.resolved.identities_only:
            for number, key in enumerate(agent, 1):
                if key.asbytes() not in named:
                    yield f"agent key {number} ({key.get_name()})", key
        locked = []
        for path, blob in zip(self.resolved.identity_files, named, strict=True):
            if blob in in_agent or not Path(path).is_file():
                continue
            try:
                key = paramiko.PKey.from_path(path)
            except PasswordRequiredException:
                locked.append(path)
                continue
            except (SSHException, OSError, ValueError, TypeError) as error:
                if "passphrase" in str(error).lower() or "password" in str(error).lower():
                    locked.append(path)
                else:
                    self._tried.append(f"{path} (unusable: {error})")
                continue
            yield from self._with_certificates(path, key)
        for path in locked:
            self._locked.append(path)
            yield from self._with_certificates(path, self._unlock(path))

    def _with_certificates(self, path: str, key: Any) -> Iterator[tuple[str, Any]]:
        if key is None:
            return
        for certificate in (*self.resolved.certificate_files, path + "-cert.pub"):
            if Path(certificate).is_file():
                certified = paramiko.PKey.from_path(path, passphrase=self._passphrase(path))
                try:
                    certified.load_certificate(certificate)
                except (ValueError, SSHException, OSError):
                    continue
                yield f"{path} with {certificate}", certified
        yield path, key

    def _passphrase(self, path: str) -> bytes | None:
        known = self.memory.get("passphrase " + path)
        return known.encode("utf-8") if known is not None else None

    def _unlock(self, path: str) -> Any:
        for _ in range(self.resolved.password_prompts):
            known = self.memory.get("passphrase " + path)
            answer = known if known is not None else self.ask(f"Passphrase of {path}: ", True)
            try:
                key = paramiko.PKey.from_path(path, passphrase=answer.encode("utf-8"))
            except (SSHException, ValueError, TypeError):
                self.memory.forget("passphrase " + path)
                continue
            self.memory.put("passphrase " + path, answer)
            return key
        return None

    @staticmethod
    def _public_blob(path: str) -> bytes | None:
        """Wire form of the public half beside a key file, to recognise it in the agent."""
        import base64
        import binascii

        try:
            return base64.b64decode(Path(path + ".pub").read_text("utf-8").split()[1])
        except (OSError, IndexError, ValueError, binascii.Error):
            return None

    def _agent_keys(self) -> list[Any]:
        where = self.resolved.identity_agent
        if where is None:
            return []
        try:
            if where == "SSH_AUTH_SOCK":
                # Without the variable paramiko would look for Pageant on Windows, which is right there.
                return list(paramiko.Agent().get_keys())
            path = os.environ.get(where[1:], "") if where.startswith("$") else where
            return list(_AgentAt(path).get_keys()) if path else []
        except (SSHException, OSError):
            return []

    # -------------------------------------------------------------------------------------------- what a person knows

    def _password(self, transport: Any) -> list[str] | None:
        for _ in range(self.resolved.password_prompts):
            key = f"password {self.resolved.label}"
            known = self.memory.get(key)
            answer = known if known is not None else self.ask(f"Password of {self.resolved.label}: ", True)
            try:
                missing: list[str] = transport.auth_password(self.resolved.user, answer, fallback=False)
            except BadAuthenticationType:
                raise
            except AuthenticationException:
                self._tried.append("password")
                self.memory.forget(key)
                continue
            self.memory.put(key, answer)
            return missing
        return None

    def _keyboard_interactive(self, transport: Any) -> list[str] | None:
        def answer(title: str, instructions: str, prompts: list[tuple[str, bool]]) -> list[str]:
            answers = []
            for text, echo in prompts:
                shown = " ".join(part for part in (title.strip(), instructions.strip()) if part)
                answers.append(self.ask(f"{self.resolved.label}: {shown + ' ' if shown else ''}{text}", not echo))
            return answers

        self._tried.append("keyboard-interactive")
        missing: list[str] = transport.auth_interactive(self.resolved.user, answer)
        return missing


class _AgentAt(paramiko.agent.AgentSSH):  # type: ignore[misc]  # paramiko is untyped
    """An agent at a given socket (IdentityAgent); paramiko itself only knows SSH_AUTH_SOCK."""

    def __init__(self, path: str) -> None:
        super().__init__()
        if not hasattr(socket, "AF_UNIX"):
            return
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(5.0)
        connection.connect(path)
        self._connect(connection)
