"""What a host answers has the shape that everything behind relies on, or is refused in one place: as it comes in.

Why: a host may be broken, newer, or hostile, and what it says must show as trouble with that host, never as a bug of
ours.  `hosts.agent` checks each answer by the table below; the jobs in a look are checked one by one (`check_record`),
for one bad record must not end a `watch` over ten hosts.  Unknown keys pass: a newer host has more to say.
Pure; must not import hosts.
"""

from __future__ import annotations

import binascii
import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

from orchestrator.core.errors import ProtocolError
from remote_jobs.protocol import AttemptState, JobState, StepState

MAX_NUMBER = 1 << 64
"""Inode numbers may be as large."""
MAX_SIZE = 1 << 62
MAX_SECONDS = 1e10
"""Three hundred years: what is longer cannot be added to a clock."""
MAX_TEXT = 1 << 20
MAX_ID = 200
MAX_DEPTH = 64
"""Of objects in objects: Python's own printers give up at a thousand."""

_NUMBER = (int, float)
_SECONDS, _SIZE, _BASE64 = "seconds", "size", "base64"
"""A span of time, a count that cannot be negative, bytes as text."""

def _states(kinds: type[Enum]) -> frozenset[str]:
    """A word of a closed list: what nobody knows would be waited for without end."""
    return frozenset(str(kind.value) for kind in kinds)


# A key may be missing and its value may be null, unless its name here ends with "!" (there, and not null) or with "~"
# (there).  A list holds no null where its items have a shape, numbers apart; {str: shape} is a mapping whose values all
# have it; None is anything.

_PHASE = {"name": str, "state": str, "started_at": str, "ended_at": str, "took_s": _SECONDS, "left_s": _SECONDS}
_BAR = {
    "label": str,
    "instance": int,
    "worker": str,
    "pid": int,
    "done": _NUMBER,
    "total": _NUMBER,
    "percent": _NUMBER,
    "elapsed_s": _SECONDS,
    "remaining_s": _SECONDS,
    "s_per_item": _SECONDS,
    "eta_s": _SECONDS,
    "eta_low_s": _SECONDS,
    "eta_high_s": _SECONDS,
}
_VERDICT = {
    "class": str,
    "summary": str,
    "retry": str,
    "signature": str,
    "advice": str,
    "root_cause": {"line": int, "text": str},
    "evidence": [None],
}
_PROCESS = {"pid": int, "ppid": int, "user": str, "state": str, "cpu_pct": _NUMBER, "rss_mib": _NUMBER, "command": str}
_ATTEMPT = {
    "n!": int,
    "state": _states(AttemptState),
    "started_at": str,
    "ended_at": str,
    "exit_status": int,
    "verdict": _VERDICT,
    "phases": [_PHASE],
    "bars": [_BAR],
    "processes": [_PROCESS],
    "pid": int,
    "gpus": [int],
    "changes": {},
    "kept": _NUMBER,
}
_STEP = {
    "name!": str,
    "uses": str,
    "state!": _states(StepState),
    "waiting": str,
    "retry_at": str,
    "needs": [str],
    "attempts": [_ATTEMPT],
}
_STATE = {
    "name": str,
    "state": _states(JobState),
    "seq": _SIZE,
    "created_at": str,
    "started_at": str,
    "ended_at": str,
    "eta": {"at": str, "low_s": _SECONDS, "high_s": _SECONDS},
    "notes": [{"at": str, "text": str}],
    "steps": [_STEP],
    "slurm": {},
}
_LOST = {"reason": str, "processes": [None]}
_JOB = {
    "state": _STATE,
    "spec": {"name": str, "created_at": str, "workdir": str, "plan_sha256": str, "secrets": {str: [str]}, "blocks": {str: {str: {}}}},
    "lost": _LOST,
}
_LOG = {
    "job!": str,
    "step!": str,
    "attempt!": int,
    "inode!": int,
    "offset!": _SIZE,
    "end!": _SIZE,
    "size": _SIZE,
    "data_b64": _BASE64,
    "skipped_bytes": _SIZE,
}
_GPU = {
    "index~": int,
    "uuid": str,
    "name~": str,
    "memory_used_mib~": _NUMBER,
    "memory_total_mib~": _NUMBER,
    "utilization_pct~": _NUMBER,
    "power_w": _NUMBER,
    "processes!": [{"pid~": int, "name~": str, "memory_mib~": _NUMBER, "kind~": str, "owner~": str}],
    "health": str,
    "clean!": bool,
    "why~": str,
}
_GPUS = {
    "gpus!": [_GPU],
    "clean!": bool,
    "expected": int,
    "why": str,
    "notes": [str],
    "holders": [{"pid!": int, "since_s": _SECONDS, "command": str, "why": str}],
    "age_s": _SECONDS,
}
_WHY = {
    "job": str,
    "state": str,
    "step": str,
    "attempt": int,
    "verdict": _VERDICT,
    "exit_status": int,
    "evidence": [None],
    "incident": str,
    "lost": _LOST,
    "attempts": [{"step": str, "n": int, "state": str, "exit_status": int, "class": str}],
    "also_failed": [{"step": str, "state": str, "attempt": int, "ended_at": str, "exit_status": int, "class": str}],
    "reason": str,
    "offer": str,
}
_FORECAST = {"true_s": _SECONDS, "forecast_s": _SECONDS, "printed_s": _SECONDS}
_HELLO = {"release!": str, "root!": str, "wall!": _NUMBER}
_PROBE = {
    "os": str,
    "kernel": str,
    "machine": str,
    "python": str,
    "user": str,
    "root!": str,
    "root_fs": str,
    "gpus": [str],
    "disks": [{"path!": str, "free_bytes": _NUMBER, "total_bytes": _NUMBER}],
    "shm_bytes": _NUMBER,
    "cpu_count": int,
    "mem_bytes": _NUMBER,
    "tools": {},
    "logind": {},
    "limits": {"nofile": [int]},
    "warnings": [str],
}
_PATCH_SET = {
    "name!": str,
    "summary!": str,
    "package!": str,
    "version!": str,
    "changes!": [{"what!": str, "why!": str, "upstream": str}],
}

