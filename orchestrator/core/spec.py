"""From a sound plan and a host to the JobSpec that the host gets: every default filled in, nothing secret in it. Pure."""

from __future__ import annotations

from typing import Any

from orchestrator.core.files import LocalFile
from orchestrator.core.ids import slug
from orchestrator.core.inputs import filled_params, gpus_for
from orchestrator.core.inventory import SLURM_KEYS, Host
from orchestrator.core.notify import named, records
from orchestrator.core.plan import LoadedPlan, Step
from orchestrator.core.retry import normal_retry
from orchestrator.core.schema import Secret
from orchestrator.core.steps import BUILTIN
from remote_jobs.protocol import GRACE_S, TWO_TERM_STEPS, JobSpec, StepSpec, to_dict

SERVICE_TIMEOUT_S = 1800.0
"""How long a service of a `run` step may take to be ready when the plan does not say."""


def build_spec(
    loaded: LoadedPlan, host_name: str, host: Host, *, release: str, job_id: str, created_at: str
) -> tuple[JobSpec, list[LocalFile]]:
    """The spec of a job.

    Args:
        loaded: the plan.
        host_name: the host's name in the inventory.
        host: its entry.
        release: hash of the scripts that will run it.
        job_id: see :func:`orchestrator.core.ids.new_job_id`.
        created_at: ISO UTC with Z.

    Returns:
        The spec with an empty ``files`` list, and the local files whose hashes belong there.

    Raises:
        ConfigError: the plan wants more GPUs than the host has.
    """
    plan = loaded.plan
    steps = [_step(loaded, index, step, host, host_name) for index, step in enumerate(plan.steps)]
    gate = {
        key: value
        for key, value in (
            ("wait_s", plan.gate.wait),
            ("memory_mib", plan.gate.memory_mib),
            ("reap", plan.gate.reap),
        )
        if value is not None
    }
    spec = JobSpec(
        id=job_id,
        name=plan.name,
        host=host_name,
        workdir=plan.workdir or f"{host.root.rstrip('/')}/work/{slug(plan.name)}",
        plan_sha256=loaded.plan_sha256,
        created_at=created_at,
        release=release,
        steps=[to_dict(step) for step in steps],
        env=_plain({**host.env, **plan.env}),
        python=plan.python or host.python,
        host_gpus=host.gpus,
        gate=gate,
        allow_tmpfs=host.allow_tmpfs,
        restart_after_reboot=plan.restart_after_reboot,
        slurm=_slurm(host),
        notify=records(named(host.notify, plan.notify)),
        controller=_version(),
    )
    if plan.log_limit is not None:
        spec.log_limit_bytes = plan.log_limit
    return spec, list(loaded.files)


def _step(loaded: LoadedPlan, index: int, step: Step, host: Host, host_name: str) -> StepSpec:
    params = filled_params(loaded.plan, step)
    gpus = gpus_for(step, params, host.gpus)
    if host.gpus is not None and gpus > host.gpus * step.nodes:
        key = "gpus" if step.gpus is not None else "with" if step.params else "name"
        raise loaded.error(
            ("steps", index, key),
            f"step {step.name} needs {gpus} GPUs, and the host {host_name} has {host.gpus}",
            "lower gpus: or tensor_parallel_size, or choose another host with --host",
        )
    if step.nodes > 1 and host.scheduler != "slurm":
        raise loaded.error(
            ("steps", index, "nodes"),
            f"step {step.name} wants {step.nodes} nodes, and the host {host_name} is one machine",
            "take nodes: out, or use a host with scheduler: slurm",
        )
    secrets = loaded.secrets(host).get(step.name, {})
    return StepSpec(
        name=step.name,
        uses=step.uses,
        run=step.run,
        params=params,
        needs=list(step.needs),
        gpus=gpus,
        env=_plain(step.env),
        secrets=sorted(secrets),
        retry=normal_retry(step.retry),
        done=step.done.model_dump(exclude_none=True) if step.done else None,
        service=service_of(step),
        grace_s=_grace_s(step),
        timeout_s=step.timeout_s,
        hang_s=step.hang_s,
        output=step.output or step.params.get("output"),
        python=step.python,
        patches=patches_of(step),
        nodes=step.nodes,
        split=step.split.ranges,
    )


def _slurm(host: Host) -> dict[str, Any] | None:
    """What `sbatch` is told for this host; None when jobs run on the host itself."""
    if host.scheduler != "slurm":
        return None
    return {key: value for key in SLURM_KEYS if (value := getattr(host, key)) not in (None, [])}


def _plain(env: dict[str, str | Secret]) -> dict[str, str]:
    return {name: value for name, value in env.items() if isinstance(value, str)}


def service_of(step: Step) -> dict[str, Any] | None:
    """A step's `service:` as the host reads it."""
    if step.service is None:
        return None
    service: dict[str, Any] = step.service.model_dump(exclude_none=True)
    if step.uses is None:
        service.setdefault("timeout_s", SERVICE_TIMEOUT_S)
    return service


def patches_of(step: Step) -> Any:
    """A step's `patches:` as the host reads it; built-in steps have a default."""
    return step.patches if step.patches is not None else "auto" if step.uses in BUILTIN else None


def _grace_s(step: Step) -> float | None:
    """Seconds between TERM and KILL; None leaves the two-TERM ladder of serve and extract to the host."""
    if step.grace_s is not None or step.uses in TWO_TERM_STEPS:
        return step.grace_s
    return GRACE_S[step.uses or "run"]


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"orchestrator {version('orch-gpu')}"
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "orchestrator"
