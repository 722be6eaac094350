"""`orch gc` and `orch doctor`: keeping house, and what to paste into a bug report."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.options import (
    InventoryOption,
    JsonOption,
    complete_hosts,
    examples,
    open_session,
    seconds,
)

UNREACHABLE = 3
HostsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="HOST", help="Hosts; all of them by default.", autocompletion=complete_hosts),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(
        epilog=examples(
            "orch gc                                  # what could go; nothing is deleted",
            "orch gc gpubox --older-than 7d --apply   # delete it",
        )
    )(gc)
    app.command(
        epilog=examples(
            "orch doctor                # asks every host of the inventory",
            "orch doctor --no-hosts     # this machine only",
            "orch doctor --json > report.json",
        )
    )(doctor)


def gc(
    names: HostsArgument = None,
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="TIME", help="Only what ended or was used last this long ago.")
    ] = "30d",
    apply: Annotated[bool, typer.Option("--apply", help="Delete; without it only tell.")] = False,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show, and with --apply delete, what old jobs left on hosts: records, releases, uploads.

    Never a job that runs, is lost or has processes left, never a work folder. Exits 3 when a host could not be asked.
    """
    from orchestrator.services.gc import gc as collect
    from orchestrator.ui.console import document, out
    from orchestrator.ui.upkeep import gc_lines

    older_than_s = seconds(older_than, "--older-than")
    assert older_than_s is not None
    with open_session(inventory) as session:
        answer = collect(session, names or [], older_than_s=older_than_s, apply=apply)
    if as_json:
        document(answer)
    else:
        for line in gc_lines(answer):
            out(line)
    if any(host["error"] for host in answer["hosts"]):
        raise typer.Exit(UNREACHABLE)


def doctor(
    names: HostsArgument = None,
    no_hosts: Annotated[bool, typer.Option("--no-hosts", help="Connect to nothing.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Show login names and addresses; secrets never.")] = False,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print what a bug report needs: versions, ssh, files, hosts; secrets and addresses masked."""
    from orchestrator.services.doctor import doctor as examine
    from orchestrator.ui.console import document, out
    from orchestrator.ui.upkeep import doctor_lines

    with open_session(inventory) as session:
        answer = examine(session, names or [], ask=not no_hosts, full=full)
    if as_json:
        document(answer)
        return
    for line in doctor_lines(answer):
        out(line)
