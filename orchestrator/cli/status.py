"""`orch status`, `wait`, `why`: questions about jobs that change nothing."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from orchestrator.cli.options import (
    AttemptOption,
    HostOption,
    InventoryOption,
    JobArgument,
    JobsArgument,
    JsonOption,
    StepOption,
    examples,
    open_session,
    seconds,
)

UNREACHABLE = 3


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(
        epilog=examples(
            "orch status                        # every job on every host",
            "orch status eagle3-2611            # the start of an id is enough",
            "orch status --json | jq '.jobs[] | {id, state, eta}'",
        )
    )(status)
    app.command(
        epilog=examples(
            "orch wait JOB && orch fetch JOB results/",
            "orch wait JOB --timeout 2h; echo $?   # 0 done, 1 failed or stopped, 5 lost, 124 time is up",
        )
    )(wait)
    app.command(epilog=examples("orch why JOB", "orch why JOB --step extract --attempt 1 --json"))(why)


def status(
    jobs: JobsArgument = None,
    host: HostOption = None,
    processes: Annotated[
        bool, typer.Option("--processes", help="Also list the processes of running attempts.")
    ] = False,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show where jobs stand.

    Hosts that cannot be reached are shown with the last known state of their jobs and its age.
    Exits 0 when every host asked could answer, 3 when one could not (what is known is printed all the same).
    """
    from orchestrator.services.status import status as ask
    from orchestrator.ui.console import console, document
    from orchestrator.ui.job import Moment
    from orchestrator.ui.status import status_lines

    with open_session(inventory) as session:
        answer = ask(session, jobs or [], host=host)
        if as_json:
            document(answer)
        lines = status_lines(answer["jobs"], answer["hosts"], Moment(session.now()), processes=processes)
    if not as_json:
        screen = console()
        for line in lines:
            screen.print(line, soft_wrap=True)
    if not all(item["reachable"] for item in answer["hosts"]):
        raise typer.Exit(UNREACHABLE)


def wait(
    job: JobArgument,
    timeout: Annotated[
        str | None,
        typer.Option("--timeout", metavar="TIME", help="Give up after this time (90, 30m, 2h) with 124."),
    ] = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Block until the job has ended, and exit as it did.

    Exit status: 0 succeeded, 1 failed or stopped, 5 lost, 124 on --timeout, 130 on Ctrl-C (the job goes on).
    """
    from orchestrator.services.notify import Deliverer
    from orchestrator.services.outcome import raise_for
    from orchestrator.services.resolve import resolve
    from orchestrator.services.wait import wait as block
    from orchestrator.ui.console import document, out

    timeout_s = seconds(timeout, "--timeout")
    with open_session(inventory) as session:
        found = resolve(session, job)
        with Deliverer(session) as deliverer:
            view = block(session, found, timeout_s=timeout_s, saw=deliverer.saw)
    if as_json:
        from orchestrator.services.outcome import exit_status

        document(
            {"job": view["id"], "host": view["host"], "state": view["state"], "ended_at": view["ended_at"]}
        )
        status_code = exit_status(view)
        if status_code:
            raise typer.Exit(status_code)
        return
    out(f"{view['id']} {view['state']}")
    sys.stdout.flush()
    raise_for(view)


def why(
    job: JobArgument,
    step: StepOption = None,
    attempt: AttemptOption = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell what a failed attempt died of, the evidence, and what the next one changes."""
    from orchestrator.services.why import why as ask
    from orchestrator.ui.console import console, document
    from orchestrator.ui.why import why_lines

    with open_session(inventory) as session:
        answer = ask(session, job, step=step, attempt=attempt)
    if as_json:
        document(answer)
        return
    screen = console()
    for line in why_lines(answer):
        screen.print(line, soft_wrap=True)
