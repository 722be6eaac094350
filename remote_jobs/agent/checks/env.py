"""Checks 2 and 8, as far as the agent goes: start the step's own Python on the scripts that judge it.

A broken environment is what they are there to find, so everything that can happen to that process is a row.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from types import MappingProxyType
from typing import Any, Dict, List, Mapping, Optional, Tuple

from remote_jobs.agent import claims, command, smi_run
from remote_jobs.agent.checks.context import FAIL, SKIP, Job, Row, Step, row

VERSIONS_TIMEOUT_S = 60.0
DEEP_TIMEOUT_S = 900.0
SCRIPT, DEEP_SCRIPT = "preflight_env.py", "preflight_deep.py"
BUILT_IN = frozenset({"serve", "generate", "vocab_map", "extract", "train", "evaluate"})


def check_versions(job: Job, gpus: Mapping[str, Any]) -> List[Row]:
    """One row per built-in step; steps of one interpreter share one process."""
    groups: Dict[str, List[Step]] = {}
    for step in job.steps:
        if step.uses in BUILT_IN:
            groups.setdefault(step.python, []).append(step)
    rows: List[Row] = []
    for python, steps in groups.items():
        request = {
            "steps": [
                {
                    "name": s.name,
                    "uses": s.uses,
                    "params": s.params,
                    "patches": s.spec.patches,
                    "gpus": s.gpus,
                }
                for s in steps
            ],
            "gpus": dict(gpus),
            "sets_dirs": [],
        }
        answer, problem = run_script(python, SCRIPT, request, steps[0], VERSIONS_TIMEOUT_S)
        if answer is not None:
            rows += answer["rows"]
        else:
            rows += [{"step": s.name, "name": "versions", **problem} for s in steps]
    return rows


def run_script(
    python: str,
    script: str,
    request: Mapping[str, Any],
    step: Step,
    timeout_s: float,
    extra_env: Mapping[str, str] = MappingProxyType({}),
) -> Tuple[Optional[Dict[str, Any]], Row]:
    """(answer, {}) of a script of `remote_jobs/steps` under the step's Python, or (None, what went wrong)."""
    path = os.path.join(command.release_dir(), "remote_jobs", "steps", script)
    fix = "set `python:` of the host or the step to the environment with vllm, torch and speculators"
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as given:
        given.write(json.dumps(request).encode("utf-8"))
        given.seek(0)
        try:
            child = subprocess.Popen(
                [python, path],
                stdin=given,
                stdout=out,
                stderr=err,
                env={**environment(step), **extra_env},
                cwd=step.job.workdir if os.path.isdir(step.job.workdir) else "/",
                start_new_session=True,
            )
        except OSError as exc:
            return None, row(
                FAIL, "Python of the step cannot be run: {}: {}".format(python, exc.strerror), fix
            )
        try:
            status = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            end_group(child)
            return None, row(
                FAIL, "{} gave no answer within {:g} s".format(python, timeout_s), "see what its start does"
            )
        out.seek(0)
        err.seek(0)
        text, errors = out.read().decode("utf-8", "replace"), err.read()[-4000:].decode("utf-8", "replace")
    for line in reversed(text.splitlines()):
        with contextlib.suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict) and "rows" in answer:
                return answer, {}
    last = next(
        (line.strip() for line in reversed((text + "\n" + errors).splitlines()) if line.strip()), "no output"
    )
    return None, row(FAIL, "{} ended with status {}: {}".format(python, status, last[:300]), fix)


def environment(step: Step) -> Dict[str, str]:
    """The step's environment as far as a check needs it: host, job, step; no secrets are there yet."""
    env = dict(os.environ)
    env.update({str(k): str(v) for source in (step.job.spec.env, step.spec.env) for k, v in source.items()})
    env.update({"PYTHONUNBUFFERED": "1", "NO_COLOR": "1", "TERM": "dumb", "PYTHONDONTWRITEBYTECODE": "1"})
    env["PYTHONPATH"] = os.pathsep.join(p for p in (env.get("PYTHONPATH"), command.release_dir()) if p)
    return env


def end_group(child: "subprocess.Popen[bytes]") -> None:
    """End a script and everything it started: TERM, a moment, KILL."""
    for signum, wait_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(wait_s)
            if signum == signal.SIGTERM:
                continue  # the group may have members that ignore TERM
            return


def gpu_facts() -> Dict[str, Any]:
    """{"compute_caps": [...], "driver": ...} by nvidia-smi, empty where it does not answer."""
    text = smi_run.run_smi(
        ["--query-gpu=compute_cap,driver_version", "--format=csv,noheader"], timeout_s=10.0
    )
    rows = [line.split(", ") for line in text.splitlines() if line.count(", ") == 1]
    rows = [r for r in rows if r[0].replace(".", "").isdigit()]
    return {"compute_caps": [r[0] for r in rows], "driver": rows[0][1]} if rows else {}


def check_deep(job: Job) -> List[Row]:
    """Check 8: the first step of each kind that computes, run for real on a cut model with dummy weights."""
    rows: List[Row] = []
    for step in job.steps:
        if step.uses not in ("serve", "extract"):
            continue
        request = {
            "step": step.name,
            "uses": step.uses,
            "params": step.params,
            "gpus": step.gpus,
            "patches": step.spec.patches,
            "workdir": job.workdir,
        }
        rows += [{"step": step.name, "name": "deep", **each} for each in _with_gpus(step, request)]
    return rows


def _with_gpus(step: Step, request: Mapping[str, Any]) -> List[Row]:
    """Run the deep check while holding its GPUs, so that no job starts beside it; it never waits for them."""
    claimer, claim, reason = claims.Claimer(), None, ""
    if step.gpus > 0:
        try:
            claim, reason = claimer.claim("preflight", step.name, step.gpus, step.job.spec.host_gpus)
        except (OSError, ValueError) as exc:
            reason = str(exc)
        if claim is None:
            claimer.forget("preflight", step.name)
            return [row(SKIP, "left out: {}".format(reason), "run it again when the GPUs are free")]
    visible = (
        {"CUDA_VISIBLE_DEVICES": ",".join(map(str, claim.indices)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        if claim
        else {}
    )
    try:
        answer, problem = run_script(
            step.python, DEEP_SCRIPT, request, step, DEEP_TIMEOUT_S, extra_env=visible
        )
    finally:
        if claim is not None:
            claim.release()
    return answer["rows"] if answer is not None else [problem]
