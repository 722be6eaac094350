"""From a step's record to argv, environment and paths on this host.

Pure but for `os.path.expanduser`.  Replaced are only {workdir}, {files} and {steps.<name>.output}, each
shell-quoted inside a `run` line and as plain text inside `with:` values; all other braces stay.
Standard library only.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from typing import Any, Callable, Dict, List, Mapping, Optional

from remote_jobs import protocol
from remote_jobs.agent.jobdir import JobDir

_PLACEHOLDER = re.compile(r"(?<!\$)\{(workdir|files|steps\.([A-Za-z0-9][A-Za-z0-9_-]*)\.output)\}")  # ${files} is the shell's
# An ssh session's own variables: dead sockets and terminals must not reach a job that outlives it.
_DROPPED_ENV = ("SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY", "SSH_AUTH_SOCK", "SSH_ORIGINAL_COMMAND",
                "PYTHONHOME", "XDG_SESSION_ID", "XDG_RUNTIME_DIR", "TERM")  # fmt: skip


class Places:
    """Resolved paths of one job on this host."""

    def __init__(self, spec: protocol.JobSpec, job: JobDir) -> None:
        self.job = job
        self.spec = spec
        self.workdir = os.path.abspath(os.path.expanduser(spec.workdir or job.at("work")))
        self.files = job.at(protocol.FILES_DIR)
        self._steps = {step.name: step for step in spec.step_specs()}

    def output(self, name: str) -> str:
        """Where a step puts its results: its `output`, else <workdir>/<step name>."""
        step = self._steps[name]
        given = step.output if step.output is not None else step.params.get("output")
        text = self.fill(str(given), lambda value: value) if given else name
        return os.path.join(self.workdir, os.path.expanduser(text))

    def fill(self, text: str, quote: Callable[[str], str]) -> str:
        """Replace the placeholders in ``text``; ``quote`` is applied to each value."""

        def value(match: "re.Match[str]") -> str:
            if match.group(1) == "workdir":
                return quote(self.workdir)
            if match.group(1) == "files":
                return quote(self.files)
            step = match.group(2)
            return quote(self.output(step)) if step in self._steps else match.group(0)

        return _PLACEHOLDER.sub(value, text)

    def filled(self, value: Any) -> Any:
        """Placeholders replaced in every string of a `with:` value."""
        if isinstance(value, str):
            return self.fill(value, lambda text: text)
        if isinstance(value, list):
            return [self.filled(item) for item in value]
        if isinstance(value, dict):
            return {key: self.filled(item) for key, item in value.items()}
        return value


def flags(params: Mapping[str, Any]) -> List[str]:
    """Command-line flags of a built-in step: snake_case keys become --kebab-case.

    True is the bare flag, False its --no- form, null leaves it out; a list of scalars is joined by commas, anything
    nested travels as JSON.
    """
    argv: List[str] = []
    for key, value in params.items():
        name = "--" + str(key).replace("_", "-")
        if value is None:
            continue
        if value is True:
            argv.append(name)
        elif value is False:
            argv.append("--no-" + name[2:])
        elif isinstance(value, list) and all(isinstance(item, (str, int, float)) for item in value):
            argv += [name, ",".join(str(item) for item in value)]
        elif isinstance(value, (list, dict)):
            argv += [name, json.dumps(value)]
        else:
            argv += [name, str(value)]
    return argv


def release_dir() -> str:
    """Folder of the release this code was started from."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def shell() -> str:
    """Shell of `run` lines: bash where present, since people write bash."""
    return "/bin/bash" if os.access("/bin/bash", os.X_OK) else "/bin/sh"


def argv(step: protocol.StepSpec, spec: protocol.JobSpec, places: Places, params: Mapping[str, Any]) -> List[str]:
    """Command of one attempt.

    Raises:
        ValueError: neither `run` nor a known built-in step.
    """
    if step.run is not None:
        return [shell(), "-c", places.fill(step.run, shlex.quote)]
    script = os.path.join(release_dir(), "remote_jobs", "steps", "{}.py".format(step.uses))
    if not step.uses or not os.path.isfile(script):
        raise ValueError("step {} uses {!r}, which this release does not have".format(step.name, step.uses))
    python = os.path.expanduser(step.python or spec.python or "python3")
    return [python, script, *flags(places.filled(dict(params)))]


def environment(
    step: protocol.StepSpec,
    spec: protocol.JobSpec,
    places: Places,
    *,
    base: Mapping[str, str],
    attempt: int,
    secrets: Mapping[str, str],
    gpus: Optional[List[int]],
    exports: Mapping[str, str],
) -> Dict[str, str]:
    """Environment of one attempt. Later entries win: host, plan, step, secrets; our own variables last.

    COLUMNS=400 keeps rich from wrapping its lines, PYTHONUNBUFFERED=1 makes output appear while it happens,
    SPT_NOENV=1 keeps setproctitle from wiping the marker (measured; see docs/decisions).
    """
    env = {key: value for key, value in base.items() if key not in _DROPPED_ENV}
    env.update({"PYTHONUNBUFFERED": "1", "COLUMNS": "400", "SPT_NOENV": "1", "TERM": "dumb", "NO_COLOR": "1"})
    env.update({str(key): str(value) for key, value in exports.items()})
    for given in (spec.env, step.env):
        env.update({str(key): places.fill(str(value), lambda text: text) for key, value in given.items()})
    env.update(secrets)
    env["PATH"] = places.files + os.pathsep + env.get("PATH", os.defpath)
    release = release_dir() if step.uses else None
    env["PYTHONPATH"] = os.pathsep.join(
        part for part in (places.files, env.get("PYTHONPATH"), release) if part
    )
    for need in step.needs:
        env["ORCH_NEEDS_{}_OUTPUT".format(re.sub(r"\W", "_", need).upper())] = places.output(need)
    env.update(
        {
            protocol.MARKER_ENV: spec.id,
            protocol.STEP_ENV: step.name,
            "ORCH_ATTEMPT": str(attempt),
            "ORCH_WORKDIR": places.workdir,
            "ORCH_FILES": places.files,
            "ORCH_OUTPUT": places.output(step.name),
        }
    )
    if gpus is not None and step.gpus > 0:
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(index) for index in gpus)
        env["ORCH_GPUS"] = str(len(gpus))
    return env
