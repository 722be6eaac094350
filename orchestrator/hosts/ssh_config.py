"""What the user's own ssh configuration says about a host: `ssh -G`, read into one record.

Why `ssh -G`: it costs a few milliseconds and no network, and resolves Include, Match, ProxyJump, tokens and defaults
exactly as the user's `ssh` would; paramiko's parser ignores Include, fabric ignores most other keys.  The
``user@host:port`` form also works where no ssh binary exists.

Must not import fabric or paramiko: resolving is tested and used without them.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.core.errors import ConfigError

DEFAULT_PORT = 22
CONNECT_TIMEOUT_S = 10.0
"""Used when the configuration has no ConnectTimeout: paramiko's default would wait for the kernel (127 s)."""
ALIVE_INTERVAL_S = 5
ALIVE_COUNT = 3
MAX_HOPS = 8
SSH_CONFIG_ENV = "ORCH_SSH_CONFIG"
"""Names a file used instead of the user's ssh configuration (passed on as `ssh -F FILE`)."""
DEFAULT_IDENTITIES = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")


@dataclass(frozen=True)
class Destination:
    """The inventory's ``ssh`` value, taken apart. ``direct`` forms carry a user or a port of their own."""

    host: str
    user: str | None = None
    port: int | None = None

    @property
    def direct(self) -> bool:
        """True when it can be used without any ssh configuration."""
        return self.user is not None or self.port is not None


@dataclass(frozen=True)
class ResolvedHost:
    """Everything needed to connect to one host (the last one of a jump chain, or a jump host itself).

    Paths are expanded; ``alive_interval_s`` * ``alive_count`` is the silence after which a link counts as dead.
    """

    asked: str
    hostname: str
    user: str
    port: int = DEFAULT_PORT
    identity_files: tuple[str, ...] = ()
    certificate_files: tuple[str, ...] = ()
    identities_only: bool = False
    identity_agent: str | None = "SSH_AUTH_SOCK"
    user_known_hosts: tuple[str, ...] = ()
    global_known_hosts: tuple[str, ...] = ()
    host_key_alias: str | None = None
    hash_known_hosts: bool = False
    revoked_host_keys: str | None = None
    connect_timeout_s: float = CONNECT_TIMEOUT_S
    alive_interval_s: int = ALIVE_INTERVAL_S
    alive_count: int = ALIVE_COUNT
    proxy_jump: tuple[str, ...] = ()
    proxy_command: str | None = None
    proxy_use_fdpass: bool = False
    address_family: str = "any"
    bind_address: str | None = None
    preferred_authentications: tuple[str, ...] = ("publickey", "keyboard-interactive", "password")
    disabled_authentications: frozenset[str] = frozenset()
    password_prompts: int = 3
    given: tuple[str, ...] = ()
    """Arguments of ssh for what the inventory says beside ssh's configuration."""

    @property
    def label(self) -> str:
        """``user@host`` or ``user@host:port``, for messages."""
        host = f"[{self.hostname}]" if ":" in self.hostname else self.hostname
        return f"{self.user}@{host}" + ("" if self.port == DEFAULT_PORT else f":{self.port}")

    @property
    def typed(self) -> str:
        """What a person types after ``ssh`` to reach the same host in the same way; ssh itself knows no ``user@host:port``."""
        where = self.asked if parse_destination(self.asked).port is None else f"ssh://{self.label}"
        return shlex.join([*self.given, where])

    @property
    def dead_after_s(self) -> int:
        """Seconds of silence from the peer's kernel after which the link is given up."""
        return self.alive_interval_s * self.alive_count


def given_arguments(identity_file: str | None, known_hosts: str | None) -> list[str]:
    """Arguments of ssh that do what these two do in the inventory: the only key to offer, the only file that vouches."""
    found = ["-i", identity_file, "-o", "IdentitiesOnly=yes"] if identity_file else []
    if known_hosts:
        found += ["-o", f'UserKnownHostsFile="{known_hosts}"', "-o", "GlobalKnownHostsFile=none"]
    return found


def parse_destination(text: str) -> Destination:
    """Take ``alias``, ``user@host``, ``host:port``, ``user@[v6]:port`` or ``ssh://user@host:port`` apart.

    Raises:
        ConfigError: empty, holds spaces or control characters, starts with a dash, or has an impossible port.
    """
    bare = text.removeprefix("ssh://").rstrip("/") if text.startswith("ssh://") else text
    user, _, rest = bare.rpartition("@")
    match = re.fullmatch(r"\[([^\]]+)\](?::(\d+))?|([^:]+)(?::(\d+))?|([0-9a-fA-F:.]+(?:%\w+)?)", rest)
    if not match or re.search(r"[\s\x00-\x1f\x7f]", bare) or bare.startswith("-") or rest.startswith("-"):
        raise ConfigError(
            f"{text!r} is not a destination for ssh",
            "write an alias of your ssh configuration, or user@host:port",
        )
    host = match[1] or match[3] or match[5]
    digits = match[2] or match[4]
    port = int(digits) if digits else None
    if port is not None and not 0 < port < 65536:
        raise ConfigError(f"{text!r} names port {port}", "ports go from 1 to 65535")
    return Destination(host, user or None, port)


