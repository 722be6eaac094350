"""`orch patch`: thin door to the patch service."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Annotated

import typer

from orchestrator.cli.options import InventoryOption, JsonOption, open_session

SERVICE = "orchestrator.services.patch"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(patch)


def patch(
    host: Annotated[str | None, typer.Argument(metavar="HOST", help="Host of the inventory.")] = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show which verified patches fit the packages of a host."""
    from orchestrator.core.errors import UsageError

    if importlib.util.find_spec(SERVICE) is None:
        raise UsageError("this build of orch carries no patch sets", "steps run with `patches: none`")
    service = importlib.import_module(SERVICE)
    with open_session(inventory) as session:
        code = service.patch(session, host, as_json=as_json)
    if code:
        raise typer.Exit(code)
