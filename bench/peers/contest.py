"""The rounds, the minute, the hole and the death of the controller; one table at the end.

Three rounds of each contestant, alone on the machine but for those that only wait: submit, SIGKILL of the job's main
process, until the controller says that it ended.  Then all at once, since only counters and outcomes are read: a minute of
watching, a black hole of a minute, SIGKILL of every controller process, and a second controller that takes the job up.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.peers.arena import Arena, Drive, alive, until
from bench.peers.contestants import FIELD, Contestant
from bench.peers.environments import NotInstallable
from bench.report import Report
from tests.support.jobdir import kill

ROUNDS = int(os.environ.get("ORCH_BENCH_ROUNDS", "3"))
SETTLE_S = float(os.environ.get("ORCH_BENCH_SETTLE_S", "35"))
MINUTE_S = float(os.environ.get("ORCH_BENCH_MINUTE_S", "60"))
HOLE_S = float(os.environ.get("ORCH_BENCH_HOLE_S", "60"))
ATTACH_S = 150.0
READY_S, SUBMIT_S = 150.0, 120.0
KNOWN_S = 150.0
LONG_PAUSE_S = 60.0
"""Who pauses longer between two looks plays its rounds side by side."""


@dataclass
class Score:
    """What was seen of one contestant; None: not measured."""

    name: str
    submit_s: list[float] = field(default_factory=list)
    known_s: list[float] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)
    connections_per_min: float | None = None
    laptop_cpu_s_per_min: float | None = None
    host_cpu_s_per_min: float | None = None
    black_hole: str | None = None
    controller_death: str | None = None
    missing: str | None = None
    troubles: list[str] = field(default_factory=list)

    @property
    def sigkill(self) -> str:
        """Whether a SIGKILL of the job is told as a failure."""
        kinds = {outcome.split()[0] for outcome in self.outcomes}
        if not kinds:
            return "-"
        if kinds == {"failed"}:
            return "yes"
        if kinds == {"gone"}:
            return "ended, not how"
        if kinds == {"ok"}:
            return "no: success"
        return "/".join(sorted(kinds))


def run(report: Report) -> None:
    """The section of `python -m bench`."""
    names = os.environ.get("ORCH_BENCH_PEERS", "")
    field_ = [one for one in FIELD if not names or any(name in one.slug for name in names.split(","))]
    scores = {one.slug: Score(one.name) for one in field_}
    present = []
    for one in field_:
        try:
            one.python()
            present.append(one)
        except NotInstallable as error:
            scores[one.slug].missing = str(error)
    with Arena() as arena:
        waiting = rounds(arena, present, scores, report)
        with Arena() as other:  # a link of its own: the hole is not for those that still wait
            together(other, present, scores, report)
        for thread in waiting:
            thread.join()
    troubles = [f"{score.name}: {text}" for score in scores.values() for text in score.troubles]
    notes = [f"{one.name}: {one.note}" for one in field_ if one.note]
    report.show("peers", HEAD, [cells(score, scores[field_[0].slug]) for score in scores.values()], [*notes, *troubles],
                [asdict(score) for score in scores.values()])  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- rounds


def rounds(
    arena: Arena, present: Sequence[Contestant], scores: dict[str, Score], report: Report
) -> list[threading.Thread]:
    """Submit and death, ``ROUNDS`` times each; the slow ones in threads of their own, of which some are returned unjoined."""

    def lane(one: Contestant, numbers: Sequence[int]) -> None:
        for number in numbers:
            play(arena, one, number, scores[one.slug])
        report.say(f"   {one.name}: submit {shown(scores[one.slug].submit_s)}, known {shown(scores[one.slug].known_s)}")

    threads, sleepers = [], []
    for one in present:
        arena.host(one)
        if one.pause_s > LONG_PAUSE_S:
            sleepers += [threading.Thread(target=lane, args=(one, [number])) for number in range(ROUNDS)]
        elif one.slower:
            sleepers.append(threading.Thread(target=lane, args=(one, range(ROUNDS))))
        elif one.slow:
            threads.append(threading.Thread(target=lane, args=(one, range(ROUNDS))))
    for thread in [*sleepers, *threads]:
        thread.start()
    for one in present:
        if not one.slow and not one.slower:
            lane(one, range(ROUNDS))
    for thread in threads:
        thread.join()
    return sleepers


def play(arena: Arena, one: Contestant, number: int, score: Score) -> None:
    """One round."""
    name = f"round-{number}"
    drive = Drive(arena, one, name)
    try:
        if not drive.wait("ready", READY_S):
            score.troubles.append(f"not ready: {drive.why()}")
            return
        drive.go()
        asked = drive.wait("submitting", 10)
        if asked is None or not until(lambda: arena.payload(one, name) or drive.process.poll() is not None, SUBMIT_S):
            score.troubles.append(f"the job did not start: {drive.why()}")
            return
        payload = arena.payload(one, name)
        if payload is None:
            score.troubles.append(f"the job did not start: {drive.why()}")
            return
        started, pid = payload
        score.submit_s.append(started - asked[0])
        time.sleep(2.0 + one.pause_s * (number + 0.5) / ROUNDS)  # the death falls anywhere between two polls
        killed = time.time()
        kill(pid)
        ended = drive.wait("ended", KNOWN_S + 2 * one.pause_s)
        if ended is None:
            score.troubles.append(f"death not known after {time.time() - killed:.0f} s: {drive.why()}")
            return
        score.known_s.append(ended[0] - killed)
        score.outcomes.append(ended[1].removeprefix("ended "))
    finally:
        drive.close()


# ------------------------------------------------------------------------------------------------------------ together


def together(arena: Arena, present: Sequence[Contestant], scores: dict[str, Score], report: Report) -> None:
    """A minute of watching, the hole, the controllers' death; everybody at the same time."""
    for one in present:
        arena.host(one)
    drives = {one.slug: Drive(arena, one, "watch") for one in present}
    running: list[tuple[Contestant, int]] = []
    try:
        for one in present:
            drive = drives[one.slug]
            if drive.wait("ready", READY_S):
                drive.go()
        for one in present:
            until(lambda one=one: arena.payload(one, "watch") or drives[one.slug].process.poll() is not None, SUBMIT_S)
            payload = arena.payload(one, "watch")
            if payload:
                running.append((one, payload[1]))
            else:
                scores[one.slug].troubles.append(f"the watched job did not start: {drives[one.slug].why()}")
        report.say(f"   {len(running)} watched; {SETTLE_S:.0f} s until all have settled, then {MINUTE_S:.0f} s are counted")
        time.sleep(SETTLE_S)
        minute(arena, running, scores)
        report.say(f"   a black hole of {HOLE_S:.0f} s")
        hole(arena, running, drives, scores)
        report.say("   every controller is killed, then another takes the job up")
        for one, _ in running:
            arena.end(one, host_too=False)
        time.sleep(3)
        each([lambda one=one, pid=pid: taken_up(arena, one, pid, scores[one.slug]) for one, pid in running])
    finally:
        for drive in drives.values():
            drive.close()


