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
        )
    )(launch)
    app.command(epilog=examples("orch preflight plan.yaml", "orch preflight plan.yaml --deep --json"))(
        preflight
    )


def launch(
    plan: PlanArgument,
    host: HostOption = None,
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
    taken up again by the same command, never started twice.
    """
    from orchestrator.cli.progress import transfer_progress
    from orchestrator.services.launch import confirm
    from orchestrator.services.launch import launch as start
    from orchestrator.services.resolve import FoundJob
    from orchestrator.ui.console import document, out

    wait_gate_s = seconds(wait_gate, "--wait") or 0.0
    with open_session(inventory) as session:
        with transfer_progress("uploading") as progress:
            answer = start(
                session,
                plan,
                host=host,
                sets=sets or [],
                attempts=attempts,
                preflight=preflight,
                wait_gate_s=wait_gate_s,
                new=new,
                progress=progress,
            )
        if as_json:
            document({"job": answer.job, "host": answer.host, "adopted": answer.adopted})
        else:
            out(answer.job)
        if not watch:
            # From here on there is nothing left that could fail or take time but the note itself.
            session.disconnect()
        confirm(session, answer)
        if watch:
            from orchestrator.cli.watch import watch_jobs

            code = watch_jobs(session, [FoundJob(answer.job, answer.host)])
            if code:
                raise typer.Exit(code)


def preflight(
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
        answer = check(session, plan, host=host, sets=sets or [], deep=deep)
    if as_json:
        document({"ok": answer["ok"], "checks": answer["checks"]})
    else:
        screen = console()
        for line in preflight_lines(answer["checks"]):
            screen.print(line, soft_wrap=True)
    if not answer["ok"]:
        raise typer.Exit(CHECK_FAILED)
