"""`orch explain`: reads a log at hand as the supervisor does. No host, no inventory."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.options import JsonOption, examples


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "orch explain vllm.log",
            "orch explain train.log --exit-status 1 --json",
            "ssh box cat run.log | orch explain - --exit-status -9",
        )
    )(explain)


def explain(
    log: Annotated[str, typer.Argument(metavar="LOG", help="Log file, or - for stdin.")],
    exit_status: Annotated[
        int | None,
        typer.Option("--exit-status", metavar="N", help="How the program ended; negative for a signal."),
    ] = None,
    updates: Annotated[bool, typer.Option("--updates", help="Every bar update as one JSON line.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what a log shows: progress bars, phases, the end in sight, and what it died of."""
    from orchestrator.services import explain as service

    raise typer.Exit(service.explain(log, exit_status=exit_status, updates=updates, as_json=as_json))
