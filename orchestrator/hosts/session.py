"""One started agent on one byte stream: requests with ids out, answers in any order back, until the stream ends.

A session is used once; `agent.AgentClient` makes a new one after a drop.  Nothing here blocks a caller beyond its
deadline: a thread of its own writes, another reads, and callers wait on a condition.  Liveness is judged by traffic:
when something was sent and nothing moves, the agent is pinged; when the ping stays unanswered, the link is dead.
That holds behind jump hosts, proxies and on systems whose TCP cannot be told when to give up.

Must not import fabric or paramiko.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from typing import Any

from orchestrator.core.errors import (
    ChannelTimeout,
    HostError,
    HostFull,
    HostRefused,
    NoPython,
    OrchError,
    ProtocolError,
    Unreachable,
)
from orchestrator.hosts.release import Release
from orchestrator.hosts.stream import MAX_FIRST_BYTES, MAX_NOISE_BYTES, ByteStream, Framing, encode

HELLO_WITHIN_S = 45.0
"""From the started command to the agent's first words; an interpreter on a cold network disk is slow."""
UPLOAD_WITHIN_S = 300.0
PING_AFTER_S = 10.0
DEAD_AFTER_S = 25.0
"""Silence after something was sent: first a ping, then the end."""
WAKE_DEAD_AFTER_S = 8.0
"""The same after a long pause or a suspended laptop, when a dead link is the likely case and a new one costs little."""
LONG_PAUSE_S = 60.0
TICK_S = 2.0
MAX_STDERR_BYTES = 16384
SEND_CHUNK_BYTES = 65536


