"""From a plan to a running job, so that doing it twice, or half and then again, starts one job.

Order: read everything local, record the intent (id and plan hash) in the ledger, then the first byte leaves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import (
    ConfigError,
    GateClosed,
    HostRefused,
    JobLost,
    OrchError,
    PreflightFailed,
    UsageError,
)
from orchestrator.core.numbers import check_seconds, check_whole
from orchestrator.core.split import expand, for_ranges, one_after_another
from orchestrator.core.times import iso
from orchestrator.services import notify
from orchestrator.services.look import job_view, look, remember
from orchestrator.services.secrets import resolve_secrets
from orchestrator.services.upload import HashedFile, Progress, hash_file, upload
from remote_jobs.protocol import JOB_TERMINAL

if TYPE_CHECKING:
    from orchestrator.core.plan import LoadedPlan
    from orchestrator.services.session import Session

LAUNCH_TIMEOUT_S = 90.0
"""The host starts a supervisor within 20 s; the gate's nvidia-smi may take as long again."""
MADE_A_FOLDER = frozenset({"supervisor_failed", "io", "slurm_unanswered"})
"""Refusals after the job's folder was made: the same launch may go on with it."""


@dataclass(frozen=True)
class Launched:
    """A job that was started, or taken up."""

    job: str
    host: str
    adopted: bool
    view: dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """How a plan is to be launched, whatever the host.

    Attributes:
        attempts: tries of every step instead of the plan's.
        preflight: check the host first.
        wait_gate_s: how long the job may wait for GPUs that a foreign process holds.
        new: start another job even if an earlier launch of this plan was cut short.

    Raises:
        UsageError: a number that no plan could hold.
    """

    attempts: int | None = None
    preflight: bool = True
    wait_gate_s: float = 0.0
    new: bool = False

    def __post_init__(self) -> None:
        from orchestrator.core.retry import MAX_ATTEMPTS
        from orchestrator.core.schema import MAX_DURATION_S

        if self.attempts is not None:
            check_whole("attempts", self.attempts, 1, MAX_ATTEMPTS)
        check_seconds("time to wait for GPUs", self.wait_gate_s, MAX_DURATION_S, zero=True)


@dataclass(frozen=True)
class Prepared:
    """Everything local of a launch: nothing has been sent yet.

    ``resumed``: an earlier launch of this plan and host was begun and never confirmed; this one goes on with it.
    """

    plan: LoadedPlan
    host: str
    spec: dict[str, Any]
    files: list[HashedFile]
    secrets: dict[str, dict[str, str]]
    resumed: bool = False


def launch(
    session: Session,
    plan: Path,
    *,
    host: str | None = None,
    sets: Sequence[str] = (),
    attempts: int | None = None,
    preflight: bool = True,
    wait_gate_s: float = 0.0,
    new: bool = False,
    progress: Progress,
) -> Launched:
    """Start a plan on a host; an unconfirmed launch of the same plan and host is resumed, unless ``new``.

    Raises:
        ConfigError, UsageError: plan, inventory, ``--set``, a secret or a number. PreflightFailed, GateClosed: nothing was started.
        HostError: the host could not be reached or refused; type the same command again.
    """
    wanted = Wanted(attempts, preflight, wait_gate_s, new)
    loaded, name = load(session, plan, host=host, sets=sets)
    return launch_on(session, loaded, name, wanted, progress)


def launch_on(
    session: Session, loaded: LoadedPlan, host: str, wanted: Wanted, progress: Progress
) -> Launched:
    """Start a plan that was read, on this host; raises as :func:`launch` does."""
    prepared = prepare(session, loaded, host, wanted)
    make_ready(session, prepared, wanted, progress)
    return send(session, prepared, wanted)


def make_ready(session: Session, prepared: Prepared, wanted: Wanted, progress: Progress) -> None:
    """Everything on the host that comes before the start: release, files, checks.

    Raises:
        PreflightFailed: a check failed. JobLost: a lost job of this plan still runs. HostError: the host could not be
            reached or refused. Nothing was started, and unless the launch was resumed nothing is remembered of it.
    """
    try:
        agent = session.agent(prepared.host)
        prepared.spec["release"] = agent.hello()["release"]
        meet_twin(session, prepared, wanted)
        upload(agent, prepared.files, progress)
        if wanted.preflight:
            _preflight(session, prepared, wait_gate=bool(wanted.wait_gate_s))
    except OrchError:
        forget(session, prepared)
        raise


def forget(session: Session, prepared: Prepared) -> None:
    """No launch request has left, so there is nothing that a later launch could find; a resumed one may have left."""
    if not prepared.resumed:
        session.ledger.drop_intent(prepared.spec["id"])


