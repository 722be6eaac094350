"""`orch gc` and `orch doctor` for people. Pure functions of their JSON documents; foreign text in them is made safe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orchestrator.ui.text import columns, duration, one_line, plural, size

Json = Mapping[str, Any]
MAX_KEPT = 10


def gc_lines(answer: Json) -> list[str]:
    """One block a host: what goes, what stays and why; the ledger; what to type next."""
    applied = bool(answer["apply"])
    lines: list[str] = []
    total = count = 0
    for host in answer["hosts"]:
        name = one_line(str(host["name"]))
        if host["error"]:
            said = one_line(str(host["error"].get("message")))  # most begin with the host's name
            lines.append(said if said.startswith(f"{name}: ") else f"{name}: {said}")
            continue
        items: Sequence[Json] = host["items"]
        total, count = total + host["bytes"], count + len(items)
        what = f"{plural(len(items), 'thing')}, {size(host['bytes'])}" if items else "nothing to delete"
        lines.append(f"{name}: {what}{' deleted' if applied and items else ''}")
        lines.extend(
            f"  {line}"
            for line in columns(
                [one_line(item["kind"]), one_line(item["name"]), size(item["bytes"]), duration(item["age_s"]), one_line(item["why"])]
                for item in items
            )
        )
        lines.extend(_kept(host["kept"]))
    ledger = answer["ledger"]
    lines.append(f"local ledger: {plural(ledger['jobs'], 'job')}, {size(ledger['bytes'])}, {one_line(ledger['path'])}")
    if not applied and count:
        lines.append(f"nothing was deleted; to delete this ({size(total)}): the same command with --apply")
    return lines


def _kept(kept: Sequence[Json]) -> Iterator[str]:
    """Why things stay; jobs that are only too young are one line."""
    young = [row for row in kept if row["why"].startswith("ended ")]
    told = [row for row in kept if row not in young]
    for row in told[:MAX_KEPT]:
        yield f"  kept: {one_line(row['kind'])} {one_line(row['name'])}: {one_line(row['why'])}"
    if len(told) > MAX_KEPT:
        yield f"  kept: {len(told) - MAX_KEPT} more, see --json"
    if young:
        yield f"  kept: {plural(len(young), 'job')} that ended more recently"


def doctor_lines(answer: Json) -> list[str]:
    """The report as plain lines, ready to be pasted."""
    lines = ["orch doctor" + ("" if answer["masked"] else " (names and addresses shown)")]
    for title in ("orch", "packages", "ssh", "environment"):
        lines += ["", title, *_table(answer[title])]
    for title, record in answer["files"].items():
        lines += ["", title, *_table(record)]
    for host in answer["hosts"]:
        lines += ["", f"host {one_line(str(host['name']))}"]
        plain = {key: host[key] for key in ("transport", "scheduler", "gpus", "root", "reachable", "error")}
        lines += _table({**plain, **(host["facts"] or {})})
        for hop in host["route"]:
            keys = ", ".join(one_line(path) for path in hop["keys"]) or "none"
            proxy = ", through a ProxyCommand" if hop["proxy_command"] else ""
            lines.append(f"  via {one_line(hop['where'])}, key files: {keys}{proxy}")
        for check in host["checks"]:
            lines.append(f"  {check['verdict']}: {one_line(str(check['name']))}: {one_line(str(check['found']))}")
            if check.get("fix"):
                lines.append(f"    -> {one_line(str(check['fix']))}")
    return lines


def _table(record: Json) -> list[str]:
    rows = [[key, _shown(value)] for key, value in record.items() if value not in (None, [], "")]
    return [f"  {line}" for line in columns(rows)]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(one_line(str(item)) for item in value)
    return one_line(str(value))
