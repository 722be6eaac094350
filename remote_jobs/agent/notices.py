"""One notification: what it says, and the record that keeps it from being sent twice.

<job>/notify/<key>.json is made once, for a pair of event and target; who makes it sends it.  What goes through Apprise
waits there until a laptop takes it, which makes <key>.taken.  Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from remote_jobs import protocol
from remote_jobs.agent import causes
from remote_jobs.agent.advice import addressed
from remote_jobs.agent.jobdir import JobDir, read_json, write_json
from remote_jobs.agent.times import seconds_between
from remote_jobs.protocol import EventKind

FOLDER = "notify"
TAKE_AT_MOST = 50
_ID = "\0"
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
    """The message about an event: {kind, job, name, host, step, attempt, at, title, text, class}.

    It is read on a phone, by somebody who has not looked for hours: the title says which job on which host and what
    happened, the text where and why, then what orch does about it, and in the last line what is left to do.
    """
    data, step = event.get("data") or {}, event.get("step")
    bad = kind in ("failure", "retry") or event.get("kind") == EventKind.STEP_FAILED.value
    verdict = data.get("verdict") or _last_verdict(state, step) if bad else None
    tell: Callable[..., Words] = _TELLERS.get(kind) or _slip
    title, lines = tell(event, state, addressed(verdict, job=spec.id, host=spec.host, step=step))
    return {
        "kind": kind,
        "job": spec.id,
        "name": spec.name,
        "host": spec.host,
        "step": step,
        "attempt": event.get("attempt"),
        "at": event.get("at"),
        "title": "{} on {} {}".format(spec.name, spec.host, title),
        "text": "\n".join(line for line in lines if line).replace(_ID, spec.id),
        "class": (verdict or {}).get("class"),
    }


Words = Tuple[str, List[str]]
"""What stands behind "NAME on HOST " in the title, and the lines, with `_ID` where the job's id belongs."""


def _success(event: Mapping[str, Any], state: Mapping[str, Any], _verdict: Any) -> Words:
    count = len(state.get("steps") or [])
    done = "All {} steps are done".format(count) if count > 1 else "It is done"
    return "has succeeded", [done + _after(state, event) + ".", "The results: orch fetch {} DEST".format(_ID)]


def _failure(event: Mapping[str, Any], state: Mapping[str, Any], verdict: Optional[Mapping[str, Any]]) -> Words:
    failed = causes.failed_steps(state.get("steps") or [])
    lines = [_cause(failed[0]["name"], causes.last_attempt(failed[0]), verdict)] if failed else [_cause(None, None, verdict)]
    if failed[1:]:
        lines.append("After it failed: {}.".format(", ".join(str(one["name"]) for one in failed[1:])))
    lines.append("The job is over{}; orch does not try again by itself.".format(_after(state, event)))
    return "has failed", [*lines, _to_do(verdict)]


def _stopped(event: Mapping[str, Any], state: Mapping[str, Any], _verdict: Any) -> Words:
    lines = ["It was stopped on request{}.".format(_after(state, event)), "To take it up again: orch retry " + _ID]
    return "was stopped", lines


def _retry(event: Mapping[str, Any], _state: Mapping[str, Any], verdict: Optional[Mapping[str, Any]]) -> Words:
    data, n = event.get("data") or {}, int(event.get("attempt") or 0)
    lines = [_cause(event.get("step"), {"n": n}, verdict)]
    soon = "" if data.get("delay_s") is None else " in {}".format(duration(float(data["delay_s"])))
    reason = " ({})".format(data["reason"]) if data.get("reason") else ""
    lines.append("orch starts attempt {}{}{}.".format(n + 1, soon, reason))
    return "tries again: step {} failed".format(event.get("step")), [*lines, "Nothing to do. Details: orch why " + _ID]


def _hang(event: Mapping[str, Any], _state: Mapping[str, Any], _verdict: Any) -> Words:
    text = (event.get("data") or {}).get("text") or "it shows no sign of life"
    lines = [
        "{}: {}.".format(_where(event.get("step"), {"n": event.get("attempt")}), str(text).rstrip(".")),
        "orch keeps its stacks, ends this attempt, and starts another one where one is left.",
        "Nothing to do. Details: orch why " + _ID,
    ]
    return "seems to hang in step {}".format(event.get("step")), lines


