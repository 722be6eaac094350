"""Logging in: keys, certificates, agent, keyboard-interactive (OTP) and password, in ssh's order and by its settings.

Why own code: paramiko's default tries every key it finds (MaxAuthTries), prints prompts to stdout and blocks, and
handles a second factor only by accident.  Nothing secret is ever logged or kept on disk.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import paramiko
from paramiko.auth_handler import AuthHandler
from paramiko.auth_strategy import AuthStrategy
from paramiko.ssh_exception import AuthenticationException, BadAuthenticationType, SSHException

from orchestrator.core.errors import AuthRefused, HostError
from orchestrator.hosts.identities import Identities, Tried
from orchestrator.hosts.prompt import ANSWER_WITHIN_S, Ask, Memory, NoTerminal
from orchestrator.hosts.ssh_config import ResolvedHost
from orchestrator.hosts.stream import HandshakeDropped

ANSWER_S = 20.0
"""How long the server may take to answer one login attempt (PAM modules delay failures by some seconds)."""
NO_TERMINAL_HINT = (
    "run it in a terminal to be asked, load the key into ssh-agent, or open a ControlMaster by hand "
    "and set `transport: openssh` for this host"
)


class _OneService(AuthHandler):  # type: ignore[misc]  # paramiko is untyped
    """paramiko asks for the login service before every single attempt, which strict servers answer by hanging up;
    once per connection is what the protocol means (RFC 4253, 10), and saves a round trip per attempt.
    """

    def _request_auth(self) -> None:
        if not getattr(self.transport, "login_service_open", False):
            super()._request_auth()
            return
        granted = paramiko.Message()
        granted.add_string("ssh-userauth")
        granted.rewind()
        super()._parse_service_accept(granted)  # which sends the attempt

    def _parse_service_accept(self, message: paramiko.Message) -> None:
        self.transport.login_service_open = True
        super()._parse_service_accept(message)


def _send(transport: paramiko.Transport, user: str, method: str, *credentials: Any) -> list[str]:
    """One attempt: [] when logged in, what is still wanted after a partial success; raises as paramiko does."""
    if not transport.is_active():
        raise EOFError("the server hung up")
    answered = threading.Event()
    handler = transport.auth_handler = _OneService(transport)
    getattr(handler, f"auth_{method}")(user, *credentials, answered)
    return list(handler.wait_for_response(answered))


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
        self._takes: list[str] = []

    def authenticate(self, transport: paramiko.Transport) -> Any:
        """Log in, or raise.

        Raises:
            AuthRefused: the server accepts nothing we have; the message lists what was tried.
            HandshakeDropped: the server hung up.
        """
        transport.auth_timeout = ANSWER_S
        allowed = self._publickey(transport) if self._may("publickey") else None
        if allowed is None:
            allowed = [method for method in self._which_methods(transport) if method != "publickey"]
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
            self._refuse()
        return []

    def _may(self, method: str) -> bool:
        return method not in self.resolved.disabled_authentications and (
            method in self.resolved.preferred_authentications
        )

    def _refuse(self) -> None:
        message = f"{self.host}: {self.resolved.label} accepts none of our logins; tried: {self._tried}"
        if self._takes:
            message += f"; the server takes: {', '.join(self._takes)}"
        if self._unanswered:
            raise AuthRefused(f"{message}. {self._unanswered}", NO_TERMINAL_HINT, host=self.host)
        raise AuthRefused(
            message, f"see what ssh does with: ssh -v {self.resolved.typed} true", host=self.host
        )

    def _attempt(
        self, transport: paramiko.Transport, what: str, call: Callable[[], list[str]]
    ) -> list[str] | None:
        """One attempt: [] when logged in, the list of what is still wanted after a part, None when refused."""
        try:
            left = call()
        except BadAuthenticationType as error:
            self._takes = list(error.allowed_types)
            self._tried.add(what, "not accepted as a method")
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
        """The server ended the connection: because of our failed logins, or for reasons of its own."""
        said = str(getattr(transport, "goodbye", "") or error)
        refused = sum(line.endswith("(refused)") for line in self._tried.lines)
        if ("authentication" in said.lower() and "transport shut down" not in said) or refused >= 2:
            return AuthRefused(
                f"{self.host}: {self.resolved.label} hung up ({said}); tried: {self._tried}",
                "if it took too many keys, name the right one: IdentityFile and IdentitiesOnly yes in your ssh config, "
                "or identity_file in the inventory",
                host=self.host,
            )
        return HandshakeDropped(
            f"{self.host}: {self.resolved.label} hung up during login ({said})", host=self.host
        )

    def _which_methods(self, transport: paramiko.Transport) -> list[str]:
        """Ask with the method "none" (one round trip, only when keys did not do)."""
        try:
            _send(transport, self.resolved.user, "none")
        except BadAuthenticationType as error:
            self._takes = list(error.allowed_types)
            return self._takes
        except AuthenticationException as error:
            if not transport.is_active():
                raise self._hung_up(transport, error) from error
        return []

    # ------------------------------------------------------------------ keys

    def _publickey(self, transport: paramiko.Transport) -> list[str] | None:
        identities = Identities(self.host, self.resolved, self._tried, self.memory, self.question)
        with contextlib.closing(identities):
            for what, key in identities.offers():
                left = self._attempt(
                    transport, what, partial(_send, transport, self.resolved.user, "publickey", key)
                )
                if left is not None:
                    return left
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
            login = partial(_send, transport, self.resolved.user, "password", password)
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
                call = partial(_send, transport, self.resolved.user, "interactive", dialogue)
                left = self._attempt(transport, "keyboard-interactive", call)
            except HostError:
                if not self._unanswered:
                    raise
                left = None
            finally:
                transport.auth_timeout = ANSWER_S
            if (
                self._unanswered
            ):  # nobody to ask: our own handler ended the dialogue, and the transport with it
                self._refuse()
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
