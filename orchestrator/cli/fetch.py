"""`orch fetch`: a job's outputs and logs onto the laptop, resumed and verified."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer

from orchestrator.cli.options import InventoryOption, JobArgument, JsonOption, examples, open_session

INCOMPLETE = 1
SHOWN = 5


class What(StrEnum):
    """What `orch fetch` brings."""

    OUTPUTS = "outputs"
    LOGS = "logs"
    ALL = "all"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "orch fetch JOB results/                              # the outputs of its steps",
            "orch fetch JOB results/ --include '*.json'",
            "orch fetch JOB results/ --what logs                  # logs and incident bundles",
        )
    )(fetch)


def fetch(
    job: JobArgument,
    dest: Annotated[str, typer.Argument(metavar="DEST", help="Folder on this laptop; made when missing.")],
    include: Annotated[
        list[str] | None,
        typer.Option(
            "--include", metavar="GLOB", help="Only files whose path or name fits. Several are allowed."
        ),
    ] = None,
    what: Annotated[What, typer.Option("--what", help="What to bring.")] = What.OUTPUTS,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring files of a job here. What is already here and identical is skipped; a broken-off copy goes on.

    Each file is verified by SHA-256 before it gets its name. Nothing is ever written outside DEST. Exits 1 when a
    file could not be brought whole (it changed meanwhile, or its name is not safe here); the rest is brought.
    """
    from orchestrator.cli.progress import transfer_progress
    from orchestrator.services.fetch import fetch as bring
    from orchestrator.services.fetch import folder_of
    from orchestrator.services.resolve import resolve
    from orchestrator.ui.console import document, out, say
    from orchestrator.ui.text import one_line, plural, size

    folder = folder_of(dest)
    with open_session(inventory) as session:
        found = resolve(session, job)
        with transfer_progress("fetching") as progress:
            answer = bring(session, found, folder, include=include or [], what=what.value, progress=progress)
    if as_json:
        document(answer)
    if answer["links"]:
        names = _some([one_line(item["path"]) for item in answer["links"]])
        say(f"orch: {plural(len(answer['links']), 'link')} not followed: {names}")
    if answer["special"]:
        names = _some([f"{one_line(item['path'])} ({one_line(item['kind'])})" for item in answer["special"]])
        say(f"orch: {plural(len(answer['special']), 'special file')} left out: {names}")
    for item in answer["skipped"]:
        say(f"orch: not fetched: {one_line(item['path'])}: {one_line(item['reason'])}")
    if what is What.OUTPUTS and not any(
        answer[kind] for kind in ("fetched", "unchanged", "links", "special", "skipped")
    ):
        say(
            f"orch: no file found that fits --include {' or '.join(map(one_line, include))}"
            if include
            else "orch: no file found: outputs are what lies in $ORCH_OUTPUT, <workdir>/<step> unless the step's `output:` names another"
        )
    if not as_json:
        fetched, same = answer["fetched"], answer["unchanged"]
        out(
            f"{plural(len(fetched), 'file')} fetched ({size(sum(item['size'] for item in fetched))}), "
            f"{len(same)} already here, {len(answer['skipped'])} not fetched, in {folder}"
        )
    if answer["skipped"]:
        raise typer.Exit(INCOMPLETE)


def _some(names: Sequence[str]) -> str:
    """The first of them, and how many there are more."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more (--json has them all)" if more > 0 else "")
