"""What `orch why` tells: the verdict of one attempt, its evidence, and what the next attempt changes.

Standard library only.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Tuple

from remote_jobs import protocol
from remote_jobs.agent import causes, fulldisk, incident, reboot
from remote_jobs.agent.advice import addressed
from remote_jobs.agent.jobdir import JobDir, Layout
from remote_jobs.agent.launching import AgentError, meant, never_started, no_step
from remote_jobs.agent.look import Looker


def why(layout: Layout, looker: Looker, job_id: str, step: Optional[str], attempt: Optional[int]) -> Dict[str, Any]:
    """The design's why JSON (without schema). Unless step or attempt say otherwise: for the last attempt of the step
    that failed first (those that failed after it are in ``also_failed``), or for the newest failed attempt.

    Raises:
        AgentError: no_job, wrong_state (never started), no_step or no_attempt, with what there is.
    """
    answer = _answer(layout, looker, job_id, step, attempt)
    host = layout.job(job_id).spec().host
    return {**answer, "verdict": addressed(answer["verdict"], job=job_id, host=host, step=answer["step"])}


def _answer(layout: Layout, looker: Looker, job_id: str, step: Optional[str], attempt: Optional[int]) -> Dict[str, Any]:
    jobs, unreadable = looker.jobs([job_id])
    if job_id not in jobs:
        raise AgentError("no_job", unreadable.get(job_id, "no job {}".format(job_id)))
    if jobs[job_id]["state"] is None:
        raise never_started(job_id)
    job, state = layout.job(job_id), jobs[job_id]["state"]
    index, item, found = _pick(state, step, attempt)
    answer: Dict[str, Any] = {
        "job": job_id, "state": state["state"], "step": item["name"] if item else None, "attempt": None,
        "verdict": None, "exit_status": None, "evidence": [], "changed_next": None, "incident": None,
        "lost": jobs[job_id]["lost"], "attempts": _ledger(state), "bundle": None, "stacks": None, "decision": None,
        "also_failed": [_also(one) for one in causes.failed_steps(state["steps"])[1:]] if step is None and attempt is None else [],
    }  # fmt: skip
    if (jobs[job_id]["lost"] or {}).get("boot_changed"):
        answer["offer"] = reboot.offer(layout, job.spec())
    if item is not None and found is None:
        answer.update(_ended_unstarted(job, item["name"]))
    if item is None or found is None:
        return answer
    folder = job.attempt_path(index, item["name"], found["n"])
    parts = incident.read(folder)
    bundle = parts["bundle"] or {}
    decision = parts["decision"]
    verdict = found.get("verdict") or bundle.get("verdict")
    evidence = list((verdict or {}).get("evidence") or [])
    answer.update(
        {
            "attempt": found["n"],
            "verdict": verdict,
            "exit_status": found.get("exit_status"),
            "evidence": evidence + _host_evidence(bundle) + fulldisk.said(state),
            "changed_next": (decision["changes"] if decision else _changes_of_next(item, found["n"])) or None,
            "incident": parts["folder"] if bundle else None,
            "bundle": {key: value for key, value in bundle.items() if key != "verdict"} or None,
            "stacks": parts["stacks"],
            "decision": decision,
            "reason": _end_reason(job, item["name"], found["n"]),
        }
    )
    return answer


def _pick(
    state: Dict[str, Any], step: Optional[str], attempt: Optional[int]
) -> Tuple[int, Optional[Dict[str, Any]], Optional[Dict[str, Any]]]:
    steps = list(enumerate(state["steps"], start=1))
    if step is not None:
        names = meant(state["steps"], step)
        steps = [(index, item) for index, item in steps if item["name"] in names]
        if not steps:
            raise no_step(state, step)
    candidates = [(index, item, one) for index, item in steps for one in item["attempts"]]
    if attempt is not None:
        chosen = [entry for entry in candidates if entry[2]["n"] == attempt]
        if not chosen:
            counts = ", ".join("{}: {}".format(item["name"], len(item["attempts"])) for _, item in steps)
            raise AgentError("no_attempt", "no attempt {}".format(attempt), "attempts so far: {}".format(counts))
        bad = [entry for entry in chosen if entry[2]["state"] not in ("succeeded", "running")]
        return (bad or chosen)[-1]
    failed = causes.failed_steps([item for _, item in steps])
    if failed:
        index = next(index for index, item in steps if item is failed[0])
        return index, failed[0], causes.last_attempt(failed[0])
    bad = [entry for entry in candidates if entry[2]["state"] in causes.FAILED]
    if bad:
        return max(bad, key=lambda entry: str(entry[2].get("ended_at") or ""))
    if candidates:
        return candidates[-1]
    return (steps[0][0], steps[0][1], None) if steps else (0, None, None)


def _also(item: Mapping[str, Any]) -> Dict[str, Any]:
    """A step that failed after the one in question."""
    last = causes.last_attempt(item) or {}
    verdict = last.get("verdict") or {}
    return {
        "step": item["name"], "state": item["state"], "attempt": last.get("n"), "ended_at": last.get("ended_at"),
        "exit_status": last.get("exit_status"), "class": verdict.get("class"),
    }  # fmt: skip


def _ended_unstarted(job: JobDir, step: str) -> Dict[str, Any]:
    """Verdict and reason of a step that failed before its first attempt."""
    for event in reversed(job.read_events()):
        if event.get("step") == step and event.get("kind") == protocol.EventKind.STEP_FAILED.value:
            data = event.get("data") or {}
            verdict = data.get("verdict")
            return {"verdict": verdict, "reason": data.get("reason"), "evidence": (verdict or {}).get("evidence") or []}
    return {}


def _ledger(state: Dict[str, Any]) -> List[Dict[str, Any]]:
    return [
        {
            "step": item["name"],
            "n": one["n"],
            "state": one["state"],
            "started_at": one["started_at"],
            "ended_at": one["ended_at"],
            "exit_status": one["exit_status"],
            "class": (one.get("verdict") or {}).get("class"),
            "summary": (one.get("verdict") or {}).get("summary"),
            "changes": one.get("changes"),
        }
        for item in state["steps"]
        for one in item["attempts"]
    ]


def _changes_of_next(item: Dict[str, Any], n: int) -> Optional[Dict[str, Any]]:
    following = [one for one in item["attempts"] if one["n"] == n + 1]
    return (following[0].get("changes") or None) if following else None


def _host_evidence(bundle: Dict[str, Any]) -> List[str]:
    """Lines of the kernel log kept in the bundle; only those the host let us read."""
    kernel = bundle.get("kernel")
    return ["kernel: {}".format(line) for line in kernel[-5:]] if isinstance(kernel, list) else []


def _end_reason(job: JobDir, step: str, n: int) -> Optional[str]:
    reason = None
    ends = (protocol.EventKind.RETRY_SCHEDULED.value, protocol.EventKind.STEP_FAILED.value)
    for event in job.read_events():
        if event.get("step") == step and event.get("kind") in ends and event.get("attempt") in (n, None):
            reason = (event.get("data") or {}).get("reason") or reason
    return reason
