"""`orch stop`, `orch retry` and `orch extend`: requests to the supervisor of a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from orchestrator.cli.options import (
    InventoryOption,
    JobArgument,
    JsonOption,
    SetOption,
    StepOption,
    examples,
    open_session,
    seconds,
)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(
        epilog=examples(
            "orch stop JOB", "orch stop JOB --wait     # until every process is gone, exit 0 when it is"
        )
    )(stop)
    app.command(
        epilog=examples(
            "orch retry JOB                                   # from what is already done",
            "orch retry JOB --set extract.with.gpu_memory_utilization=0.8",
            "orch retry JOB --step train                      # and what it needs that is not done",
        )
    )(retry)
    app.command(
        epilog=examples(
            "orch extend JOB 2h                  # every step that has a limit and is not over",
            "orch extend JOB --step train 12h",
        )
    )(extend)


def stop(
    job: JobArgument,
    step: StepOption = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return only when it has ended.")] = False,
    timeout: Annotated[
        str | None,
        typer.Option("--timeout", metavar="TIME", help="With --wait: give up after this time with 124."),
    ] = None,
    reason: Annotated[str, typer.Option("--reason", help="Kept in the job's events.")] = "",
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop a job; final until `orch retry`.

    Every process of it gets TERM, the grace of its step, then KILL.
    """
    from orchestrator.core.errors import UsageError
    from orchestrator.services.resolve import resolve
    from orchestrator.services.stop import stop as request
    from orchestrator.ui.console import document, out
    from orchestrator.ui.text import one_line

    if timeout is not None and not wait:
        raise UsageError("--timeout limits what --wait waits, and --wait is not there", "add --wait")
    timeout_s = seconds(timeout, "--timeout")
    with open_session(inventory) as session:
        found = resolve(session, job)
        answer = request(session, found, step=step, wait=wait, timeout_s=timeout_s, reason=reason)
    if as_json:
        document(answer)
        return
    late = "" if answer["acknowledged"] else " (asked; not acknowledged yet)"
    if step is None:
        out(f"{answer['job']} {answer['state']}{late}")
    for name, state in (answer.get("stopping") or {}).items():
        out(f"{answer['job']} {one_line(name)} {state}{late}")


def retry(
    job: JobArgument,
    sets: SetOption = None,
    step: Annotated[
        str | None, typer.Option("--step", metavar="STEP", help="Only this step of the job, and what it needs.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Then watch it.")] = False,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a failed, stopped or lost job up again.

    Finished steps are kept; the others resume from what they have done where they can. With --step also what that step
    needs runs again where it is not done, be it that it was stopped on purpose, and what was skipped for want of it.
    """
    from orchestrator.services.resolve import resolve
    from orchestrator.services.retry import retry as request
    from orchestrator.ui.console import document, out

    with open_session(inventory) as session:
        found = resolve(session, job)
        answer = request(session, found, step=step, sets=sets or [])
        if as_json:
            document(answer)
        else:
            out(f"{answer['job']} {answer['state']}{_taken_up(step, answer.get('steps') or [])}")
        if watch:
            from orchestrator.cli.watch import watch_jobs

            code = watch_jobs(session, [found], aside=as_json)
            if code:
                raise typer.Exit(code)


def _taken_up(step: str | None, steps: Sequence[str]) -> str:
    """Words for the steps that a retry of one step runs again, in the order of the plan; empty when it is that one only."""
    from orchestrator.ui.text import one_line

    if step is None or step not in steps or len(steps) == 1:
        return ""
    at = steps.index(step)
    needed, after = (", ".join(one_line(name) for name in some) for some in (steps[:at], steps[at + 1 :]))
    return (
        f": {one_line(step)}"
        + (f", and {needed} which it needs" if needed else "")
        + (f", then {after} which was skipped for want of it" if after else "")
    )


def extend(
    job: JobArgument,
    more: Annotated[str, typer.Argument(metavar="TIME", help="How much more: 90s, 30m, 2h.", show_default=False)],
    step: StepOption = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give the steps of a job more time than their `timeout_s`.

    What runs is not touched; only the moment at which it would be ended moves. It holds for the supervisor that runs now:
    an attempt after a restart has its whole limit anew. The time limit of a Slurm allocation stays what it is; a job that
    needs longer goes on in the next one.
    """
    from orchestrator.services.extend import extend as request
    from orchestrator.services.resolve import resolve
    from orchestrator.ui.console import document, out
    from orchestrator.ui.text import duration, one_line

    more_s = seconds(more, "TIME") or 0.0
    with open_session(inventory) as session:
        answer = request(session, resolve(session, job), more_s, step=step)
    if as_json:
        document(answer)
        return
    for name, limit_s in (answer.get("limits_s") or {}).items():
        late = "" if answer["acknowledged"] else " (asked; not acknowledged yet)"
        out(f"{answer['job']} {one_line(name)} may run for {duration(limit_s)}{late}")
