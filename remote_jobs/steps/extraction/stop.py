"""SIGTERM and SIGINT: the file in hand is finished, then the run ends with 128 + signal. A second signal ends it at once."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Interrupted(BaseException):
    """The run was told to stop. Not an Exception, so that no library swallows it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number
        self.exit_status = 128 + number


class StopSignal:
    """Remembers a stop request; raises it at once only where nothing is half-written (`raising`)."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._raise_now = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Take over SIGTERM and SIGINT while inside; only in the main thread."""
        former = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        again = self.number is not None
        self.number = number
        if self._raise_now or again:
            self._raise_now = False
            raise Interrupted(number)

    def check(self) -> None:
        """Raise when a stop was asked for."""
        if self.number is not None:
            raise Interrupted(self.number)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """While inside, a signal interrupts at once: for loads and forward passes, which write nothing."""
        self._raise_now = True  # first, so that no signal falls between the check and the flag
        try:
            self.check()
            yield
        finally:
            self._raise_now = False
