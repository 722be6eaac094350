"""`orch completion`: prints the completion script of a shell. Nothing is installed behind anybody's back."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated

import typer

from orchestrator.cli.options import examples


class Shell(StrEnum):
    """Shells with a completion script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"
    POWERSHELL = "powershell"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            'eval "$(orch completion bash)"                                   # for this shell',
            "orch completion fish > ~/.config/fish/completions/orch.fish      # for good",
        )
    )(completion)


def completion(
    shell: Annotated[Shell | None, typer.Argument(help="Default: the shell of $SHELL.")] = None,
) -> None:
    """Print the script that lets a shell complete commands, hosts, plans and job ids."""
    from orchestrator.core.errors import UsageError
    from orchestrator.ui.console import out

    name = shell.value if shell else os.path.basename(os.environ.get("SHELL", ""))
    if name not in set(Shell):
        raise UsageError(
            f"no completion script for the shell {name or '(SHELL is not set)'}",
            f"say which one: orch completion {' | '.join(Shell)}",
        )
    from typer._completion_shared import get_completion_script

    out(get_completion_script(prog_name="orch", complete_var="_ORCH_COMPLETE", shell=name))
