"""`orch hosts` and `orch hosts check` for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from orchestrator.ui.job import Json
from orchestrator.ui.text import columns, one_line

VERDICT_STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "bright_black"}


def host_list_lines(hosts: Sequence[Json]) -> list[str]:
    """The inventory as a table."""
    rows = [["HOST", "SSH", "GPUS", "ROOT", "SCHEDULER", "TRANSPORT"]]
    for host in hosts:
        values = (host.get(key) for key in ("name", "ssh", "gpus", "root", "scheduler", "transport"))
        rows.append([one_line(str(value)) if value is not None else "-" for value in values])
    return columns(rows)


def check_lines(hosts: Sequence[Json]) -> list[Text]:
    """One block a host: what was found, and what to do about it."""
    lines: list[Text] = []
    for host in hosts:
        if lines:
            lines.append(Text(""))
        good = host.get("ok")
        word = "ready" if good else "not reachable" if not host.get("reachable") else "not ready"
        lines.append(
            Text.assemble(
                (one_line(str(host["name"])), "bold"),
                "  ",
                (word, "green" if good else "bold red"),
                f"  {one_line(str(host.get('ssh')))}",
            )
        )
        if host.get("accepted_key"):
            lines.append(Text(f"  kept its key: {one_line(str(host['accepted_key']))}"))
        error = host.get("error")
        if error:
            lines.append(Text(f"  {one_line(str(error['message']))}", "red"))
            if error.get("hint"):
                lines.append(Text(f"  {one_line(str(error['hint']))}"))
        lines.extend(verdict_lines(host.get("checks") or []))
    return lines


def verdict_lines(checks: Sequence[Json]) -> list[Text]:
    """One line a check, its fix below it when it is not fine."""
    width = max((len(str(check["name"])) for check in checks), default=0)
    lines = []
    for check in checks:
        verdict = str(check["verdict"])
        line = Text("  ")
        line.append(f"{verdict:<4}", VERDICT_STYLE.get(verdict, ""))
        line.append(f"  {one_line(str(check['name'])):<{width}}  {one_line(str(check['found']))}")
        lines.append(line)
        if check.get("fix") and verdict in {"warn", "fail"}:
            lines.append(Text(f"        {'':<{width}}  -> {one_line(str(check['fix']))}"))
    return lines
