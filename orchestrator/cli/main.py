"""The program `orch`: one typer application, and the only place where errors become text or JSON and an exit status.

Must import no service, rich or SSH library at the top: `orch --help` and completion answer at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from orchestrator.cli import (
    completion,
    control,
    demo,
    explain,
    fetch,
    hosts,
    launch,
    logs,
    patch,
    status,
    watch,
)
from orchestrator.cli.options import HELP, examples

INTERRUPTED = 130
BROKEN_PIPE = 141
INTERNAL = 70

ORDER = (
    "demo", "init", "hosts", "gpus", "preflight", "launch", "status", "watch", "wait", "logs", "why", "stop", "retry",
    "fetch", "history", "explain", "patch", "completion",
)  # fmt: skip


class Commands(TyperGroup):
    """The commands in the order in which a newcomer meets them."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in reading order; anything not listed comes last."""
        names = super().list_commands(ctx)
        return sorted(names, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


app = typer.Typer(
    name="orch",
    cls=Commands,
    help="Run hours-long GPU jobs on a host over SSH: launched detached, watched, retried, explained.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=HELP,
    epilog=examples(
        "orch demo                          # see a whole job crash, retry and finish, on this machine",
        "orch init gpubox                   # probe a host, write inventory.yaml and a first plan",
        "orch launch plans/extract.yaml     # start; prints the job id",
        "orch watch                         # look at everything; q or Ctrl-C leaves the jobs alone",
        "orch why JOB                       # what a failed attempt died of",
    ),
)
for module in (demo, hosts, launch, status, watch, logs, control, fetch, explain, patch, completion):
    module.register(app)


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the result is the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in (args[: args.index("--")] if "--" in args else args)
    try:
        if "_ORCH_COMPLETE" in os.environ:
            from typer._completion_classes import completion_init

            completion_init()
        result = app(args=args, prog_name="orch", standalone_mode=False)
        sys.stdout.flush()
    except BaseException as error:
        return _report(error, as_json=as_json)
    if result == INTERRUPTED:
        # Typer turns Ctrl-C into this exit status without a word.
        return _report(KeyboardInterrupt(), as_json=as_json)
    return result if isinstance(result, int) else 0


def _report(error: BaseException, *, as_json: bool) -> int:
    """Say what went wrong (as JSON too where asked); the exit status."""
    from orchestrator.core.errors import Interrupted, OrchError, UsageError

    if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
        # The reader of our output has gone (`| head`): end quietly, and let no flush at exit complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        error = Interrupted("interrupted; jobs on hosts go on")
    elif isinstance(error, _usage_errors()):
        error = _usage(error)
    elif isinstance(error, typer.Exit):
        return int(error.exit_code)
    elif isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, OrchError):
        _print(error, as_json=as_json)
        return error.exit_status
    if os.environ.get("ORCH_DEBUG"):
        raise error
    kind = type(error).__name__
    _print(
        UsageError(
            f"this is a bug in orch, not in what you typed: {kind}: {error}",
            "jobs on hosts are not affected; set ORCH_DEBUG=1 to see the traceback, and report it",
        ),
        as_json=as_json,
        code="internal",
    )
    return INTERNAL


def _print(error: object, *, as_json: bool, code: str | None = None) -> None:
    from orchestrator.core.errors import OrchError
    from orchestrator.ui.console import document, error_lines, say_lines

    assert isinstance(error, OrchError)
    if as_json:
        body = error.to_json()
        if code:
            body["error"]["code"] = code
        document(body)
    say_lines(error_lines(error.message, error.hint))


def _usage_errors() -> type[BaseException]:
    """Typer's error of a wrong command line: click's own, or the one of the copy that typer carries."""
    return typer.BadParameter.__mro__[2]


def _usage(error: BaseException) -> BaseException:
    """A wrong command line as our own error, with the help to ask for."""
    from orchestrator.core.errors import UsageError

    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "orch"
    words = (
        str(getattr(error, "format_message", lambda: str(error))()).rstrip(".").replace("Value error, ", "")
    )
    if type(error).__name__ == "NoArgsIsHelpError":
        words = "a command is missing"
    return UsageError(words[:1].lower() + words[1:] if words[1:2].islower() else words, f"see: {path} --help")


def run() -> None:
    """Entry point that ends the process."""
    sys.exit(main())


if __name__ == "__main__":
    run()