ANSWERS: Mapping[str, Mapping[Any, Any]] = {
    "hello": {"hello!": _HELLO},
    "look": {"jobs!": {}, "unreadable": {str: str}, "logs": [_LOG], "gpus": _GPUS, "disk": {}},
    "launch": {"job!": str, "state": _STATE, "warnings": [str]},
    "control": {"acknowledged": bool, "seq": _SIZE, "state": _STATE, "limits_s": {str: _SECONDS}, "steps": [str]},
    "preflight": {"checks!": [{"step": str, "name!": str, "verdict!": str, "took_s": _SECONDS, "found~": str, "fix": str}]},
    "gpus": _GPUS,
    "probe": _PROBE,
    "have": {"missing!": [{"sha256!": str, "offset!": _SIZE}]},
    "put": {"offset!": _SIZE},
    "list": {
        "entries": [{"root!": str, "path!": str, "absolute!": str, "size!": _SIZE, "mtime_ns!": int, "kind!": str}]
    },
    "get": {"size!": _SIZE, "mtime_ns": int},
    "digest": {"sha256!": str, "size!": _SIZE},
    "why": {"why!": _WHY},
    "history": {"runs!": [{"job!": str, "forecasts": [_FORECAST]}]},
    "patch list": {"sets!": [_PATCH_SET]},
    "patch check": {"python~": str, "versions!": {str: str}, "sets!": [{"name!": str, "state!": str, "why~": str}]},
    "patch apply": {"sets": [{"name!": str}], "overlay": str, "changed": {str: [str]}},
    "patch revert": {"restored!": {str: [str]}},
    "gc": {
        "items!": [{"kind!": str, "name!": str, "bytes!": _SIZE, "age_s!": _SECONDS, "why!": str}],
        "kept!": [{"kind!": str, "name!": str, "why!": str}],
        "bytes!": _SIZE,
    },
    "notify": {"messages": [{"target!": str, "label!": str, "key!": str}], "claimed": bool},
}
"""Request (with its action, where the answer depends on that) -> shape of the answer."""

READING = {"at!": str, "gpus!": [[_NUMBER]]}
"""A line of a job's usage.jsonl."""
SPEC = {"steps!": [{"name!": str, "uses": str, "params": {}, "service": {"ready": {"http": str, "port": int}}}]}
"""A job's spec.json."""
HINT = "is another program answering there? see: orch hosts check"


