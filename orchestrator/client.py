"""The Python API: what the commands do, for programs.

    from orchestrator import Client

    with Client() as client:
        job = client.launch("plans/extract.yaml")
        if job.wait()["state"] != "succeeded":
            print(job.why()["verdict"]["summary"])

It calls the same services as the commands, raises the errors of orchestrator.core.errors (all are `OrchError`) instead of
exiting, and prints nothing: words for people go to ``say``. One client may be used by several threads.
Must import no service at the top, so that `from orchestrator import Client` stays quick.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

if TYPE_CHECKING:
    from orchestrator.core.timeline import Timeline
    from orchestrator.services.resolve import FoundJob
    from orchestrator.services.session import Session
    from orchestrator.views import JobView


def _quiet(_line: str) -> None:
    """Words for people that nobody asked to hear."""


class _NoBar:
    """Progress of transfers that nobody looks at."""

    def start(self, name: str, total_bytes: int, done_bytes: int) -> None:
        """See services.upload.Progress."""

    def advance(self, num_bytes: int) -> None:
        """See services.upload.Progress."""

    def finish(self) -> None:
        """See services.upload.Progress."""


class Client:
    """Inventory, ledger and one connection per host, opened when first needed; a context manager that closes them.

    Args:
        inventory: the file; default as for the commands: ``ORCH_INVENTORY``, ./inventory.yaml, the user's folder.
        say: hears remarks, such as a link that broke and is being renewed.
    """

    def __init__(self, inventory: Path | str | None = None, *, say: Callable[[str], None] = _quiet) -> None:
        from orchestrator.services.session import Session

        self.session: Session = Session(Path(inventory) if inventory is not None else None, say=say)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and the ledger. Jobs go on."""
        self.session.close()

    @property
    def hosts(self) -> list[str]:
        """Names of the inventory's hosts."""
        return self.session.host_names()

    def launch(
        self,
        plan: Path | str,
        *,
        host: str | None = None,
        sets: Sequence[str] = (),
        attempts: int | None = None,
        preflight: bool = True,
        wait_gate_s: float = 0.0,
        new: bool = False,
    ) -> Job:
        """Start a plan. A launch of the same plan and host that was cut short is taken up, unless ``new``.

        Args:
            plan: the YAML file.
            host: instead of the plan's.
            sets: ``step.key=value`` texts, as for ``--set``.
            attempts: tries of every step, instead of the plan's.
            preflight: check the host first.
            wait_gate_s: how long the job may wait for GPUs that a foreign process holds.
            new: start another job in any case.

        Raises:
            ConfigError, UsageError, PreflightFailed, GateClosed: nothing was started. HostError: call it again, it resumes.
        """
        from orchestrator.services.launch import confirm, launch

        launched = launch(
            self.session, Path(plan), host=host, sets=sets, attempts=attempts, preflight=preflight,
            wait_gate_s=wait_gate_s, new=new, progress=_NoBar(),
        )  # fmt: skip
        confirm(self.session, launched)
        return Job(self, launched.job, launched.host)

    def job(self, id_or_start: str, *, host: str | None = None) -> Job:
        """A job by its id, or by the start of one.

        Raises:
            NoSuchJob, AmbiguousJob: none or several fit. HostError: a host that might know it did not answer.
        """
        from orchestrator.services.resolve import resolve

        found = resolve(self.session, id_or_start, host=host)
        return Job(self, found.id, found.host)

    def jobs(self, *, host: str | None = None) -> list[JobView]:
        """Every job of every host, as `orch status`; those of an unreachable host as last seen."""
        from orchestrator.services.status import status

        return cast("list[JobView]", status(self.session, [], host=host)["jobs"])

    def history(
        self, *, host: str | None = None, plan: str | None = None, limit: int = 50, local: bool = False
    ) -> dict[str, Any]:
        """The document of `orch history`: jobs with durations, attempts, verdicts and GPU hours."""
        from orchestrator.services.history import history

        return history(self.session, host=host, plan=plan, limit=limit, local=local)

    def gpus(self, host: str | None = None) -> dict[str, Any]:
        """The document of `orch gpus`."""
        from orchestrator.services.gpus import gpus

        return gpus(self.session, host)

    def preflight(
        self, plan: Path | str, *, host: str | None = None, sets: Sequence[str] = (), deep: bool = False
    ) -> dict[str, Any]:
        """The document of `orch preflight`: ``{"ok", "checks"}``."""
        from orchestrator.services.preflight import preflight

        return preflight(self.session, Path(plan), host=host, sets=sets, deep=deep)

    def check_hosts(self, *names: str) -> dict[str, Any]:
        """The document of `orch hosts check`."""
        from orchestrator.services.hosts import check_hosts

        return check_hosts(self.session, names)


