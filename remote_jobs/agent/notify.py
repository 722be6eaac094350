"""Notifications: what of a job's events somebody wants to hear of, and a record that keeps each from being sent twice.

The supervisor decides and writes one record per (event, target), see notices.py; making that file is the claim.
Webhooks and commands it sends itself, by forked couriers (courier.py); what goes through Apprise waits in its record
until a laptop takes it, which is one more claim.  A heartbeat target is asked for as long as the supervisor lives.
Addresses carry tokens: they come with the secrets, never from spec.json.  Nothing in here may hurt the supervisor:
errors end in its log.  Standard library only.
"""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections import deque
from typing import TYPE_CHECKING, Any, Deque, Dict, List, Mapping, Optional, Tuple

from remote_jobs import protocol
from remote_jobs.agent import incident, notices
from remote_jobs.agent.side import SideTask
from remote_jobs.protocol import EventKind

if TYPE_CHECKING:
    from remote_jobs.agent.supervisor import Supervisor

SECRETS_KEY = "@notify"
"""Where the targets' addresses are among a job's secrets; no step can have this name."""
COURIER_LIMIT_S = 1500.0
COURIERS = 4
"""At most so many at once; what comes meanwhile waits its turn."""
LINGER_S = 4.0
"""How long a supervisor whose job is over waits for its couriers: where its end takes them along (Slurm), most are done."""
BEAT_LIMIT_S = 30.0


class SlipWatch:
    """Tells once when a job's expected end has moved past what was last to be expected by more than a threshold.

    A forecast is a range.  What is to be expected is its late end, the latest of the last ``SUSTAIN_S``, and only ever
    earlier as forecasts narrow: the first ones of a bar are wide.  Only when even the early end lies ``threshold_s`` behind
    that, and still does after ``SUSTAIN_S``, has anything slipped.  Pure: clocks come in.
    """

    SUSTAIN_S = 60.0

    def __init__(self, threshold_s: float) -> None:
        self.threshold_s = threshold_s
        self._expected: Optional[float] = None
        self._recent: Deque[Tuple[float, float]] = deque()
        self._began: Optional[float] = None
        self._since: Optional[float] = None

    def look(self, eta: Optional[Mapping[str, Any]], now: float) -> Optional[float]:
        """Seconds that the end has moved by, when that is to be told now; ``now`` is wall-clock time in s."""
        if not eta or eta.get("low_s") is None or eta.get("high_s") is None:
            self._since = self._began = None
            self._recent.clear()
            return None
        early, late = now + float(eta["low_s"]), now + float(eta["high_s"])
        if self._expected is not None and early - self._expected > self.threshold_s:
            self._since = now if self._since is None else self._since
            if now - self._since < self.SUSTAIN_S:
                return None
            moved = (early + late) / 2 - self._expected
            self._expected, self._since, self._began = late, None, None
            self._recent.clear()
            return moved
        self._since = None
        self._narrow(late, now)
        return None

    def _narrow(self, late: float, now: float) -> None:
        self._began = now if self._began is None else self._began
        self._recent.append((now, late))
        while self._recent[0][0] < now - self.SUSTAIN_S:
            self._recent.popleft()
        if now - self._began >= self.SUSTAIN_S:
            latest = max(end for _, end in self._recent)
            self._expected = latest if self._expected is None else min(self._expected, latest)


