"""`orch history` and `orch report`: what jobs did and cost, as a list, a picture and a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.options import (
    HostOption,
    InventoryOption,
    JobArgument,
    JsonOption,
    complete_jobs,
    examples,
    open_client,
    open_session,
)

if TYPE_CHECKING:
    from orchestrator.core.timeline import Timeline

PLOT_ENDINGS = (".png", ".svg", ".pdf")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(
        epilog=examples(
            "orch history",
            "orch history --host gpubox --plan eagle3 --json",
            "orch history JOB                    # its timeline, in this terminal",
            "orch history JOB --plot job.svg     # the same as a picture (pip install 'orch-gpu[plot]')",
        )
    )(history)
    app.command(
        epilog=examples("orch report JOB                     # writes JOB.html", "orch report JOB -o page.html")
    )(report)


def history(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB", help="One job: its timeline instead of the list.", autocompletion=complete_jobs, show_default=False
        ),
    ] = None,
    host: HostOption = None,
    plan: Annotated[
        str | None, typer.Option("--plan", metavar="NAME", help="Only jobs of this plan name.")
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", envvar="ORCH_HISTORY_LIMIT", min=1, metavar="N", help="At most this many, the newest.")
    ] = 50,
    local: Annotated[
        bool, typer.Option("--local", help="Ask no host; only what this laptop has seen.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw JOB's timeline: .png, .svg or .pdf.", show_default=False),
    ] = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """List past and present jobs with durations, attempts, verdicts, GPU hours; or one job in time."""
    from orchestrator.core.errors import ProtocolError, UsageError

    if job is None and plot is not None:
        raise UsageError("--plot draws one job", "name it: orch history JOB --plot FILE")
    if plot is not None and plot.suffix.lower() not in PLOT_ENDINGS:
        raise UsageError(f"--plot {plot}: the ending says which format", f"one of {' '.join(PLOT_ENDINGS)}")
    if job is not None and plan is not None:
        raise UsageError("--plan chooses among jobs, and one is named", "leave one of them out")
    if job is not None:
        _one(job, host=host, local=local, plot=plot, inventory=inventory, as_json=as_json)
        return
    from orchestrator.services.history import history as ask
    from orchestrator.services.history import plan_names
    from orchestrator.ui.console import document, out, say
    from orchestrator.ui.history import history_lines, hours_line, no_such_plan, score_line
    from orchestrator.ui.job import Moment
    from orchestrator.ui.text import one_line

    with open_session(inventory) as session:
        answer = ask(session, host=host, plan=plan, limit=limit, local=local)
        others = plan_names(session, host=host) if plan is not None and not answer["jobs"] else []
        moment = Moment(session.now())
    if as_json:
        document(answer)
    elif plan is not None and others:
        out(no_such_plan(plan, others))
    else:
        for line in history_lines(answer["jobs"], moment):
            out(line)
        for words in (hours_line(answer["gpu_hours"]), score_line(answer["forecasts"])):
            if words:
                say(words)
    for item in answer["hosts"]:
        if item["error"]:
            say(f"orch: {one_line(item['name'])} was not asked: {one_line(item['error']['message'])}")
    if any(item["error"] and item["error"]["code"] == "protocol" for item in answer["hosts"]):
        raise typer.Exit(ProtocolError.exit_status)


def _one(
    job: str, *, host: str | None, local: bool, plot: Path | None, inventory: Path | None, as_json: bool
) -> None:
    from orchestrator.core.timeline import gpu_hours
    from orchestrator.services.resolve import resolve
    from orchestrator.services.timeline import timeline
    from orchestrator.services.wait import NOT_LAUNCHED
    from orchestrator.ui.console import console, document, say
    from orchestrator.ui.job import Moment
    from orchestrator.ui.timeline import timeline_lines

    with open_session(inventory) as session:
        view, line = timeline(session, resolve(session, job, host=host), local=local)
        moment = Moment(session.now())
    drawn = plot is None or _draw(line, plot)
    if as_json:
        document({"job": {**view, "gpu_hours": gpu_hours(view, moment.now)}, "plot": str(plot) if plot and drawn else None})
    elif plot is None or not drawn:
        screen = console()
        width = screen.width if screen.is_terminal else 120
        for row in timeline_lines(line, moment, width):
            screen.print(row, soft_wrap=True)
    if view.get("unfinished") and view.get("reachable", True):
        say(f"orch: {NOT_LAUNCHED.format(view['id'])}")
    if not drawn:
        from orchestrator.core.errors import UsageError

        raise UsageError(
            f"{plot} was not drawn: matplotlib is not installed", "install it: pip install 'orch-gpu[plot]'"
        )


def _draw(line: Timeline, path: Path) -> bool:
    """True when the picture was written, False when there is nothing here to draw it with."""
    from orchestrator.core.errors import LocalError
    from orchestrator.ui.plot import draw

    try:
        draw(line, path)
    except ImportError:
        return False
    except OSError as error:
        raise LocalError(f"{path} cannot be written: {error.strerror or error}", "choose another file") from error
    return True


def report(
    job: JobArgument,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where to write it. Default: JOB.html here.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the FILE of -o if it is there; JOB.html always is.")] = False,
    host: HostOption = None,
    inventory: InventoryOption = None,
) -> None:
    """Write one HTML page about a job, to send to a colleague: timeline, attempts, verdicts, GPU use.

    The page loads nothing from anywhere. It holds the end of each failed attempt's log: look before you send it.
    """
    from orchestrator.core.errors import LocalError
    from orchestrator.ui.console import out

    with open_client(inventory) as client:
        found = client.job(job, host=host)
        page = found.report()
    path = output or Path(f"{found.id}.html")
    try:
        with path.open("w" if force or output is None else "x", encoding="utf-8") as file:
            file.write(page)
    except FileExistsError as error:
        raise LocalError(f"{path} is there already", "replace it with --force, or name another file") from error
    except OSError as error:
        raise LocalError(f"{path} cannot be written: {error.strerror or error}", "choose another file: -o FILE") from error
    out(str(path))
