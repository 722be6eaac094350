"""What an ended attempt amounts to: success as checked work, or a verdict with evidence.

Runs in a side task (a fork with limits), so a pathological log can cost a verdict but never the supervisor.
Evidence besides the log: exit status or signal, the kernel's OOM counters, files counted.  Standard library only.
"""

from __future__ import annotations

import contextlib
import glob
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Sequence, Tuple

from remote_jobs import protocol
from remote_jobs.agent import fewer_gpus, hang, incident, procs, ready
from remote_jobs.agent.attempt import Attempt
from remote_jobs.agent.counting import count_files
from remote_jobs.agent.jobdir import read_json

if TYPE_CHECKING:
    from remote_jobs.agent.supervisor import Supervisor


_HEAD_BYTES, _TAIL_BYTES = 2 << 20, 8 << 20
"""What the verdict reads of a huge log: enough for the arguments at its head and every rank's death at its end."""


@dataclass
class Facts:
    """Everything the verdict needs, collected before the fork."""

    log_path: str
    attempt_dir: str
    exit_status: Optional[int]
    stop_kind: Optional[str]
    stop_reason: Optional[str]
    done: Optional[Dict[str, Any]]
    workdir: str
    output: str
    uses: Optional[str]
    is_service: bool
    host_gpus: Optional[int]
    marker_progress: int
    oom_kills_before: Optional[int]
    started_mono: float
    log_disk_full: bool = False
    stop_verdict: Optional[Dict[str, Any]] = None
    """What the attempt was stopped for (a hang, a prompt); it stands, whatever the program made of the signal."""
    secrets: List[str] = field(default_factory=list)
    left: List[procs.Proc] = field(default_factory=list)
    lost_service: Optional[str] = None
    """The service whose end made the attempt's work vain."""
    context: Dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        attempt: Attempt,
        step: protocol.StepSpec,
        boss: "Supervisor",
        others: Sequence[Attempt],
        hang_verdict: Optional[Dict[str, Any]],
    ) -> "Facts":
        """Facts of an attempt that has just ended; ``others``: attempts of other steps, whose processes are not its own."""
        done = dict(step.done) if step.done else None
        if done and done.get("count"):
            done["count"] = boss.places.filled(done["count"])
        left = attempt.own_processes(others)
        return cls(
            log_path=attempt.log.path,
            attempt_dir=attempt.dir,
            exit_status=attempt.exit_status,
            stop_kind=attempt.stop_kind,
            stop_reason=attempt.stop_reason,
            done=done,
            workdir=boss.places.workdir,
            output=boss.places.output(step.name),
            uses=step.uses,
            is_service=ready.is_service(step),
            host_gpus=boss.spec.host_gpus,
            marker_progress=attempt.work_done(),
            oom_kills_before=attempt.oom_kills_before,
            started_mono=attempt.started_mono,
            log_disk_full=boss.usage.disk.met(),
            stop_verdict=hang_verdict if attempt.stop_kind == "hang" else None,
            secrets=boss.secret_values(),
            left=left,
            lost_service=attempt.lost_service,
            context=incident.context(attempt, step, boss.spec, left),
        )


_LIMITS = {"timeout": "timeout_s", "not_ready": "service.timeout_s"}
"""The key of a step whose time an attempt was stopped for, by kind of stop."""
_MORE_TIME = "give it more time: orch retry JOB --set STEP.{}=TIME; or see where it stood: orch logs JOB --tail 200"


def judge(facts: Facts) -> Dict[str, Any]:
    """State, verdict and progress of an ended attempt: {state, verdict, progress, survey}.

    `stop_kind` user and service are no failures; a hang keeps the verdict it was stopped for; nothing in the log of an
    attempt that was ended with its service can say why, so it is not read.  ``survey``: None unless
    a GPU failed; then which ones work, and which are to blame.
    """
    counted = _counted(facts)
    progress = counted if counted is not None else facts.marker_progress
    if facts.uses == "train" and counted is None:
        progress = saved_training_step(facts.output)
    if facts.stop_kind in ("user", "service", "slurm"):
        state = "succeeded" if facts.stop_kind == "service" else "stopped"
        return {"state": state, "verdict": None, "progress": progress}
    if facts.stop_kind == "service_lost":
        return {"state": "failed", "verdict": service_lost_verdict(facts.lost_service), "progress": progress}
    verdict = _verdict(facts, counted)
    if verdict is None:
        return {"state": "succeeded", "verdict": None, "progress": progress}
    verdict, survey = _naming_gpus(verdict, facts)
    verdict = incident.scrubbed(verdict, facts.secrets)
    if facts.left:
        hang.write_stacks(facts.attempt_dir, facts.left, facts.secrets)
    incident.write(facts.attempt_dir, facts.log_path, verdict, facts.exit_status, facts.context, facts.secrets)
    return {"state": "failed", "verdict": verdict, "progress": progress, "survey": survey}


