"""Questions to the person at the terminal: passwords, one-time codes, key passphrases.

Rules: never when stdin is not a terminal (a clear error instead); a password or passphrase is asked once and kept in
memory for reconnects; a one-time code is never reused.  The connecting thread hands its question to the thread that
waits for it (usually the main one), so that Ctrl-C works and the terminal's echo is always restored.

Must not import fabric or paramiko.
"""

from __future__ import annotations

import getpass
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

ANSWER_WITHIN_S = 120.0
"""sshd's LoginGraceTime: later answers come too late anyway."""

T = TypeVar("T")


class NoTerminal(Exception):
    """There is nobody to ask."""


class Ask(Protocol):
    """Puts a question to a person."""

    def __call__(self, text: str, *, secret: bool) -> str:
        """The answer; raises NoTerminal when there is nobody."""


class Prompter(Protocol):
    """Asks a person."""

    def ask(self, text: str, *, secret: bool) -> str:
        """Show ``text`` and return the answer, not echoed when ``secret``.

        Raises:
            NoTerminal: nobody is there, or the person ended the input.
        """


class TerminalPrompter:
    """Asks on the terminal; one question at a time, whatever the number of hosts that connect."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def ask(self, text: str, *, secret: bool) -> str:
        """See `Prompter.ask`; the question goes to the terminal or stderr, never to stdout."""
        if sys.stdin is None or not sys.stdin.isatty():
            raise NoTerminal("stdin is not a terminal")
        with self._lock:
            try:
                if secret:
                    return getpass.getpass(text)
                sys.stderr.write(text)
                sys.stderr.flush()
                line = sys.stdin.readline()
            except EOFError:
                line = ""
            if not line:
                raise NoTerminal("the input ended")
            return line.rstrip("\n")


@dataclass
class _Question:
    text: str
    secret: bool
    answer: str | None = None
    error: NoTerminal | None = None
    done: bool = False


class Meeting(Generic[T]):
    """Where a working thread and the threads that wait for its result meet; questions go one way, answers the other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._questions: deque[_Question] = deque()
        self._result: T | None = None
        self._error: BaseException | None = None
        self.done = False

    # ---- the working thread

    def ask(self, text: str, *, secret: bool) -> str:
        """Put a question to whoever waits; blocks until answered.

        Raises:
            NoTerminal: nobody waits, nobody is there, or the answer took too long.
        """
        question = _Question(text, secret)
        with self._changed:
            self._questions.append(question)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: question.done, ANSWER_WITHIN_S):
                raise NoTerminal(f"no answer within {ANSWER_WITHIN_S:g} s")
        if question.error:
            raise question.error
        return question.answer or ""

    def finish(self, result: T) -> None:
        """The work is done."""
        with self._changed:
            self._result, self.done = result, True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """The work failed; every waiting thread raises ``error``."""
        with self._changed:
            self._error, self.done = error, True
            self._changed.notify_all()

    # ---- the waiting threads

    def wait(self, timeout_s: float, prompter: Prompter) -> tuple[T | None, float]:
        """The result (None after ``timeout_s``), and the seconds that a person took to answer: those do not count.

        Raises:
            BaseException: what the working thread failed with.
        """
        deadline, asked_s = time.monotonic() + timeout_s, 0.0
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self.done or self._questions, max(0.0, deadline - time.monotonic())
                )
                if self.done:
                    break
                if not self._questions:
                    return None, asked_s
                question = self._questions.popleft()
            asked_at = time.monotonic()
            try:
                question.answer = prompter.ask(question.text, secret=question.secret)
            except NoTerminal as error:
                question.error = error
            except BaseException:
                question.error = NoTerminal("interrupted")
                raise
            finally:
                with self._changed:
                    question.done = True
                    self._changed.notify_all()
            deadline += time.monotonic() - asked_at
            asked_s += time.monotonic() - asked_at
        if self._error:
            raise self._error
        return self._result, asked_s


class Memory:
    """Answers given in this run of orch, by what they are for. Never written anywhere."""

    def __init__(self) -> None:
        self._answers: dict[str, str] = {}
        self._lock = threading.Lock()

    def get(self, key: str) -> str | None:
        """A remembered answer."""
        with self._lock:
            return self._answers.get(key)

    def put(self, key: str, answer: str) -> None:
        """Remember an answer that worked."""
        with self._lock:
            self._answers[key] = answer

    def forget(self, key: str) -> None:
        """The answer did not work (any more)."""
        with self._lock:
            self._answers.pop(key, None)