def explain(log: Path | str, *, exit_status: int | None = None) -> dict[str, Any]:
    """The document of `orch explain`: bars, phases and what a log died of. Needs no inventory and no host."""
    from orchestrator.services.explain import explain as read
    from orchestrator.services.explain import open_log

    with open_log(str(log)) as stream:
        return read(stream, exit_status)


@dataclass(frozen=True)
class Job:
    """One job on its host; made by `Client.launch` and `Client.job`. Holds no state: every call asks."""

    client: Client
    id: str
    host: str

    @property
    def _found(self) -> FoundJob:
        from orchestrator.services.resolve import FoundJob

        return FoundJob(self.id, self.host)

    @property
    def _session(self) -> Session:
        return self.client.session

    def view(self) -> JobView:
        """Where it stands, as `orch status --json`; what was seen last when the host does not answer.

        Raises:
            JobLost: its host answers and has no such job.
        """
        from orchestrator.services.status import status

        return cast("JobView", status(self._session, [self.id], host=self.host)["jobs"][0])

    def wait(self, *, timeout_s: float | None = None, saw: Callable[[JobView], None] | None = None) -> JobView:
        """Block until it has ended or is lost; ``saw`` is called with every newer view on the way.

        Raises:
            WaitTimeout: it goes on. HostError: the host cannot be asked at all. JobLost: it is not there.
        """
        from orchestrator.services.notify import Deliverer
        from orchestrator.services.wait import wait

        with Deliverer(self._session) as deliverer:

            def tell(view: Mapping[str, Any]) -> None:
                deliverer.saw(view)
                if saw is not None:
                    saw(cast("JobView", view))

            return cast("JobView", wait(self._session, self._found, timeout_s=timeout_s, saw=tell))

    def stop(
        self, *, step: str | None = None, wait: bool = False, timeout_s: float | None = None, reason: str = ""
    ) -> dict[str, Any]:
        """Stop it; returns when that is acknowledged, with ``wait`` when every process is gone."""
        from orchestrator.services.stop import stop

        return stop(self._session, self._found, step=step, wait=wait, timeout_s=timeout_s, reason=reason)

    def retry(self, *, step: str | None = None, sets: Sequence[str] = ()) -> dict[str, Any]:
        """Take it up again after it failed, was stopped or got lost."""
        from orchestrator.services.retry import retry

        return retry(self._session, self._found, step=step, sets=sets)

    def extend(self, more_s: float, *, step: str | None = None) -> dict[str, Any]:
        """Add this many seconds to the time limits of its steps, or of one; ``limits_s`` in the answer are the new ones."""
        from orchestrator.services.extend import extend

        return extend(self._session, self._found, more_s, step=step)

    def why(self, *, step: str | None = None, attempt: int | None = None) -> dict[str, Any]:
        """What a failed attempt died of, as `orch why`."""
        from orchestrator.services.why import why

        return why(self._session, self.id, step=step, attempt=attempt)

    def log(self, *, step: str | None = None, attempt: int | None = None, tail: int | None = None) -> bytes:
        """A log as it is now: whole, or its last ``tail`` lines."""
        return b"".join(self.follow_log(step=step, attempt=attempt, tail=tail, follow=False))

    def follow_log(
        self, *, step: str | None = None, attempt: int | None = None, tail: int | None = None, follow: bool = True
    ) -> Iterator[bytes]:
        """Pieces of a log as it grows, through later attempts, until the job ends."""
        from orchestrator.services.logs import read_log

        chunks = read_log(self._session, self._found, step=step, attempt=attempt, tail=tail, follow=follow)
        return (chunk.data for chunk in chunks if chunk.data)

    def fetch(self, dest: Path | str, *, include: Sequence[str] = (), what: str = "outputs") -> dict[str, Any]:
        """Bring files here, verified: ``what`` is outputs, logs or all, as for `orch fetch`."""
        from orchestrator.services.fetch import fetch, folder_of

        return fetch(self._session, self._found, folder_of(str(dest)), include=include, what=what, progress=_NoBar())

    def forward(
        self, port: int | None = None, *, local: int = 0, step: str | None = None, address: str | None = None
    ) -> AbstractContextManager[Any]:
        """A local port that leads to a service of the host while the block runs; its number is ``.port``.

        Args:
            port: on the host; default: that of the job's service (of ``step``).
            local: wanted local port; 0 takes any.
            step: which service.
            address: machine to reach from the host; default: itself, on a Slurm cluster the job's first node.
        """
        from orchestrator.services.forward import find, forward

        destination = find(self._session, self._found, port=port, step=step, address=address)
        return forward(self._session, self.host, destination, local=local, say=self._session.say)

    def timeline(self) -> Timeline:
        """Attempts, phases and GPU readings as spans of time."""
        from orchestrator.services.timeline import timeline

        return timeline(self._session, self._found)[1]

    def report(self) -> str:
        """One HTML page about it, as `orch report` writes it."""
        from orchestrator.services.report import report
        from orchestrator.ui.report import page

        return page(report(self._session, self._found))
