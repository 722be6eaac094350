"""A command's module is imported when the command is typed: each command pays only for itself.

Must import nothing but typer and the standard library at the top.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from orchestrator.cli.commands import TABLE

if TYPE_CHECKING:
    Commands = MutableMapping[str, Any]
else:
    Commands = MutableMapping


class LazyCommands(Commands):
    """The commands by name; a command's module is imported when the command is asked for."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            module, _ = TABLE[name]
            small = typer.Typer(add_completion=False, rich_markup_mode=None)
            small.callback()(_nothing)
            import_module(f"orchestrator.cli.{module}").register(small)
            self._loaded |= typer.main.get_group(small).commands
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        raise TypeError("commands are not taken away")

    def __iter__(self) -> Iterator[str]:
        return iter(TABLE)

    def __len__(self) -> int:
        return len(TABLE)


def _nothing() -> None:
    """A group without options of its own."""


class LazyGroup(TyperGroup):
    """The root: knows its commands' names and lines without importing them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = LazyCommands()

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The list of `orch --help`."""
        limit = formatter.width - 6 - max(map(len, TABLE))
        rows = [
            (name, TyperCommand(name, help=line).get_short_help_str(limit)) for name, (_, line) in TABLE.items()
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
