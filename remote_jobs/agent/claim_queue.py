"""The queue for GPUs: who is served next and what somebody waits for, decided from the tickets alone.

Pure: no locks, no files, no clock; those are in claims.py.  Standard library only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Set, Tuple, Union

from remote_jobs.agent.spans import spans


@dataclass
class Ticket:
    """One waiter's or holder's record. `wants` lists the GPUs it could use, `count` how many it needs."""

    number: int
    job: str
    step: str
    user: str
    count: int
    wants: List[int]
    held: List[int]
    since: float
    """Wall clock, seconds."""
    pid: int
    path: str = ""

    def row(self) -> Dict[str, object]:
        """What a status shows of it."""
        return {"job": self.job, "step": self.step, "user": self.user, "since": self.since}

    def label(self, reader: str) -> str:
        """For people: `job X`, and whose it is unless it is the reader's own."""
        return "job {}".format(self.job) if self.user == reader else "job {} of {}".format(self.job, self.user)


def choose(mine: Ticket, tickets: Sequence[Ticket], free: Set[int]) -> Optional[List[int]]:
    """GPUs that this ticket may take now, or None: those before it in the queue are served first.

    An older waiter that could be served now gets the lowest free ones; one that cannot keeps all it could use, so
    that a stream of small jobs never starves a large one.
    """
    # A holder's record counts as well: a cleaner may have taken the lock file's name away.
    left = set(free) - {index for other in tickets for index in other.held}
    for other in sorted(tickets, key=lambda t: t.number):
        if other.number >= mine.number or other.held:
            continue
        could = sorted(left & set(other.wants))
        left -= set(could[: other.count]) if len(could) >= other.count else set(other.wants)
    mine_now = sorted(left & set(mine.wants))
    return mine_now[: mine.count] if len(mine_now) >= mine.count else None


def waiting_for(mine: Ticket, tickets: Sequence[Ticket], free: Set[int]) -> str:
    """One line: which GPU is held by whom, or who stands before us."""
    holders: Dict[str, List[int]] = {}
    for other in tickets:
        for index in other.held:
            if index in mine.wants:
                holders.setdefault(other.label(mine.user), []).append(index)
    named = {index for indices in holders.values() for index in indices}
    unnamed = [index for index in mine.wants if index not in free and index not in named]
    parts = ["gpu {} held by {}".format(",".join(spans(sorted(i))), who) for who, i in sorted(holders.items())]
    if unnamed:
        parts.append("gpu {} held by an unnamed process".format(",".join(spans(unnamed))))
    ahead = [t for t in tickets if t.number < mine.number and not t.held and set(t.wants) & set(mine.wants)]
    if ahead:
        parts.append(
            "{} in the queue before it ({})".format(len(ahead), ", ".join(t.label(mine.user) for t in ahead[:3]))
        )
    return "; ".join(parts) or "gpus are being handed over"


def wanted(gpus: Union[int, Sequence[int]], host_gpus: Optional[int]) -> Tuple[List[int], int]:
    """(indices, how many of them): of a number, any of the host's; of indices, exactly those.

    Raises:
        ValueError: more than the host has.
    """
    if not isinstance(gpus, int):
        wants = sorted(set(gpus))
        return wants, len(wants)
    total = gpus if host_gpus is None else host_gpus
    if gpus > total:
        raise ValueError(
            "asks for {} GPUs, the host has {}: lower `gpus` or use another host".format(gpus, total)
        )
    return list(range(total)), gpus




def number_of(name: str) -> int:
    """The number in a ticket file's name; 0 when there is none."""
    part = name.split("-")[1]
    return int(part) if part.isdigit() else 0


def dump(ticket: Ticket) -> bytes:
    """What a ticket file holds."""
    record = {key: value for key, value in vars(ticket).items() if key != "path"}
    return json.dumps(record).encode("utf-8")


def parse(data: bytes, name: str, path: str) -> Optional[Ticket]:
    """A ticket, which another user wrote: anything may be in it."""
    try:
        record = json.loads(data.decode("utf-8"))
        return Ticket(
            number=number_of(name),
            job=str(record["job"])[:200],
            step=str(record["step"])[:200],
            user=str(record["user"])[:64],
            count=max(0, int(record["count"])),
            wants=[int(i) for i in record["wants"]][:1024],
            held=[int(i) for i in record["held"]][:1024],
            since=float(record["since"]),
            pid=int(record["pid"]),
            path=path,
        )
    except (ValueError, KeyError, TypeError):
        return None