def resolve(
    ssh: str,
    *,
    identity_file: str | None = None,
    known_hosts: str | None = None,
    config_file: str | None = None,
) -> ResolvedHost:
    """Resolve the inventory's ``ssh`` value; ``identity_file`` and ``known_hosts`` of the inventory win.

    Args:
        ssh: alias, or ``user@host:port``.
        identity_file: the only key to offer.
        known_hosts: the only file that vouches for the host.
        config_file: like `ssh -F`; default the file named by ORCH_SSH_CONFIG, else the user's own configuration.

    Raises:
        ConfigError: the value is malformed, the configuration is, or an alias needs an ssh binary and there is none.
    """
    where = parse_destination(ssh)
    config_file = config_file or os.environ.get(SSH_CONFIG_ENV) or None
    binary = shutil.which("ssh")
    if binary:
        found = from_settings(ssh, _ssh_g(binary, where, config_file))
    elif where.direct:
        found = _without_binary(ssh, where)
    else:
        raise ConfigError(
            f"cannot resolve the ssh alias {ssh!r}: there is no ssh program on the PATH",
            "install the OpenSSH client, or write user@host:port in the inventory",
        )
    if identity_file:
        found = replace(
            found, identity_files=(expand(identity_file),), certificate_files=(), identities_only=True
        )
    if known_hosts:
        found = replace(found, user_known_hosts=(expand(known_hosts),), global_known_hosts=())
    given = given_arguments(identity_file and expand(identity_file), known_hosts and expand(known_hosts))
    return replace(found, given=tuple(given))


def resolve_chain(
    ssh: str,
    *,
    identity_file: str | None = None,
    known_hosts: str | None = None,
    config_file: str | None = None,
) -> list[ResolvedHost]:
    """The hosts to pass through, outermost first, the target last; a chain of one when there is no ProxyJump.

    As in ssh, the inventory's own key and known_hosts are for the target only: jump hosts use their configuration.

    Raises:
        ConfigError: as `resolve`, and when the jumps lead in a circle.
    """
    target = resolve(ssh, identity_file=identity_file, known_hosts=known_hosts, config_file=config_file)
    chain = [target]
    jumps = target.proxy_jump
    while jumps:
        if len(chain) > MAX_HOPS:
            route = " <- ".join(hop.asked for hop in chain)
            raise ConfigError(
                f"the ProxyJump of {ssh!r} leads in a circle: {route}", "correct it in your ssh config"
            )
        hop = resolve(jumps[-1], config_file=config_file)
        # An explicit list overrides the hop's own ProxyJump; the first of the list uses its own.
        jumps = jumps[:-1] or hop.proxy_jump
        chain.append(hop)
    return chain[::-1]


def _ssh_g(binary: str, where: Destination, config_file: str | None) -> dict[str, list[str]]:
    command = [binary, "-G"]
    if config_file:
        command += ["-F", config_file]
    if where.port:
        command += ["-p", str(where.port)]
    command += ["--", f"{where.user}@{where.host}" if where.user else where.host]
    try:
        done = subprocess.run(command, capture_output=True, timeout=20, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"`{' '.join(command)}` did not end within 20 s",
            "a `Match exec` line of your ssh config may hang",
        ) from None
    if done.returncode != 0:
        seen = done.stderr.decode("utf-8", "replace").strip()
        raise ConfigError(
            f"ssh cannot read its configuration for {where.host!r}: {seen}", f"try: {' '.join(command)}"
        )
    settings: dict[str, list[str]] = {}
    for line in done.stdout.decode("utf-8", "surrogateescape").splitlines():
        key, _, value = line.strip().partition(" ")
        settings.setdefault(key.lower(), []).append(value.strip())
    return settings


