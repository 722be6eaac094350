"""`orch logs`: the bytes of an attempt's log, followed by offset, so that nothing is lost or repeated."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.options import (
    AttemptOption,
    InventoryOption,
    JobArgument,
    StepOption,
    examples,
    open_session,
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "orch logs JOB --tail 50",
            "orch logs JOB -f                          # goes on through retries, until the job ends",
            "orch logs JOB --step extract --attempt 1 > attempt1.log   # the very bytes",
        )
    )(logs)


def logs(
    job: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", min=0, metavar="N", help="Start with the last N lines.")
    ] = None,
    step: StepOption = None,
    attempt: AttemptOption = None,
    inventory: InventoryOption = None,
) -> None:
    """Print a step's log: the newest attempt of the step that matters now, unless told otherwise.

    To a pipe or a file the bytes are the log's own. On a terminal, control sequences are taken out.
    """
    import sys

    from orchestrator.services.logs import read_log
    from orchestrator.services.resolve import resolve
    from orchestrator.ui.console import is_terminal, say
    from orchestrator.ui.logtext import TerminalText

    screen = TerminalText() if is_terminal(sys.stdout) else None
    with open_session(inventory) as session:
        found = resolve(session, job)
        try:
            for chunk in read_log(session, found, step=step, attempt=attempt, tail=tail, follow=follow):
                if chunk.note:
                    if screen is not None:
                        sys.stdout.write(screen.end())
                    say(chunk.note)
                if screen is not None:
                    sys.stdout.write(screen.feed(chunk.data))
                    sys.stdout.flush()
                else:
                    sys.stdout.buffer.write(chunk.data)
                    sys.stdout.buffer.flush()
        finally:
            if screen is not None:
                sys.stdout.write(screen.end())
                sys.stdout.flush()
