"""`orch merge`: the fetched ranges of an extraction that ran on several hosts become one output."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import JsonOption, examples


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "orch fetch JOB_A results/ && orch fetch JOB_B results/",
            "orch merge results/extract     # the folder with hs_0.safetensors, hs_1.safetensors, ...",
        )
    )(merge)


def merge(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where the ranges were fetched to.", show_default=False)
    ],
    as_json: JsonOption = False,
) -> None:
    """Make one output of the fetched ranges of an extraction that was split over hosts.

    Checks that the ranges are of one extraction and hold every row once, that each file is whole, and that all token
    ids together are the prompts; only then the manifest says complete. Exits 1 when something is missing or damaged.
    """
    from orchestrator.services.merge import merge as join
    from orchestrator.ui.console import document, out, say

    answer = join(folder, say=say)
    if as_json:
        document(answer)
    else:
        out(f"{answer['samples']} samples are complete in {folder}")
