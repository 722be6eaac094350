"""Collect evidence of failure from interesting lines: which rule a line meets, and whether it shows an end.

Why this file exists: the same words mean an end in an uncaught traceback and nothing in a warning. This part looks at
one line at a time, in order, knows which tracebacks were caught, and keeps a bounded number of findings. Deciding
among them is verdict.py's work.

Must not import anything but the standard library and its siblings; no I/O.
"""

from __future__ import annotations

import re
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

from remote_jobs.logs.lines import Prefix, read_prefix
from remote_jobs.logs.rules import RULES, Rule
from remote_jobs.logs.rules.context import (
    CAUGHT,
    DONE,
    FINITE_RETRY,
    GAVE_UP,
    HARMLESS,
    NOISE,
    SERVER_STOPPED,
    WORK,
)
from remote_jobs.logs.rules.rule import ALWAYS, CATCH_ALL, GENERIC, HARD, NEVER, SYMPTOM, needles_of

TEXT_LIMIT = 2000
"""Characters of a line that rules look at; longer lines keep their start (and end, where messages stand)."""
FINDINGS_KEPT = 400
STALE_ACTIVITY = 12 * WORK
"""So much healthy work behind an error shows that the program got over it."""

TRIGGERS = (
    b"error", b"exception", b"fail", b"traceback", b"gmentation", b"segfault", b"fatal", b"kill", b"sig", b"abort",
    b"of memory", b"no space", b"denied", b"refused", b"timed out", b"timeout", b"cannot", b"could", b"n't", b"unable",
    b"invalid", b"nvrm", b"no such", b"unrecognized", b"cancel", b"quota", b"interrupt", b"terminat", b"died", b"assert",
    b"nan", b"hangup", b"exit", b"in use", b"not found", b"panic", b"complete", b"finished", b"shut", b"is lost",
    b"evicted", b"success", b"watchdog", b"closed by", b"illegal", b"fit` stopped", b"final validation", b"view run",
    b"all done", b"extracted ", b"preempt", b"duplicate gpu", b"process down", b"scale-out", b"row remap", b"system not y",
    b"bus err", b"floating point", b"disconnect", b"train_runtime",
)
"""Lower-case texts, one of which every line of interest contains; the test suite holds the table to it."""

_EXCEPTION_LINE = re.compile(
    r"(?:[A-Za-z_]\w*\.)*(?:Exception|[A-Z]\w*(?:Error|Exception|Interrupt|Failure|Fault|Died|Timeout|Exit|Expired|Empty|Full|Again|NotFound|Invalid|NotAvailable|OutOfResources))(?:\([^)]*\))?(?::|\s*$)"
)
_ANY_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:: |:?$)")
_WHAT = re.compile(r"^\s*what\(\):\s+")
_REQUEST_SOURCE = re.compile(r"\[(?:[\w/-]*/)?(?:serving\w*|preprocess|chat_utils|protocol|serve/\w+|openai/\w+|logger|middleware)(?:/\w+)*\.py:\d+\]")
_TRACEBACK = "Traceback (most recent call last)"
_LOW = frozenset({"DEBUG", "INFO", "WARNING"})
_HIGH = frozenset({"ERROR", "CRITICAL", "FATAL"})
_LOUD = re.compile(r"\W{0,4}(?:fatal|critical|error|an error occurred)\b(?! ?level)", re.IGNORECASE)
_NAN_METRIC = re.compile(r"['\"]?\b(?:loss|train_loss|lm loss|grad_norm|train/loss)['\"]?\s*[:=]\s*['\"]?nan\b", re.IGNORECASE)
_CONTEXT_LINES = 6
MESSAGE_LINES = 8
"""An exception's message may go on over so many lines (pydantic, CUDA, Ray)."""


class _Compiled(NamedTuple):
    rule: Rule
    needles: Tuple[str, ...]
    search: "re.Pattern[str]"


_RULES = [_Compiled(rule, needles_of(rule.pattern), rule.compiled()) for rule in RULES]


class _Reading(NamedTuple):
    """Everything that a line's body says by itself."""

    rule: Optional[Rule]
    done: bool
    stopped: bool
    caught: bool
    nan: bool
    noise: bool
    goes_on: bool
    exception: bool


_LONG_NUMBERS = re.compile(r"\d{4,}")
_READINGS: Dict[str, _Reading] = {}
_READINGS_KEPT = 2048


