"""`orch demo`: a whole job on this machine, with a crash in the middle, through the ordinary commands."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.options import examples


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=examples("orch demo", "orch demo --keep     # leaves the host up to play with"))(demo)


def demo(
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the demo's SSH host up and print what to try.")
    ] = False,
) -> None:
    """See a whole job run, crash, retry and finish on this machine.

    A small extraction runs on an SSH server of its own, through the ordinary commands: it is killed half-way,
    retried, finished and checked.
    """
    from orchestrator.services import demo as service

    code = service.demo(keep=keep)
    if code:
        raise typer.Exit(code)