def _naming_gpus(verdict: Dict[str, Any], facts: Facts) -> Tuple[Dict[str, Any], Optional[Dict[str, Any]]]:
    """A verdict of broken hardware says which GPU, as far as anything tells."""
    if verdict.get("class") != fewer_gpus.CLASS:
        return verdict, None
    from remote_jobs.agent import gate

    survey = gate.read_survey(facts.host_gpus)
    blamed = fewer_gpus.suspects(verdict, survey, facts.context.get("gpus"))
    if not blamed:
        return verdict, survey
    healthy = [row for row in survey["healthy"] if row["index"] not in [one["index"] for one in blamed]]
    said = ["{}: {}".format(fewer_gpus.label(row), row["why"]) for row in blamed]
    names = ", ".join(fewer_gpus.label(row) for row in blamed)
    summary = "{}: {}".format(names, verdict.get("summary") or "the GPU failed")
    named = {**verdict, "summary": summary, "evidence": [*(verdict.get("evidence") or []), *said]}
    return named, {"healthy": healthy, "faulty": blamed}


def _verdict(facts: Facts, counted: Optional[int]) -> Optional[Dict[str, Any]]:
    if facts.stop_verdict is not None:
        return facts.stop_verdict
    if facts.stop_kind in _LIMITS:
        return unknown_verdict(
            facts.stop_reason or facts.stop_kind, signature=facts.stop_kind,
            advice=_MORE_TIME.format(_LIMITS[facts.stop_kind]),
        )
    from remote_jobs.logs.source import explain_file  # heavy (rules): only ever loaded in the side task

    kernel = [] if facts.exit_status == 0 else incident.kernel_lines(since_s=facts.started_mono)
    explained = explain_file(facts.log_path, facts.exit_status, _HEAD_BYTES, _TAIL_BYTES, host=kernel)
    failure: Optional[Dict[str, Any]] = explained["failure"]
    if facts.exit_status == 0:
        if failure is not None:
            return failure
        missing = _not_done(facts, counted)
        if missing:
            return unknown_verdict(missing, signature="done_not_reached")
        if facts.is_service:
            return unknown_verdict("the service ended by itself with exit status 0", signature="service_ended")
        return None
    if failure is None:
        failure = unknown_verdict("exit status {} and no cause in the log".format(facts.exit_status))
    return _with_full_disk(_with_kernel_evidence(failure, facts), facts)


def _with_full_disk(failure: Dict[str, Any], facts: Facts) -> Dict[str, Any]:
    """What no log explains became of its own log's disk: a program that prints ends when a line cannot be written."""
    if failure.get("class") != "unknown" or failure.get("root_cause") or not facts.log_disk_full:
        return failure
    text = "the file system of {} was full when the program ended".format(facts.log_path)
    return {
        **failure,
        "class": "disk_full",
        "retry": "after_change",
        "signature": "log_disk_full",
        "summary": "the disk of the job's own log was full: what could not print ended",
        "advice": "free room on the disk of orch's root (orch gc shows what old jobs hold there), or move `root`; or print less (log_limit)",
        "evidence": [*(failure.get("evidence") or []), text],
    }


def _with_kernel_evidence(failure: Dict[str, Any], facts: Facts) -> Dict[str, Any]:
    """A bare kill becomes host_oom when the kernel counted one meanwhile; silence proves nothing by itself."""
    if failure.get("class") != "killed" or facts.oom_kills_before is None:
        return failure
    after = oom_kills()
    if after is None or after <= facts.oom_kills_before:
        return failure
    text = "the kernel's OOM killer ended {} process(es) during this attempt (memory.events / vmstat)".format(
        after - facts.oom_kills_before
    )
    changed = dict(failure)
    changed.update(
        {
            "class": "host_oom",
            "retry": "after_change",
            "signature": "kernel_oom_counter",
            "summary": "the host ran out of memory and the kernel killed the job",
            "advice": "use fewer workers or a smaller batch, or a host with more memory",
            "evidence": [*(failure.get("evidence") or []), text],
        }
    )
    return changed


def _counted(facts: Facts) -> Optional[int]:
    if facts.done and facts.done.get("count"):
        return count_files(facts.workdir, str(facts.done["count"]))
    return None


def _not_done(facts: Facts, counted: Optional[int]) -> Optional[str]:
    """Why the work is not complete in spite of exit status 0, or None."""
    if not facts.done or counted is None:
        return None
    pattern = facts.done["count"]
    if "equals" in facts.done and counted != int(facts.done["equals"]):
        return "exit status 0, but {} holds {} files instead of {}".format(pattern, counted, facts.done["equals"])
    if "at_least" in facts.done and counted < int(facts.done["at_least"]):
        return "exit status 0, but {} holds {} files, fewer than {}".format(pattern, counted, facts.done["at_least"])
    return None


