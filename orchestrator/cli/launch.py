"""`orch launch` and `orch preflight`: from a plan on the laptop to a job on a host."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.options import (
    WATCH_HELP,
    HostOption,
    InventoryOption,
    JsonOption,
    PlanArgument,
    SetOption,
    complete_groups,
    examples,
    open_session,
    seconds,
)

CHECK_FAILED = 4


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(
        epilog=examples(
            "orch launch plans/extract.yaml",
            "orch launch plan.yaml --host gpubox --set extract.with.layers=[2,30] --attempts 2",
            "job=$(orch launch plan.yaml) && orch wait $job",
            "orch launch plan.yaml --wait 30m    # let a foreign GPU process end first",
            "orch launch plan.yaml --any h200s   # the first host of the group whose GPUs are free",
        )
    )(launch)
    app.command(epilog=examples("orch preflight plan.yaml", "orch preflight plan.yaml --deep --json"))(
        preflight
    )


def _host(context: typer.Context, host: str | None) -> dict[str, str | None]:
    """The host as typed, or the user's usual one (ORCH_HOST): that one gives way to --any and to hosts in the plan."""
    source = context.get_parameter_source("host")
    usual = source is not None and source.name == "ENVIRONMENT"
    return {"host": None, "usual_host": host} if usual else {"host": host}


def launch(
    context: typer.Context,
    plan: PlanArgument,
    host: HostOption = None,
    any_of: Annotated[
        str | None,
        typer.Option(
            "--any",
            metavar="GROUP",
            help="The first host of a group (or of HOST,HOST) whose gate is open; exits 4 when none is.",
            autocompletion=complete_groups,
        ),
    ] = None,
    sets: SetOption = None,
    attempts: Annotated[
        int | None,
        typer.Option("--attempts", min=1, metavar="N", help="Tries of every step, the first included."),
    ] = None,
    preflight: Annotated[
        bool, typer.Option("--preflight/--no-preflight", help="Check the host first.")
    ] = True,
    wait_gate: Annotated[
        str | None,
        typer.Option(
            "--wait", metavar="TIME", help="When a foreign process holds the GPUs, wait this long for it."
        ),
    ] = None,
    new: Annotated[
        bool,
        typer.Option("--new", help="Start another job even if an earlier launch of this plan was cut short."),
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help=WATCH_HELP)] = False,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start a plan on a host and print the job id alone on stdout.

    The job runs detached: it outlives this command, the connection and the laptop. A launch that was cut short is
    taken up again by the same command, never started twice. A step that is split over hosts is one job on each, on a
    Slurm cluster one for each range (submitted as one array), and one id a line.
    """
    from orchestrator.cli.progress import transfer_progress
    from orchestrator.services.launch import Wanted, confirm
    from orchestrator.services.launch_hosts import launch_plan
    from orchestrator.services.resolve import FoundJob
    from orchestrator.ui.console import document, out

    wait_gate_s = seconds(wait_gate, "--wait") or 0.0
    with open_session(inventory) as session:
        with transfer_progress("uploading") as progress:
            wanted = Wanted(attempts, preflight, wait_gate_s, new)
            where = _host(context, host)
            answers = launch_plan(
                session, plan, wanted, **where, group=any_of, sets=sets or [], progress=progress
            )
        if as_json:
            rows = [{"job": one.job, "host": one.host, "adopted": one.adopted} for one in answers]
            document(rows[0] if len(rows) == 1 else {**rows[0], "jobs": rows})
        else:
            for one in answers:
                out(one.job)
        if not watch:
            # From here on there is nothing left that could fail or take time but the note itself.
            session.disconnect()
        confirm(session, *answers)
        if watch:
            from orchestrator.cli.watch import watch_jobs

            code = watch_jobs(session, [FoundJob(one.job, one.host) for one in answers], aside=as_json)
            if code:
                raise typer.Exit(code)


def preflight(
    context: typer.Context,
    plan: PlanArgument,
    host: HostOption = None,
    sets: SetOption = None,
    deep: Annotated[bool, typer.Option("--deep", help="Also the checks that take minutes.")] = False,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check in a minute what would else fail after twenty; exits 4 when a check fails."""
    from orchestrator.services.preflight import preflight as check
    from orchestrator.ui.console import console, document
    from orchestrator.ui.preflight import preflight_lines

    with open_session(inventory) as session:
        answer = check(session, plan, **_host(context, host), sets=sets or [], deep=deep)
    if as_json:
        document({"ok": answer["ok"], "checks": answer["checks"]})
    else:
        screen = console()
        for line in preflight_lines(answer["checks"]):
            screen.print(line, soft_wrap=True)
    if not answer["ok"]:
        raise typer.Exit(CHECK_FAILED)