def check_answer(host: str, request: str, answer: Mapping[str, Any]) -> None:
    """Refuse an answer that does not fit its request.

    Args:
        host: inventory name.
        request: a key of `ANSWERS`; others pass.
        answer: what came.

    Raises:
        ProtocolError: names the host, what was asked, and what is wrong where.
    """
    try:
        _shallow(answer)
        _check(answer, ANSWERS.get(request), "the answer")
    except ProtocolError as error:
        raise ProtocolError(f"{host}: its answer to {request} makes no sense: {error.message}", HINT) from None


def check_record(job: str, record: Any) -> None:
    """A job's record in a look's answer.

    Raises:
        ProtocolError: says what is wrong and where.
    """
    if not job or len(job) > MAX_ID or not job.isprintable() or job.startswith(".") or set(job) & set("/\\"):
        raise ProtocolError("this is no job id: it could not be a file name")
    if not isinstance(record, Mapping):
        raise ProtocolError(f"its record is {_kind(record)}, not an object")
    _check(record, _JOB, "record")


def fits(value: Any, shape: Any) -> bool:
    """Does a line of a file on a host have this shape?"""
    try:
        _shallow(value)
        _check(value, shape, "it")
    except ProtocolError:
        return False
    return True


def _shallow(value: Any) -> None:
    """Refuse what is nested deeper than anything honest; level by level, for recursion is what must not happen."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    raise ProtocolError(f"it is nested more than {MAX_DEPTH} deep")


def _check(value: Any, shape: Any, where: str) -> None:
    if value is None or shape is None:
        return
    if isinstance(shape, Mapping):
        if not isinstance(value, Mapping):
            raise ProtocolError(f"{where} is {_kind(value)}, not an object")
        for key, inner in shape.items():
            if key is str:
                for name, found in value.items():
                    _check(found, inner, f"{where}.{name[:40]}")
                continue
            name = key.rstrip("!~")
            if name != key and (name not in value or (key[-1] == "!" and value[name] is None)):
                raise ProtocolError(f"{where} has no {name}")
            _check(value.get(name), inner, f"{where}.{name}")
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise ProtocolError(f"{where} is {_kind(value)}, not a list")
        if shape[0] is not None:
            for item in value:
                if item is None and shape[0] is not _NUMBER:
                    raise ProtocolError(f"{where} holds nothing where something belongs")
                _check(item, shape[0], where)
    elif isinstance(shape, frozenset):
        if not isinstance(value, str) or value not in shape:
            raise ProtocolError(f"{where} is none of {', '.join(sorted(shape))}")
    else:
        _check_plain(value, shape, where)


def _check_plain(value: Any, shape: Any, where: str) -> None:
    kinds: Any = {_SECONDS: _NUMBER, _SIZE: int, _BASE64: str}.get(shape, shape)
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        raise ProtocolError(f"{where} is {_kind(value)}, not {_WANTED[kinds]}")
    if isinstance(value, str):
        if shape == _BASE64:
            _check_bytes(value, where)
        elif len(value) > MAX_TEXT:
            raise ProtocolError(f"{where} is a text of {len(value)} characters")
        return
    limit = {_SECONDS: MAX_SECONDS, _SIZE: MAX_SIZE}.get(shape, MAX_NUMBER)
    if (isinstance(value, float) and not math.isfinite(value)) or abs(value) > limit:
        raise ProtocolError(f"{where} is not a number that can be meant")
    if shape == _SIZE and value < 0:
        raise ProtocolError(f"{where} is negative")


def _check_bytes(value: str, where: str) -> None:
    try:
        binascii.a2b_base64(value.encode("ascii"), strict_mode=True)
    except ValueError:
        raise ProtocolError(f"{where} is not in base64") from None


_WANTED = {str: "a text", int: "a whole number", _NUMBER: "a number", bool: "a truth value"}


def _kind(value: Any) -> str:
    return {bool: "a truth value", str: "a text", list: "a list", dict: "an object"}.get(
        type(value), "a number" if isinstance(value, _NUMBER) else "nothing known"
    )
