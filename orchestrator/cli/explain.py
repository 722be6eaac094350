"""`orch explain`: reads a log at hand as the supervisor does. No host, no inventory."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.options import JsonOption, examples


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "orch explain vllm.log",
            "orch explain train.log --exit-status 1 --json",
            "ssh box cat run.log | orch explain - --exit-status -9",
        )
    )(explain)


def explain(
    log: Annotated[str, typer.Argument(metavar="LOG", help="Log file, or - for stdin.")],
    exit_status: Annotated[
        int | None,
        typer.Option("--exit-status", metavar="N", help="How the program ended; negative for a signal."),
    ] = None,
    updates: Annotated[bool, typer.Option("--updates", help="Every bar update as one JSON line.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what a log shows: progress bars, phases, the end in sight, and what it died of."""
    import json

    from orchestrator.services.explain import explain as read
    from orchestrator.services.explain import open_log
    from orchestrator.services.explain import updates as read_updates
    from orchestrator.ui.console import console, document, out
    from orchestrator.ui.explain import explain_lines

    with open_log(log) as stream:
        if updates:
            for update in read_updates(stream):
                out(json.dumps(update))
            return
        answer = read(stream, exit_status)
    if as_json:
        document({key: value for key, value in answer.items() if key != "schema"})
        return
    screen = console()
    for line in explain_lines(answer):
        screen.print(line, soft_wrap=True)
