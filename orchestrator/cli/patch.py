"""`orch patch`: the verified patch sets, and what they would do on a host."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from orchestrator.cli.options import InventoryOption, JsonOption, complete_hosts, examples, open_session


class Action(StrEnum):
    """What to do with patch sets."""

    LIST = "list"
    CHECK = "check"
    APPLY = "apply"
    REVERT = "revert"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "orch patch list                     # the sets there are",
            "orch patch check gpubox             # which of them suit the packages of a host",
            "orch patch apply gpubox             # build the patched copy ahead of the first job",
        )
    )(patch)


def patch(
    action: Annotated[Action, typer.Argument(help="list, check, apply or revert.", show_default=False)],
    host: Annotated[
        str | None,
        typer.Argument(
            metavar="HOST",
            help="Host of the inventory; its only one by default.",
            autocompletion=complete_hosts,
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME", help="Only this patch set. Can be given several times."),
    ] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Change site-packages itself instead of a copy; needs --set.")
    ] = False,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show or apply the verified patch sets for vLLM and speculators.

    Jobs do this by themselves (`patches:` of a step, on a copy of the package); nothing here is needed before a launch.
    """
    from orchestrator.services import patch as service
    from orchestrator.ui.console import document, out
    from orchestrator.ui.text import one_line

    with open_session(inventory) as session:
        answer = service.patch(session, action.value, host, sets=sets or [], in_place=in_place)
    if as_json:
        document(answer)
        return
    for line in service.text(action.value, answer):
        out(" " * (len(line) - len(line.lstrip())) + one_line(line))
