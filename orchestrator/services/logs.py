"""The bytes of an attempt's log, by (inode, offset): a broken link loses none and repeats none.

The log never travels whole for its end: ``tail`` asks for a window at the end and widens it only as far as needed.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator.core.answers import HINT
from orchestrator.core.errors import ProtocolError, UsageError
from orchestrator.core.numbers import check_whole
from orchestrator.core.schema import suggest
from orchestrator.core.states import OVER
from orchestrator.services.look import HostLook, look, remember
from orchestrator.services.pace import Pace
from orchestrator.services.resolve import FoundJob
from orchestrator.services.views import interesting_step
from orchestrator.services.wait import NOT_LAUNCHED, first_line, the_job, worth_waiting

if TYPE_CHECKING:
    from orchestrator.services.session import Session

CHUNK_BYTES = 256 * 1024
FIRST_WINDOW_BYTES = 64 * 1024
BYTES_PER_LINE = 400
"""A tail of N lines never asks for more than this times N (or 256 KiB): one endless line must not travel whole."""
MAX_TAIL_BYTES = 64 * 1024 * 1024
QUIET_S = (0.25, 2.0)
"""Wait between looks while following: from, doubling to."""


@dataclass
class LogChunk:
    """Bytes of the log, and a word about them for people."""

    data: bytes = b""
    note: str | None = None


@dataclass
class _Position:
    step: str
    attempt: int
    inode: int = 0
    offset: int = 0

    def cursor(self, job: str, max_bytes: int = CHUNK_BYTES) -> dict[str, Any]:
        return {
            "job": job,
            "step": self.step,
            "attempt": self.attempt,
            "inode": self.inode,
            "offset": self.offset,
            "tail_bytes": 0,
            "max_bytes": max_bytes,
        }


@dataclass
class _Link:
    """Looks at one job that go on through a broken link."""

    session: Session
    job: FoundJob
    pace: Pace
    met: bool = False
    away: bool = False
    notes: list[str] = field(default_factory=list)

    def ask(self, **request: Any) -> tuple[dict[str, Any], HostLook]:
        """The job's view and the look, however often the link breaks.

        Raises:
            HostError: first contact failed, or the host refuses us.
            JobLost: no such job.
        """
        while True:
            result = look(self.session, self.job.host, jobs=[self.job.id], **request)
            if result.error is None:
                if self.away:
                    self.notes.append(f"orch: {self.job.host} answers again")
                self.met, self.away = True, False
                return the_job(result.jobs, self.job, (result.answer or {}).get("unreadable") or {}), result
            if not self.met or not worth_waiting(result.error, met=True):
                raise result.error
            if not self.away:
                self.session.say(
                    f"orch: the link to {self.job.host} broke ({first_line(result.error)}); trying again"
                )
            self.away = True
            time.sleep(self.pace.after_error())


def read_log(
    session: Session,
    job: FoundJob,
    *,
    step: str | None = None,
    attempt: int | None = None,
    tail: int | None = None,
    follow: bool = False,
) -> Iterator[LogChunk]:
    """Chunks of a log: whole, or its last ``tail`` lines; with ``follow`` on and on, through later attempts.

    Raises:
        UsageError: no such step or attempt, or nothing was started yet and ``follow`` was not asked; ``tail`` below 0.
    """
    for what, number, least in (("attempt", attempt, 1), ("tail", tail, 0)):
        if number is not None:
            check_whole(what, number, least)
    link = _Link(session, job, Pace(session, job.host))
    view, _ = link.ask()
    remember(session, [view])
    position = _start(view, step, attempt)
    looked_again = told = False
    while position is None:
        # At the first look it may be a supervisor that is just being started.
        unfinished = bool(view["unfinished"])
        if (not follow and (looked_again or not unfinished)) or view["state"] in OVER:
            what = f"step {step} of job {job.id} was not started" if step else f"job {job.id} has no log"
            over = view["state"] in OVER
            hint = f"see: orch status {job.id}" if over else f"follow it with: orch logs -f {job.id}"
            raise UsageError(
                f"{what} (the job is {view['state']})", NOT_LAUNCHED.format(job.id) if unfinished else hint
            )
        if unfinished and looked_again and not told:
            told = True
            session.say(f"orch: {NOT_LAUNCHED.format(job.id)}; waiting for it")
        looked_again = True
        view, _ = link.ask(seen={job.id: view["seq"]}, wait_s=link.pace.after([view], changed=False))
        position = _start(view, step, attempt)
    if step is None and len(view["steps"]) > 1:
        others = ", ".join(str(item["name"]) for item in view["steps"] if item["name"] != position.step)
        yield LogChunk(
            note=f"orch: log of step {position.step}, attempt {position.attempt} (others: {others})"
        )
    if tail is not None:
        yield from _tail(link, position, tail)
    while True:
        yield from _drain(link, position, follow=follow, alone=attempt is not None)
        if not follow or attempt is not None:
            return
        following = _next(link, position, None if step is None else position.step)
        if following is None:
            return
        position = following
        yield LogChunk(note=f"orch: now step {position.step}, attempt {position.attempt}")


def _steps(view: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(view.get("steps") or [])


def _start(view: Mapping[str, Any], step: str | None, attempt: int | None) -> _Position | None:
    """The log to begin with; None while nothing was started."""
    steps = _steps(view)
    chosen = interesting_step(steps)
    if step is not None and (steps or not view["unfinished"]):  # before its plan has come, it may have any step
        named = [item for item in steps if item["name"] == step]
        named = named or [item for item in steps if (item.get("part") or {}).get("of") == step]
        if not named:
            names = [str(item["name"]) for item in steps]
            raise UsageError(f"job {view['id']} has no step {step!r}", suggest(step, names, "its steps"))
        chosen = interesting_step(named) or named[0]
    if chosen is None:
        return None
    numbers = [int(item["n"]) for item in chosen.get("attempts") or []]
    if attempt is not None and attempt not in numbers and (numbers or view["state"] in OVER):
        had = f"it had {len(numbers)}" if numbers else "none was started"
        raise UsageError(f"step {chosen['name']} of job {view['id']} has no attempt {attempt}: {had}")
    if not numbers:
        return None
    return _Position(str(chosen["name"]), attempt or numbers[-1])


def _answer(result: HostLook, position: _Position) -> Mapping[str, Any]:
    for item in (result.answer or {}).get("logs") or []:
        if item.get("step") == position.step:
            return dict(item)
    return {"missing": True}


def _tail(link: _Link, position: _Position, lines: int) -> Iterator[LogChunk]:
    """The last lines; moves the position to the end of what was read."""
    limit = min(MAX_TAIL_BYTES, max(256 * 1024, lines * BYTES_PER_LINE))
    window = min(FIRST_WINDOW_BYTES, limit)
    while True:
        cursor = {**position.cursor(link.job.id, window), "offset": -1, "tail_bytes": window}
        _, result = link.ask(logs=[cursor])
        answer = _answer(result, position)
        if answer.get("missing"):
            return
        data, start, size = _data(answer), int(answer["offset"]), int(answer["size"])
        position.inode, position.offset = int(answer["inode"]), int(answer["end"])
        while position.offset < size:
            _, result = link.ask(logs=[position.cursor(link.job.id)])
            more = _answer(result, position)
            if more.get("missing") or int(more["end"]) <= position.offset:
                break
            data += _data(more)
            position.inode, position.offset = int(more["inode"]), int(more["end"])
        if start == 0 or data.count(b"\n", 0, len(data) - 1) >= lines or window >= limit:
            break
        window = min(window * 4, limit)
    yield LogChunk(last_lines(data, lines, whole=start == 0))


def last_lines(data: bytes, lines: int, *, whole: bool) -> bytes:
    """The last lines of a window of a log; an unfinished last line counts as one.

    Without ``whole`` the window starts inside a line, which is shown only when there is nothing better.
    """
    if lines == 0:
        return b""
    at = len(data) - 1 if data.endswith(b"\n") else len(data)
    for _ in range(lines):
        at = data.rfind(b"\n", 0, at)
        if at < 0:
            first = data.find(b"\n") + 1
            return data if whole or not first or first == len(data) else data[first:]
    return data[at + 1 :]


def _data(answer: Mapping[str, Any]) -> bytes:
    return base64.b64decode(answer.get("data_b64") or "")


def _drain(link: _Link, position: _Position, *, follow: bool, alone: bool) -> Iterator[LogChunk]:
    """Read to the end of the log; with ``follow`` until the attempt has ended and nothing is left."""
    wait_s, quiet = 0.0, QUIET_S[0]
    while True:
        view, result = link.ask(logs=[position.cursor(link.job.id)], wait_s=wait_s)
        while link.notes:
            yield LogChunk(note=link.notes.pop(0))
        answer = _answer(result, position)
        if answer.get("missing"):
            if not follow or _over(view, position, alone=alone):
                if not follow and position.offset == 0:
                    raise UsageError(
                        f"step {position.step}, attempt {position.attempt}: the log is not there"
                    )
                return
            data, caught_up = b"", True
        else:
            data, caught_up = _data(answer), bool(answer.get("caught_up"))
            if answer["end"] <= position.offset and not (caught_up or answer.get("rotated")):
                raise ProtocolError(f"{link.job.host}: its log of step {position.step} goes backwards", HINT)
            if answer.get("rotated") and position.inode:
                yield LogChunk(
                    note="orch: the log was replaced or truncated on the host; going on with the new one"
                )
            skipped = int(answer.get("skipped_bytes") or 0)
            if skipped:
                yield LogChunk(
                    note=f"orch: {skipped} bytes are not in the log (its middle was cut, or never asked for)"
                )
            position.inode, position.offset = int(answer["inode"]), int(answer["end"])
        if data:
            yield LogChunk(data)
        if caught_up:
            if not follow or _over(view, position, alone=alone):
                return
            quiet = QUIET_S[0] if data else min(quiet * 2, QUIET_S[1])
            wait_s = quiet
            if not answer.get("held"):
                time.sleep(quiet)
                wait_s = 0.0
        else:
            wait_s = 0.0


def _over(view: Mapping[str, Any], position: _Position, *, alone: bool) -> bool:
    """True when nothing more will be written to this log."""
    if view["state"] in OVER:
        return True
    for step in _steps(view):
        if step["name"] == position.step:
            for attempt in step.get("attempts") or []:
                if attempt.get("n") == position.attempt:
                    return attempt.get("ended_at") is not None
    return alone


def _next(link: _Link, position: _Position, only_step: str | None) -> _Position | None:
    """The log that follows: the step's next attempt, or the next step's; None when the job is over."""
    view, _ = link.ask()
    while True:
        found = _following(view, position, only_step)
        if found is not None:
            return found
        steps = {step["name"]: step for step in _steps(view)}
        if view["state"] in OVER:
            return None
        if only_step is not None and steps[position.step]["state"] in {
            "succeeded",
            "failed",
            "stopped",
            "skipped",
        }:
            return None
        seq = view["seq"]
        view, _ = link.ask(seen={link.job.id: seq}, wait_s=link.pace.after([view], changed=False))


def _following(view: Mapping[str, Any], position: _Position, only_step: str | None) -> _Position | None:
    steps = _steps(view)
    ended_at = ""
    for step in steps:
        if step["name"] == position.step:
            for attempt in step.get("attempts") or []:
                if int(attempt["n"]) > position.attempt:
                    return _Position(position.step, int(attempt["n"]))
                if attempt["n"] == position.attempt:
                    ended_at = str(attempt.get("ended_at") or "")
    if only_step is not None:
        return None
    later = [
        (str(attempt["started_at"]), step["name"], int(attempt["n"]))
        for step in steps
        for attempt in step.get("attempts") or []
        if step["name"] != position.step
        and not step.get("service")
        and str(attempt.get("started_at")) >= ended_at
    ]
    if not later:
        return None
    _, name, number = min(later)
    return _Position(str(name), number)
