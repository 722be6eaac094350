"""`orch forward`: a service of a job on a local port, over the connection that is there anyway."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.options import InventoryOption, JobArgument, StepOption, examples, open_client


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "orch forward JOB                    # the job's service, such as its vLLM server",
            "curl http://127.0.0.1:8000/v1/models   # in another terminal",
            "orch forward JOB 6006 --local 16006 # any port of the host",
        )
    )(forward)


def forward(
    job: JobArgument,
    port: Annotated[
        int | None,
        typer.Argument(metavar="PORT", min=1, max=65535, help="Port on the host. Default: that of the job's service."),
    ] = None,
    local: Annotated[
        int | None,
        typer.Option("--local", metavar="PORT", min=0, max=65535, help="Local port. Default: the same, else any."),
    ] = None,
    step: StepOption = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="ADDRESS",
            help="Machine to reach from the host. Default: the host itself; on a Slurm cluster the job's first node.",
        ),
    ] = None,
    inventory: InventoryOption = None,
) -> None:
    """Forward a local port to a service of a job, until the job ends or Ctrl-C.

    Prints the local address alone on stdout. Only programs of this laptop can connect to it.
    """
    from orchestrator.services.forward import find
    from orchestrator.services.forward import forward as open_forward
    from orchestrator.services.resolve import FoundJob
    from orchestrator.ui.console import out, say

    with open_client(inventory) as client:
        found = client.job(job)
        destination = find(client.session, FoundJob(found.id, found.host), port=port, step=step, address=to)
        with open_forward(client.session, found.host, destination, local=local, say=say) as opened:
            what = f"step {destination.step}, " if destination.step else ""
            say(f"orch: to {destination.address}:{destination.port} on {found.host} ({what}{found.id}); Ctrl-C ends it")
            out(f"127.0.0.1:{opened.port}")
            view = found.wait()
        say(f"orch: {view['id']} {view['state']}: nothing is forwarded any more")