def _slip(event: Mapping[str, Any], _state: Mapping[str, Any], _verdict: Any) -> Words:
    text = str((event.get("data") or {}).get("text") or "")
    lines = [text[:1].upper() + text[1:] + ".", "orch lets it run: nothing has failed.", "Look at it: orch watch " + _ID]
    return "takes longer than expected", lines


def _step(event: Mapping[str, Any], state: Mapping[str, Any], verdict: Optional[Mapping[str, Any]]) -> Words:
    name = event.get("step")
    steps = state.get("steps") or []
    one: Mapping[str, Any] = next((item for item in steps if item["name"] == name), {})
    left = [str(item["name"]) for item in steps if item.get("state") not in protocol.STEP_TERMINAL]
    onward = "The job goes on with: {}.".format(", ".join(left)) if left else "It was the last one."
    if event.get("kind") == EventKind.STEP_SUCCEEDED.value:
        last = causes.last_attempt(one) or {}
        took_s = seconds_between(last.get("started_at"), event.get("at"))
        took = "" if took_s is None else ", its last attempt took {}".format(duration(took_s))
        return "finished step {}".format(name), ["Step {} has succeeded{}.".format(name, took), onward, "orch status " + _ID]
    lost = [str(item["name"]) for item in steps if name in (item.get("needs") or [])]
    reason = (event.get("data") or {}).get("reason")
    given_up = "orch does not try this step again{}.".format(": {}".format(reason) if reason else "")
    lines = [_cause(name, causes.last_attempt(one), verdict), given_up]
    if lost:
        lines.append("What needs it is left out: {}.".format(", ".join(lost)))
    rest = [other for other in left if other not in lost]
    if rest:
        lines.append("Still to end: {}.".format(", ".join(rest)))
    return "failed in step {}".format(name), [*lines, _to_do(verdict)]


_TELLERS: Mapping[str, Callable[..., Words]] = {
    "success": _success, "failure": _failure, "stopped": _stopped, "retry": _retry, "hang": _hang, "eta_slip": _slip,
    "step": _step,
}  # fmt: skip


def _where(step: Any, attempt: Optional[Mapping[str, Any]]) -> str:
    number = (attempt or {}).get("n")
    return "Step {}, attempt {}".format(step, number) if number else "Step {}".format(step)


def _cause(step: Any, attempt: Optional[Mapping[str, Any]], verdict: Optional[Mapping[str, Any]]) -> str:
    """Which attempt of which step died of what."""
    what = ": ".join(str(verdict[key]) for key in ("class", "summary") if verdict.get(key)) if verdict else ""
    return "{} failed{}.".format(_where(step, attempt) if step else "It", ": " + what.rstrip(".") if what else "")


def _to_do(verdict: Optional[Mapping[str, Any]]) -> str:
    advice = str((verdict or {}).get("advice") or "").rstrip(".")
    return "To do: {0}orch why {1}, then orch retry {1}".format(advice + "; " if advice else "", _ID)


def _after(state: Mapping[str, Any], event: Mapping[str, Any]) -> str:
    took_s = seconds_between(state.get("started_at"), event.get("at"))
    return "" if took_s is None else " after {}".format(duration(took_s))


def duration(seconds: float) -> str:
    """3 h 12 min, 4 min, 12 s."""
    minutes = int(seconds // 60)
    if minutes >= 60:
        return "{} h {} min".format(minutes // 60, minutes % 60)
    return "{} min".format(minutes) if minutes else "{:.0f} s".format(seconds)


def _last_verdict(state: Mapping[str, Any], step: Any) -> Optional[Dict[str, Any]]:
    """What the newest attempt of the step in question died of: the one named, else the one that failed first."""
    steps = [one for one in state.get("steps") or [] if one["name"] == step] or causes.failed_steps(state.get("steps") or [])
    for one in steps:
        for attempt in reversed(one.get("attempts") or []):
            if isinstance(attempt.get("verdict"), dict):
                return dict(attempt["verdict"])
    return None


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
