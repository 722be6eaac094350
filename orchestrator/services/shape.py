"""What a host says about its jobs has the shape that everything behind relies on, or is refused, job by job.

Why: a host may be broken, newer, or hostile, and one bad record must neither end a `watch` over ten hosts nor show as
a bug of ours.  Unknown keys pass (a newer host has more to say), missing ones too; None is allowed everywhere.
Pure; must not import hosts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from orchestrator.core.errors import ProtocolError

MAX_NUMBER = 1 << 63
MAX_TEXT = 1 << 20
MAX_ID = 200

_NUMBER = (int, float)
_PHASE = {"name": str, "state": str, "started_at": str, "ended_at": str, "took_s": _NUMBER}
_BAR = {
    "label": str,
    "done": _NUMBER,
    "total": _NUMBER,
    "percent": _NUMBER,
    "elapsed_s": _NUMBER,
    "remaining_s": _NUMBER,
    "s_per_item": _NUMBER,
    "eta_s": _NUMBER,
    "eta_low_s": _NUMBER,
    "eta_high_s": _NUMBER,
}
_VERDICT = {"class": str, "summary": str, "retry": str, "signature": str, "advice": str}
_PROCESS = {"pid": int, "ppid": int, "cpu_pct": _NUMBER, "rss_mib": _NUMBER}
_ATTEMPT = {
    "n": int,
    "state": str,
    "started_at": str,
    "ended_at": str,
    "exit_status": int,
    "verdict": _VERDICT,
    "phases": [_PHASE],
    "bars": [_BAR],
    "processes": [_PROCESS],
    "pid": int,
}
_STEP = {
    "name": str,
    "uses": str,
    "state": str,
    "waiting": str,
    "retry_at": str,
    "needs": [str],
    "attempts": [_ATTEMPT],
}
_JOB = {
    "state": {
        "name": str,
        "state": str,
        "seq": int,
        "created_at": str,
        "started_at": str,
        "ended_at": str,
        "eta": {"at": str, "low_s": _NUMBER, "high_s": _NUMBER},
        "notes": [None],
        "steps": [_STEP],
    },
    "spec": {"name": str, "created_at": str, "workdir": str, "plan_sha256": str},
    "lost": {"reason": str, "processes": [None]},
}
_LOG = {
    "job": str,
    "step": str,
    "attempt": int,
    "inode": int,
    "offset": int,
    "end": int,
    "size": int,
    "data_b64": str,
    "skipped_bytes": int,
}
_ENTRY = {"root": str, "path": str, "absolute": str, "size": int, "mtime_ns": int, "kind": str}
_COLLECTED = {
    "items": [{"kind": str, "name": str, "bytes": int, "age_s": _NUMBER, "why": str}],
    "kept": [{"kind": str, "name": str, "why": str}],
    "bytes": int,
}
_HINT = "is another program answering there? see: orch hosts check"
_ANSWER: dict[str, Any] = {"jobs": {}, "unreadable": {}, "logs": [_LOG], "gpus": {}, "disk": {}}


def check_listing(answer: Mapping[str, Any], host: str) -> list[dict[str, Any]]:
    """The entries of a listing of files.

    Raises:
        ProtocolError: says what is wrong and where.
    """
    entries = answer.get("entries")
    try:
        _check(entries, [_ENTRY], "the listing")
        for entry in entries or []:
            if any(entry is None or entry.get(key) is None for key in _ENTRY):
                raise ProtocolError("an entry of the listing is not whole")  # noqa: TRY301 - named with its host below
            if not entry["size"] >= 0:
                raise ProtocolError("a size is negative")  # noqa: TRY301
    except ProtocolError as error:
        raise ProtocolError(f"{host}: its answer makes no sense: {error.message}", _HINT) from None
    return list(entries or [])


def check_collected(answer: Mapping[str, Any], host: str) -> dict[str, Any]:
    """What a host's house-keeping found, with nothing missing.

    Raises:
        ProtocolError: says what is wrong and where.
    """
    try:
        _check(answer, _COLLECTED, "the answer")
        for key in ("items", "kept"):
            for row in answer.get(key) or []:
                if any(row.get(name) is None for name in _COLLECTED[key][0]):  # type: ignore[index]
                    raise ProtocolError("a row of it is not whole")  # noqa: TRY301 - named with its host below
    except (ProtocolError, AttributeError) as error:
        raise ProtocolError(f"{host}: its answer makes no sense: {error}", _HINT) from None
    return {"items": answer.get("items") or [], "kept": answer.get("kept") or [], "bytes": answer.get("bytes") or 0}


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
    for step in (record.get("state") or {}).get("steps") or []:
        if step is None or not step.get("name") or any(
            attempt is None or attempt.get("n") is None for attempt in step.get("attempts") or []
        ):
            raise ProtocolError("a step or an attempt of it has no name")


def check_answer(answer: Mapping[str, Any]) -> None:
    """A look's answer but for its jobs, which `check_record` judges one by one.

    Raises:
        ProtocolError: says what is wrong and where.
    """
    _check(answer, _ANSWER, "the answer")


def _check(value: Any, shape: Any, where: str) -> None:
    if value is None or shape is None:
        return
    if isinstance(shape, dict):
        if not isinstance(value, Mapping):
            raise ProtocolError(f"{where} is {_kind(value)}, not an object")
        for key, inner in shape.items():
            found = value.get(key)
            if found is not None:
                _check(found, inner, f"{where}.{key}")
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise ProtocolError(f"{where} is {_kind(value)}, not a list")
        if shape[0] is not None:
            for item in value:
                _check(item, shape[0], where)
    elif isinstance(value, bool) or not isinstance(value, shape):
        raise ProtocolError(f"{where} is {_kind(value)}")
    elif isinstance(value, str):
        if len(value) > MAX_TEXT and not where.endswith("data_b64"):
            raise ProtocolError(f"{where} is a text of {len(value)} characters")
    elif not math.isfinite(value) if isinstance(value, float) else abs(value) > MAX_NUMBER:
        raise ProtocolError(f"{where} is not a number that can be meant")


def _kind(value: Any) -> str:
    return {bool: "a truth value", str: "a text", list: "a list", dict: "an object"}.get(
        type(value), "a number" if isinstance(value, _NUMBER) else "nothing known"
    )
