"""What a bug report needs: versions, ssh setup, local files, and each host as `hosts check` sees it. Made to be pasted.

Nothing secret is read, and what looks secret or private is masked all the same: values of variables that sound secret,
credentials in URLs, the home folder, and unless ``full`` login names and addresses.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import OrchError

if TYPE_CHECKING:
    from orchestrator.core.inventory import Host
    from orchestrator.hosts.ssh_config import ResolvedHost
    from orchestrator.services.session import Session

PACKAGES = (
    "fabric", "paramiko", "cryptography", "pydantic", "tenacity", "rich", "typer", "ruamel.yaml", "platformdirs",
    "asyncssh", "keyring", "apprise",
)  # fmt: skip
MASK = "***"
_SECRET_NAME = re.compile(r"(?i)TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_KEY|PRIVATE|AUTH(?!_SOCK)|COOKIE")
_SECRET_TEXT = re.compile(r"(?i)\b((?:token|secret|password|passwd|api_?key|signature|sig|key)=)[^\s&'\"]+")
_URL_LOGIN = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@]+@", re.IGNORECASE)
_SHOWN = ("ORCH_HOME", "ORCH_INVENTORY", "ORCH_SSH_CONFIG", "TERM", "LANG", "LC_ALL", "NO_COLOR", "PYTHONPATH")
_NEVER_MASKED = frozenset({"root", "localhost", "127.0.0.1", "user", "ubuntu"})
_WAIT_S = 5.0


def doctor(session: Session, names: Sequence[str], *, ask: bool = True, full: bool = False) -> dict[str, Any]:
    """``{"orch", "packages", "ssh", "environment", "files", "hosts": [...], "masked": bool}``.

    Args:
        names: hosts to look at; all of the inventory by default.
        ask: connect to them.
        full: show login names and addresses.

    Raises:
        ConfigError: a host that is not in the inventory.
    """
    files = _files(session)
    known: Mapping[str, Host] = {} if files["inventory"]["error"] else session.inventory.hosts
    for name in names:
        session.host(name)
    chosen = list(dict.fromkeys(names)) or list(known)
    private: dict[str, str] = {}
    hosts = [_host(name, known[name], private) for name in chosen]
    if ask and chosen:
        _ask(session, chosen, hosts)
    answer = {
        "orch": _orch(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "ssh": _ssh(),
        "environment": {name: os.environ[name] for name in _SHOWN if name in os.environ},
        "files": files,
        "hosts": hosts,
        "masked": not full,
    }
    masked = mask(answer, {} if full else private)
    assert isinstance(masked, dict)
    return masked


def mask(value: Any, private: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> Any:
    """The same JSON value with secrets masked in every text, and ``private`` texts replaced by what they stand for."""
    secrets = {
        text for name, text in environ.items() if _SECRET_NAME.search(name) and len(text) >= 6 and not text.isdigit()
    }
    home = os.path.expanduser("~")
    words = {text: shown for text, shown in private.items() if len(text) >= 3 and text not in _NEVER_MASKED}
    pattern = re.compile("|".join(rf"(?<![\w.-]){re.escape(text)}(?![\w-])" for text in sorted(words, key=len, reverse=True)))

    def text_of(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, MASK)
        text = _URL_LOGIN.sub(rf"\1{MASK}@", text)
        text = _SECRET_TEXT.sub(rf"\1{MASK}", text)
        if len(home) > 1:
            text = re.sub(rf"{re.escape(home)}(?=/|$|[\s'\":,)])", "~", text)
        return pattern.sub(lambda match: words[match[0]], text) if words else text

    def of(item: Any) -> Any:
        if isinstance(item, str):
            return text_of(item)
        if isinstance(item, Mapping):
            return {str(key): of(inner) for key, inner in item.items()}
        if isinstance(item, (list, tuple)):
            return [of(inner) for inner in item]
        return item

    return of(value)


def _orch() -> dict[str, Any]:
    from orchestrator.hosts.release import build

    return {
        "version": _version("orch-gpu") or "not installed",
        "release": build().hash,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "encoding": sys.getfilesystemencoding(),
        "terminal": sys.stdout.isatty(),
    }


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _ssh() -> dict[str, Any]:
    program = shutil.which("ssh")
    said = _said([program, "-V"]) if program else None
    keys = _said(["ssh-add", "-l"]) if os.environ.get("SSH_AUTH_SOCK") and shutil.which("ssh-add") else None
    config = Path(os.environ.get("ORCH_SSH_CONFIG") or "~/.ssh/config").expanduser()
    agent = "none" if keys is None else "no keys" if "no identities" in keys else f"{len(keys.splitlines())} keys"
    return {
        "program": program,
        "version": said,
        "agent": agent,
        "config": str(config) if os.path.exists(config) else f"{config} (not there)",
        "keys": [path.name for path in sorted(Path("~/.ssh").expanduser().glob("id_*")) if path.suffix != ".pub"],
    }


def _said(argv: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_WAIT_S, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (done.stdout or done.stderr).strip()


def _files(session: Session) -> dict[str, Any]:
    from orchestrator.core.paths import ledger_path

    inventory: dict[str, Any] = {"path": None, "hosts": 0, "error": None}
    try:
        inventory |= {"path": str(session.inventory.path), "hosts": len(session.inventory.hosts)}
    except OrchError as error:
        inventory["error"] = error.message
    ledger: dict[str, Any] = {"path": str(ledger_path()), "bytes": None, "jobs": None, "error": None}
    try:
        if ledger_path().exists():
            ledger |= {"bytes": ledger_path().stat().st_size, "jobs": len(session.ledger.jobs())}
    except OrchError as error:
        ledger["error"] = error.message
    except OSError as error:  # its folder may not be looked into
        ledger["error"] = str(error.strerror)
    return {"inventory": inventory, "ledger": ledger}


def _host(name: str, host: Host, private: dict[str, str]) -> dict[str, Any]:
    """How ssh would go there, without going there."""
    from orchestrator.hosts.ssh_config import resolve_chain

    entry: dict[str, Any] = {
        "name": name, "transport": host.transport, "scheduler": host.scheduler, "gpus": host.gpus, "root": host.root,
        "route": [], "error": None, "reachable": None, "facts": None, "checks": [],
    }  # fmt: skip
    try:
        chain = resolve_chain(host.ssh, identity_file=host.identity_file, known_hosts=host.known_hosts)
    except OrchError as error:
        entry["error"] = error.message
        return entry
    for index, hop in enumerate(chain):
        last = index == len(chain) - 1
        private.setdefault(hop.hostname, f"<address of {name}>" if last else f"<jump host of {name}>")
        private.setdefault(hop.user, f"<user of {name}>")
    if "@" not in host.ssh:
        private.setdefault(host.ssh, f"<ssh of {name}>")
    private.pop(name, None)  # what the inventory calls it is how the report names it
    entry["route"] = [_hop(hop) for hop in chain]
    return entry


def _hop(hop: ResolvedHost) -> dict[str, Any]:
    return {
        "where": f"{hop.user}@{hop.hostname}:{hop.port}",
        "keys": [str(path) for path in hop.identity_files if os.path.exists(path)],
        "proxy_command": hop.proxy_command is not None,
    }


def _ask(session: Session, names: Sequence[str], hosts: Sequence[dict[str, Any]]) -> None:
    from orchestrator.services.hosts import check_hosts

    shown = ("os", "kernel", "machine", "python", "root_fs", "container", "slurm", "skew_s", "gpus", "nvidia_smi")
    for entry, found in zip(hosts, check_hosts(session, names)["hosts"], strict=True):
        facts = {**(found["facts"] or {}), "skew_s": found["skew_s"]}
        entry["reachable"] = found["reachable"]
        entry["error"] = (found["error"] or {}).get("message") or entry["error"]
        entry["facts"] = {key: facts.get(key) for key in shown} if found["facts"] else None
        entry["checks"] = [check for check in found["checks"] if check["verdict"] in {"warn", "fail"}]