def saved_training_step(output: str) -> int:
    """Newest optimizer step in a training state below ``output``: steps that no checkpoint holds are not kept."""
    newest = 0
    for pattern in ("*/training_state.json", "*/*/training_state.json"):
        for path in glob.iglob(os.path.join(output, pattern)):
            with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
                step = int(read_json(path).get("global_step") or 0)
                newest = max(newest, step if step <= protocol.MAX_COUNT else 0)
    return newest


def oom_kills() -> Optional[int]:
    """OOM kills counted so far: by our cgroup (v2 memory.events), else by the whole host (/proc/vmstat)."""
    for path, key in ((_cgroup_events(), "oom_kill"), ("/proc/vmstat", "oom_kill")):
        if path is None:
            continue
        try:
            with open(path, encoding="ascii") as file:
                for line in file:
                    name, _, value = line.partition(" ")
                    if name == key:
                        return int(value)
        except (OSError, ValueError):
            continue
    return None


def _cgroup_events() -> Optional[str]:
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            for line in file:
                if line.startswith("0::"):
                    return "/sys/fs/cgroup{}/memory.events".format(line.strip()[3:].rstrip("/"))
    except OSError:
        pass
    return None


def unknown_verdict(
    summary: str, *, signature: str = "none", klass: str = "unknown", retry: str = "yes", advice: Optional[str] = None
) -> Dict[str, Any]:
    """A verdict that no log rule gave, in explain's shape."""
    return {
        "class": klass,
        "retry": retry,
        "root_cause": None,
        "signature": signature,
        "summary": summary,
        "advice": advice or "read the end of the log: orch logs JOB --tail 200",
        "evidence": [],
    }


def fallback(attempt: Attempt, error: Optional[str]) -> Dict[str, Any]:
    """Judgement when the side task itself failed: unknown, never a dead supervisor."""
    if attempt.exit_status == 0 and attempt.stop_kind is None:
        return {"state": "succeeded", "verdict": None, "progress": attempt.work_done()}
    if attempt.stop_kind == "service_lost":
        return {"state": "failed", "verdict": service_lost_verdict(attempt.lost_service), "progress": attempt.work_done()}
    stopped = attempt.stop_kind in ("user", "service", "slurm")
    state = ("succeeded" if attempt.stop_kind == "service" else "stopped") if stopped else "failed"
    verdict = None if stopped else unknown_verdict("the log could not be judged: {}".format(error), signature="judge")
    return {"state": state, "verdict": verdict, "progress": attempt.work_done()}


def gate_verdict(reasons: Sequence[str], waited_s: float, *, broken: Optional[str] = None) -> Dict[str, Any]:
    """The gate stayed closed for as long as the plan allows; ``broken``: the class, when no waiting would have helped."""
    if broken is not None:
        return unknown_verdict(
            "the GPUs cannot be used: {}".format("; ".join(reasons)), signature="gate_broken", klass=broken,
            retry="no", advice="look at them: orch gpus HOST; a reset or a reboot of the host may be needed",
        )  # fmt: skip
    summary = "the GPUs were not free within {:.0f} s: {}".format(waited_s, "; ".join(reasons))
    return unknown_verdict(
        summary, signature="gate_wait", klass="gpu_busy", retry="after_change",
        advice="see who holds them: orch gpus HOST; then: orch retry JOB",
    )  # fmt: skip


def lost_verdict(
    attempt: Mapping[str, Any], left: List[int], *, rebooted: bool = False, crashed: Optional[str] = None
) -> Dict[str, Any]:
    """An attempt whose supervisor ended without a word: its exit status is not known. ``crashed``: what a supervisor died of."""
    what = "the host was rebooted under attempt {}" if rebooted else "the supervisor of attempt {} was killed"
    if crashed and not rebooted:
        what = "the supervisor of attempt {} crashed, a defect of orch"
    summary = what.format(attempt.get("n")) + ", so its exit status is unknown"
    if left:
        summary += "; {} process(es) still ran and were ended".format(len(left))
    return unknown_verdict(summary, signature="supervisor_lost", klass="killed", retry="yes")


def service_lost_verdict(service: Optional[str]) -> Dict[str, Any]:
    """An attempt that was ended since its work was in vain: the service that its step needs had ended."""
    return unknown_verdict(
        "orch ended this attempt because the service {} ended, which the step needs".format(service),
        signature="service_lost", klass="killed",
        advice="see what became of the service: orch why JOB --step {}".format(service),
    )  # fmt: skip


def start_failure_text(argv: Sequence[str], workdir: str, exc: BaseException) -> str:
    """What goes into the log when the program could not even be started, in the words people search for."""
    program = argv[0] if argv else "the step"
    if isinstance(exc, FileNotFoundError):
        missing = exc.filename or program
        return "orch: cannot start {}: No such file or directory: {!r} (workdir {})".format(program, missing, workdir)
    return "orch: cannot start {}: {}: {} (workdir {})".format(program, type(exc).__name__, exc, workdir)
