"""One notification: what it says, and the record that keeps it from being sent twice.

<job>/notify/<key>.json is made once, for a pair of event and target; who makes it sends it.  What goes through Apprise
waits there until a laptop takes it, which makes <key>.taken.  Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from typing import Any, Dict, List, Mapping, Optional, Sequence

from remote_jobs import protocol
from remote_jobs.agent import history
from remote_jobs.agent.jobdir import JobDir, read_json, write_json
from remote_jobs.protocol import EventKind

FOLDER = "notify"
TAKE_AT_MOST = 50
_KEY = re.compile(r"[A-Za-z0-9_-]{1,80}")


def kinds_of(event: Mapping[str, Any]) -> List[str]:
    """What an event is called in ``on:``."""
    kind, data = str(event.get("kind")), event.get("data") or {}
    if kind == EventKind.FINISHED.value:
        return [{"succeeded": "success", "stopped": "stopped"}.get(str(data.get("state")), "failure")]
    if kind == EventKind.NOTE.value and data.get("notify"):
        return [str(data["notify"])]
    named = {
        EventKind.RETRY_SCHEDULED.value: "retry",
        EventKind.HANG_SUSPECTED.value: "hang",
        EventKind.STEP_SUCCEEDED.value: "step",
        EventKind.STEP_FAILED.value: "step",
    }
    return [named[kind]] if kind in named else []


def message_of(spec: protocol.JobSpec, event: Mapping[str, Any], kind: str, state: Mapping[str, Any]) -> Dict[str, Any]:
    """The message about an event: {kind, job, name, host, step, attempt, at, title, text, class}."""
    data, step = event.get("data") or {}, event.get("step")
    verdict = data.get("verdict") or _last_verdict(state) if kind in ("failure", "retry", "step") else None
    words = {
        "success": "has succeeded", "failure": "has failed", "stopped": "was stopped", "retry": "tries again",
        "hang": "seems to hang", "eta_slip": "takes longer than expected",
        "step": "goes on: step {} {}".format(step, "succeeded" if event.get("kind") == "step_succeeded" else "failed"),
    }  # fmt: skip
    lines = []
    where = "step {}, attempt {}".format(step, event["attempt"]) if event.get("attempt") else "step {}".format(step)
    if verdict and kind in ("failure", "step") and event.get("kind") != "step_succeeded":
        failed = next((item["name"] for item in state.get("steps") or [] if item.get("state") == "failed"), step)
        lines.append("step {}: {}: {}".format(failed, verdict.get("class"), verdict.get("summary") or ""))
    elif kind == "retry":
        lines.append("{}: {}".format(where, data.get("reason") or (verdict or {}).get("summary") or ""))
        if data.get("delay_s") is not None:
            lines.append("next attempt in {:.0f} s".format(float(data["delay_s"])))
    elif kind in ("hang", "eta_slip") and data.get("text"):
        lines.append("{}: {}".format(where, data["text"]) if step else str(data["text"]))
    took_s = _seconds_between(state.get("started_at"), event.get("at"))
    if kind in ("success", "failure", "stopped") and took_s is not None:
        lines.append("after {}".format(duration(took_s)))
    hint = {"failure": "why", "retry": "why", "hang": "watch", "eta_slip": "watch"}.get(kind, "status")
    lines.append("orch {} {}".format(hint, spec.id))
    return {
        "kind": kind,
        "job": spec.id,
        "name": spec.name,
        "host": spec.host,
        "step": step,
        "attempt": event.get("attempt"),
        "at": event.get("at"),
        "title": "{} on {} {}".format(spec.name, spec.host, words.get(kind, kind)),
        "text": "\n".join(lines),
        "class": (verdict or {}).get("class"),
    }


def duration(seconds: float) -> str:
    """3 h 12 min, 4 min, 12 s."""
    minutes = int(seconds // 60)
    if minutes >= 60:
        return "{} h {} min".format(minutes // 60, minutes % 60)
    return "{} min".format(minutes) if minutes else "{:.0f} s".format(seconds)


def _last_verdict(state: Mapping[str, Any]) -> Optional[Dict[str, Any]]:
    """What the newest attempt of a failed (else of any) step died of."""
    steps = sorted(state.get("steps") or [], key=lambda item: item.get("state") == "failed", reverse=True)
    for step in steps:
        for attempt in reversed(step.get("attempts") or []):
            if isinstance(attempt.get("verdict"), dict):
                return dict(attempt["verdict"])
    return None


def _seconds_between(start: Any, end: Any) -> Optional[float]:
    first, last = history.epoch(start), history.epoch(end)
    return None if first is None or last is None else max(0.0, last - first)


# ------------------------------------------------------------------------------------------------------------- records


def _path(job: JobDir, key: str, suffix: str = ".json") -> str:
    if not _KEY.fullmatch(key):
        raise ValueError("{!r} is not the key of a notification".format(key))
    return job.at(FOLDER, key + suffix)


def make_record(job: JobDir, record: Mapping[str, Any]) -> bool:
    """Write a notification down; False when it was before: who makes the record sends it, nobody else.

    Raises:
        OSError: it cannot be written.
    """
    path = _path(job, str(record["key"]))
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    draft = "{}.draft.{}".format(path, os.getpid())
    write_json(draft, record)
    try:
        os.link(draft, path)
        return True
    except FileExistsError:
        return False
    finally:
        with contextlib.suppress(OSError):
            os.unlink(draft)


def settle(job: JobDir, key: str, error: Optional[str], by: str) -> None:
    """Note how a delivery ended."""
    path = _path(job, key)
    with contextlib.suppress(OSError, ValueError):
        record = dict(read_json(path))
        record.update(state="failed" if error else "sent", by=by, error=error)
        write_json(path, record)


def take(job: JobDir, targets: Sequence[str], by: str) -> List[Dict[str, Any]]:
    """Messages that wait for a laptop and were taken by none before; they are the asker's now.

    Args:
        job: the job.
        targets: those that the asker can reach, each as "id label".
        by: who asks, for the record.
    """
    found: List[Dict[str, Any]] = []
    try:
        names = sorted(name for name in os.listdir(job.at(FOLDER)) if name.endswith(".json"))
    except OSError:
        return found
    for name in names:
        with contextlib.suppress(OSError, ValueError):
            record = read_json(job.at(FOLDER, name))
            waits = record.get("state") == "waiting"
            waits = waits and "{} {}".format(record.get("target"), record.get("label")) in targets
            if waits and len(found) < TAKE_AT_MOST and _claim(job, str(record["key"]), by):
                found.append(record)
    return found


def _claim(job: JobDir, key: str, by: str) -> bool:
    try:
        fd = os.open(_path(job, key, ".taken"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    try:
        os.write(fd, protocol.dumps({"by": by, "at": time.time()}))
    finally:
        os.close(fd)
    return True


def answer(job: JobDir, request: Mapping[str, Any]) -> Dict[str, Any]:
    """The agent's op ``notify``: ``do`` is ``take`` {targets} -> {messages}, ``claim`` {record} -> {claimed} for what
    only a laptop can know (a lost job), or ``settle`` {key, error}.

    Raises:
        ValueError: none of these, or no such key.
    """
    by, do = str(request.get("by") or "?")[:200], request.get("do")
    if do == "take":
        return {"messages": take(job, [str(item) for item in request.get("targets") or []], by)}
    if do == "claim":
        record = dict(request["record"])
        return {"claimed": make_record(job, {"v": protocol.VERSION, **record, "state": "claimed", "by": by})}
    if do == "settle":
        error = request.get("error")
        settle(job, str(request["key"]), None if error is None else str(error)[:500], by)
        return {}
    raise ValueError("notify cannot do {!r}".format(do))