def send(
    session: Session,
    prepared: Prepared,
    wanted: Wanted,
    only: Sequence[int] | None = None,
    *,
    join: bool = False,
) -> Launched:
    """Ask the host to start the job; of a split step with ``only`` these ranges, and see `expand` for ``join``.

    Raises:
        GateClosed, HostRefused: nothing runs, and nothing is remembered, unless the job's folder was made.
        HostError: unknown whether it runs; the same launch takes it up.
    """
    spec = {**prepared.spec, "steps": expand(prepared.spec["steps"], only, join=join)}
    try:
        answer = session.agent(prepared.host).request(
            "launch",
            timeout_s=LAUNCH_TIMEOUT_S,
            spec=spec,
            secrets=for_ranges(prepared.secrets, spec["steps"]),
            new=wanted.new,
            skip_gate=bool(wanted.wait_gate_s),
        )
    except (GateClosed, HostRefused) as error:
        if getattr(error, "reason", "") not in MADE_A_FOLDER:
            session.ledger.drop_intent(spec["id"])
        raise
    job = str(answer["job"])
    record = {
        "state": answer.get("state"),
        "spec": {"workdir": spec["workdir"], "plan_sha256": spec["plan_sha256"]},
    }
    for warning in [*one_after_another(spec), *(answer.get("warnings") or [])]:
        session.say(f"orch: {prepared.host}: {warning}")
    if prepared.resumed:
        session.say(f"orch: took up the unconfirmed launch {job}; --new would start another")
    return Launched(job, prepared.host, prepared.resumed, job_view(prepared.host, job, record, age=0.0))


def confirm(session: Session, *launched: Launched) -> None:
    """Note that the launch is known to have arrived. Call it when whoever asked has been told the ids: a controller
    that dies before leaves the intents open, and the same launch then takes these jobs up instead of starting others.
    All jobs of a launch are confirmed at once: of a launch known in part, the same command would start the rest anew.
    """
    session.ledger.confirm_all([one.job for one in launched], session.now())
    remember(session, [one.view for one in launched])


def read_plan(session: Session, plan: Path, sets: Sequence[str]) -> LoadedPlan:
    """The plan with its ``--set`` options; its warnings are said.

    Raises:
        ConfigError: it is wrong.
    """
    from orchestrator.core.plan import load_plan

    loaded = load_plan(plan, list(sets))
    for warning in loaded.warnings:
        session.say(f"orch: {warning}")
    return loaded


def load(session: Session, plan: Path, *, host: str | None, sets: Sequence[str]) -> tuple[LoadedPlan, str]:
    """The plan and the one host that it goes to.

    Raises:
        ConfigError, UsageError: as :func:`load_for`, and when a step is split over several hosts.
    """
    loaded, hosts = load_for(session, plan, host=host, sets=sets)
    if len(hosts) != 1:
        raise UsageError(f"{plan} is split over several hosts: {', '.join(hosts)}", "use `orch launch`")
    return loaded, hosts[0]


def load_for(
    session: Session, plan: Path, *, host: str | None, sets: Sequence[str], usual_host: str | None = None
) -> tuple[LoadedPlan, list[str]]:
    """The plan and its host: ``--host``, the user's usual one, the plan's, or the only one of the inventory; several
    for a step that is split over hosts.

    Raises:
        ConfigError, UsageError: no such plan or host, or several hosts and none named.
    """
    loaded = read_plan(session, plan, sets)
    for index, step in enumerate(loaded.plan.steps):
        if step.split.hosts:
            if host is not None:
                hint = f"do all ranges on one host: --set {step.name}.split={step.split.ranges}"
                raise UsageError(f"{step.name}.split names its hosts, and --host {host} another", hint)
            for wanted in step.split.hosts:
                try:
                    session.host(wanted)
                except ConfigError as error:
                    raise loaded.error(("steps", index, "split"), error.message, error.hint) from None
            return loaded, list(step.split.hosts)
    name = host or usual_host or loaded.plan.host
    if name is None:
        names = session.host_names()
        if len(names) != 1:
            raise UsageError(
                f"{plan} names no host, and the inventory has {', '.join(names) or 'none'}",
                "add `host:` to the plan, or say --host NAME or --any GROUP",
            )
        name = names[0]
    session.host(name)
    return loaded, [name]


def meet_twin(session: Session, prepared: Prepared, wanted: Wanted) -> None:
    """Two jobs of one plan share a workdir: that is allowed, and said; but not beside one that nobody looks after.

    Raises:
        JobLost: processes of such a job still run.
    """
    spec, host = prepared.spec, prepared.host
    if wanted.new or prepared.resumed:
        return
    rows = [row for row in session.ledger.jobs(host) if row.confirmed and row.plan_sha256 == spec["plan_sha256"]]
    known = [row.id for row in rows if row.view and str(row.view.get("state")) not in JOB_TERMINAL]
    if not known:
        return
    for view in look(session, host, jobs=known[:1]).jobs:
        remember(session, [view])
        job, state = view["id"], view["state"]
        left = (view["lost"] or {}).get("processes") or []
        if left:
            raise JobLost(
                f"nothing was started: {job} of this very plan is lost ({view['lost']['reason']}), "
                f"and a second copy would run beside it in the same workdir",
                f"orch retry {job} goes on with it, orch stop {job} ends it; or launch all the same with --new",
            )
        if state not in JOB_TERMINAL:
            session.say(
                f"orch: {job} of this very plan is {state}, with the same workdir; this starts another "
                f"(orch status {job}; --new says it is meant)"
            )


