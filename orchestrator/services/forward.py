"""Which port of the host a job's service listens on, and a local port that leads there over the host's connection."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from orchestrator.core.answers import SPEC, fits
from orchestrator.core.errors import HostError, LocalError, UsageError
from orchestrator.core.numbers import MAX_PORT, check_whole
from orchestrator.core.schema import suggest
from orchestrator.core.states import OVER
from orchestrator.services.look import look
from orchestrator.services.wait import never_launched, the_job

if TYPE_CHECKING:
    from orchestrator.hosts.forward import Forward
    from orchestrator.services.resolve import FoundJob
    from orchestrator.services.session import Session

VLLM_PORT = 8000
"""Where `vllm serve`, and so our step `serve`, listens unless told otherwise."""
MAX_SPEC_BYTES = 1 << 20
LOCAL = "127.0.0.1"
_ON_NODES = re.compile(r"runs as Slurm job \S+ on ([A-Za-z0-9._-]+)(?:\[(\d+))?")
_SERVICE_OVER = frozenset({"succeeded", "failed", "stopped", "skipped", "lost"})


@dataclass(frozen=True)
class Destination:
    """A service: its step (None when only a port was named), and where the host reaches it."""

    step: str | None
    address: str
    port: int
    state: str | None = None


def find(
    session: Session, job: FoundJob, *, port: int | None = None, step: str | None = None, address: str | None = None
) -> Destination:
    """The service that a person means: the port named, the step named, or the job's only service.

    ``address`` is where the host reaches it; default: itself, on a Slurm cluster the first node of the job.

    Raises:
        UsageError: no such port, no service, several, or one without a port; its launch was cut short. JobLost, HostError: the
            job cannot be asked for.
    """
    if port is not None:
        check_whole("the port on the host", port, 1, MAX_PORT)
    clustered = address is None and session.host(job.host).scheduler == "slurm"
    if port is not None and step is None and not clustered:
        return Destination(None, address or LOCAL, port)
    result = look(session, job.host, jobs=[job.id])
    if result.error is not None:
        raise result.error
    view = the_job(result.jobs, job, (result.answer or {}).get("unreadable") or {})
    address = address or (first_node(view) if clustered else LOCAL)
    if port is not None and step is None:
        return Destination(None, address, port)
    if view["unfinished"] and not view["steps"]:
        raise never_launched(job)
    states = {str(item["name"]): item for item in view["steps"]}
    if step is not None and step not in states:
        raise UsageError(f"job {job.id} has no step {step!r}", suggest(step, states, "steps"))
    specs = [item for item in spec_of(session, job)["steps"] if item["name"] in states]
    services = [item for item in specs if item.get("service") or item.get("uses") == "serve"]
    chosen = [item for item in services if item["name"] == step] if step is not None else services
    if step is None and len(chosen) > 1:  # those that are over cannot be meant
        chosen = [item for item in chosen if states[item["name"]]["state"] not in _SERVICE_OVER] or chosen
    if len(chosen) != 1:
        names = ", ".join(str(item["name"]) for item in chosen or services)
        if chosen:
            seen, hint = f"has several services: {names}", "say which: orch forward JOB --step STEP, or name the port"
        elif services:
            seen, hint = f"has no service {step!r}", f"services: {names}; or name the port"
        else:
            seen, hint = "has no service", "name the port"
        raise UsageError(f"job {job.id} {seen}", f"{hint}: orch forward JOB PORT")
    found = port or service_port(chosen[0], states[chosen[0]["name"]])
    if found is None:
        raise UsageError(
            f"the plan does not say on which port {chosen[0]['name']} listens", "name it: orch forward JOB PORT"
        )
    state = states[chosen[0]["name"]]["state"]
    if view["state"] in OVER or state in _SERVICE_OVER:
        raise UsageError(f"the service {chosen[0]['name']} of job {job.id} is over ({state})", "see: orch status")
    return Destination(str(chosen[0]["name"]), address, found, str(state))


def first_node(view: Mapping[str, Any]) -> str:
    """The node that a Slurm job's supervisor runs on, by its newest note (``... on gpu[03-04]`` is gpu03); else the host."""
    for note in reversed(view.get("notes") or []):
        found = _ON_NODES.search(str(note.get("text")))
        if found:
            return f"{found[1]}{found[2] or ''}"
    return LOCAL


def service_port(spec: Mapping[str, Any], state: Mapping[str, Any]) -> int | None:
    """Port of a service by its newest attempt's changes, its parameters, or the probe that says when it is ready."""
    attempts = state.get("attempts") or []
    changed = ((attempts[-1].get("changes") or {}) if attempts else {}).get("port")
    if isinstance(changed, Mapping):
        changed = changed.get("to")
    given = changed or (spec.get("params") or {}).get("port")
    ready = (spec.get("service") or {}).get("ready") or {}
    try:
        if given is None and ready.get("http"):
            url = urlsplit(str(ready["http"]))
            given = url.port or {"http": 80, "https": 443}.get(url.scheme)
        given = given or ready.get("port")
        if given is None and spec.get("uses") == "serve":
            return VLLM_PORT
        return int(given) if given is not None else None
    except (TypeError, ValueError):  # no number, though it came from the job's own spec
        return None


def spec_of(session: Session, job: FoundJob) -> dict[str, Any]:
    """The job's spec.json.

    Raises:
        HostError: it cannot be read.
    """
    agent = session.agent(job.host)
    path = f"{agent.hello()['root']}/jobs/{job.id}/spec.json"
    answer = agent.request("get", path=path, offset=0, length=MAX_SPEC_BYTES)
    try:
        found = json.loads(answer.get("payload") or b"")
    except (ValueError, RecursionError) as error:
        raise HostError(f"{job.host}: {path} cannot be read", host=job.host) from error
    if not fits(found, SPEC):
        raise HostError(f"{job.host}: {path} is no spec", host=job.host)
    return dict(found)


def forward(
    session: Session, host: str, destination: Destination, *, local: int | None, say: Callable[[str], None]
) -> Forward:
    """A local port that leads to the service; the same number where it is free, unless ``local`` says another.

    Raises:
        HostError: the host forbids forwarding. LocalError: the port named cannot be had. UsageError: there is no such port.
    """
    from orchestrator.hosts.forward import Forward

    if local is not None:
        check_whole("the local port", local, 0, MAX_PORT)

    agent = session.agent(host)
    try:
        agent.tunnel(destination.address, destination.port).close()
    except HostError as error:
        if "nothing answers" not in error.message:
            raise
        say(f"orch: {error.message} yet; connections will work once it does")

    def make(port: int) -> Forward:
        return Forward(lambda: agent.tunnel(destination.address, destination.port), port, say)

    if local is not None:
        return make(local)
    try:
        return make(destination.port)
    except LocalError:
        return make(0)
