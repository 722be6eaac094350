"""``notify:`` of a plan or of a host in the inventory: who hears of what, and by which way.

Addresses carry tokens, so no address leaves here for the spec: `records` holds ids and labels, `addresses` says where
the values are, and services.notify sends those beside the spec, as secrets travel.  Pure: no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema, model_validator

from orchestrator.core.schema import SECRET_SCHEMA, Duration, Env, Secret, Strict, env_value, wrong

Kind = Literal["success", "failure", "stopped", "retry", "hang", "step", "lost"]
KINDS: tuple[str, ...] = get_args(Kind)
DEFAULT_ON: tuple[Kind, ...] = ("success", "failure", "hang", "lost")
HEARTBEAT_EVERY_S = 300.0
SECRETS_KEY = "@notify"
"""Where the addresses are among a job's secrets (remote_jobs.agent.notify)."""
_WAYS = ("apprise", "webhook", "command", "heartbeat")
_FORMS = "write an Apprise URL, an https:// webhook, or one of " + ", ".join(f"{{{way}: ...}}" for way in _WAYS)


def _address(value: Any) -> str | Secret:
    found = env_value(value)
    if not found:
        raise wrong("is empty", "an address, or {env: NAME}, {file: PATH}, {keyring: SERVICE/USER}")
    return found


def _web_address(value: Any) -> str | Secret:
    found = _address(value)
    if isinstance(found, str) and not found.startswith(("http://", "https://")):
        raise wrong("must start with http:// or https://", "other services go through Apprise: {apprise: URL}")
    return found


_SCHEMA = WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, SECRET_SCHEMA]})
Address = Annotated[str | Secret, PlainValidator(_address), _SCHEMA]
WebAddress = Annotated[str | Secret, PlainValidator(_web_address), _SCHEMA]
Headers = dict[
    Annotated[str, Field(pattern=r"^[A-Za-z0-9-]+$")],
    Annotated[str | Secret, PlainValidator(env_value), _SCHEMA],
]


class Target(Strict):
    """One way to reach somebody; exactly one of apprise, webhook, command and heartbeat."""

    apprise: Address | None = None
    webhook: WebAddress | None = None
    command: Annotated[str, Field(min_length=1)] | None = None
    heartbeat: WebAddress | None = None
    on: list[Kind] = Field(default_factory=lambda: list(DEFAULT_ON))
    eta_slip: Duration | None = None
    format: Literal["json", "text"] = "json"
    headers: Headers = Field(default_factory=dict)
    env: Env = Field(default_factory=dict)
    every: Duration = HEARTBEAT_EVERY_S
    end: WebAddress | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Target:
        ways = [way for way in _WAYS if getattr(self, way) is not None]
        if len(ways) != 1:
            raise wrong(f"has {' and '.join(ways) or 'no address'}", _FORMS)
        owners = {"format": "webhook", "headers": "webhook", "env": "command", "every": "heartbeat", "end": "heartbeat"}
        for key, owner in owners.items():
            if key in self.model_fields_set and owner != ways[0]:
                raise wrong(f"{key} is for {owner}, and this is {ways[0]}")
        if ways == ["heartbeat"] and {"on", "eta_slip"} & self.model_fields_set:
            raise wrong("a heartbeat is asked for all the time: on and eta_slip do not go with it")
        if ways == ["heartbeat"] and self.every < 1:
            raise wrong("every must be at least 1 s")
        return self

    @property
    def way(self) -> str:
        """apprise, webhook, command or heartbeat."""
        return next(way for way in _WAYS if getattr(self, way) is not None)

    @property
    def label(self) -> str:
        """The target for messages: kind and service or server, never what may be secret."""
        address = getattr(self, self.way)
        if self.way == "command" or isinstance(address, Secret):
            return f"{self.way} {address.key or address.source}" if isinstance(address, Secret) else self.way
        parts = urlsplit(address)
        return f"{self.way} {parts.scheme if self.way == 'apprise' else parts.hostname}"


def _item(value: Any) -> Any:
    if isinstance(value, str):
        if value.startswith(("http://", "https://")):
            return {"webhook": value}
        if "://" in value:
            return {"apprise": value}
        raise wrong("is not a URL", _FORMS)
    if isinstance(value, Mapping) and isinstance(value.get("on"), str):
        return {**value, "on": [value["on"]]}
    return value


def _items(value: Any) -> Any:
    if value is None:
        return []
    return [value] if isinstance(value, str | Mapping) else value


_TEXT_SCHEMA = {"type": "string", "format": "uri", "description": "An Apprise URL, or an http(s) webhook."}
Notify = Annotated[list[Annotated[Target, BeforeValidator(_item)]], BeforeValidator(_items)]
"""A list of targets; a text alone is an Apprise URL or a webhook."""


@dataclass(frozen=True)
class Named:
    """A target with its id: ``host-1`` for the first of the inventory's host, ``plan-2`` for the plan's second."""

    id: str
    target: Target


def named(of_host: Sequence[Target], of_plan: Sequence[Target]) -> list[Named]:
    """Every target of a job with its id."""
    return [
        Named(f"{owner}-{number}", target)
        for owner, targets in (("host", of_host), ("plan", of_plan))
        for number, target in enumerate(targets, 1)
    ]


def records(targets: Sequence[Named]) -> list[dict[str, Any]]:
    """``spec.notify``: what the host has to know, without any address."""
    return [_record(item) for item in targets]


def _record(item: Named) -> dict[str, Any]:
    target = item.target
    record: dict[str, Any] = {"id": item.id, "kind": target.way, "label": target.label}
    if target.way == "heartbeat":
        return {**record, "every_s": target.every, "end": target.end is not None}
    record |= {"on": list(target.on), "eta_slip_s": target.eta_slip}
    if target.way == "webhook":
        record["format"] = target.format
    if target.way == "command":
        record["command"] = target.command
    return record


def addresses(targets: Sequence[Named], *, of_host: bool) -> dict[str, str | Secret]:
    """``{"plan-1": address, "plan-1 header NAME": value, ...}``: those that the host needs, or those that stay here."""
    found: dict[str, str | Secret] = {}
    for item in targets:
        target = item.target
        if (target.way != "apprise") is not of_host:
            continue
        if target.way != "command":
            found[item.id] = getattr(target, target.way)
        found |= {f"{item.id} header {name}": value for name, value in target.headers.items()}
        found |= {f"{item.id} env {name}": value for name, value in target.env.items()}
        if target.end is not None:
            found[f"{item.id} end"] = target.end
    return found
