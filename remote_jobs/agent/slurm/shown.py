"""A job's state as a look shows it: the job directory's own record, and over it what Slurm last said. Pure.

The directory says what the job did, Slurm whether anybody still runs it.  A job is lost only when Slurm says that it
ended; until then a lock or a process of another machine proves nothing.  Standard library only.
"""

from __future__ import annotations

import time
from typing import Any, Dict, Mapping, Optional, Tuple

from remote_jobs import protocol
from remote_jobs.agent.slurm import queue


def overlay(
    state: Dict[str, Any], record: Mapping[str, Any], slurm_id: Optional[str], *, submitted: bool, held: bool
) -> Tuple[Optional[bool], Optional[Dict[str, Any]]]:
    """Put Slurm's word into a state object that is not final; (alive, lost) as in a look's answer.

    Args:
        state: changed in place.
        record: what was last seen of the newest submission (submissions.seen), empty when nothing.
        slurm_id: id of the newest submission, None when its answer is not known.
        submitted: False when there is no submission at all.
        held: a supervisor holds the job's lock, as far as this machine can see.
    """
    row = queue.from_record(record["row"]) if record.get("row") else None
    error = record.get("error")
    state["slurm"] = {
        "job": slurm_id, "submission": record.get("n"), "state": row.state if row else None,
        "reason": row.reason if row else None, "start": _iso(row.start) if row else None,
        "nodes": row.nodes if row else None, "error": error,
    }  # fmt: skip
    if held:  # newer than any reading of the queue
        return True, None
    if row is not None and row.ended:
        if error:  # it waits to be taken again
            _waits(state, error)
            return True, None
        reason = "Slurm job {} ended ({}{}) and its supervisor left no final event".format(
            row.id, row.state, " on " + row.nodes if row.nodes else ""
        )
        return False, {"reason": reason, "main_alive": False, "boot_changed": False, "processes": []}
    if row is None or row.waiting:
        _waits(state, _waiting_words(row, slurm_id, error, submitted=submitted))
        if state["state"] != "stopping":  # a retry waits for its place in the queue, not for a clock
            state["state"] = "queued"
        return (None if error else True), None
    if error:
        state["notes"] = [*state.get("notes", []), {"at": None, "text": "Slurm does not answer: {}".format(error)}]
    return True, None


def _waiting_words(row: Optional[queue.Row], slurm_id: Optional[str], error: Any, *, submitted: bool) -> str:
    silent = "; now Slurm does not answer: {}".format(error) if error else ""
    if row is None:
        if not submitted:
            return "not yet submitted to Slurm: the launch was cut short, the same command goes on with it"
        known = "Slurm job {}: submitted".format(slurm_id) if slurm_id else "submitted to Slurm, its answer is not known"
        return known + silent
    words = "Slurm job {}: {}, {}".format(row.id, row.state.lower(), queue.reason_words(row))
    if row.start is not None:
        words += "; expected start {}".format(_iso(row.start))
        if row.nodes:
            words += " on {}".format(row.nodes)
    return words + silent


def _waits(state: Dict[str, Any], text: str) -> None:
    """Say it at the first step that waits."""
    for item in state["steps"]:
        if item["state"] not in protocol.STEP_TERMINAL:
            item["waiting"] = text
            return


def _iso(at: Optional[float]) -> Optional[str]:
    return None if at is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