def minute(arena: Arena, running: Sequence[tuple[Contestant, int]], scores: dict[str, Score]) -> None:
    """Connections and CPU of a minute."""
    before = {one.slug: arena.usage(one, pid) for one, pid in running}
    time.sleep(MINUTE_S)
    for one, pid in running:
        first, last, score = before[one.slug], arena.usage(one, pid), scores[one.slug]
        scale = 60 / (last.at - first.at)
        score.connections_per_min = (last.connections - first.connections) * scale
        score.laptop_cpu_s_per_min = (last.laptop_cpu_s - first.laptop_cpu_s) * scale
        score.host_cpu_s_per_min = (last.host_cpu_s - first.host_cpu_s) * scale


def hole(
    arena: Arena, running: Sequence[tuple[Contestant, int]], drives: dict[str, Drive], scores: dict[str, Score]
) -> None:
    """Packets vanish while the jobs go on; whoever says that a job ended is wrong."""
    cut = time.time()
    arena.wan.set(up=0)
    time.sleep(HOLE_S)
    arena.wan.set(up=1)
    time.sleep(25)  # long enough for what was queued or timed out to come forward
    for one, pid in running:
        drive, score = drives[one.slug], scores[one.slug]
        ended = drive.said("ended")
        if not alive(pid):
            score.black_hole = "the job died"
        elif ended and ended[0] < cut:
            score.black_hole = "ended before the hole"
        elif ended and ended[1].split()[1] == "gave-up":
            score.black_hole = f"gives up after {ended[0] - cut:.0f} s"
            score.troubles.append(f"in the hole: {ended[1]}")
        elif ended:
            score.black_hole = f"yes, after {ended[0] - cut:.0f} s"
            score.troubles.append(f"in the hole: {ended[1]}")
        elif drive.process.poll() is not None:
            score.black_hole = f"crashed: {drive.why()}"
        else:
            score.black_hole = "no"


