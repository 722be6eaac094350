"""Notifications from the laptop: what goes through Apprise, and the addresses that a host is given beside the spec.

The host decides what is to be told and keeps the record (remote_jobs.agent.notices); a laptop that watches takes what
waits there, each message once, and sends it. Where the addresses are is kept in ORCH_HOME/notify/<job>.json (0600) until
the job is taken up again or 90 days are over; values that came from the environment or a keyring are looked up anew.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from orchestrator.core import notify as targets
from orchestrator.core.errors import ConfigError, LocalError, OrchError, UsageError
from orchestrator.core.paths import orch_home
from orchestrator.core.schema import Secret
from orchestrator.services.secrets import secret_value

if TYPE_CHECKING:
    from orchestrator.core.plan import LoadedPlan
    from orchestrator.services.session import Session

ENVIRONMENT = "ORCH_NOTIFY"
KEPT_FOR_S = 90 * 86400.0
DRAIN_S = 20.0
LEAVE_S = 3.0
"""For a message that was taken from its host and is being sent: nobody else would send it any more."""
_STYLES = {"success": "success", "failure": "failure", "lost": "failure", "hang": "warning", "eta_slip": "warning"}
NO_APPRISE = "install it: pip install 'orch-gpu[notify]'"


@dataclass(frozen=True)
class Address:
    """An Apprise target that this laptop can reach: ``name`` is its id and label, as the host's records have them."""

    name: str
    value: str | Secret
    base: Path
    on: tuple[str, ...] = field(default=targets.DEFAULT_ON)

    def url(self) -> str:
        """The address itself.

        Raises:
            MissingSecret: its source has nothing.
        """
        if isinstance(self.value, str):
            return self.value
        return secret_value(self.name, self.value, self.base, f"notify ({self.name})")


# ------------------------------------------------------------------------------------------------------------- launch


def for_host(session: Session, loaded: LoadedPlan, host: str, job: str) -> dict[str, dict[str, str]]:
    """The addresses that the host's supervisor needs, as one more block of secrets; the rest is kept here for watching.

    Raises:
        MissingSecret: an address is not where the plan says. ConfigError: Apprise does not know such an address.
    """
    entry = session.host(host)
    named = targets.named(entry.notify, loaded.plan.notify)
    if not named:
        return {}
    bases = {"host": _inventory_folder(session), "plan": loaded.base_dir}
    here = [
        Address(f"{item.id} {item.target.label}", value, bases[item.id.partition("-")[0]], tuple(item.target.on))
        for item in named
        if isinstance(value := item.target.apprise, str | Secret)
    ]
    _check(session, here)
    there = targets.addresses(named, of_host=True)
    found = {
        name: value
        if isinstance(value, str)
        else secret_value(name, value, bases[name.partition("-")[0]], f"notify ({name})")
        for name, value in there.items()
    }
    _keep(job, here, there, bases)
    return {targets.SECRETS_KEY: found} if found else {}


def _inventory_folder(session: Session) -> Path:
    path = session.inventory.path
    return path.resolve().parent if path is not None else Path.cwd()


def _check(session: Session, addresses: Sequence[Address]) -> None:
    """Find a wrong address before the job runs, not when it ends."""
    urls = [(address.name, address.url()) for address in addresses]
    if not urls:
        return
    try:
        import apprise
    except ImportError:
        session.say(f"orch: notify: {urls[0][0]} goes through Apprise, which is not here; {NO_APPRISE}")
        return
    _quiet()
    for name, url in urls:
        if apprise.Apprise.instantiate(url, suppress_exceptions=True) is None:
            raise ConfigError(f"notify: Apprise cannot read the address of {name}", "see: https://appriseit.com/services")


