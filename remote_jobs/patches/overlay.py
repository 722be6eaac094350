"""What the supervisor asks for before it starts a step: the environment that puts the step's patch sets in force.

The sets are judged and the overlay is built by the step's own interpreter, because that is the installation they are
for. Standard library only, Python 3.8: this module is imported by the supervisor.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Sequence

if TYPE_CHECKING:
    from remote_jobs.protocol import JobSpec, StepSpec

TIMEOUT_S = 180.0
USER_SETS = "patches"
"""Folder of people's own sets: below the root, and among the files of the plan."""


def for_step(
    step: StepSpec, spec: JobSpec, job_dir: str, root: str, env: Mapping[str, str]
) -> Dict[str, str]:
    """Variables for one attempt: PYTHONPATH with the overlay first, ORCH_PATCHES, ORCH_PATCHES_SHA256.

    `env` is the environment that the step would have without patches.

    Raises:
        ValueError: a set asked for by name does not suit this host, or the step's Python cannot be run.
    """
    answer = ask("prepare", step.python or spec.python, root, step.patches, env, user_folders(root, job_dir))
    return {str(name): str(value) for name, value in {"ORCH_PATCHES": "none", **answer["env"]}.items()}


def ask(
    action: str,
    python: object,
    root: str,
    wanted: object,
    env: Mapping[str, str],
    folders: List[str],
    extra: Sequence[str] = (),
) -> Dict[str, Any]:
    """Run `python remote_jobs/patches ACTION` under the given interpreter and return its answer.

    Raises:
        ValueError: what went wrong and what to do.
    """
    interpreter = os.path.expanduser(str(python or "python3"))
    names = [wanted] if isinstance(wanted, str) else list(wanted or [])  # type: ignore[call-overload]
    argv = [interpreter, os.path.dirname(os.path.abspath(__file__)), action, "--root", root, *extra]
    for name in names:
        argv += ["--set", str(name)]
    for folder in folders:
        argv += ["--sets-dir", folder]
    try:
        done = subprocess.run(
            argv,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError("the patch sets cannot be judged with {}: {}".format(interpreter, error)) from None
    try:
        answer = json.loads(done.stdout.decode("utf-8", "replace").strip().splitlines()[-1])
    except (ValueError, IndexError):
        tail = done.stderr.decode("utf-8", "replace").strip()[-400:]
        raise ValueError("the patch sets cannot be judged with {}: {}".format(interpreter, tail)) from None
    if "error" in answer:
        hint = answer["error"].get("hint")
        raise ValueError(answer["error"]["message"] + ("; " + hint if hint else ""))
    return dict(answer)


def user_folders(root: str, job_dir: str = "") -> List[str]:
    """Folders of people's own sets that exist: <root>/patches, and `patches` among the job's files."""
    places = [os.path.join(root, USER_SETS)]
    if job_dir:
        places.append(os.path.join(job_dir, "files", USER_SETS))
    return [place for place in places if os.path.isdir(place)]
