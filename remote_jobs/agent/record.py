"""A job's record as its supervisor writes it: events.jsonl, state.json and result.json, in spite of a full disk.

Events come first: they are on disk before they are acted on or told, and everything else can be made again from them.
A reserve file, given up when the disk is full, keeps room for the last of them.  Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import Any, Dict, List, Mapping, Optional, Sequence

from remote_jobs import protocol
from remote_jobs.agent import procs
from remote_jobs.agent.attempt import utc_now
from remote_jobs.agent.fold import Fold
from remote_jobs.agent.jobdir import EventLog, JobDir, Lock, write_atomic, write_json

_RESERVE_BYTES = 1 << 20
_RESULT_TRIES = 50


class Record:
    """The one writer of a job's record. ``earlier``: the events that former supervisors wrote."""

    def __init__(
        self, job: JobDir, spec: protocol.JobSpec, lock: Lock, earlier: Sequence[Mapping[str, Any]]
    ) -> None:
        self._job, self._lock = job, lock
        self.fold = Fold(spec)
        self.overrides: Dict[str, Any] = {}
        """What `orch retry --set` has set: {"step.key": value}."""
        self.acknowledged: set[str] = set()
        """Requests that an event has answered."""
        self.urgent = False
        """An event is newer than state.json."""
        self.pending: List[Dict[str, Any]] = []
        """Events that a full disk keeps off it."""
        self._written_at = float("-inf")
        self.events = EventLog(job)
        for event in earlier:
            self._fold_one(event)

    # -------------------------------------------------------------------------------------------------------- events

    def add(
        self, kind: protocol.EventKind, step: Optional[str], attempt: Optional[int], data: Mapping[str, Any]
    ) -> Dict[str, Any]:
        """Put an event on disk, then into the state; the event. A full disk delays, never drops."""
        last = self.pending[-1]["seq"] if self.pending else self.events.seq
        event = protocol.Event(
            seq=last + 1, at=utc_now(), mono=round(time.monotonic(), 3), kind=kind.value, step=step, attempt=attempt,
            data=dict(data),
        )  # fmt: skip
        record = protocol.to_dict(event)
        self._fold_one(record)
        self.pending.append(record)
        self.flush()
        self.urgent = True  # the state follows once per turn of the loop: it is derived, the event is on disk
        return record

    def _fold_one(self, record: Mapping[str, Any]) -> None:
        try:
            self.fold.apply(record)
        except protocol.IllegalTransition as exc:
            # An older or newer supervisor may have ordered its events otherwise: keep going, and say so.
            print("ignored: {}".format(exc), file=sys.stderr, flush=True)
        data = record.get("data") or {}
        if data.get("control"):
            self.acknowledged.add(str(data["control"]))
        if record.get("kind") in ("reopened", "retry_requested"):
            self.overrides.update(data.get("set") or {})

    def flush(self) -> None:
        """Write what is pending, as far as there is room."""
        while self.pending:
            try:
                self.events.append(protocol.from_dict(protocol.Event, self.pending[0]))
            except OSError as exc:
                print("events.jsonl: {}".format(exc), file=sys.stderr, flush=True)
                if not self._free_reserve():
                    return  # stays pending and is tried again at every tick
                continue
            self.pending.pop(0)

    def make_reserve(self) -> None:
        """Take room for the last records while there is some."""
        path = self._job.at(protocol.RESERVE_FILE)
        if not os.path.exists(path):
            with contextlib.suppress(OSError):
                write_atomic(path, os.urandom(4096) * (_RESERVE_BYTES // 4096), durable=False)

    def _free_reserve(self) -> bool:
        """Give up the reserve file so that the last records fit on a full disk."""
        try:
            os.unlink(self._job.at(protocol.RESERVE_FILE))
        except OSError:
            return False
        return True

    # --------------------------------------------------------------------------------------------- what follows from them

    def state_age_s(self) -> float:
        """Seconds since state.json was written."""
        return time.monotonic() - self._written_at

    def write_state(self, state: Mapping[str, Any], *, durable: bool) -> None:
        """Replace state.json, with the supervisor's sign of life in it."""
        now = time.monotonic()
        beat = {
            "beat_at": utc_now(), "beat_mono": round(now, 3),
            "boot_id": procs.boot_id(), "supervisor": {"pid": os.getpid()},
        }  # fmt: skip
        try:
            write_json(self._job.state_path, {**state, **beat}, durable=durable)
        except OSError as exc:
            print("state.json: {}".format(exc), file=sys.stderr, flush=True)
            return
        self.urgent = False
        self._written_at = now
        self._lock.touch()  # the heartbeat keeps cleaners of temporary folders away from a node-local lock

    def write_result(self, state: str) -> None:
        """Write result.json. When even that fails, no harm: the final event is the commit, any agent can write it."""
        result = {"v": protocol.VERSION, "id": self._job.id, "state": state, "seq": self.events.seq, "at": utc_now()}
        for _ in range(_RESULT_TRIES):
            try:
                write_json(self._job.result_path, result)
            except OSError as exc:
                print("result.json: {}".format(exc), file=sys.stderr, flush=True)
                if not self._free_reserve():
                    return
            else:
                return

    def put_result_aside(self) -> None:
        """The job goes on after its end: its former result stays as result.<k>.json."""
        for k in range(1, 10000):
            target = self._job.at("result.{}.json".format(k))
            if not os.path.exists(target):
                with contextlib.suppress(OSError):
                    os.rename(self._job.result_path, target)
                return

    def forget_secrets(self) -> None:
        """Nothing will start any more: the values go from the disk."""
        with contextlib.suppress(OSError):
            os.unlink(self._job.at(protocol.SECRETS_FILE))

    def close(self) -> None:
        """The job is over: its reserve is not needed any more."""
        with contextlib.suppress(OSError):
            os.unlink(self._job.at(protocol.RESERVE_FILE))
