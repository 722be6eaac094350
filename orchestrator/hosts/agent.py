"""The client of one host's agent: requests with ids over one channel, answers in any order, reconnects by itself.

Threads may share a client.  Every request has a time limit that holds even when packets vanish silently.  Requests
are idempotent by design (launch by job id, put by offset, control by key), so one that was under way when the link
dropped is sent again after a reconnect; what the job did is never in doubt, since its truth lies on the host.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from orchestrator.core.errors import (
    ChannelTimeout,
    GateClosed,
    HostError,
    HostFull,
    HostRefused,
    NoPython,
    NoSuchJob,
    OrchError,
    ProtocolError,
    Unreachable,
)
from orchestrator.hosts.errors import translate
from orchestrator.hosts.prompt import Meeting, NoTerminal, Prompter
from orchestrator.hosts.release import Release, build
from orchestrator.hosts.stream import MAX_NOISE_BYTES, ByteStream, Framing, HandshakeDropped, encode

REQUEST_TIMEOUT_S = 30.0
HELLO_TIMEOUT_S = 60.0
UPLOAD_TIMEOUT_S = 300.0
RECONNECTS = 4
_MAX_STDERR = 16384

Open = Callable[[Callable[[str, bool], str]], ByteStream]
"""Opens a connection and starts the bootstrap on it; the argument asks a person."""


class _Live:
    """One started agent: its stream, its reader thread, the requests that wait for an answer."""

    def __init__(self, host: str, stream: ByteStream) -> None:
        self.host, self.stream = host, stream
        self.framing = Framing(stream.recv)
        self.hello: dict[str, Any] = {}
        self.error: OrchError | None = None
        self._answers: dict[int, dict[str, Any] | None] = {}
        self._changed = threading.Condition()
        self._send_lock = threading.Lock()
        self._stderr = bytearray()
        threading.Thread(target=self._drain_stderr, daemon=True, name=f"stderr {host}").start()

    # ---- starting

    def handshake(self, release: Release) -> None:
        """Read the hello, uploading the release first when it is asked for.

        Raises:
            NoPython, HostFull, HostError, ProtocolError; EOFError when the stream ends.
        """
        noise = 0
        while True:
            message = self.framing.message()
            if isinstance(message, bytes):
                noise += len(message) + 1
                if noise > MAX_NOISE_BYTES:
                    raise ProtocolError(
                        f"{self.host}: the login prints without end and the agent never speaks",
                        "check ~/.bashrc on the host: it must be silent without a terminal",
                    )
            elif "hello" in message:
                self.hello = dict(message["hello"])
                return
            elif message.get("need") == "release":
                self.stream.send(f"{len(release.archive)}\n".encode() + release.archive)
            elif "error" in message:
                raise self._bootstrap_error(str(message["error"]), str(message.get("seen", "")))

    def _bootstrap_error(self, code: str, seen: str) -> OrchError:
        if code == "no_python":
            return NoPython(
                f"{self.host}: no Python 3.8 or newer on the host ({seen.strip()})",
                "install python3 there, or name one: `agent_python: /path/to/python3` in the inventory",
                host=self.host,
            )
        if code == "disk_full":
            return HostFull(
                f"{self.host}: no space for orch's files on the host ({seen})", "free some, or move `root:`", host=self.host
            )
        return HostError(f"{self.host}: orch cannot be installed there: {seen}", "check `root:` in the inventory", host=self.host)

    # ---- reading

    def read_forever(self) -> None:
        """Sort answers to whoever waits; ends with the stream."""
        error: OrchError
        try:
            while True:
                message = self.framing.message()
                if isinstance(message, dict) and isinstance(message.get("id"), int):
                    with self._changed:
                        if message["id"] in self._answers:
                            self._answers[message["id"]] = message
                            self._changed.notify_all()
        except EOFError:
            found = self.stream.explain_end(self.stderr())
            error = found if isinstance(found, OrchError) else Unreachable(f"{self.host}: the link was dropped", host=self.host)
        except OrchError as found_error:
            error = found_error
        except Exception as exc:
            error = translate(exc, self.host, "reading answers")
        self.fail(error)

    def fail(self, error: OrchError) -> None:
        """The stream is of no use any more; every waiting request ends with ``error``."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()
        self.stream.close()

    def ask(self, number: int, data: bytes, timeout_s: float) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            ChannelTimeout: no answer in time; the stream is given up. HostError: the link broke.
        """
        with self._changed:
            self._answers[number] = None
        try:
            with self._send_lock:
                self.stream.send(data)
        except Exception as exc:
            self.fail(translate(exc, self.host, "sending a request"))
        deadline = time.monotonic() + timeout_s
        try:
            with self._changed:
                while self._answers[number] is None:
                    if self.error is not None:
                        raise type(self.error)(self.error.message, self.error.hint) if not isinstance(
                            self.error, HostError
                        ) else _again(self.error)
                    left = deadline - time.monotonic()
                    if left <= 0:
                        break
                    self._changed.wait(min(left, 1.0))
                answer = self._answers[number]
        finally:
            with self._changed:
                self._answers.pop(number, None)
        if answer is None:
            error = ChannelTimeout(f"{self.host}: no answer within {timeout_s:.0f} s", host=self.host)
            self.fail(error)
            raise error
        return answer

    def _drain_stderr(self) -> None:
        with contextlib.suppress(Exception):
            while data := self.stream.recv_stderr(4096):
                self._stderr += data
                del self._stderr[:-_MAX_STDERR]

    def stderr(self) -> str:
        """The end of what the host wrote to stderr."""
        return bytes(self._stderr).decode("utf-8", "replace")


def _again(error: HostError) -> HostError:
    """A fresh copy, so that several threads do not share one traceback."""
    copy = error.__class__.__new__(error.__class__)
    copy.__dict__.update(error.__dict__)
    copy.args = error.args
    return copy


class AgentClient:
    """Requests to one host.

    Args:
        host: inventory name, for messages.
        open_stream: connects and starts the bootstrap; called again after a drop.
        prompter: asks a person, from the thread that waits.
    """

    def __init__(self, host: str, open_stream: Open, prompter: Prompter) -> None:
        self.host = host
        self._open, self._prompter = open_stream, prompter
        self._live: _Live | None = None
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._closed = False
        self.connected_once = False
        self.unreachable_since: float | None = None
        self.round_trip_s: float | None = None

    # ---- what callers use

    def hello(self) -> dict[str, Any]:
        """The agent's first words (versions, clocks, root); connects when needed.

        Raises:
            HostError: no connection, no login, no Python. ProtocolError: another program answers.
        """
        return self._with_reconnects(lambda live: live.hello)

    def request(
        self, op: str, payload: bytes | None = None, *, timeout_s: float | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Ask the agent and wait. An answer's raw bytes are under ``payload``.

        Args:
            op: one of protocol.Op.
            payload: raw bytes that go along.
            timeout_s: how long the answer may take, not counting a long poll's own ``wait_s``.
            fields: the request's arguments.

        Raises:
            HostError: unreachable, refused, timed out. GateClosed, HostFull, NoSuchJob, HostRefused: the agent's answer.
        """
        if op == "control":
            fields.setdefault("key", uuid.uuid4().hex[:12])
        limit = (timeout_s or REQUEST_TIMEOUT_S) + float(fields.get("wait_s") or 0.0)

        def send(live: _Live) -> dict[str, Any]:
            number = next(self._numbers)
            data = encode({"id": number, "op": op, **fields}, payload)
            sent_at = time.monotonic()
            answer = live.ask(number, data, limit)
            if not fields.get("wait_s"):
                self.round_trip_s = time.monotonic() - sent_at
            return answer

        answer = self._with_reconnects(send)
        if answer.get("ok"):
            return answer
        raise self._refusal(answer.get("error") or {})

    def close(self) -> None:
        """End the connection; the client can be used no more."""
        with self._lock:
            self._closed = True
            live, self._live = self._live, None
        if live is not None:
            live.fail(Unreachable(f"{self.host}: closed", host=self.host))

    @property
    def connection_state(self) -> str:
        """connected, connecting or unreachable."""
        if self._live is not None and self._live.error is None:
            return "connected"
        return "unreachable" if self.unreachable_since is not None else "connecting"

    # ---- connecting

    def _with_reconnects(self, work: Callable[[_Live], dict[str, Any]]) -> dict[str, Any]:
        """Run ``work`` on a live agent; a dropped link is renewed, a first connection only retried when sshd was full."""

        def worth_it(error: BaseException) -> bool:
            if self._closed or not isinstance(error, HostError) or isinstance(error, ChannelTimeout):
                return False
            return isinstance(error, HandshakeDropped) or (self.connected_once and isinstance(error, Unreachable))

        def before_sleep(_state: RetryCallState) -> None:
            self.unreachable_since = self.unreachable_since or time.time()

        retrying = Retrying(
            retry=retry_if_exception(worth_it),
            stop=stop_after_attempt(RECONNECTS),
            wait=wait_random_exponential(multiplier=0.2, max=3.0),
            before_sleep=before_sleep,
            reraise=True,
        )
        try:
            answer = retrying(lambda: work(self._connected()))
        except HostError:
            self.unreachable_since = self.unreachable_since or time.time()
            raise
        self.unreachable_since = None
        return answer

    def _connected(self) -> _Live:
        with self._lock:
            if self._closed:
                raise Unreachable(f"{self.host}: this client is closed", host=self.host)
            if self._live is not None and self._live.error is None:
                return self._live
            self._live = None
            meeting: Meeting[_Live] = Meeting()
            threading.Thread(target=self._connect, args=(meeting,), daemon=True, name=f"connect {self.host}").start()
            live = meeting.wait(HELLO_TIMEOUT_S, self._prompter)
            if live is None:
                raise ChannelTimeout(
                    f"{self.host}: connected, but the agent said nothing within {HELLO_TIMEOUT_S:.0f} s", host=self.host
                )
            threading.Thread(target=live.read_forever, daemon=True, name=f"reader {self.host}").start()
            self._live, self.connected_once = live, True
            return live

    def _connect(self, meeting: Meeting[_Live]) -> None:
        live: _Live | None = None
        try:

            def ask(text: str, secret: bool) -> str:  # noqa: FBT001
                return meeting.ask(text, secret=secret)

            live = _Live(self.host, self._open(ask))
            live.handshake(build())
            meeting.finish(live)
        except EOFError as exc:
            assert live is not None
            meeting.fail(self._ended_early(live, exc))
            live.stream.close()
        except Exception as exc:
            if live is not None:
                live.stream.close()
            meeting.fail(exc if isinstance(exc, OrchError | NoTerminal) else translate(exc, self.host, "starting the agent"))

    def _ended_early(self, live: _Live, _exc: EOFError) -> OrchError:
        time.sleep(0.05)  # stderr may be a moment behind stdout
        said = live.stderr().strip()
        found = live.stream.explain_end(said)
        if isinstance(found, OrchError):
            return found
        return HostError(
            f"{self.host}: the agent ended before it said anything" + (f": {said[-800:]}" if said else ""),
            "try the host's Python by hand, or name another with `agent_python:` in the inventory",
            host=self.host,
        )

    # ---- refusals

    def _refusal(self, error: dict[str, Any]) -> OrchError:
        code, hint = str(error.get("code", "?")), error.get("hint") or None
        message = f"{self.host}: {error.get('message') or code}"
        if code == "gate_closed":
            return GateClosed(message, hint, error.get("gate") or {})
        if code in ("disk_full", "tmpfs"):
            return HostFull(message, hint, host=self.host)
        if code == "no_job":
            return NoSuchJob(message, hint)
        if code == "version":
            return ProtocolError(message, hint)
        return HostRefused(message, hint, host=self.host, reason=code)