def again(job: str) -> dict[str, dict[str, str]]:
    """The host's addresses of a job launched from here, for a retry: the host deleted its own when the job ended."""
    kept = _kept(job)
    found = {}
    for name, value in (kept.get("there") or {}).items():
        with contextlib.suppress(OrchError):
            found[name] = _address(name, value, kept).url()
    return {targets.SECRETS_KEY: found} if found else {}


def _keep(job: str, here: Sequence[Address], there: Mapping[str, str | Secret], bases: Mapping[str, Path]) -> None:
    def plain(value: str | Secret) -> Any:
        return value if isinstance(value, str) else {"source": value.source, "key": value.key}

    record = {
        "v": 1,
        "bases": {owner: str(path) for owner, path in bases.items()},
        "here": {item.name: {"value": plain(item.value), "on": list(item.on)} for item in here},
        "there": {name: {"value": plain(value)} for name, value in there.items()},
    }
    folder = orch_home() / "notify"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for old in folder.glob("*.json"):
            if time.time() - old.stat().st_mtime > KEPT_FOR_S:
                old.unlink(missing_ok=True)
        draft = folder / f".{job}.{os.getpid()}"
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            json.dump(record, file)
        os.replace(draft, folder / f"{job}.json")
    except OSError as error:
        raise LocalError(
            f"{folder} cannot be written: {error.strerror or error}", "make it writable, or set ORCH_HOME"
        ) from error