def taken_up(arena: Arena, one: Contestant, pid: int, score: Score) -> None:
    """Does the job live after its controller; does another controller learn of its end?"""
    if not alive(pid):
        score.controller_death = "no: the job dies too"
        return
    seldom = one.pause_s > LONG_PAUSE_S
    if seldom:  # its first look is the one that counts
        kill(pid)
    drive = Drive(arena, one, "watch", "attach")
    try:
        first = None if seldom else drive.wait("ended", 12)  # whatever is said now is said of a job that runs
        if first or (not seldom and drive.process.poll() is not None):
            score.controller_death = "job yes, watching no"
            score.troubles.append(f"taking up: {first[1] if first else drive.why()}")
            return
        kill(pid)
        ended = drive.wait("ended", ATTACH_S)
        knows = ended is not None and "gave-up" not in ended[1]
        score.controller_death = "yes" if knows else "job yes, watching no"
        if ended and not knows:
            score.troubles.append(f"taking up: {ended[1]}")
        elif ended is None:
            score.troubles.append(f"taking up: its end was not known after {ATTACH_S:.0f} s: {drive.why()}")
    finally:
        drive.close()


def each(calls: Sequence[Callable[[], None]]) -> None:
    """All at the same time."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# --------------------------------------------------------------------------------------------------------------- table

HEAD = [
    "", "submit -> running", "death -> known", "connections/min", "laptop CPU s/min", "host CPU s/min",
    "survives controller death", "SIGKILL noticed", 'false "dead" in a 60 s hole',
]  # fmt: skip


def shown(values: Sequence[float]) -> str:
    """Median and range."""
    if not values:
        return "-"
    middle = f"{statistics.median(values):.2f} s"
    return middle if len(values) == 1 else f"{middle} ({min(values):.2f}..{max(values):.2f})"


def cells(score: Score, ours: Score) -> list[str]:
    """A line of the table; ratios are to the first contestant, which is orch."""
    if score.missing:
        return [score.name, f"not installed: {score.missing}", *[""] * (len(HEAD) - 2)]

    def timed(values: Sequence[float], first: Sequence[float]) -> str:
        if not values or not first or values is first:
            return shown(values)
        return f"{shown(values)} = {statistics.median(values) / statistics.median(first):.3g} x"

    def number(value: Any) -> str:
        return "-" if value is None else f"{value:.2f}"

    return [
        score.name, timed(score.submit_s, ours.submit_s), timed(score.known_s, ours.known_s),
        number(score.connections_per_min), number(score.laptop_cpu_s_per_min), number(score.host_cpu_s_per_min),
        score.controller_death or "-", score.sigkill, score.black_hole or "-",
    ]  # fmt: skip
