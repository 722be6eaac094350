"""The batch script of a job and the `sbatch` command that submits it. Pure.

Options go on the command line, not into `#SBATCH` lines: nothing needs quoting there, and they win over SBATCH_*
variables of the login shell.  Standard library only.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple, Union

from remote_jobs import protocol
from remote_jobs.agent.attempt import ladder
from remote_jobs.agent.spans import spans

SUPERVISOR_ENV = protocol.MARKER_ENV + "_SUPERVISOR"
SETTLE_S = 60.0
"""Seconds that records, verdict and the follow-on submission may take after the last process has ended."""
LEAST_MARGIN_S = 10.0
_SIGNAL = re.compile(r"--signal(?:=|\s+)\S*@(\d+)")


def job_name(job: str, n: Union[int, str]) -> str:
    """Name of a submission in the queue: it says whose it is, and no other one has it."""
    return "orch-{}.{}".format(job, n)


_HEAD = "#!/bin/sh\n# Written by orch: {}.\ntrap '' USR1 USR2\numask 077\ncd /\n"
"""Slurm may send the signal of a near limit up to a minute early, and to a supervisor that is not up yet: not its end."""


def batch_script(argv: Sequence[str]) -> str:
    """The script: it becomes the supervisor, so that a signal to the batch script is a signal to the supervisor."""
    command = " ".join(shlex.quote(word) for word in argv)
    return _HEAD.format("runs the job's supervisor in the allocation") + "exec {}\n".format(command)


def array_script(argv: Sequence[str], tasks: Mapping[int, Tuple[str, str]]) -> str:
    """The script of an array: each task becomes the supervisor of its own job.

    Args:
        argv: the supervisor's command without the job's id, which comes last.
        tasks: number -> (job id, file of what its batch script prints).
    """
    cases = "".join(
        "{}) job={} output={} ;;\n".format(number, shlex.quote(job), shlex.quote(output))
        for number, (job, output) in sorted(tasks.items())
    )
    return (
        _HEAD.format("every task of the array runs the supervisor of one job")
        + 'case "$SLURM_ARRAY_TASK_ID" in\n{}*) exit 64 ;;\nesac\nexport {}="$job"\nexec {} "$job" >>"$output" 2>&1\n'
    ).format(cases, SUPERVISOR_ENV, " ".join(shlex.quote(word) for word in argv))


def sbatch_argv(
    spec: protocol.JobSpec,
    name: str,
    script: str,
    output: str,
    *,
    dependency: Optional[str] = None,
    tasks: Sequence[int] = (),
) -> List[str]:
    """`sbatch` with every option; the inventory's own `sbatch:` flags come last and win.

    Args:
        spec: the job; `spec.slurm` is not None.
        name: see :func:`job_name`.
        script: path of the batch script.
        output: file of what the batch script itself prints (the job's logs are in its directory).
        dependency: such as ``afterany:17``.
        tasks: numbers of an array's tasks.
    """
    options = spec.slurm or {}
    steps = spec.step_specs()
    nodes = max([step.nodes for step in steps], default=1)
    argv = ["sbatch", "--parsable", "--job-name=" + name, "--chdir=/", "--open-mode=append", "--export=ALL"]
    argv += ["--output=" + output.replace("%", "%%"), "--input=/dev/null"]
    # A node failure or preemption is Slurm's to repair only where the plan wants a job to go on by itself.
    argv.append("--requeue" if spec.restart_after_reboot else "--no-requeue")
    argv.append("--nodes={}".format(nodes))
    if nodes > 1:
        argv.append("--ntasks-per-node=1")
    for key in ("partition", "account", "qos", "constraint", "reservation"):
        if options.get(key):
            argv.append("--{}={}".format(key, options[key]))
    if options.get("time_limit"):
        argv.append("--time={}".format(options["time_limit"]))
    argv += _gpu_flags(options, gpus_per_node(spec))
    if tasks:
        limit = options.get("array_limit")
        argv.append("--array={}{}".format(",".join(spans(tasks)), "%{}".format(limit) if limit else ""))
    if dependency:
        argv.append("--dependency=" + dependency)
    argv.append("--signal=B:USR2@{}".format(int(margin_s(spec))))
    return [*argv, *(str(flag) for flag in options.get("sbatch") or []), script]


def _gpu_flags(options: Mapping[str, Any], gpus: int) -> List[str]:
    gres = options.get("gres")
    if gres:
        counted = re.search(r":\d+$", gres) or "," in gres
        return ["--gres={}".format(gres if counted else "{}:{}".format(gres, max(1, gpus)))]
    return ["--gpus-per-node={}".format(gpus)] if gpus > 0 else []




def gpus_per_node(spec: protocol.JobSpec) -> int:
    """GPUs of each node that the job can use at one time: the most that steps which may run together claim."""
    steps = {step.name: step for step in spec.step_specs()}
    before: Dict[str, Set[str]] = {}
    for step in steps.values():  # plan order is not enough: a need may stand further down
        todo: List[str] = list(step.needs)
        seen: Set[str] = set()
        while todo:
            name = todo.pop()
            if name in steps and name not in seen:
                seen.add(name)
                todo += steps[name].needs
        before[step.name] = seen

    def share(step: protocol.StepSpec) -> int:
        return math.ceil(step.gpus / max(1, step.nodes))

    most = 0
    for name, step in steps.items():
        together = share(step)
        for other in steps.values():
            service = other.service is not None or other.uses == "serve"
            apart = other.name in before[name] or name in before[other.name]
            if other.name != name and (not apart or (service and other.name in step.needs)):
                together += share(other)
        most = max(most, together)
    most = min(most, spec.host_gpus) if spec.host_gpus else most
    return max([most, *(share(step) for step in steps.values())])


def margin_s(spec: protocol.JobSpec) -> float:
    """Seconds before the end of the allocation at which steps are told to save and end: the longest stop ladder, plus."""
    options = spec.slurm or {}
    given = _SIGNAL.search(" ".join(str(flag) for flag in options.get("sbatch") or []))
    if given:
        return max(LEAST_MARGIN_S, float(given.group(1)))
    longest = max([sum(wait_s for _, wait_s in ladder(step)) for step in spec.step_specs()], default=0.0)
    margin = longest + SETTLE_S
    limit = seconds(str(options.get("time_limit") or ""))
    return margin if limit is None else max(LEAST_MARGIN_S, min(margin, limit / 4))


def seconds(text: str) -> Optional[float]:
    """A time limit as Slurm writes it: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S; None when it is none (or UNLIMITED)."""
    days, dash, rest = text.strip().partition("-")
    if not dash:
        days, rest = "0", text.strip()
    parts = rest.split(":")
    if not days.isdigit() or not all(part.isdigit() for part in parts) or len(parts) > 3:
        return None
    numbers = [int(part) for part in parts]
    if dash:
        hours, minutes, secs = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, secs = numbers
    else:
        hours, (minutes, secs) = 0, [*numbers, 0][:2]
    return float(((int(days) * 24 + hours) * 60 + minutes) * 60 + secs)


def srun_prefix(nodes: int) -> List[str]:
    """`srun` for one task a node, labelled, all ended when one of them fails; they stop by a file (see spread.py)."""
    return [
        "srun", "--nodes={}".format(nodes), "--ntasks={}".format(nodes), "--ntasks-per-node=1", "--label",
        "--unbuffered", "--kill-on-bad-exit=1", "--wait=30", "--overlap", "--input=none", "--export=ALL",
        sys.executable, _spread(), "node",
    ]  # fmt: skip


def spread_argv(nodes: int, argv: Sequence[str]) -> List[str]:
    """A command on every node, as the main process of an attempt: it takes SIGTERM like any other."""
    return [sys.executable, _spread(), "head", *srun_prefix(nodes), *argv]


def _spread() -> str:
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "spread.py")


def first_hosts(nodelist: str) -> Tuple[str, ...]:
    """Host names of a node list such as ``gpu[01-03,07],login1``, in order."""
    found: List[str] = []
    for part in re.findall(r"[^,\[\]]+(?:\[[^\]]*\][^,\[\]]*)*", nodelist):
        match = re.match(r"([^\[]*)\[([^\]]*)\](.*)", part)
        if match is None:
            found.append(part)
            continue
        head, ranges, tail = match.groups()
        for item in ranges.split(","):
            low, _, high = item.partition("-")
            numbers = range(int(low), int(high or low) + 1)
            found += ["{}{:0{}d}{}".format(head, number, len(low), tail) for number in numbers]
    return tuple(found)
