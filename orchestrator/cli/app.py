"""The typer application `orch`: options before the command, and commands that are imported when typed.

Must import no service, rich or SSH library at the top: completion answers at once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.commands import EXAMPLES, SUMMARY
from orchestrator.cli.lazy import LazyGroup
from orchestrator.cli.options import HELP, examples

app = typer.Typer(
    name="orch",
    cls=LazyGroup,
    help=SUMMARY,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=HELP,
    epilog=examples(*EXAMPLES),
)


def _version(value: bool) -> None:
    if value:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"orch {version('orch-gpu')}")
        except PackageNotFoundError:
            typer.echo("orch (not installed)")
        raise typer.Exit


@app.callback()
def root(
    inventory: Annotated[
        Path | None, typer.Option("--inventory", metavar="FILE", help="Inventory for every command.")
    ] = None,
    _version_asked: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command."""
    if inventory is not None:
        os.environ["ORCH_INVENTORY"] = str(inventory)
