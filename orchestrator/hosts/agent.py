"""The client of one host's agent: connects when first asked, reconnects by itself, never hangs.

Threads may share a client; whoever comes while it connects waits for the same connection.  Requests are idempotent by
design (launch by job id, put by offset, control by key), so one that was under way when the link dropped is sent again
after a reconnect; what the job did is never in doubt, since its truth lies on the host.

Must not import fabric or paramiko; what opens the stream is given.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from orchestrator.core.answers import ANSWERS, check_answer
from orchestrator.core.errors import (
    ChannelTimeout,
    GateClosed,
    HostError,
    HostFull,
    HostRefused,
    MissingSecret,
    NoPython,
    NoSuchJob,
    OrchError,
    ProtocolError,
    Unreachable,
    UsageError,
    WrongState,
)
from orchestrator.hosts.forward import Tunnel
from orchestrator.hosts.prompt import Ask, Meeting, NoTerminal, Prompter
from orchestrator.hosts.release import build
from orchestrator.hosts.session import Session, fresh
from orchestrator.hosts.stream import ByteStream, HandshakeDropped

REQUEST_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 60.0
"""For `hello`, which asks for nothing but the connection."""
ATTEMPTS = 4
"""Tries for one request when the link drops; waits between them are random and at most 3 s."""


T = TypeVar("T")
Open = Callable[[Ask], ByteStream]
"""Opens a connection and starts the bootstrap on it."""


class AgentClient:
    """Requests to one host.

    Args:
        host: inventory name, for messages.
        open_stream: connects and starts the bootstrap; called again after a drop.
        prompter: asks a person, from the thread that waits.

    Attributes:
        round_trip_s: how long the last quick request took, or None.
        unreachable_since: wall clock (epoch s) of the first failure since the last success, or None.
        connections: how many times an agent was started.
    """

    def __init__(self, host: str, open_stream: Open, prompter: Prompter) -> None:
        self.host = host
        self._open, self._prompter = open_stream, prompter
        self._session: Session | None = None
        self._meeting: Meeting[Session] | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.connections = 0
        self.unreachable_since: float | None = None
        self.round_trip_s: float | None = None

    # ------------------------------------------------------------------ what callers use

    def hello(self) -> dict[str, Any]:
        """The agent's first words on this connection (versions, clocks, root); connects when needed.

        Raises:
            HostError: no connection, no login, no Python. ProtocolError: another program answers.
        """
        return self._with_reconnects(lambda session, _deadline: session.hello, CONNECT_TIMEOUT_S)

    def request(
        self, op: str, payload: bytes | None = None, *, timeout_s: float | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Ask the agent and wait; connecting and reconnecting count, the time a person takes to answer does not.

        Args:
            op: one of protocol.Op.
            payload: raw bytes that go along.
            timeout_s: how long all of it may take (default 30 s), not counting a long poll's own ``wait_s``.
            fields: the request's arguments.

        Returns:
            the answer; its raw bytes, if any, are under ``payload``.

        Raises:
            HostError: unreachable, refused, timed out. GateClosed, HostFull, NoSuchJob, WrongState, HostRefused ...: what the agent said.
            ProtocolError: an answer that makes no sense (see `orchestrator.core.answers`).
        """
        if op == "control":
            fields.setdefault("key", uuid.uuid4().hex[:12])  # makes a resend recognisable
        held_s = float(fields.get("wait_s") or 0.0)

        def send(session: Session, deadline: float) -> dict[str, Any]:
            message = {"op": op, **fields}
            if held_s:
                message["wait_s"] = max(0.0, min(held_s, deadline - time.monotonic() - 5.0))
            sent_at = time.monotonic()
            answer = session.call(message, payload, deadline)
            if not held_s:
                self.round_trip_s = time.monotonic() - sent_at
            return answer

        answer = self._with_reconnects(send, (timeout_s or REQUEST_TIMEOUT_S) + held_s)
        if answer.get("ok"):
            exact = f"{op} {fields.get('action')}"
            check_answer(self.host, exact if exact in ANSWERS else op, answer)
            return answer
        raise refusal(answer, self.host)

    def tunnel(self, address: str, port: int) -> Tunnel:
        """A connection from the host to an address, over this client's own connection; connects when needed.

        Raises:
            HostError: no connection, forwarding is forbidden, or nothing listens there.
        """
        return self._with_reconnects(
            lambda session, _deadline: session.stream.tunnel(address, port), CONNECT_TIMEOUT_S
        )

    def close(self) -> None:
        """End the connection; the client can be used no more. Never waits for a dead peer."""
        self._closed.set()
        with self._lock:
            session, self._session = self._session, None
        if session is not None:
            session.fail(Unreachable(f"{self.host}: closed", host=self.host))

    @property
    def connection_state(self) -> str:
        """``connected``, ``connecting`` or ``unreachable`` (since `unreachable_since`)."""
        session = self._session
        if session is not None and session.error is None:
            return "connected"
        return "unreachable" if self.unreachable_since is not None else "connecting"

    # ------------------------------------------------------------------ connecting

    def _with_reconnects(
        self, work: Callable[[Session, float], T], timeout_s: float
    ) -> T:
        """Run ``work`` on a live session; a dropped link is renewed, a first connection only retried when sshd was
        full or restarting: an unknown name or a refused port is told at once.
        """
        deadline = time.monotonic() + timeout_s

        def worth_it(error: BaseException) -> bool:
            if self._closed.is_set() or time.monotonic() >= deadline or not isinstance(error, HostError):
                return False
            lost = isinstance(error, Unreachable) and self.connections > 0
            return lost or isinstance(error, HandshakeDropped)

        def note(_state: RetryCallState) -> None:
            self.unreachable_since = self.unreachable_since or time.time()

        def pause(seconds: float) -> None:
            self._closed.wait(max(0.0, min(seconds, deadline - time.monotonic())))

        def attempt() -> T:
            nonlocal deadline
            session, asked_s = self._connected(deadline)
            deadline += asked_s
            return work(session, deadline)

        retrying = Retrying(
            retry=retry_if_exception(worth_it),
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_random_exponential(multiplier=0.2, max=3.0),
            sleep=pause,
            before_sleep=note,
            reraise=True,
        )
        try:
            answer = retrying(attempt)
        except HostError as error:
            if error.transient:
                self.unreachable_since = self.unreachable_since or time.time()
            raise
        self.unreachable_since = None
        return answer

    def _connected(self, deadline: float) -> tuple[Session, float]:
        """The live session and the seconds a person took to log in."""
        with self._lock:
            if self._closed.is_set():
                raise Unreachable(f"{self.host}: this client is closed", host=self.host)
            if self._session is not None and self._session.error is None:
                return self._session, 0.0
            self._session = None
            meeting = self._meeting
            if meeting is None:
                meeting = self._meeting = Meeting()
                threading.Thread(
                    target=self._connect, args=(meeting,), name=f"connect {self.host}", daemon=True
                ).start()
        try:
            session, asked_s = meeting.wait(deadline - time.monotonic(), self._prompter)
        except OrchError as error:
            raise fresh(error) from error.__cause__
        if session is None:
            raise ChannelTimeout(
                f"{self.host}: no connection in time",
                "is the host up, and reachable from here?",
                host=self.host,
            )
        return session, asked_s

    def _connect(self, meeting: Meeting[Session]) -> None:
        """One try, in a thread of its own: every step has a limit, but callers may have shorter ones."""
        session: Session | None = None
        try:
            session = Session(self.host, self._open(meeting.ask))
            session.start(build())
            check_answer(self.host, "hello", {"hello": session.hello})
        except BaseException as exc:
            if session is not None:
                session.stream.close()
            error = exc if isinstance(exc, OrchError) else self._unforeseen(exc)
            with self._lock:
                self._meeting = None
            meeting.fail(error)
            return
        with self._lock:
            self._meeting, self._session = None, session
            self.connections += 1
        if self._closed.is_set():
            session.fail(Unreachable(f"{self.host}: closed", host=self.host))
        meeting.finish(session)

    def _unforeseen(self, exc: BaseException) -> OrchError:
        if isinstance(exc, NoTerminal):
            return HostError(f"{self.host}: {exc}", host=self.host)
        from orchestrator.hosts.errors import translate

        return translate(exc, self.host, "starting the agent")


def refusal(answer: Mapping[str, Any], host: str) -> OrchError:
    """Our error for an answer with ``ok: false``."""
    error = answer.get("error")
    error = error if isinstance(error, dict) else {"message": str(error)}
    code, hint = str(error.get("code") or "?"), error.get("hint") or None
    message = f"{host}: {error.get('message') or code}"
    if code == "gate_closed":
        return GateClosed(message, hint, error.get("gate") or answer.get("gate") or {})
    if code in ("disk_full", "tmpfs"):
        return HostFull(message, hint, host=host)
    if code == "no_python":
        return NoPython(message, hint, host=host)
    if code == "no_job":
        return NoSuchJob(message, hint)
    if code in ("no_step", "no_attempt", "no_limit"):
        return UsageError(message, hint)
    if code == "wrong_state":
        return WrongState(message, hint)
    if code == "needs_secrets":
        return MissingSecret(message, hint)
    if code == "version":
        return ProtocolError(message, hint)
    if code == "timeout":
        return ChannelTimeout(message, hint, host=host)
    return HostRefused(message, hint, host=host, reason=code)
