"""Preflight: what could fail after a 20-minute load, found in seconds. All checks in parallel, each failing alone.

`run` is called in a short-lived child of the agent (`python -m remote_jobs.agent.checks`), since a check may hang on a
dead network disk: a check that gives no answer in time is a row that says so.  Standard library only, Python 3.8;
only the checks of `env` start the step's own Python.
"""

from __future__ import annotations

import threading
import time
import traceback
from functools import partial
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple, Union

from remote_jobs.agent import gate, gpu_access
from remote_jobs.agent.checks import checkpoint, data, disk, env, host, memory, model, timers
from remote_jobs.agent.checks.context import FAIL, OK, SKIP, WARN, Job, Row, Step, row

CHECK_TIMEOUT_S = 60.0
NAMES = ("checkpoint", "versions", "memory", "disk", "timers", "data", "port", "gpus", "limits", "locale", "write",
         "cache", "clock", "slurm", "deep")  # fmt: skip
"""Order of the rows of one step."""
_OF_THE_NODE = frozenset({"memory", "port", "gpus", "limits", "cache", "deep"})
"""What a Slurm login node cannot tell of the node that will run the job."""
Result = Union[Optional[Row], List[Row]]
Task = Tuple[Optional[str], str, Callable[[], Result], float]


def run(spec: Mapping[str, Any], facts: Mapping[str, Any]) -> List[Row]:
    """Check a plan on this host.

    Args:
        spec: the plan as uploaded (`JobSpec` with its steps; `with` and `params` are the same).
        facts: what the asker knows: `root` (orch's folder here), `deep`, `laptop_files` (names beside the plan that the
            host may lack), `wait_gate` (held GPUs are waited for), `laptop_wall` and `received_wall` (epoch seconds), `latency_s`, `only` (names of checks).

    Returns:
        Rows {"step", "name", "verdict", "took_s", "found", "fix"}; `step` is null for those of the whole job; the
        timers' rows add `exports`, variables that the launch sets.
    """
    try:
        job = Job(spec, facts)
    except (ValueError, TypeError, AttributeError, KeyError) as exc:
        return [
            {
                "step": None,
                "name": "plan",
                "took_s": 0.0,
                **row(FAIL, "the plan cannot be read: {}".format(exc), "correct the plan"),
            }
        ]
    only = set(facts.get("only") or NAMES)
    if job.spec.slurm is not None:
        only -= _OF_THE_NODE
    tasks = [task for task in tasks_of(job) if task[1] in only]
    if facts.get("deep") and "deep" in only:
        rows = run_tasks(tasks)
        # The dummy run needs the GPUs for itself, and is worth its minute only when nothing simpler fails.
        if any(r["verdict"] == FAIL for r in rows):
            rows.append(
                {"step": None, "name": "deep", "took_s": 0.0, **row(SKIP, "left out: other checks fail", "")}
            )
        else:
            deep: Task = (None, "deep", lambda: env.check_deep(job), env.DEEP_TIMEOUT_S * 2)
            rows += run_tasks([deep])
    else:
        rows = run_tasks(tasks)
    order = {step.name: number for number, step in enumerate(job.steps)}
    return sorted(
        rows, key=lambda r: (order.get(r["step"], -1), NAMES.index(r["name"]) if r["name"] in NAMES else 99)
    )


def tasks_of(job: Job) -> List[Task]:
    """Every check as (step or None, name, work, seconds allowed)."""
    shelf, scans = model.Shelf(), data.Scans()
    limit = CHECK_TIMEOUT_S
    gpus = _Once(lambda: _gpu_reading(job))
    tasks: List[Task] = []
    for step in job.steps:
        tasks += [
            (step.name, "checkpoint", partial(checkpoint.check, step, shelf), limit),
            (step.name, "memory", partial(_memory, step, shelf, gpus), limit),
            (step.name, "disk", partial(disk.check, step, shelf, scans), limit),
            (step.name, "timers", partial(timers.check, step, shelf), limit),
            (step.name, "data", partial(data.check, step, shelf, scans), limit),
            (step.name, "port", partial(host.check_port, step), limit),
        ]
    facts = job.facts
    log_limit, tmpfs = job.spec.log_limit_bytes, job.spec.allow_tmpfs
    root = partial(disk.check_root, job.layout.root, log_limit_bytes=log_limit, allow_tmpfs=tmpfs)
    clock = partial(
        host.judge_clock,
        _float(facts.get("laptop_wall")),
        _received(facts),
        _float(facts.get("latency_s")) or 0.0,
    )
    tasks += [
        (
            None,
            "versions",
            lambda: env.check_versions(job, env.gpu_facts() if job.first_gpu_step and not job.spec.slurm else {}),
            limit,
        ),
        (None, "gpus", partial(_gpus, job, gpus), limit),
        (None, "disk", root, limit),
        (None, "limits", partial(host.check_limits, job), limit),
        (None, "locale", partial(host.check_locale, job), limit),
        (None, "write", partial(host.check_write, job), limit),
        (None, "cache", partial(host.check_cache, job), limit),
        (None, "clock", clock, limit),
    ]
    if job.spec.slurm is not None:
        tasks.append((None, "slurm", lambda: _slurm(job), limit))
    return tasks