def read_body(body: str) -> _Reading:
    """Read a line's body; lines that differ in long numbers only (ids, times, sizes) are read once."""
    key = _LONG_NUMBERS.sub("0000", body)
    reading = _READINGS.get(key)
    if reading is None:
        if len(_READINGS) >= _READINGS_KEPT:
            _READINGS.clear()
        exception = _EXCEPTION_LINE.match(body) is not None
        reading = _READINGS[key] = _Reading(
            None if HARMLESS.search(body) else match_rule(body),
            DONE.search(body) is not None,
            SERVER_STOPPED.search(body) is not None,
            CAUGHT.search(body) is not None,
            _NAN_METRIC.search(body) is not None,
            not exception and NOISE.search(body) is not None,
            not exception and FINITE_RETRY.search(body) is not None and GAVE_UP.search(body) is None,
            exception,
        )
    return reading


class Finding(NamedTuple):
    """A line that meets a rule. ``ends`` says whether it shows that a process ended."""

    rule: Rule
    line: int
    text: str
    ends: bool
    handled: bool  # in a caught traceback, or the program said that it goes on
    clean: bool  # an exception line of its own, not a piece of scrambled or quoted text
    worker: Optional[str]
    pid: Optional[int]
    activity: int  # healthy work counted up to here
    loud: bool = False  # logged as an error, or starts with that word


class _Writer:
    """What one process is in the middle of printing."""

    __slots__ = ("caught_at", "in_traceback", "message_caught", "message_until", "traceback_caught", "traceback_line")

    def __init__(self) -> None:
        self.caught_at = -1000
        self.in_traceback = False
        self.message_until = -1  # an exception's message may go on for some lines
        self.message_caught = False
        self.traceback_caught = False
        self.traceback_line = 0


def match_rule(body: str) -> Optional[Rule]:
    """The rule that speaks for a line: specific ones by rank, then wrappers, then exceptions known by type only."""
    low = body.lower()
    best: Optional[Rule] = None
    best_key = (9, 0)
    for entry in _RULES:
        rule = entry.rule
        key = (1 if GENERIC <= rule.rank <= CATCH_ALL else 0, rule.rank)
        if best is not None and key >= best_key:
            continue
        for needle in entry.needles:
            if needle in low:
                break
        else:
            continue
        if entry.search.search(body) is not None:
            best, best_key = rule, key
    return best


