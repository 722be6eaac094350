"""`orch watch`: a live view on a terminal, dated lines anywhere else. Leaving it never touches a job."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.options import (
    HostOption,
    InventoryOption,
    JobsArgument,
    examples,
    open_session,
    seconds,
)

if TYPE_CHECKING:
    from orchestrator.services.resolve import FoundJob
    from orchestrator.services.session import Session


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "orch watch                  # everything that runs, on every host",
            "orch watch JOB              # one job, until it ends; exits as `orch wait` does",
            "orch watch JOB | tee log    # off a terminal: one dated line per change",
        )
    )(watch)


def watch(
    jobs: JobsArgument = None,
    host: HostOption = None,
    plain: Annotated[bool, typer.Option("--plain", help="Dated lines, also on a terminal.")] = False,
    interval: Annotated[
        str | None,
        typer.Option("--interval", metavar="TIME", help="Look at least this often (default: adaptive)."),
    ] = None,
    inventory: InventoryOption = None,
) -> None:
    """Show progress until the jobs end. q or Ctrl-C leaves; the jobs go on.

    On a terminal: steps, phases, bars with the expected end, GPUs, processes and the log. Elsewhere: dated lines.
    """
    from orchestrator.services.resolve import resolve_many

    interval_s = seconds(interval, "--interval")
    with open_session(inventory) as session:
        found = resolve_many(session, jobs or [], host=host)
        code = watch_jobs(session, found, host=host, plain=plain, interval_s=interval_s)
    if code:
        raise typer.Exit(code)


def watch_jobs(
    session: Session,
    jobs: list[FoundJob],
    *,
    host: str | None = None,
    plain: bool = False,
    interval_s: float | None = None,
) -> int:
    """Watch these jobs (none: all that are active), live where a person looks; the exit status."""
    from orchestrator.services.watch import Watch
    from orchestrator.ui.console import is_terminal

    live = not plain and is_terminal(sys.stdout) and is_terminal(sys.stdin)
    with Watch(session, jobs, host=host, interval_s=interval_s, live=live) as watching:
        if live:
            from orchestrator.cli.live import run_live

            return run_live(session, watching)
        from orchestrator.cli.plain import run_plain

        return run_plain(session, watching)