def _kept(job: str) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((orch_home() / "notify" / f"{job}.json").read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def _address(name: str, record: Mapping[str, Any], kept: Mapping[str, Any]) -> Address:
    value = record["value"]
    base = Path((kept.get("bases") or {}).get(name.partition("-")[0], "."))
    found = value if isinstance(value, str) else Secret(value["source"], value["key"])
    return Address(name, found, base, tuple(record.get("on") or targets.DEFAULT_ON))


# -------------------------------------------------------------------------------------------------------------- watch


def addresses_of(session: Session, job: str, host: str) -> list[Address]:
    """Apprise targets of a job that this laptop can reach: those of its launch, else those of its own inventory."""
    kept = _kept(job)
    if kept:
        return [_address(name, record, kept) for name, record in (kept.get("here") or {}).items()]
    folder = _inventory_folder(session)
    return [
        Address(f"{item.id} {item.target.label}", item.target.apprise, folder, tuple(item.target.on))
        for item in targets.named(session.host(host).notify, [])
        if item.target.apprise is not None
    ]


class Deliverer:
    """Sends what waits on the hosts of watched jobs, in a thread of its own; a context manager that drains at its end."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._seen: dict[str, tuple[int, str]] = {}
        self._addresses: dict[str, list[Address]] = {}
        self._work: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._said: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)

    def close(self, *, drain: bool) -> None:
        """End; with ``drain`` what waits is sent first. Who leaves before the end wants to leave soon."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(DRAIN_S if drain else LEAVE_S)

    def saw(self, view: Mapping[str, Any]) -> None:
        """Take note of a job's newest view; cheap, and never raises for what is a target's fault."""
        job, host = str(view["id"]), str(view["host"])
        mark = (int(view.get("seq") or 0), str(view.get("state")))
        if not view.get("reachable", True) or self._seen.get(job) == mark:
            return
        self._seen[job] = mark
        if job not in self._addresses:
            self._addresses[job] = addresses_of(self.session, job, host)
        if not self._addresses[job]:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="notify", daemon=True)
            self._thread.start()
        self._work.put({key: view.get(key) for key in ("id", "host", "name", "state", "seq")})

    def _run(self) -> None:
        while (view := self._work.get()) is not None:
            try:
                self._deliver(view)
            except OrchError as error:
                self._say(f"orch: notify: {error.message}")
            except Exception as error:  # a plugin of Apprise may raise anything; watching goes on
                self._say(f"orch: notify: {type(error).__name__}: {error}")

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self.session.say(line)

    def _deliver(self, view: Mapping[str, Any]) -> None:
        addresses = {item.name: item for item in self._addresses[str(view["id"])]}
        if not apprise_here():
            self._say(f"orch: notify: {next(iter(addresses))} goes through Apprise, which is not here; {NO_APPRISE}")
            return
        ask = {"job": view["id"], "by": socket.gethostname()}
        agent = self.session.agent(str(view["host"]))
        answer = agent.request("notify", do="take", targets=list(addresses), **ask)
        messages = list(answer.get("messages") or [])
        if view["state"] == "lost":
            messages += self._lost(view, addresses, ask)
        for message in messages:
            address = addresses[f"{message['target']} {message['label']}"]
            error = send(address, str(message.get("title")), str(message.get("text")), str(message.get("kind")))
            agent.request("notify", do="settle", key=message["key"], error=error, **ask)
            if error is not None:
                self._say(f"orch: notify: {address.name}: {error}")

    def _lost(
        self, view: Mapping[str, Any], addresses: Mapping[str, Address], ask: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Nobody on the host can say that a job is lost: whoever finds it so claims the message there."""
        found = []
        for address in addresses.values():
            if "lost" not in address.on:
                continue
            name, _, label = address.name.partition(" ")
            record = {
                "key": f"lost-{view['seq']}-{name}", "target": name, "label": label, "kind": "lost", "seq": view["seq"],
                "title": f"{view['name']} on {view['host']} is lost",
                "text": "Its supervisor on the host is gone without a final word: killed, or the host restarted.\n"
                "orch does nothing by itself, for it is not known what still runs.\n"
                f"To do: orch why {view['id']}, then orch retry {view['id']}",
            }  # fmt: skip
            if self.session.agent(str(view["host"])).request("notify", do="claim", record=record, **ask)["claimed"]:
                found.append(record)
        return found


def apprise_here() -> bool:
    """Is Apprise installed?"""
    from importlib.util import find_spec

    return find_spec("apprise") is not None


def send(address: Address, title: str, text: str, kind: str) -> str | None:
    """Send one message through Apprise; None, or what went wrong, without the address."""
    try:
        url = address.url()
    except OrchError as error:
        return error.message
    import apprise

    _quiet()
    sender = apprise.Apprise(asset=apprise.AppriseAsset(app_id="orch", app_desc="orch", async_mode=False))
    if not sender.add(url):
        return "Apprise cannot read its address"
    style = _STYLES.get(kind, "info")
    try:
        sent = sender.notify(title=title, body=text, notify_type=style, body_format="text")
    except Exception as error:  # each plugin has its own errors, which may quote the address
        return type(error).__name__
    return None if sent else "the service did not take the message"


def _quiet() -> None:
    """Apprise logs with its own logger, to stderr when nobody listens: our words are enough."""
    logger = logging.getLogger("apprise")
    logger.propagate = False
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())


# -------------------------------------------------------------------------------------------------------------- until


def own_addresses(session: Session, jobs: Sequence[tuple[str, str]]) -> list[Address]:
    """Where `orch watch --notify` sends to: ``ORCH_NOTIFY`` (Apprise URLs), else the Apprise targets of the jobs.

    Args:
        session: inventory and hosts.
        jobs: (job, host) of each job that is watched.

    Raises:
        UsageError: there is no target, or Apprise is not installed.
    """
    given = os.environ.get(ENVIRONMENT, "").split()
    found = [Address(f"{ENVIRONMENT}-{number}", url, Path.cwd()) for number, url in enumerate(given, 1)]
    if not found:
        found = list({item.name: item for job, host in jobs for item in addresses_of(session, job, host)}.values())
    if not found:
        raise UsageError(
            "--notify has nobody to tell",
            f"set {ENVIRONMENT} to an Apprise URL (such as ntfys://ntfy.sh/my-topic), or write notify: in the inventory",
        )
    if not apprise_here():
        raise UsageError("--notify goes through Apprise, which is not here", NO_APPRISE)
    return found