class EvidenceCollector:
    """Feed interesting lines in order; ask for the findings at the end. Memory is bounded."""

    def __init__(self) -> None:
        self.findings: List[Finding] = []
        self.done_line: Optional[int] = None
        self.stopped_line: Optional[int] = None
        self.first_nan_line: Optional[int] = None
        self.counts: Dict[str, int] = {}
        self.dense = 0
        self._writers: Dict[Tuple[Optional[str], Optional[int]], _Writer] = {}
        self._last_caught = -1000
        self._seen: Dict[Tuple[str, bool, str], int] = {}

    def take(self, text: str, line: int, activity: Callable[[], int], prefix: Optional[Prefix] = None) -> None:
        """Look at one line (without colours).

        Args:
            text: the line or segment; only its first TEXT_LIMIT characters and its end are read.
            line: its number.
            activity: asked for the healthy work so far (bar advances, answered requests, metric lines) when needed.
            prefix: the prefix of the line's first segment, where this segment has none.
        """
        if len(text) > TEXT_LIMIT:
            text = text[: TEXT_LIMIT - 500] + " ... " + text[-495:]
        own = read_prefix(text)
        worker, pid = own.worker, own.pid
        if prefix is not None and worker is None:
            worker, pid = prefix.worker, prefix.pid
        body = text[own.size :]
        writer = self._writer(worker, pid)
        if self.dense:
            self.dense -= 1
        if not body or body.isspace():
            return
        if _TRACEBACK in body:
            self._open_traceback(writer, own, text, body, line)
            return
        indented = body[0] in " \t|\u2502^~"
        if indented and writer.in_traceback and "rror" not in body:
            return  # frames and quoted source
        reading = read_body(body)
        if reading.caught:
            writer.caught_at = self._last_caught = line
        if self._note_markers(reading, body, line):
            return
        ending = writer.in_traceback and not indented and self._closes(body)
        caught = ending and writer.traceback_caught
        if writer.in_traceback and not ending and line - writer.traceback_line > 400:
            writer.in_traceback = False
        message = not ending and line <= writer.message_until
        if ending:
            writer.in_traceback = False
            writer.message_until = line + MESSAGE_LINES
            writer.message_caught = caught
        if message:
            caught = writer.message_caught
        if reading.rule is None or (reading.noise and not ending and not message):
            return
        self._add(reading, reading.rule, own, text, body, line, activity(), ending=ending, caught=caught, message=message, worker=worker, pid=pid)

    def _writer(self, worker: Optional[str], pid: Optional[int]) -> _Writer:
        key = (worker, pid)
        writer = self._writers.get(key)
        if writer is None:
            if len(self._writers) >= 256:
                self._writers.clear()
            writer = self._writers[key] = _Writer()
        return writer

    def _open_traceback(self, writer: _Writer, own: Prefix, text: str, body: str, line: int) -> None:
        before = body[: body.index(_TRACEBACK)]
        continued = writer.in_traceback  # "During handling of the above exception ..."
        writer.traceback_caught = (
            own.level in _LOW
            or line - writer.caught_at <= _CONTEXT_LINES
            or line - self._last_caught <= 2
            or bool(_REQUEST_SOURCE.search(text[:160]))
            or bool(CAUGHT.search(before))
            or (continued and writer.traceback_caught)
        )
        writer.in_traceback = True
        writer.traceback_line = line
        self.dense = 80

    @staticmethod
    def _closes(body: str) -> bool:
        """The unindented line behind a traceback's frames."""
        if body.startswith(("During handling", "The above exception", "[Previous line", "File ")):
            return False
        return bool(_EXCEPTION_LINE.match(body) or _ANY_EXCEPTION.match(body))

    def _note_markers(self, reading: _Reading, body: str, line: int) -> bool:
        if reading.done:
            self.done_line = line
            return True
        if reading.stopped:
            if self.stopped_line is None:
                self.stopped_line = line
            return "rror" not in body
        if reading.nan:
            if self.first_nan_line is None:
                self.first_nan_line = line
            return True
        return False

    def _add(
        self,
        reading: _Reading,
        rule: Rule,
        own: Prefix,
        text: str,
        body: str,
        line: int,
        activity: int,
        *,
        ending: bool,
        caught: bool,
        message: bool,
        worker: Optional[str],
        pid: Optional[int],
    ) -> None:
        clean = rule.shows_end == ALWAYS or reading.exception or (ending and bool(_ANY_EXCEPTION.match(body)))
        handled = caught or bool(_REQUEST_SOURCE.search(text[:160])) or (reading.goes_on and rule.rank != HARD)
        if own.level in _LOW and rule.rank != HARD and rule.shows_end != NEVER and not rule.cut_short:
            handled = True
        ends = False
        if not handled:
            if rule.shows_end == ALWAYS:
                ends = True
            elif rule.shows_end != NEVER:
                ends = clean or ending or bool(_WHAT.match(body)) or (message and rule.rank < SYMPTOM)
        loud = own.level in _HIGH or _LOUD.match(body) is not None
        self.counts[rule.id] = self.counts.get(rule.id, 0) + 1
        if self.findings and ends and activity - self._last_activity() > STALE_ACTIVITY:
            self._forget_recovered(activity)
        key = (rule.id, ends, body.strip()[:60] if rule.rank >= GENERIC else "")
        if len(self._seen) > 4096:
            self._seen.clear()
        seen = self._seen.get(key, 0)
        self._seen[key] = seen + 1
        finding = Finding(rule, line, text.rstrip("\r\n"), ends, handled, clean, worker, pid, activity, loud)
        if seen < 6 and len(self.findings) < FINDINGS_KEPT:
            self.findings.append(finding)
        else:
            self._replace_last(finding)

    def _replace_last(self, finding: Finding) -> None:
        """Keep the newest of a rule beside its first ones, in order."""
        for at in range(len(self.findings) - 1, -1, -1):
            old = self.findings[at]
            if old.rule is finding.rule and old.ends == finding.ends:
                del self.findings[at]
                self.findings.append(finding)
                return

    def _last_activity(self) -> int:
        for finding in reversed(self.findings):
            if finding.ends:
                return finding.activity
        return self.findings[0].activity

    def _forget_recovered(self, activity: int) -> None:
        self.findings = [
            old for old in self.findings if old.rule.rank == HARD or activity - old.activity <= STALE_ACTIVITY
        ]
        self._seen.clear()
