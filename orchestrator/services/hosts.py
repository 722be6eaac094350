"""The hosts of the inventory: listed without asking, or asked what they are and what would be in the way of a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import HostFull, HostRefused, NoPython, OrchError
from orchestrator.services.parallel import in_parallel

if TYPE_CHECKING:
    from orchestrator.core.inventory import Host
    from orchestrator.hosts.agent import AgentClient
    from orchestrator.services.session import Session

ANSWERED = (HostFull, NoPython, HostRefused)
"""Errors of a host that was reached, and let us in, and cannot run jobs as it is."""
PROBE_TIMEOUT_S = 60.0
MIN_FREE_BYTES = 2 << 30
MIN_SHM_BYTES = 1 << 30
MIN_OPEN_FILES = 4096
MAX_SKEW_S = 2.0


def list_hosts(session: Session) -> dict[str, Any]:
    """``{"inventory": path, "hosts": [{name, ssh, gpus, root, scheduler, transport}]}``. Connects to nothing."""
    return {
        "inventory": str(session.inventory.path),
        "hosts": [{"name": name, **_entry(host)} for name, host in session.inventory.hosts.items()],
    }


def _entry(host: Host) -> dict[str, Any]:
    return {
        "ssh": host.ssh,
        "gpus": host.gpus,
        "root": host.root,
        "scheduler": host.scheduler,
        "transport": host.transport,
    }


def check_hosts(
    session: Session, names: Sequence[str], *, accept_new: bool = False, raise_errors: bool = False
) -> dict[str, Any]:
    """``{"hosts": [{name, reachable, ok, error, skew_s, facts, checks: [{name, verdict, found, fix}]}]}``.

    Raises:
        ConfigError, UsageError: the inventory, or a name that is not in it.
        HostError: with ``raise_errors``, a host could not be asked.
    """
    chosen = list(dict.fromkeys(names)) or session.host_names()
    for name in chosen:
        session.host(name)
    return {"hosts": in_parallel(chosen, lambda name: _check(session, name, accept_new, raise_errors))}


def _check(session: Session, name: str, accept_new: bool, raise_errors: bool) -> dict[str, Any]:  # noqa: FBT001
    answer: dict[str, Any] = {
        "name": name,
        "ssh": session.host(name).ssh,
        "reachable": False,
        "ok": False,
        "accepted_key": None,
        "error": None,
        "skew_s": None,
        "facts": None,
        "checks": [],
    }
    try:
        if accept_new:
            answer["accepted_key"] = session.pool.accept_new_key(name)
        agent = session.agent(name)
        skew_s = _skew_s(session, agent)
        facts = agent.request("probe", timeout_s=PROBE_TIMEOUT_S)
    except OrchError as error:
        if raise_errors:
            raise
        answer.update(error=error.to_json()["error"], reachable=isinstance(error, ANSWERED))
        return answer
    facts = {key: value for key, value in facts.items() if key not in {"id", "ok"}}
    checks = judge(facts, session.host(name), skew_s)
    answer.update(
        reachable=True,
        ok=not any(check["verdict"] == "fail" for check in checks),
        skew_s=round(skew_s, 1),
        facts=facts,
        checks=checks,
    )
    return answer


def _skew_s(session: Session, agent: AgentClient) -> float:
    """The host's clock against ours, at the middle of one quick round trip."""
    before = session.now().timestamp()
    theirs = float(agent.request("hello")["hello"]["wall"])
    return theirs - (before + session.now().timestamp()) / 2


def judge(facts: dict[str, Any], host: Host, skew_s: float | None) -> list[dict[str, Any]]:
    """What a host's facts mean for jobs there. Pure."""
    checks: list[dict[str, Any]] = []

    def add(name: str, verdict: str, found: str, fix: str = "") -> None:
        checks.append({"name": name, "verdict": verdict, "found": found, "fix": fix})

    add("system", "ok", f"{facts.get('os')}, kernel {facts.get('kernel')}, {facts.get('machine')}")
    add("python", "ok", f"{facts.get('python')} runs the agent")
    _judge_gpus(facts, host, add)
    _judge_root(facts, host, add)
    _judge_memory(facts, add)
    _judge_logout(facts, add)
    if skew_s is not None and abs(skew_s) > MAX_SKEW_S:
        add(
            "clock",
            "warn",
            f"{abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} this laptop",
            "check NTP",
        )
    elif skew_s is not None:
        add("clock", "ok", f"within {MAX_SKEW_S:g} s of this laptop's")
    if facts.get("container"):
        add(
            "container",
            "warn",
            "inside a container: pids of nvidia-smi mean nothing here, memory is judged instead",
        )
    if facts.get("slurm") and host.scheduler == "direct":
        add(
            "scheduler",
            "warn",
            "sbatch is there: this may be a Slurm login node, where work must not run",
            "set `scheduler: slurm` in the inventory",
        )
    elif not facts.get("slurm") and host.scheduler == "slurm":
        add(
            "scheduler",
            "fail",
            "the inventory says slurm, and there is no sbatch, or no cluster that it knows",
            "set `scheduler: direct`",
        )
    for warning in facts.get("warnings") or []:
        if not any(warning in check["found"] for check in checks):
            add("host", "warn", str(warning))
    return checks