def prepare(
    session: Session, loaded: LoadedPlan, host: str, wanted: Wanted, only: Sequence[int] | None = None
) -> Prepared:
    """Read files and secrets, choose the job's id and record the intent, or find the earlier one to resume.

    ``only``: the ranges of a split step that this job does; a host may have several such jobs of one plan.
    """
    from orchestrator.core.ids import new_job_id

    now = session.now()
    prepared = build(session, loaded, host, job=new_job_id(loaded.plan.name, now), created_at=iso(now))
    spec = prepared.spec
    if wanted.attempts is not None:
        for step in spec["steps"]:
            step["retry"] = {**(step.get("retry") or {}), "attempts": wanted.attempts}
    if wanted.wait_gate_s:
        spec["gate"] = {**(spec.get("gate") or {}), "wait_s": wanted.wait_gate_s}
    spec["plan_sha256"] = _identity(loaded.plan_sha256, prepared.files, wanted.attempts, only)
    secrets = resolve_secrets(loaded.secrets(session.host(host)), loaded.base_dir)
    intent = None if wanted.new else session.ledger.unconfirmed(spec["plan_sha256"], host)
    if intent is not None:
        spec["id"], spec["created_at"] = intent.id, intent.created_at
    secrets |= notify.for_host(session, loaded, host, spec["id"])
    if intent is None:
        session.ledger.record_intent(
            spec["id"],
            host=host,
            plan_sha256=spec["plan_sha256"],
            name=loaded.plan.name,
            created_at=spec["created_at"],
        )
    return Prepared(loaded, host, spec, prepared.files, secrets, intent is not None)


def begun_on(session: Session, loaded: LoadedPlan, hosts: Sequence[str], wanted: Wanted) -> str | None:
    """The first of the hosts to which this very launch was sent before without ever being confirmed."""
    from orchestrator.core.ids import new_job_id

    if wanted.new:
        return None
    for host in hosts:
        now = session.now()
        built = build(session, loaded, host, job=new_job_id(loaded.plan.name, now), created_at=iso(now))
        identity = _identity(loaded.plan_sha256, built.files, wanted.attempts)
        if session.ledger.unconfirmed(identity, host) is not None:
            return host
    return None


def _identity(
    plan_sha256: str, files: Sequence[HashedFile], attempts: int | None, only: Sequence[int] | None = None
) -> str:
    """What makes two launches the same: the plan with its settings, the bytes of its own files, the ranges to do."""
    if not files and attempts is None and only is None:
        return plan_sha256
    parts = [plan_sha256, *(file.sha256 for file in files), str(attempts)]
    if only is not None:
        parts.append(f"ranges {list(only)}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def build(session: Session, loaded: LoadedPlan, host: str, *, job: str, created_at: str) -> Prepared:
    """The spec as it will be sent, with the hashes of the plan's own files.

    Raises:
        ConfigError: a file of ``files:`` cannot be read.
    """
    from orchestrator.core.spec import build_spec
    from remote_jobs.protocol import to_dict

    spec, local_files = build_spec(
        loaded, host, session.host(host), release="", job_id=job, created_at=created_at
    )
    record = to_dict(spec)
    files = [hash_file(item.path, item.name) for item in local_files]
    record["files"] = [
        {
            "name": item.name,
            "sha256": file.sha256,
            "size": file.size,
            "mode": 0o700 if file.executable else 0o600,
        }
        for item, file in zip(local_files, files, strict=True)
    ]
    return Prepared(loaded, host, record, files, {})


def _preflight(session: Session, prepared: Prepared, *, wait_gate: bool) -> None:
    from orchestrator.services.preflight import run_checks

    answer = run_checks(session, prepared, deep=False, wait_gate=wait_gate)
    failed = [check for check in answer["checks"] if check.get("verdict") == "fail"]
    raised = {check["step"]: check["exports"] for check in answer["checks"] if check.get("exports")}
    for step in prepared.spec["steps"]:
        step["exports"] = raised.get(step["name"], {})
    for check in answer["checks"]:
        if check.get("verdict") == "warn":
            session.say(f"orch: {check.get('step') or prepared.host}: {check['name']}: {check['found']}")
    if failed:
        lines = [f"preflight on {prepared.host} failed, nothing was started:"]
        for check in failed:
            lines.append(f"  {check.get('step') or prepared.host}: {check['name']}: {check['found']}")
            if check.get("fix"):
                lines.append(f"    -> {check['fix']}")
        raise PreflightFailed(
            "\n".join(lines),
            "correct these, or launch all the same with --no-preflight",
            checks=failed,
        )
