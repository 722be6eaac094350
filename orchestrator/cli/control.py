"""`orch stop` and `orch retry`: requests to the supervisor of a job."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.options import (
    InventoryOption,
    JobArgument,
    JsonOption,
    SetOption,
    StepOption,
    examples,
    open_session,
    seconds,
)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(
        epilog=examples(
            "orch stop JOB", "orch stop JOB --wait     # until every process is gone, exit 0 when it is"
        )
    )(stop)
    app.command(
        epilog=examples(
            "orch retry JOB                                   # from what is already done",
            "orch retry JOB --set extract.with.gpu_memory_utilization=0.8",
        )
    )(retry)


def stop(
    job: JobArgument,
    step: StepOption = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return only when the job has ended.")] = False,
    timeout: Annotated[
        str | None,
        typer.Option("--timeout", metavar="TIME", help="With --wait: give up after this time with 124."),
    ] = None,
    reason: Annotated[str, typer.Option("--reason", help="Kept in the job's events.")] = "",
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop a job; final until `orch retry`.

    Every process of it gets TERM, the grace of its step, then KILL.
    """
    from orchestrator.services.resolve import resolve
    from orchestrator.services.stop import stop as request
    from orchestrator.ui.console import document, out

    timeout_s = seconds(timeout, "--timeout")
    with open_session(inventory) as session:
        found = resolve(session, job)
        answer = request(session, found, step=step, wait=wait, timeout_s=timeout_s, reason=reason)
    if as_json:
        document(answer)
        return
    target = f"{answer['job']} {step}" if step else answer["job"]
    out(f"{target} {answer['state']}" + ("" if answer["acknowledged"] else " (asked; not acknowledged yet)"))


def retry(
    job: JobArgument,
    sets: SetOption = None,
    step: StepOption = None,
    watch: Annotated[bool, typer.Option("--watch", help="Then watch it.")] = False,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a failed, stopped or lost job up again.

    Finished steps are kept; the others resume from what they have done where they can.
    """
    from orchestrator.services.resolve import resolve
    from orchestrator.services.retry import retry as request
    from orchestrator.ui.console import document, out

    with open_session(inventory) as session:
        found = resolve(session, job)
        answer = request(session, found, step=step, sets=sets or [])
        if as_json:
            document(answer)
        else:
            out(f"{answer['job']} {answer['state']}")
        if watch:
            from orchestrator.cli.watch import watch_jobs

            code = watch_jobs(session, [found], aside=as_json)
            if code:
                raise typer.Exit(code)