class Notifier:
    """The supervisor's part. Without targets it costs nothing."""

    def __init__(self, boss: "Supervisor") -> None:
        self._boss = boss
        self.targets = [item for item in boss.spec.notify if isinstance(item, dict) and item.get("id")]
        self._queue: List[Dict[str, Any]] = []
        self._couriers: List[SideTask] = []
        self._beats: Dict[str, SideTask] = {}
        self._beat_at: Dict[str, float] = {}
        self._silent: Dict[str, int] = {}
        self._sent: set[str] = set()
        self._slips = {
            str(item["id"]): SlipWatch(float(item["eta_slip_s"])) for item in self.targets if item.get("eta_slip_s")
        }
        self._eta: Optional[Dict[str, Any]] = None
        self._news = False
        if self.targets:
            with self._harmless():
                for event in boss.replayed:  # told by no one: the supervisor before us was killed in between
                    self.take(event)

    @staticmethod
    @contextlib.contextmanager
    def _harmless() -> Any:
        """What goes wrong here is written to the log and stays here."""
        try:
            yield
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()

    def take(self, event: Mapping[str, Any], to: Optional[str] = None) -> None:
        """Queue what an event means for each target (or only for one)."""
        if not self.targets:
            return
        with self._harmless():
            for kind in notices.kinds_of(event):
                only = to or (event.get("data") or {}).get("to")
                for target in self.targets:
                    wanted = target["id"] == only if only else kind in (target.get("on") or ())
                    if wanted:
                        self._write_down(event, kind, target)

    def _write_down(self, event: Mapping[str, Any], kind: str, target: Mapping[str, Any]) -> None:
        key = "{:06d}-{}".format(int(event["seq"]), target["id"])
        if key in self._sent:
            return
        self._sent.add(key)
        message = notices.message_of(self._boss.spec, event, kind, self._boss.fold.state)
        message = incident.scrubbed(message, self._boss.secret_values())
        waiting = target.get("kind") == "apprise"
        record = {
            "v": protocol.VERSION, "key": key, "seq": event["seq"], "target": target["id"], "label": target.get("label"),
            "state": "waiting" if waiting else "claimed", **message,
        }  # fmt: skip
        try:
            if not notices.make_record(self._boss.job, record):
                return
        except OSError as exc:  # a full disk is what somebody wants to hear of: sent all the same, from memory
            print("notify {}: {}".format(key, exc), file=sys.stderr, flush=True)
        if not waiting:
            self._queue.append({"record": record, "target": dict(target)})

    def look(self, state: Mapping[str, Any]) -> None:
        """Note the newest forecast of the job's end."""
        self._eta, self._news = state.get("eta"), True

    def tick(self, now: float) -> None:
        """Start couriers and heartbeats that are due, and take the answers of those that are back. Never blocks."""
        if not self.targets:
            return
        with self._harmless():
            for task in [task for task in self._couriers if task.ready()]:
                self._couriers.remove(task)
                self._report(task)
            while self._queue and len(self._couriers) < COURIERS:
                self._send(self._queue.pop(0))
            self._beat(now)
            self._look_for_slips()

    def _address(self, target: Mapping[str, Any]) -> Dict[str, str]:
        """The secret parts of a target: {"": address, "header NAME": value, "env NAME": value, "end": address}."""
        prefix = str(target["id"])
        found = {}
        for name, value in dict(self._boss.secrets.get(SECRETS_KEY) or {}).items():
            owner, _, part = str(name).partition(" ")
            if owner == prefix:
                found[part] = str(value)
        return found

    def _send(self, item: Dict[str, Any]) -> None:
        from remote_jobs.agent import courier

        record, target, address = item["record"], item["target"], self._address(item["target"])
        env = dict(self._boss.spec.env) if target.get("kind") == "command" else {}
        workdir, job = self._boss.places.workdir, self._boss.job
        self._couriers.append(
            SideTask(lambda: courier.deliver(job, record, target, address, env, workdir), timeout_s=COURIER_LIMIT_S)
        )

    def _report(self, task: SideTask) -> None:
        result = task.result if isinstance(task.result, dict) else {"error": task.error, "label": "a target"}
        if result.get("error"):
            text = "a notification could not be sent to {}: {}".format(result.get("label"), result["error"])
            if self._boss.fold.state.get("state") in protocol.JOB_TERMINAL:
                print(text, file=sys.stderr, flush=True)
            else:
                self._boss.emit(EventKind.NOTE, text=incident.scrubbed(text, self._boss.secret_values()))

    def _beat(self, now: float) -> None:
        from remote_jobs.agent import courier

        for target in self.targets:
            if target.get("kind") != "heartbeat":
                continue
            name = str(target["id"])
            task = self._beats.get(name)
            if task is not None:
                if not task.ready():
                    continue
                del self._beats[name]
                self._silent[name] = 0 if task.error is None else self._silent.get(name, 0) + 1
                if self._silent[name] == 3:
                    text = "the heartbeat {} does not answer: {}".format(target.get("label"), task.error)
                    self._boss.emit(EventKind.NOTE, text=incident.scrubbed(text, self._boss.secret_values()))
            if now >= self._beat_at.get(name, 0.0):
                address = self._address(target).get("", "")
                self._beat_at[name] = now + max(1.0, float(target.get("every_s") or 300.0))
                self._beats[name] = SideTask(lambda url=address: courier.ping(url), timeout_s=BEAT_LIMIT_S)  # type: ignore[misc]

    def _look_for_slips(self) -> None:
        if not self._news:  # one look per forecast
            return
        self._news = False
        for name, watch in self._slips.items():
            moved = watch.look(self._eta, time.time())
            if moved is not None and self._eta is not None:
                text = "the expected end has moved by {} to {}".format(notices.duration(moved), self._eta.get("at"))
                self._boss.emit(EventKind.NOTE, text=text, notify="eta_slip", to=name)

    def close(self) -> None:
        """The supervisor leaves: send what is left, say goodbye to heartbeats, and wait a little. Couriers outlive us."""
        if not self.targets:
            return
        with self._harmless():
            for task in self._beats.values():
                if task.pending:
                    task.cancel()
            self._beats = {}
            over = self._boss.fold.state.get("state") in protocol.JOB_TERMINAL  # else it goes on in another allocation
            for target in self.targets:
                if over and target.get("kind") == "heartbeat" and target.get("end"):
                    from remote_jobs.agent import courier

                    label, url = target.get("label"), self._address(target).get("end", "")
                    self._couriers.append(
                        SideTask(lambda label=label, url=url: courier.end_heartbeat(self._boss.job, label, url), timeout_s=COURIER_LIMIT_S)  # type: ignore[misc]
                    )
            until = time.monotonic() + LINGER_S
            while (self._queue or self._couriers) and time.monotonic() < until:
                self._couriers = [task for task in self._couriers if not task.ready()]
                while self._queue and len(self._couriers) < COURIERS:
                    self._send(self._queue.pop(0))
                time.sleep(0.05)
            while self._queue:
                self._send(self._queue.pop(0))
