"""Launches that have several hosts to choose from, or to share the work: `--any`, and a step split over hosts.

Choosing is no scheduling: the hosts of a group are asked in their order, and the first whose gate is open gets the
job. A launch that may have reached a host is taken up there before any other host is tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.core.errors import GateClosed, HostError, OrchError, PreflightFailed, UsageError
from orchestrator.core.split import arrays, shares
from orchestrator.core.times import iso
from orchestrator.services.launch import (
    Launched,
    Prepared,
    Wanted,
    begun_on,
    build,
    forget,
    launch_on,
    load_for,
    make_ready,
    meet_twin,
    prepare,
    read_plan,
    send,
)

if TYPE_CHECKING:
    from orchestrator.core.plan import LoadedPlan
    from orchestrator.services.session import Session
    from orchestrator.services.upload import Progress


def launch_plan(
    session: Session,
    plan: Path,
    wanted: Wanted,
    *,
    host: str | None = None,
    usual_host: str | None = None,
    group: str | None = None,
    sets: Sequence[str] = (),
    progress: Progress,
) -> list[Launched]:
    """Start a plan where it belongs: on its host, on the first free one of ``group``, or its ranges on several.

    Raises:
        UsageError: options that contradict each other. GateClosed: no host of the group is free. Else as `launch`.
    """
    if group is not None:
        if host is not None:
            raise UsageError("--any chooses the host, and --host names one", "say one of them")
        if wanted.wait_gate_s:
            raise UsageError(
                "--any takes a host that is free now, and --wait waits for one host",
                "say --host HOST --wait TIME, or --any alone",
            )
        return [launch_any(session, read_plan(session, plan, sets), group, wanted, progress)]
    loaded, hosts = load_for(session, plan, host=host, usual_host=usual_host, sets=sets)
    if any(step.split.hosts for step in loaded.plan.steps) or _is_array(session, loaded, hosts[0]):
        return launch_spread(session, loaded, hosts, wanted, progress)
    return [launch_on(session, loaded, hosts[0], wanted, progress)]


# ------------------------------------------------------------------------------------------------------- the first free


def launch_any(
    session: Session, loaded: LoadedPlan, group: str, wanted: Wanted, progress: Progress
) -> Launched:
    """Start the plan on the first host of a group whose gate is open.

    Raises:
        GateClosed: none is; the message says why for each. HostError: none could be asked, or one did not answer when
            the launch was already on its way: the same command asks it first.
    """
    hosts = session.inventory.choice(group)
    begun = begun_on(session, loaded, hosts, wanted)
    order = [begun, *(name for name in hosts if name != begun)] if begun else hosts
    seen: dict[str, str] = {}
    closed = False
    for name in order:
        try:
            # Where an earlier launch was begun its own job may hold the GPUs: nothing but the launch itself can tell.
            reason = None if name == begun else _why_closed(session, loaded, name)
            if reason is None:
                return launch_on(session, loaded, name, wanted, progress)
            closed = True
        except GateClosed as error:
            closed, reason = True, error.message
        except PreflightFailed as error:
            if any(check.get("name") != "gpus" for check in error.checks):
                raise
            closed, reason = True, "; ".join(str(check.get("found")) for check in error.checks)
        except HostError as error:
            if begun_on(session, loaded, [name], wanted):
                error.message += f"; the launch was on its way to {name} and may run there"
                error.hint = (
                    f"type the same command again: {name} is asked first (--new would start another job)"
                )
                raise
            reason = error.message.removeprefix(f"{name}: ")
        seen[name] = reason
        session.say(f"orch: {name} is passed over: {reason}")
    lines = "".join(f"\n  {name}: {reason}" for name, reason in seen.items())
    if closed:
        raise GateClosed(
            f"no host of {group} is free, nothing was started:{lines}",
            f"wait for one: orch launch {loaded.path} --host {hosts[0]} --wait 30m",
        )
    raise HostError(
        f"no host of {group} could be asked, nothing was started:{lines}", "see: orch hosts check"
    )


def _why_closed(session: Session, loaded: LoadedPlan, host: str) -> str | None:
    """Why the job could not start on this host at once; None when its gate is open. A queue is closed too."""
    from orchestrator.core.ids import new_job_id
    from orchestrator.services.preflight import run_checks

    now = session.now()
    prepared = build(session, loaded, host, job=new_job_id(loaded.plan.name, now), created_at=iso(now))
    answer = run_checks(session, prepared, deep=False, only=("gpus",), no_queue=True)
    failed = [str(check.get("found")) for check in answer["checks"] if check.get("verdict") == "fail"]
    return "; ".join(failed) or None


# ------------------------------------------------------------------------------------------------- split over several


def _is_array(session: Session, loaded: LoadedPlan, host: str) -> bool:
    """True when the ranges of a split are jobs of their own though no hosts are named: Slurm places them where it has
    room. They are steps of one job where the plan has other steps, or a `done:` that only a last step can check.
    """
    only = loaded.plan.steps[0]
    apart = len(loaded.plan.steps) == 1 and only.split.array and only.done is None
    return only.split.ranges > 1 and apart and session.host(host).scheduler == "slurm"


def launch_spread(
    session: Session, loaded: LoadedPlan, hosts: Sequence[str], wanted: Wanted, progress: Progress
) -> list[Launched]:
    """Start a job on each host with its share of the ranges, on a Slurm host one for each range, submitted as one array
    when the last of them is there; all hosts are ready before the first job starts.

    Raises:
        OrchError: as `launch`; when some jobs run already the message names them, and the same launch takes them up.
    """
    split = loaded.plan.steps[0].split  # such a plan has no other step
    count = split.ranges
    queued = {name: session.host(name).scheduler == "slurm" and split.array for name in hosts}
    todo = shares(count, queued)
    prepared = [prepare(session, loaded, host, wanted, ranges) for host, ranges in todo]
    together = arrays([(one.spec["id"], one.host) for one in prepared], queued)
    for one in prepared:
        if one.spec["id"] in together:
            one.spec["slurm"]["array"] = together[one.spec["id"]]
    try:
        ready: dict[str, Prepared] = {}
        for one in prepared:
            if one.host in ready:  # the second job of a host needs what the first one has found
                one.spec["release"] = ready[one.host].spec["release"]
                for step, checked in zip(one.spec["steps"], ready[one.host].spec["steps"], strict=True):
                    step["exports"] = checked.get("exports") or {}
                meet_twin(session, one, wanted)
            else:
                make_ready(session, one, wanted, progress)
                ready[one.host] = one
    except OrchError:
        for one in prepared:
            forget(session, one)
        raise
    launched: list[Launched] = []
    for number, (one, (_, ranges)) in enumerate(zip(prepared, todo, strict=True)):
        try:
            launched.append(send(session, one, wanted, ranges, join=len(hosts) == 1))
        except OrchError as error:
            for later in prepared[number + 1 :]:
                forget(session, later)
            if launched:
                names = ", ".join(f"{item.job} on {item.host}" for item in launched)
                verb = "wait for it" if one.spec["id"] in together else "started"
                error.message += f"\n  {one.host} was to do {_listed(ranges)}; {verb}: {names}"
                again = "type the same command again: it takes up what runs and starts the rest"
                refused = getattr(error, "reason", "") == "slurm_refused" and error.hint
                error.hint = f"{error.hint}, then {again}" if refused else again
            raise
        session.say(f"orch: {launched[-1].job}: {_listed(ranges)} of {count} on {one.host}")
        array, _, task = str((launched[-1].view.get("slurm") or {}).get("job")).partition("_")
        if task and one.spec["id"] == together.get(one.spec["id"], [""])[-1]:
            session.say(f"orch: {one.host}: the ranges there are the tasks of one Slurm array, {array}")
    return launched


def _listed(ranges: Sequence[int]) -> str:
    return f"ranges {ranges[0]} to {ranges[-1]}" if len(ranges) > 1 else f"range {ranges[0]}"
