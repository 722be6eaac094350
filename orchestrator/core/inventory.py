"""The inventory: which hosts there are and how to reach them, read from YAML with every mistake found at once.

Resolving an ssh alias is the business of orchestrator.hosts; here it is only a text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from orchestrator.core import yaml
from orchestrator.core.errors import ConfigError, Problem
from orchestrator.core.notify import Notify
from orchestrator.core.paths import inventory_candidates, user_inventory
from orchestrator.core.plan import in_order, text_of_env
from orchestrator.core.schema import (
    Duration,
    Env,
    Strict,
    Texts,
    check,
    duration_s,
    suggest,
    unusable_text,
    without_nulls,
    wrong,
)
from orchestrator.core.yaml import Document
from remote_jobs.protocol import DEFAULT_ROOT

Text = Annotated[str, Field(min_length=1)]
EMPTY_HINT = "write hosts: {gpubox: {ssh: user@host, gpus: 8}}, or let orch init HOST write it"
_SLURM_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}")
_HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def _ssh(value: str) -> str:
    if value.startswith("-") or any(
        character.isspace() or not character.isprintable() for character in value
    ):
        raise wrong(
            f"{value!r} is not an ssh destination", "write an alias of ~/.ssh/config, or user@host:port"
        )
    _, _, port = value.rpartition(":")
    bracketed = re.fullmatch(r"(?:ssh://)?(?:[^@]+@)?\[[0-9A-Fa-f:.%\w]+\](?::(\d+))?", value)
    if bracketed:
        port = bracketed[1] or ""
    elif value.removeprefix("ssh://").count(":") != 1:
        return value
    if port and (not port.isdecimal() or not 1 <= int(port) <= 65535):
        raise wrong(f"{value!r}: {port!r} is not a port", "ports are numbers from 1 to 65535")
    return value


def _time_limit(value: Any) -> Any:
    """A limit as `sbatch --time` takes it (a bare number is minutes), or as durations are written elsewhere: 8h, 90m."""
    text = str(value)
    if text.upper() in {"UNLIMITED", "INFINITE"} or _SLURM_TIME.fullmatch(text):
        return text
    try:
        seconds = int(duration_s(value))
    except (PydanticCustomError, ValueError):
        seconds = 0
    if seconds <= 0:
        raise wrong(f"{text!r} is not a time limit", "write it as sbatch --time does: 90 (minutes), 8:00:00, 2-0; or 8h")
    return f"{seconds // 3600}:{seconds % 3600 // 60:02}:{seconds % 60:02}"


def _root(value: str) -> str:
    if not value.startswith(("/", "~")):
        raise wrong(f"{value!r} must be an absolute path on the host", "start it with / or ~/")
    return value


class Host(Strict):
    """One host. Durations are seconds; paths of ``identity_file`` and ``known_hosts`` are local."""

    ssh: Annotated[Text, AfterValidator(_ssh)]
    gpus: Annotated[int, Field(ge=0, le=4096)] | None = None
    root: Annotated[Text, AfterValidator(_root)] = DEFAULT_ROOT
    python: Text | None = None
    agent_python: Text | None = None
    scheduler: Literal["direct", "slurm"] = "direct"
    partition: Text | None = None
    account: Text | None = None
    qos: Text | None = None
    constraint: Text | None = None
    reservation: Text | None = None
    gres: Text | None = None
    time_limit: Annotated[Text, BeforeValidator(_time_limit)] | None = None
    sbatch: list[Text] = Field(default_factory=list)
    array_limit: Annotated[int, Field(ge=1)] | None = None
    queue_interval_s: Duration | None = None
    transport: Literal["paramiko", "openssh"] = "paramiko"
    identity_file: Text | None = None
    known_hosts: Text | None = None
    min_look_interval_s: Duration | None = None
    env: Env = Field(default_factory=dict)
    notify: Notify = Field(default_factory=list)
    group: Text | None = None
    allow_tmpfs: bool = False


SLURM_KEYS = (
    "partition", "account", "qos", "constraint", "reservation", "gres", "time_limit", "sbatch", "array_limit",
    "queue_interval_s",
)  # fmt: skip


class InventoryFile(Strict):
    """An inventory, as written."""

    hosts: dict[str, Host]
    groups: dict[str, Texts] = Field(default_factory=dict)


@dataclass(frozen=True)
class Inventory:
    """The hosts by name, groups of them, and the file they came from (None when they were made up by a program)."""

    hosts: Mapping[str, Host]
    path: Path | None = None
    document: Document | None = field(default=None, repr=False, compare=False)
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def host(self, name: str) -> Host:
        """A host.

        Raises:
            ConfigError: there is no such host; the hint names the nearest and all others.
        """
        if name not in self.hosts:
            raise ConfigError(
                f"no host is called {name!r} in {self.path}", suggest(name, self.hosts, "hosts")
            )
        return self.hosts[name]


    def choice(self, text: str) -> list[str]:
        """The hosts that `--any` chooses from, in order: a group of ``groups:``, the hosts with ``group: NAME`` in the
        order of the file, or hosts with commas between them.

        Raises:
            ConfigError: no such group or host.
        """
        named = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
        if len(named) > 1:
            for name in named:
                self.host(name)
            return named
        group = named[0] if named else text
        own = [name for name, host in self.hosts.items() if host.group == group]
        if group in self.groups or own:
            return list(dict.fromkeys([*self.groups.get(group, ()), *own]))
        if group in self.hosts:
            return [group]
        groups = [*self.groups, *(host.group for host in self.hosts.values() if host.group)]
        raise ConfigError(
            f"no group or host is called {group!r} in {self.path}",
            suggest(group, dict.fromkeys([*groups, *self.hosts]), "groups and hosts"),
        )


def load_inventory(path: Path | str | None = None) -> Inventory:
    """Read the inventory.

    Args:
        path: the file; None looks at ``ORCH_INVENTORY``, ./inventory.yaml and the user's configuration folder.

    Raises:
        ConfigError: there is none, or with all problems found in it.
    """
    found = Path(path) if path is not None else _find()
    return inventory_of(yaml.load(found, "inventory"), found)


def inventory_of(document: Document, path: Path) -> Inventory:
    """The inventory that a document of the file ``path`` says.

    Raises:
        ConfigError: with all problems found.
    """
    name = document.name
    raw = document.value
    if raw is None:
        raise ConfigError("the inventory is empty", EMPTY_HINT, file=name)
    if not isinstance(raw, dict):
        kind = "a list" if isinstance(raw, list) else "one value"
        raise ConfigError(
            f"an inventory is a mapping (key: value), not {kind}", EMPTY_HINT, file=name, line=1
        )
    if raw.get("hosts", ...) is None:  # the key with nothing behind it, which is another mistake than no key
        raw["hosts"] = {}
    raw = without_nulls(raw)
    problems: list[Problem] = list(document.problems)
    hosts = raw.get("hosts")
    if isinstance(hosts, dict):
        raw["hosts"] = {key: _normal_host(document, key, host, problems) for key, host in hosts.items()}
        if not hosts:
            problems.append(document.problem(("hosts",), "'hosts' is empty: there are no hosts", EMPTY_HINT))
    problems += unusable_text(document, raw)
    inventory, wrong_shapes = check(InventoryFile, document, raw)
    problems += wrong_shapes
    if problems or inventory is None:
        raise ConfigError.of(in_order(problems), f"the inventory {path}")
    for group, members in inventory.groups.items():
        problems += [
            document.problem(
                ("groups", group), f"groups.{group}: no host is called {name!r}", suggest(name, inventory.hosts, "hosts")
            )
            for name in members
            if name not in inventory.hosts
        ]
    if problems:
        raise ConfigError.of(in_order(problems), f"the inventory {path}")
    folder = path.resolve().parent
    hosts_here = {key: _with_paths(host, folder) for key, host in inventory.hosts.items()}
    return Inventory(hosts_here, path, document, inventory.groups)


def _find() -> Path:
    candidates = inventory_candidates()
    for candidate in candidates:
        if _may_exist(candidate):
            return candidate
    if len(candidates) == 1:  # ORCH_INVENTORY: let the reader say what is wrong with it
        return candidates[0]
    raise ConfigError(
        f"no inventory: neither ./inventory.yaml nor {user_inventory()} exists",
        "let orch init HOST write one, or name it: --inventory FILE or ORCH_INVENTORY",
    )


def _may_exist(path: Path) -> bool:
    """False where there surely is nothing; of what may not be looked at, the reader says why."""
    try:
        path.stat()
    except OSError as error:
        return not isinstance(error, (FileNotFoundError, NotADirectoryError))
    return True


def _normal_host(document: Document, name: str, host: Any, problems: list[Problem]) -> Any:
    where = ("hosts", name)
    if not _HOST_NAME.fullmatch(name):
        hint = "letters, digits, '.', - and _, a letter or digit first; the address goes into ssh:"
        problems.append(document.problem(where, f"{name!r} cannot be a host's name", hint))
    if host is None:
        host = {}
    if not isinstance(host, dict):
        return host
    host = without_nulls(host)
    host.setdefault("ssh", name)  # `gpubox: {gpus: 8}`: the name is the alias
    text_of_env(document, host, where)
    if host.get("scheduler", "direct") == "direct":
        for key in [key for key in SLURM_KEYS if key in host]:
            message = f"hosts.{name}.{key} is for Slurm, and this host has scheduler: direct"
            problems.append(document.problem((*where, key), message, "add scheduler: slurm"))
    return host


def _with_paths(host: Host, folder: Path) -> Host:
    """Local paths made absolute: relative ones are relative to the inventory's folder."""
    changes = {
        key: str(folder / Path(value).expanduser())
        for key in ("identity_file", "known_hosts")
        if (value := getattr(host, key)) is not None
    }
    return host.model_copy(update=changes) if changes else host