def from_settings(asked: str, settings: Mapping[str, list[str]]) -> ResolvedHost:
    """Record of what `ssh -G` printed (key, in lower case -> values in order)."""

    def one(key: str, default: str = "") -> str:
        value = settings.get(key, [default])[0]
        return default if value.lower() == "none" else value

    def number(key: str) -> int:
        value = one(key, "0")
        return int(value) if value.isdigit() else 0

    def yes(key: str, default: str = "no") -> bool:
        return one(key, default).lower() in ("yes", "true", "ask")

    hostname, user, port = (
        one("hostname", asked),
        one("user", getpass.getuser()),
        number("port") or DEFAULT_PORT,
    )
    tokens = _tokens(asked, hostname, user, port, one("hostkeyalias"))

    def path(value: str) -> str:
        return expand(_replace_tokens(value, tokens))

    def paths(key: str) -> tuple[str, ...]:
        return tuple(path(value) for value in split_paths(one(key)))

    agent = settings.get("identityagent", ["SSH_AUTH_SOCK"])[0]
    methods = {"publickey": "pubkeyauthentication", "password": "passwordauthentication"}
    disabled = {method for method, key in methods.items() if not yes(key, "yes")}
    if not yes("kbdinteractiveauthentication", one("challengeresponseauthentication", "yes")):
        disabled.add("keyboard-interactive")
    if yes("batchmode"):
        disabled |= {"password", "keyboard-interactive"}
    command = one("proxycommand")
    return ResolvedHost(
        asked=asked,
        hostname=hostname,
        user=user,
        port=port,
        identity_files=tuple(path(v) for v in settings.get("identityfile", []) if v.lower() != "none"),
        certificate_files=tuple(path(v) for v in settings.get("certificatefile", []) if v.lower() != "none"),
        identities_only=yes("identitiesonly"),
        identity_agent=None
        if agent.lower() == "none"
        else agent
        if agent == "SSH_AUTH_SOCK"
        else path(agent),
        user_known_hosts=paths("userknownhostsfile"),
        global_known_hosts=paths("globalknownhostsfile"),
        host_key_alias=one("hostkeyalias") or None,
        hash_known_hosts=yes("hashknownhosts"),
        revoked_host_keys=path(one("revokedhostkeys")) if one("revokedhostkeys") else None,
        connect_timeout_s=float(number("connecttimeout")) or CONNECT_TIMEOUT_S,
        alive_interval_s=number("serveraliveinterval") or ALIVE_INTERVAL_S,
        alive_count=(number("serveralivecountmax") or ALIVE_COUNT)
        if number("serveraliveinterval")
        else ALIVE_COUNT,
        proxy_jump=tuple(hop for hop in one("proxyjump").split(",") if hop),
        proxy_command=_replace_tokens(command, tokens) if command else None,
        proxy_use_fdpass=yes("proxyusefdpass"),
        address_family=one("addressfamily", "any"),
        bind_address=one("bindaddress") or None,
        preferred_authentications=tuple(
            one("preferredauthentications", "publickey,keyboard-interactive,password").split(",")
        ),
        disabled_authentications=frozenset(disabled),
        password_prompts=number("numberofpasswordprompts") or 3,
    )


def _without_binary(asked: str, where: Destination) -> ResolvedHost:
    """Ssh's defaults, for machines without the OpenSSH client."""
    return ResolvedHost(
        asked=asked,
        hostname=where.host,
        user=where.user or getpass.getuser(),
        port=where.port or DEFAULT_PORT,
        identity_files=tuple(expand(path) for path in DEFAULT_IDENTITIES),
        user_known_hosts=(expand("~/.ssh/known_hosts"),),
        global_known_hosts=("/etc/ssh/ssh_known_hosts",),
    )


def split_paths(value: str) -> list[str]:
    """Split the one-line list of files that `ssh -G` prints without quotes; names may hold spaces.

    A new path starts at a blank that is followed by an absolute path, ~ or a drive letter.
    """
    return [part.strip('"') for part in re.split(r"\s+(?=\"?(?:/|~|%|\$\{|[A-Za-z]:[\\/]))", value) if part]


def expand(path: str) -> str:
    """Replace a leading ~ and ${NAME} by their values."""
    filled = re.sub(r"\$\{(\w+)\}", lambda m: os.environ.get(m[1], m[0]), path)
    return str(Path(filled).expanduser()) if filled.startswith("~") else filled


def _tokens(asked: str, hostname: str, user: str, port: int, alias: str) -> dict[str, str]:
    local = socket.gethostname()
    return {
        "%": "%",
        "d": str(Path.home()),
        "h": hostname,
        "n": parse_destination(asked).host,
        "p": str(port),
        "r": user,
        "u": getpass.getuser(),
        "l": local,
        "L": local.split(".", 1)[0],
        "k": alias or hostname,
        "i": str(os.getuid()) if hasattr(os, "getuid") else "0",
    }


def _replace_tokens(value: str, tokens: Mapping[str, str]) -> str:
    return re.sub(r"%(.)", lambda m: tokens.get(m[1], m[0]), value)
