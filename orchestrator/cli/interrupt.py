"""Ctrl-C of the program: while it starts, it just ends; later it is `KeyboardInterrupt` as ever, wherever it comes.

Why: for the first tenths of a second Python does nothing but import, and an interrupted import ends in a traceback, or in
none and the key press is lost (importlib runs callbacks whose exceptions Python prints and drops).
Must import nothing that `orch --help` does not need: `signal` would bring enum along, milliseconds of every start.
"""

from __future__ import annotations

import os
import time
from _signal import SIGINT, getsignal, signal  # type: ignore[import-not-found]
from _thread import interrupt_main, start_new_thread

INTERRUPTED = 130


def install() -> None:
    """Take Ctrl-C over; until `started` it ends the process without a word."""
    signal(SIGINT, _leave)


def started() -> None:
    """From now on there is something to clean up and to say. Where nothing was installed nothing changes."""
    if getsignal(SIGINT) is _leave:
        signal(SIGINT, _interrupted)


def _leave(_number: int, _frame: object) -> None:
    os._exit(INTERRUPTED)


def _interrupted(_number: int, frame: object) -> None:
    code = getattr(frame, "f_code", None)
    if code is not None and code.co_name == "cb" and "importlib" in code.co_filename:
        start_new_thread(_again, ())  # what is raised here would be lost
        return
    raise KeyboardInterrupt


def _again() -> None:
    time.sleep(0.005)
    interrupt_main()
