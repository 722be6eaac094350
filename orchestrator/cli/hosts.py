"""`orch hosts`, `hosts check`, `gpus`, `init`: what a host is, before anything runs on it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import HELP, InventoryOption, JsonOption, complete_hosts, examples, open_session

NOT_CLEAN = 4
UNREACHABLE = 3

HostsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="HOST", help="Hosts; all of them by default.", autocompletion=complete_hosts),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(
        name="hosts",
        help="List the hosts of the inventory; `orch hosts check` asks them what they are.",
        context_settings=HELP,
        rich_markup_mode=None,
        add_completion=False,
    )
    group.callback(invoke_without_command=True)(hosts)
    group.command(
        epilog=examples(
            "orch hosts check                            # all of them",
            "orch hosts check gpubox --accept-new        # first meeting: shows and keeps its host key",
        )
    )(check)
    app.add_typer(group)
    app.command(
        epilog=examples("orch gpus gpubox", "nvidia-smi | orch gpus --from -", "orch gpus --from smi.txt")
    )(gpus)
    app.command(
        epilog=examples(
            "orch init gpubox                          # an alias of your ~/.ssh/config",
            "orch init me@10.0.0.7:2222 --name box",
        )
    )(init)


def hosts(context: typer.Context, inventory: InventoryOption = None, as_json: JsonOption = False) -> None:
    """List the hosts of the inventory. Nothing is connected to."""
    if context.invoked_subcommand is not None:
        if inventory is not None:
            import os

            os.environ["ORCH_INVENTORY"] = str(inventory)
        return
    from orchestrator.services.hosts import list_hosts
    from orchestrator.ui.console import document, out, say
    from orchestrator.ui.hosts import host_list_lines

    with open_session(inventory) as session:
        answer = list_hosts(session)
    if as_json:
        document(answer)
        return
    for line in host_list_lines(answer["hosts"]):
        out(line)
    say(f"from {answer['inventory']}")


def check(
    names: HostsArgument = None,
    accept_new: Annotated[
        bool,
        typer.Option(
            "--accept-new", help="Keep the key of a host that is not known yet. Never a changed one."
        ),
    ] = False,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Connect to hosts and say what was found and what would be in the way of a job.

    Exits 3 when a host could not be asked, 4 when a host answers but cannot run jobs.
    """
    from orchestrator.services.hosts import check_hosts
    from orchestrator.ui.console import console, document
    from orchestrator.ui.hosts import check_lines

    with open_session(inventory) as session:
        answer = check_hosts(session, names or [], accept_new=accept_new)
    if as_json:
        document(answer)
    else:
        screen = console()
        for line in check_lines(answer["hosts"]):
            screen.print(line, soft_wrap=True)
    if not all(item["reachable"] for item in answer["hosts"]):
        raise typer.Exit(UNREACHABLE)
    if not all(item["ok"] for item in answer["hosts"]):
        raise typer.Exit(NOT_CLEAN)


def gpus(
    host: Annotated[
        str | None,
        typer.Argument(metavar="HOST", help="Host of the inventory.", autocompletion=complete_hosts),
    ] = None,
    from_file: Annotated[
        str | None,
        typer.Option("--from", metavar="FILE|-", help="Read what nvidia-smi printed; no host is asked."),
    ] = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show every GPU, who holds it and whether it is clean; exits 4 when one is not."""
    from orchestrator.ui.console import console, document
    from orchestrator.ui.gpus import gpu_lines

    if from_file is not None:
        from orchestrator.services.gpus_file import gpus_from_file

        answer = gpus_from_file(from_file)
    else:
        from orchestrator.services.gpus import gpus as ask

        with open_session(inventory) as session:
            answer = ask(session, host)
    if as_json:
        document({key: value for key, value in answer.items() if key != "schema"})
    else:
        screen = console()
        for line in gpu_lines(answer):
            screen.print(line, soft_wrap=True)
    if not answer["clean"]:
        raise typer.Exit(NOT_CLEAN)


def init(
    host: Annotated[str, typer.Argument(metavar="HOST", help="ssh alias, or user@host:port.")],
    name: Annotated[
        str | None, typer.Option("--name", help="Name in the inventory; default: from HOST.")
    ] = None,
    directory: Annotated[Path, typer.Option("--directory", "-C", help="Where to write the files.")] = Path(),
    accept_new: Annotated[
        bool, typer.Option("--accept-new", help="Keep the host's key when it is not known.")
    ] = False,
    identity_file: Annotated[
        Path | None, typer.Option("--identity-file", "-i", help="Private key to use.")
    ] = None,
    known_hosts: Annotated[
        Path | None, typer.Option("--known-hosts", help="Another known_hosts file.")
    ] = None,
    root: Annotated[str | None, typer.Option("--root", help="Folder on the host for jobs.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that are there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Probe a host and write `inventory.yaml` and a first plan that runs there."""
    from orchestrator.services.init import InitRequest
    from orchestrator.services.init import init as write
    from orchestrator.ui.console import document, out

    request = InitRequest(
        ssh=host,
        name=name,
        directory=directory,
        accept_new=accept_new,
        identity_file=identity_file,
        known_hosts=known_hosts,
        root=root,
        force=force,
    )
    with open_session(None) as session:
        answer = write(session, request)
    if as_json:
        document(answer)
        return
    for line in answer["notes"]:
        out(line)
    for path in answer["written"]:
        out(f"wrote {path}")
    plan, there = Path(answer["plan"]), ""
    if directory.resolve() != Path.cwd():  # the inventory is looked for where orch is started
        plan, there = plan.relative_to(directory), f"cd {shlex.quote(str(directory))} && "
    out(f"next: {there}orch preflight {plan} && orch launch {plan} --watch")
