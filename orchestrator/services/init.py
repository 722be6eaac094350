"""`orch init HOST`: from an ssh alias to an inventory and a first plan that runs, both explained in comments."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import HostKeyChanged, HostKeyUnknown, LocalError, UsageError

if TYPE_CHECKING:
    from orchestrator.services.session import Session


@dataclass(frozen=True)
class InitRequest:
    """What a person said about the new host."""

    ssh: str
    name: str | None = None
    directory: Path = Path()
    accept_new: bool = False
    identity_file: Path | None = None
    known_hosts: Path | None = None
    root: str | None = None
    force: bool = False


def init(session: Session, request: InitRequest) -> dict[str, Any]:
    """Probe the host, then write; ``{"host", "written": [...], "plan", "notes": [...], "facts", "checks"}``.

    Raises:
        ConfigError: what was said makes no inventory. UsageError: files are there already, and ``force`` was not given.
        LocalError: they cannot be read or written. HostError: the host could not be asked.
    """
    from orchestrator.core.inventory import inventory_of
    from orchestrator.core.yaml import Document
    from orchestrator.services.hosts import check_hosts
    from orchestrator.services.session import Session as OtherSession

    name = request.name or name_of(request.ssh)
    inventory_path = request.directory / "inventory.yaml"
    plan_path = request.directory / "plans" / "first.yaml"
    entry: dict[str, Any] = {"ssh": request.ssh}
    if request.identity_file:
        entry["identity_file"] = _from_here(request.identity_file)
        if not os.path.exists(entry["identity_file"]):
            raise UsageError(f"there is no file {request.identity_file}", "--identity-file is the private key: ~/.ssh/id_ed25519")
    if request.known_hosts:
        entry["known_hosts"] = _from_here(request.known_hosts)
    if request.root:
        entry["root"] = request.root
    inventory = inventory_of(Document(None, {"hosts": {name: entry}}), inventory_path)
    try:
        there = [str(path) for path in (inventory_path, plan_path) if path.exists()]
    except OSError as error:
        raise LocalError(f"{error.filename} cannot be read: {error.strerror}") from error
    if there and not request.force:
        raise UsageError(
            f"{' and '.join(there)} already there, nothing was written",
            "add a host to an inventory by hand, name another folder with --directory, or overwrite with --force",
        )
    with OtherSession(None, say=session.say, now=session.now, inventory=inventory) as probing:
        try:
            found = check_hosts(probing, [name], accept_new=request.accept_new, raise_errors=True)["hosts"][0]
        except (HostKeyUnknown, HostKeyChanged) as error:
            from orchestrator.hosts.trust import accepting

            # What the hint names needs the inventory, which is not there yet.
            error.hint = str(error.hint).replace(accepting(name), typed(replace(request, accept_new=True)))
            raise
    facts = found["facts"]
    entry["gpus"] = len(facts.get("gpus") or [])
    python = job_python(facts)
    if python:
        entry["python"] = python
    if facts.get("slurm"):
        entry["scheduler"] = "slurm"
    notes = [f"{check['name']}: {check['found']}" for check in found["checks"]]
    written = []
    try:
        plan_path.parent.mkdir(parents=True, exist_ok=True)
        for path, text in (
            (inventory_path, inventory_text(name, entry, facts)),
            (plan_path, plan_text(name, facts)),
        ):
            path.write_text(text, encoding="utf-8")
            written.append(str(path))
    except OSError as error:
        raise LocalError(
            f"{error.filename or request.directory} cannot be written: {error.strerror}"
        ) from error
    return {
        "host": name,
        "written": written,
        "plan": str(plan_path),
        "notes": notes,
        "facts": facts,
        "checks": found["checks"],
    }


def _from_here(path: Path) -> str:
    """A path that was typed in this folder, for the inventory, whose paths begin at its own folder."""
    return os.path.abspath(os.path.expanduser(path))


def typed(request: InitRequest) -> str:
    """The command line that says this."""
    options = {
        "--name": request.name,
        "--directory": None if request.directory == Path() else request.directory,
        "--identity-file": request.identity_file,
        "--known-hosts": request.known_hosts,
        "--root": request.root,
    }
    words = ["orch", "init", request.ssh]
    for option, value in options.items():
        words += [] if value is None else [option, str(value)]
    words += [option for option, on in (("--accept-new", request.accept_new), ("--force", request.force)) if on]
    return shlex.join(words)


def name_of(ssh: str) -> str:
    """A host name for the inventory out of an ssh alias or user@host:port."""
    host = ssh.rpartition("@")[2].split(":")[0].split(".")[0] if not re.match(r".*@?\d+\.\d+", ssh) else ssh
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", host.rpartition("@")[2].split(":")[0])
    return plain.strip("-_").lower() or "host"


def job_python(facts: dict[str, Any]) -> str | None:
    """The newest Python of the host, for the built-in steps; None when only one is there."""
    pythons = facts.get("pythons") or []
    if len(pythons) < 2:
        return None
    newest = max(
        pythons, key=lambda item: [int(part) for part in re.findall(r"\d+", str(item.get("version")))[:3]]
    )
    return str(newest["path"])


def yaml_text(value: Any) -> str:
    """A value for one YAML line (JSON is YAML 1.2)."""
    import json

    if (
        isinstance(value, str)
        and re.fullmatch(r"[A-Za-z_/~][A-Za-z0-9_./@~-]*", value)
        and value.lower() not in {"true", "false", "null"}
    ):
        return value
    return json.dumps(value)


def inventory_text(name: str, entry: dict[str, Any], facts: dict[str, Any]) -> str:
    """The inventory file."""
    comments = {
        "ssh": "alias of ~/.ssh/config, or user@host:port",
        "gpus": "how many there must be; fewer is an error, not a smaller job",
        "python": "runs the built-in steps (serve, extract ...): where vllm and torch are installed",
        "root": "jobs, logs and uploads; a local disk",
        "scheduler": "direct or slurm",
    }
    seen = f"{facts.get('hostname')}: {facts.get('os')}, {facts.get('cpu_count')} CPUs"
    # One line, whatever the host says: behind a line's end its words would be keys of the inventory.
    lines = [f"# Hosts that orch may use. {' '.join(seen.split())}.", "hosts:"]
    lines.append(f"  {yaml_text(name)}:")
    for key, value in entry.items():
        comment = f"  # {comments[key]}" if key in comments else ""
        lines.append(f"    {key}: {yaml_text(value)}{comment}")
    if "root" not in entry:
        lines.append("    # root: ~/.orchestrator   # jobs, logs and uploads; set it to a large local disk")
    return "\n".join(lines) + "\n"


def plan_text(name: str, facts: dict[str, Any]) -> str:
    """A first plan that runs on any host and shows what a step may say."""
    gpus = len(facts.get("gpus") or [])
    return f"""\
# A first job: counts to 20 and says how far it is. Start it with: orch launch plans/first.yaml --watch
name: first
host: {yaml_text(name)}
workdir: ~/orch-first        # made when missing; every step runs in it
steps:
  - name: count
    run: |
      mkdir -p "$ORCH_OUTPUT"       # what lies there is what `orch fetch` brings
      for i in $(seq 20); do
        echo "::orch {{\\"phase\\": \\"count\\", \\"state\\": \\"progress\\", \\"done\\": $i, \\"total\\": 20}}"
        echo "line $i" >> "$ORCH_OUTPUT/lines.txt"
        sleep 1
      done
    # gpus: {gpus or 1}                 # claim that many GPUs, and start only when they are clean
    # retry: {{attempts: 3}}      # tries of this step, the first included
    # done: {{count: "out/*.safetensors", equals: 10000}}   # success is checked work, not only exit status 0
"""
