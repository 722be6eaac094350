"""Options that several commands share, and the way a command gets its session.

Must import nothing but typer and the standard library at the top: `orch --help` and shell completion load this.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from orchestrator.client import Client
    from orchestrator.services.session import Session

WATCH_HELP = "Show progress until the job ends; Ctrl-C leaves the job alone."


def complete_hosts(incomplete: str) -> list[str]:
    """Host names of the inventory; silent when there is none."""
    with contextlib.suppress(Exception):
        from orchestrator.core.inventory import load_inventory

        return [name for name in load_inventory(None).hosts if name.startswith(incomplete)]
    return []


def complete_groups(incomplete: str) -> list[str]:
    """Groups and hosts of the inventory; silent when there is none."""
    with contextlib.suppress(Exception):
        from orchestrator.core.inventory import load_inventory

        found = load_inventory(None)
        groups = [*found.groups, *(host.group for host in found.hosts.values() if host.group)]
        return [name for name in dict.fromkeys([*groups, *found.hosts]) if name.startswith(incomplete)]
    return []


def complete_jobs(incomplete: str) -> list[str]:
    """Ids of jobs seen from this laptop, newest first; no host is asked."""
    with contextlib.suppress(Exception):
        from orchestrator.services.session import local_job_ids

        return [job for job in local_job_ids() if job.startswith(incomplete)]
    return []


def complete_plans(incomplete: str) -> list[str]:
    """Plan files below the current folder."""
    folder, _, start = incomplete.rpartition("/")
    base = Path(folder or ("/" if incomplete.startswith("/") else "."))
    found: list[str] = []
    with contextlib.suppress(OSError):
        for path in sorted(base.iterdir()):
            shown = f"{folder}/{path.name}" if "/" in incomplete else path.name
            if path.name.startswith(start) and not path.name.startswith("."):
                if path.is_dir():
                    found.append(f"{shown}/")
                elif path.suffix in {".yaml", ".yml"}:
                    found.append(shown)
    return found


JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Answer with one JSON document on stdout; words for people go to stderr."),
]
InventoryOption = Annotated[
    Path | None,
    typer.Option(
        "--inventory",
        envvar="ORCH_INVENTORY",
        metavar="FILE",
        help="Inventory to use instead of ./inventory.yaml or the one in the user configuration folder.",
    ),
]
HostOption = Annotated[
    str | None,
    typer.Option(
        "--host", "-H", envvar="ORCH_HOST", metavar="HOST", help="Host of the inventory.", autocompletion=complete_hosts
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="STEP.KEY=VALUE",
        help="Change one value of the plan; the value is read as YAML. Can be given several times.",
    ),
]
PlanArgument = Annotated[
    Path,
    typer.Argument(
        metavar="PLAN", help="Plan file (YAML).", autocompletion=complete_plans, show_default=False
    ),
]
JobArgument = Annotated[
    str,
    typer.Argument(
        metavar="JOB", help="Job id, or the start of one.", autocompletion=complete_jobs, show_default=False
    ),
]
JobsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="JOB",
        help="Job ids, or starts of them.",
        autocompletion=complete_jobs,
        show_default=False,
    ),
]
StepOption = Annotated[str | None, typer.Option("--step", metavar="STEP", help="Only this step of the job.")]
AttemptOption = Annotated[
    int | None, typer.Option("--attempt", min=1, metavar="K", help="This attempt instead of the newest.")
]


@contextlib.contextmanager
def open_session(inventory: Path | None) -> Iterator[Session]:
    """The session of one command: inventory, ledger and connections, closed at its end."""
    from orchestrator.services.session import Session
    from orchestrator.ui.console import say

    with Session(inventory, say=say) as session:
        yield session


@contextlib.contextmanager
def open_client(inventory: Path | None) -> Iterator[Client]:
    """The Python API for one command, with remarks on stderr; closed at its end."""
    from orchestrator.client import Client
    from orchestrator.ui.console import say

    with Client(inventory, say=say) as client:
        yield client


def seconds(text: str | None, option: str) -> float | None:
    """Seconds of a time such as ``90``, ``90s``, ``30m``, ``1h30m``.

    Raises:
        UsageError: it is none of these.
    """
    if text is None:
        return None
    from orchestrator.core.errors import UsageError
    from orchestrator.core.schema import duration_s

    try:
        return duration_s(float(text) if text.replace(".", "", 1).isdigit() else text)
    except ValueError as error:  # pydantic's custom error is one
        raise UsageError(
            f"{option} {text!r} is not a time up to 366 days", "write seconds, or 90s, 30m, 1h30m, 2d"
        ) from error


def examples(*lines: str) -> str:
    """The epilog of a command's help: examples that the help formatter leaves as they are."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 112}
if not sys.stdout.isatty():
    HELP["terminal_width"] = 112
