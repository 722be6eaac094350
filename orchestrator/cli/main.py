"""The program `orch`: the only place where errors become text or JSON and an exit status.

Must import nothing but the standard library at the top, and little of that: `orch --help` answers at once.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import IO

from orchestrator.cli.commands import HELP_COLUMNS, help_text
from orchestrator.cli.encoding import take_any_text
from orchestrator.cli.interrupt import INTERRUPTED, started

BROKEN_PIPE = 141
INTERNAL = 70


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the result is the exit status."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by who started us (`>&-`): no other file may take its number
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    for stream in (sys.stdout, sys.stderr):
        take_any_text(stream)
    args = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in (args[: args.index("--")] if "--" in args else args)
    try:
        if args in (["--help"], ["-h"]) and "_ORCH_COMPLETE" not in os.environ and _columns() >= HELP_COLUMNS:
            sys.stdout.write(help_text())
            sys.stdout.flush()
            return 0
        if "_ORCH_COMPLETE" in os.environ:
            from typer._completion_classes import completion_init

            completion_init()
        from orchestrator.cli.app import app

        started()
        result = app(args=args, prog_name="orch", standalone_mode=False)
        sys.stdout.flush()
    except BaseException as error:
        return _report(error, as_json=as_json)
    if result == INTERRUPTED:
        # Typer turns Ctrl-C into this exit status without a word.
        return _report(KeyboardInterrupt(), as_json=as_json)
    return result if isinstance(result, int) else 0


def _columns() -> int:
    """Columns of the terminal on stdout; off a terminal a line may be of any length."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else HELP_COLUMNS
    except (OSError, ValueError, AttributeError):
        return HELP_COLUMNS


def _report(error: BaseException, *, as_json: bool) -> int:
    """Say what went wrong (as JSON too where asked); the exit status."""
    import typer

    from orchestrator.core.errors import Interrupted, LocalError, OrchError, UsageError

    try:
        sys.stdout.flush()
    except BrokenPipeError as gone:
        error = gone
    except OSError as full:
        _discard(sys.stdout)
        error = full
    if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
        # The reader of our output has gone (`| head`): end quietly, and let no flush at exit complain.
        _discard(sys.stdout)
        return BROKEN_PIPE
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        error = Interrupted("interrupted; jobs on hosts go on")
    elif isinstance(error, _usage_errors()):
        error = _usage(error)
    elif isinstance(error, typer.Exit):
        return int(error.exit_code)
    elif isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        what = error.filename or "the output"
        error = LocalError(f"{what} cannot be written: {error.strerror}", "jobs on hosts are not affected")
    elif isinstance(error, PermissionError) and error.filename:
        what = f"{error.filename} cannot be used: {error.strerror}"
        error = LocalError(what, "jobs on hosts are not affected")
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


def _discard(stream: IO[str]) -> None:
    """Send what waits in the stream's buffer nowhere: it would fail again, at the next word and at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _print(error: object, *, as_json: bool, code: str | None = None) -> None:
    from orchestrator.core.errors import OrchError
    from orchestrator.ui.console import document, error_lines, say_lines

    assert isinstance(error, OrchError)
    if as_json:
        body = error.to_json()
        if code:
            body["error"]["code"] = code
        try:
            document(body)
        except OSError:  # perhaps the very failure that is to be told
            _discard(sys.stdout)
    try:
        say_lines(error_lines(error.message, error.hint))
    except OSError:
        _discard(sys.stderr)


def _usage_errors() -> type[BaseException]:
    """Typer's error of a wrong command line: click's own, or the one of the copy that typer carries."""
    import typer

    return typer.BadParameter.__mro__[2]


def _usage(error: BaseException) -> BaseException:
    """A wrong command line as our own error, with the help to ask for."""
    from orchestrator.core.errors import UsageError

    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "orch"
    words = (
        str(getattr(error, "format_message", lambda: str(error))()).rstrip(".").replace("Value error, ", "")
    )
    words = " ".join(words.split())
    if type(error).__name__ == "NoArgsIsHelpError":
        words = "a command is missing"
    return UsageError(words[:1].lower() + words[1:] if words[1:2].islower() else words, f"see: {path} --help")


def run() -> None:
    """Entry point that ends the process."""
    sys.exit(main())


if __name__ == "__main__":
    run()