def _slurm(job: Job) -> Row:
    """Whether Slurm would take the batch job, and when it would start it."""
    from remote_jobs.agent.slurm import client, verbs

    try:
        return row(OK, verbs.test_only(job.spec))
    except client.Refused as exc:
        return row(FAIL, "Slurm would refuse the job: {}".format(exc), verbs.REFUSED_HINT.format(job.spec.host))
    except client.Unanswered as exc:
        return row(WARN, "Slurm does not answer: {}".format(exc), "the launch will say the same; try `sinfo` there")


def _memory(step: Step, shelf: model.Shelf, gpus: Callable[[], gate.GateReading]) -> Optional[Row]:
    document = gpus().document if step.gpus > 0 else None
    return memory.check(step, shelf, memory.from_document(document), memory.read_host())


def _float(value: Any) -> Optional[float]:
    return float(value) if isinstance(value, (int, float)) else None


def _received(facts: Mapping[str, Any]) -> float:
    return _float(facts.get("received_wall")) or time.time()


def _gpu_reading(job: Job) -> gate.GateReading:
    options = job.spec.gate or {}
    return gate.look(job.spec.host_gpus, None, job.layout.jobs, memory_mib=options.get("memory_mib"))


def _gpus(job: Job, gpus: Callable[[], gate.GateReading]) -> Optional[Row]:
    """The gate, for the first step that needs GPUs; a held GPU is no failure when the job may queue for it."""
    step = job.first_gpu_step
    if step is None:
        return None
    reading = gpus()
    clean = _clean(reading.document)
    if reading.open:
        return row(OK, "{} GPUs clean".format(clean))
    found = "; ".join(reading.reasons)
    if clean >= step.gpus:
        return row(WARN, "{} of the host's GPUs are clean, step {} takes {}; {}".format(clean, step.name, step.gpus, found),
                   "see who holds the others: orch gpus {}".format(job.spec.host))  # fmt: skip
    smaller = gpu_access.starts_smaller(step.spec, reading.to_json())
    if smaller:
        return row(WARN, found, "the plan allows fewer GPUs: the step starts {}".format(smaller))
    if reading.orphans and not reading.holders and (job.spec.gate or {}).get("reap", "own") == "own":
        return row(WARN, found, "own orphans: they are ended before the start")
    if not reading.foreign:
        verdict = FAIL if job.facts.get("no_queue") else WARN
        return row(verdict, found, "another orch job holds them: the launch queues")
    if job.facts.get("wait_gate") and reading.can_wait:
        return row(WARN, found, "the launch waits for them")
    hint = "orch gpus {0}; wait for them with orch launch --wait 30m".format(job.spec.host)
    return row(
        FAIL, found, hint if reading.can_wait else "repair the host; see orch gpus {}".format(job.spec.host)
    )


def _clean(document: Mapping[str, Any]) -> int:
    return sum(bool(gpu["clean"]) for gpu in document.get("gpus") or [])


class _Once:
    """A value read by the first who asks; the others wait for it."""

    def __init__(self, read: Callable[[], gate.GateReading]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._value: Optional[gate.GateReading] = None

    def __call__(self) -> gate.GateReading:
        with self._lock:
            if self._value is None:
                self._value = self._read()
            return self._value


def run_tasks(tasks: List[Task]) -> List[Row]:
    """Run all at once; a check that raises or hangs is a row and disturbs no other."""
    results: Dict[int, List[Row]] = {}
    began = time.monotonic()

    def work(number: int, task: Task) -> None:
        step, name, check, _ = task
        start = time.monotonic()
        try:
            result = check()
            found = result if isinstance(result, list) else [] if result is None else [result]
        except Exception as exc:  # one broken check must not hide the others
            where = traceback.extract_tb(exc.__traceback__)[-1]
            text = "the check itself failed: {}: {} ({}:{})".format(
                type(exc).__name__, exc, where.filename.rpartition("/")[2], where.lineno
            )
            found = [row(WARN, text, "report this; go on with --no-preflight if the rest is fine")]
        took = round(time.monotonic() - start, 3)
        results[number] = [{"step": step, "name": name, "took_s": took, **r} for r in found]

    threads = [threading.Thread(target=work, args=(n, task), daemon=True) for n, task in enumerate(tasks)]
    for thread in threads:
        thread.start()
    rows: List[Row] = []
    for number, (thread, task) in enumerate(zip(threads, tasks)):
        thread.join(max(0.0, began + task[3] - time.monotonic()))
        late = [{"step": task[0], "name": task[1], "took_s": round(time.monotonic() - began, 3),
                 **row(FAIL, "no answer within {:.0f} s: a dead network disk or a stuck driver?".format(task[3]),
                       "look at `df -h` and `dmesg` on the host")}]  # fmt: skip
        rows += results.get(number, late)
    return rows
