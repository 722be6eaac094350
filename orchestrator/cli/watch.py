"""`orch watch`: a live view on a terminal, dated lines anywhere else. Leaving it never touches a job."""

from __future__ import annotations

import os
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
    from orchestrator.core.until import Until
    from orchestrator.services.resolve import FoundJob
    from orchestrator.services.session import Session


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "orch watch                  # everything that runs, on every host",
            "orch watch JOB              # one job, until it ends; exits as `orch wait` does",
            "orch watch JOB | tee log    # off a terminal: one dated line per change",
            "orch watch JOB --until phase=extract --notify   # a message (ORCH_NOTIFY, notify:) when it is there",
        )
    )(watch)


def watch(
    jobs: JobsArgument = None,
    host: HostOption = None,
    plain: Annotated[bool, typer.Option("--plain", help="Dated lines, also on a terminal.")] = False,
    interval: Annotated[
        str | None,
        typer.Option(
            "--interval",
            envvar="ORCH_WATCH_INTERVAL",
            metavar="TIME",
            help="Look at least this often (default: adaptive).",
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            "--until", metavar="POINT", help="Leave at done, phase=NAME, phase=NAME:done, step=NAME or state=NAME."
        ),
    ] = None,
    notify: Annotated[
        bool,
        typer.Option(
            "--notify",
            help="Send a message then (without --until: at the end) through Apprise: to the URLs in ORCH_NOTIFY, "
            "else to those of notify: in plan and inventory.",
        ),
    ] = False,
    inventory: InventoryOption = None,
) -> None:
    """Show progress until the jobs end. q or Ctrl-C leaves; the jobs go on.

    On a terminal: steps, phases, bars with the expected end, GPUs, processes and the log. Elsewhere: dated lines.
    While it runs, it also sends what the jobs' own notify: leaves to this laptop.
    """
    from orchestrator.core.until import Until
    from orchestrator.services.resolve import resolve_many

    interval_s = seconds(interval, "--interval")
    point = Until.parse(until) if until is not None else None
    with open_session(inventory) as session:
        found = resolve_many(session, jobs or [], host=host)
        code = watch_jobs(session, found, host=host, plain=plain, interval_s=interval_s, until=point, tell=notify)
    if code:
        raise typer.Exit(code)


def watch_jobs(
    session: Session,
    jobs: list[FoundJob],
    *,
    host: str | None = None,
    plain: bool = False,
    interval_s: float | None = None,
    until: Until | None = None,
    tell: bool = False,
    aside: bool = False,
) -> int:
    """Watch these jobs (none: all that are active), live where a person looks; the exit status.

    With ``aside`` dated lines go to stderr: stdout holds a document that a program reads.
    """
    from orchestrator.cli.memory import share_memory_pools
    from orchestrator.services.attend import AttentiveWatch
    from orchestrator.ui.console import is_terminal, out, say

    live = not plain and not aside and not _under_ci() and is_terminal(sys.stdout) and is_terminal(sys.stdin)
    watch = AttentiveWatch(session, jobs, host=host, interval_s=interval_s, live=live, until=until, tell=tell)
    share_memory_pools()
    with watch as watching:
        if live:
            from orchestrator.cli.live import run_live

            return run_live(session, watching)
        from orchestrator.cli.plain import run_plain

        return run_plain(session, watching, say if aside else out)


def _under_ci() -> bool:
    """Some CI services give a job a terminal that nobody looks at."""
    return os.environ.get("CI", "").lower() not in {"", "0", "false", "no"}