class Session:
    """A running agent.

    Args:
        host: inventory name, for messages.
        stream: the started bootstrap.

    Attributes:
        hello: the agent's first words, after `start`.
        error: why the session is of no use any more, or None.
    """

    def __init__(self, host: str, stream: ByteStream) -> None:
        self.host, self.stream = host, stream
        self.hello: dict[str, Any] = {}
        self.error: OrchError | None = None
        self._framing = Framing(self._recv)
        self._answers: dict[int, dict[str, Any] | None] = {}
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._stderr = bytearray()
        self._silent_since: float | None = None
        self._pinged = False
        self._dead_after_s = DEAD_AFTER_S
        self._heard_at = time.time()
        self._clock_gap_s = time.time() - time.monotonic()

    # ------------------------------------------------------------------ starting

    def start(self, release: Release) -> None:
        """Read the hello (uploading the release first when asked for it), then serve requests.

        Raises:
            NoPython, HostFull, HostRefused, HostError: the host cannot run the agent.
            Unreachable, ChannelTimeout: the link broke, or nothing came in time.
            ProtocolError: something else than our agent talks.
        """
        threading.Thread(target=self._drain_stderr, name=f"stderr {self.host}", daemon=True).start()
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self.stream.close()

        timers = [threading.Timer(HELLO_WITHIN_S, give_up)]
        timers[0].daemon = True
        timers[0].start()
        try:
            self._handshake(release, timers, give_up)
        except (EOFError, OSError) as exc:
            if late.is_set():
                raise ChannelTimeout(
                    f"{self.host}: the command was started, but the agent said nothing in time",
                    "the host may be overloaded, or its disk hangs; try: ssh to it and run python3 by hand",
                    host=self.host,
                ) from exc
            raise self._ended_early() from exc
        finally:
            for timer in timers:
                timer.cancel()
        for work in (self._read_forever, self._write_forever):
            threading.Thread(target=work, name=f"{work.__name__.strip('_')} {self.host}", daemon=True).start()

    def _handshake(self, release: Release, timers: list[threading.Timer], give_up: Any) -> None:
        noise, sent = 0, False
        while True:
            message = self._framing.message(MAX_FIRST_BYTES)
            if isinstance(message, bytes):
                noise += len(message) + 1
            elif isinstance(message.get("hello"), dict):
                self.hello = message["hello"]
                return
            elif message.get("need") == "release" and not sent:
                sent = True  # a host that asks again and again would keep us here for ever
                timers.pop().cancel()
                timers.append(threading.Timer(UPLOAD_WITHIN_S, give_up))
                timers[0].daemon = True
                timers[0].start()
                self.stream.send(f"{len(release.archive)}\n".encode("ascii") + release.archive)
            elif "error" in message and "seen" in message:
                raise self._bootstrap_error(str(message["error"]), " ".join(str(message["seen"]).split()))
            else:
                noise += 200
            if noise > MAX_NOISE_BYTES:
                raise ProtocolError(
                    f"{self.host}: the login prints without end and the agent never speaks",
                    "check ~/.bashrc on the host: it must be silent without a terminal",
                )

    def _bootstrap_error(self, code: str, seen: str) -> OrchError:
        if code == "no_python":
            return NoPython(
                f"{self.host}: no Python 3.8 or newer on the host (seen: {seen})",
                "install python3 there, or say where one is: `agent_python: /path/to/python3` in the inventory",
                host=self.host,
            )
        if code == "disk_full":
            return HostFull(
                f"{self.host}: the host's disk is full: no space for orch's own files ({seen})",
                "free some, or move `root:` in the inventory",
                host=self.host,
            )
        return HostRefused(
            f"{self.host}: orch cannot install itself there: {seen}",
            "check `root:` in the inventory",
            host=self.host,
            reason=code,
        )

    def _ended_early(self) -> OrchError:
        """Why the stream ended before the hello."""
        time.sleep(0.05)  # stderr is read by another thread and may be a moment behind
        said = self.stderr()
        found = self.stream.explain_end(said)
        if isinstance(found, OrchError):
            return found
        return HostError(
            f"{self.host}: the agent ended before it said anything" + (f": {said[-800:]}" if said else ""),
            "try the host's Python by hand, or name another with `agent_python:` in the inventory",
            host=self.host,
        )

    # ------------------------------------------------------------------ requests

    def call(self, message: dict[str, Any], payload: bytes | None, deadline: float) -> dict[str, Any]:
        """Send a request (without id) and wait for its answer; the agent's refusals are answers too.

        Args:
            message: ``op`` and its arguments.
            payload: raw bytes that travel behind the request.
            deadline: on the monotonic clock.

        Raises:
            ChannelTimeout: the deadline came first; the session lives on.
            HostError, ProtocolError: the session ended.
        """
        number = next(self._numbers)
        data = encode({"id": number, **message}, payload)
        with self._changed:
            self._answers[number] = None
            self._sending()
        self._outbox.put(data)
        try:
            while True:
                with self._changed:
                    answer = self._answers[number]
                    if answer is not None:
                        return answer
                    if self.error is not None:
                        raise fresh(self.error)
                    left = deadline - time.monotonic()
                    if left > 0:
                        self._changed.wait(min(left, TICK_S))
                if left <= 0:
                    break
                self._check_life()
        finally:
            with self._changed:
                self._answers.pop(number, None)
        raise ChannelTimeout(
            f"{self.host}: no answer to {message.get('op')} in time",
            "the host may be overloaded; what was asked for may still happen: look again before repeating",
            host=self.host,
        )

    def fail(self, error: OrchError) -> None:
        """The session is of no use any more: every waiting call ends with ``error``. The first error counts."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()
        self._outbox.put(None)
        self.stream.close()

    def stderr(self) -> str:
        """The end of what the host wrote to stderr."""
        return bytes(self._stderr).decode("utf-8", "replace").strip()

    # ------------------------------------------------------------------ liveness

    def _sending(self) -> None:
        """Something is about to be sent (the lock is held)."""
        if self._silent_since is None:
            self._silent_since = time.monotonic()
            if time.time() - self._heard_at > LONG_PAUSE_S:
                self._doubt()

    def _doubt(self) -> None:
        """The link may well be dead: find out soon."""
        self._dead_after_s = WAKE_DEAD_AFTER_S
        self._silent_since = time.monotonic()
        self._ping()

    def _ping(self) -> None:
        self._pinged = True
        self._outbox.put(encode({"id": -1, "op": "hello"}))

    def _moved(self) -> None:
        """Bytes went either way: the clock of silence starts again, if anything is still awaited."""
        with self._changed:
            self._silent_since = time.monotonic() if self._answers else None
            self._pinged = False
            self._dead_after_s = DEAD_AFTER_S
            self._heard_at = time.time()

    def _check_life(self) -> None:
        with self._changed:
            gap = time.time() - time.monotonic()
            slept, self._clock_gap_s = gap - self._clock_gap_s > LONG_PAUSE_S / 4, gap
            if slept:  # the monotonic clock stands still while the machine is suspended, the other does not
                self._doubt()
            if self._silent_since is None:
                return
            silent_s = time.monotonic() - self._silent_since
            if silent_s >= self._dead_after_s and not self._pinged:
                self._doubt()  # nobody looked for a while (Ctrl-Z): the answer may lie here unread
                return
            if silent_s < self._dead_after_s:
                if silent_s > PING_AFTER_S and not self._pinged:
                    self._ping()
                return
        self.fail(
            Unreachable(
                f"{self.host}: nothing has come for {silent_s:.0f} s, not even a ping", host=self.host
            )
        )

    # ------------------------------------------------------------------ threads

    def _recv(self, size: int) -> bytes:
        data = self.stream.recv(size)
        self._moved()
        return data

    def _read_forever(self) -> None:
        error: OrchError
        noise = 0
        try:
            while True:
                message = self._framing.message()
                if isinstance(message, bytes):
                    noise += len(message) + 1  # a background process of the login, printing late
                    if noise > MAX_NOISE_BYTES:
                        self.fail(
                            ProtocolError(
                                f"{self.host}: something else than the agent talks: {message[:80]!r}"
                            )
                        )
                        return
                    continue
                number = message.get("id")
                with self._changed:
                    if isinstance(number, int) and number in self._answers:
                        self._answers[number] = message
                        self._changed.notify_all()
        except OrchError as found:
            error = found
        except Exception:  # EOF, or whatever a dying stream raises
            found_end = self.stream.explain_end(self.stderr())
            said = self.stderr()[-300:]
            error = (
                found_end
                if isinstance(found_end, OrchError)
                else Unreachable(
                    f"{self.host}: the agent ended" + (f": {said}" if said else ""), host=self.host
                )
            )
        self.fail(error)

    def _write_forever(self) -> None:
        try:
            while (data := self._outbox.get()) is not None:
                for start in range(0, len(data), SEND_CHUNK_BYTES):
                    self.stream.send(data[start : start + SEND_CHUNK_BYTES])
                    if len(data) > SEND_CHUNK_BYTES:
                        self._moved()  # a long upload is alive although nothing comes back
        except Exception as exc:  # the reader knows better why; this is for the case that it does not
            self.fail(
                Unreachable(
                    f"{self.host}: the link was dropped ({str(exc) or type(exc).__name__})", host=self.host
                )
            )

    def _drain_stderr(self) -> None:
        with contextlib.suppress(Exception):
            while data := self.stream.recv_stderr(4096):
                self._stderr += data
                del self._stderr[:-MAX_STDERR_BYTES]


def fresh(error: OrchError) -> OrchError:
    """A copy to raise, so that several threads do not share one traceback."""
    copy = error.__class__.__new__(error.__class__)
    copy.__dict__.update(error.__dict__)
    copy.args = error.args
    copy.__cause__ = error.__cause__
    return copy