def _judge_gpus(facts: dict[str, Any], host: Host, add: Any) -> None:
    gpus = facts.get("gpus")
    if host.scheduler == "slurm":
        shown = f"{host.gpus} a node by the inventory" if host.gpus is not None else "not in the inventory"
        add("gpus", "ok", f"{shown}; Slurm's nodes have them, not this login node")
    elif gpus:
        names = sorted({str(gpu).split(",")[0] for gpu in gpus})
        found = f"{len(gpus)} x {', '.join(names)}"
        if host.gpus is not None and host.gpus != len(gpus):
            add(
                "gpus",
                "fail",
                f"{found}; the inventory says {host.gpus}",
                f"set `gpus: {len(gpus)}`, or look for the lost one",
            )
        else:
            add("gpus", "ok", found)
    elif host.gpus:
        seen = "nvidia-smi does not answer" if facts.get("nvidia_smi") else "there is no nvidia-smi"
        add("gpus", "fail", f"{seen}; the inventory says {host.gpus}", "install the driver, or set `gpus: 0`")
    else:
        add("gpus", "ok", "none")


def _judge_root(facts: dict[str, Any], host: Host, add: Any) -> None:
    root = str(facts.get("root"))
    disk = next((item for item in facts.get("disks") or [] if item.get("path") == root), None)
    free = None if disk is None else int(disk.get("free_bytes") or 0)
    shown = "" if free is None else f", {free / 2**30:.1f} GiB free"
    if facts.get("tmpfs") and not host.allow_tmpfs:
        add(
            "root",
            "fail",
            f"{root} lies in memory ({facts.get('root_fs')}): jobs are gone after a reboot",
            "set `root:` to a disk, or `allow_tmpfs: true`",
        )
    elif disk is not None and not disk.get("writable", True):
        add("root", "fail", f"{root} cannot be written", "set another `root:`")
    elif free is not None and free < MIN_FREE_BYTES:
        add(
            "root",
            "warn",
            f"{root} on {facts.get('root_fs')}{shown}",
            "free some space, or set another `root:`",
        )
    else:
        add("root", "ok", f"{root} on {facts.get('root_fs')}{shown}")


def _judge_memory(facts: dict[str, Any], add: Any) -> None:
    memory, shm = facts.get("mem_bytes"), facts.get("shm_bytes")
    if memory:
        add("memory", "ok", f"{memory / 2**30:.0f} GiB, {facts.get('cpu_count')} CPUs")
    if shm is not None and shm < MIN_SHM_BYTES:
        add(
            "shm",
            "warn",
            f"shared memory holds {shm / 2**20:.0f} MiB: NCCL and data loaders need more",
            "start the container with --shm-size, or remount it",
        )
    limits = (facts.get("limits") or {}).get("nofile") or []
    if limits and 0 < int(limits[0]) < MIN_OPEN_FILES:
        add(
            "open files",
            "warn",
            f"the limit is {limits[0]}",
            f"raise it: ulimit -n {max(MIN_OPEN_FILES, 65536)}",
        )


def _judge_logout(facts: dict[str, Any], add: Any) -> None:
    logind = facts.get("logind") or {}
    if logind.get("kill_user_processes") and not logind.get("linger"):
        tools = facts.get("tools") or {}
        if tools.get("systemd-run"):
            add(
                "logout", "warn", "logind kills processes at logout; jobs are started in a scope of their own"
            )
        else:
            add(
                "logout",
                "fail",
                "logind kills your processes at logout",
                f"loginctl enable-linger {facts.get('user')}",
            )
    else:
        add("logout", "ok", "processes survive a logout")
