"""Patch sets on a host: which there are, which suit its packages, and applying or reverting them.

A job's sets are applied by its supervisor (`patches:` of a step) to a copy for that job alone; what is here is for looking,
for building that copy ahead of time, and for people who want a set in site-packages (`in_place`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import UsageError
from orchestrator.core.schema import suggest
from orchestrator.services.gpus import only_host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.services.session import Session

ACTIONS = ("list", "check", "apply", "revert")
STATE_WORDS = {
    "suits": "suits: steps with `patches: auto` get it",
    "applied": "already in site-packages",
    "drift": "refused: the original file was changed",
    "unsuitable": "does not suit",
}


def patch(
    session: Session, action: str, host: str | None, *, sets: Sequence[str] = (), in_place: bool = False
) -> dict[str, Any]:
    """The document of `orch patch ACTION HOST --json`.

    list: {"sets": [{name, summary, package, version, partner, partners, files, adds, changes, sha256}]}.
    check: {"python", "versions": {...}, "sets": [{name, state: suits|applied|drift|unsuitable, why, in_place}]}.
    apply: {"overlay", "sets", "sha256", "env"} or, in place, {"changed": {set: [file]}}. revert: {"restored": ...}.

    Raises:
        UsageError: unknown action or set; several hosts and none named; in_place without a set.
        OrchError: the host says why it refuses.
    """
    if action not in ACTIONS:
        raise UsageError(f"no such action: {action}", f"one of {', '.join(ACTIONS)}")
    if in_place and not sets:
        raise UsageError(
            "changing site-packages needs the set's name", "orch patch apply HOST --set NAME --in-place"
        )
    name = host or only_host(session, f"orch patch {action} HOST")

    def ask(action: str, **more: Any) -> dict[str, Any]:
        answer = session.agent(name).request("patch", action=action, python=session.host(name).python, **more)
        return {"host": name, **{key: value for key, value in answer.items() if key not in {"id", "ok"}}}

    if sets and not (action == "apply" and list(sets) in (["auto"], ["none"])):
        known = [str(item["name"]) for item in ask("list")["sets"]]
        for wanted in sets:
            if wanted not in known:
                raise UsageError(f"there is no patch set {wanted!r}", suggest(wanted, known, "sets"))
    answer = ask(action, sets=list(sets), in_place=in_place)
    if sets and action in ("list", "check"):
        answer["sets"] = [item for item in answer["sets"] if item["name"] in sets]
    return answer


def text(action: str, document: dict[str, Any]) -> list[str]:
    """The document in lines for people."""
    if action == "list":
        return [line for item in document["sets"] for line in _described(item)]
    if action == "check":
        versions = ", ".join(f"{name} {version or '-'}" for name, version in document["versions"].items())
        lines = [f"{document['host']}: {document['python']} ({versions})"]
        for item in document["sets"]:
            lines.append(f"  {item['name']}: {STATE_WORDS.get(item['state'], item['state'])}")
            if item["state"] != "suits":
                lines.append(f"      {item['why']}")
        return lines
    if action == "revert":
        restored = [f"{name}: {path}" for name, paths in document["restored"].items() for path in paths]
        return restored or ["nothing was applied in place"]
    if document.get("changed") is not None:
        return [f"{name}: {path}" for name, paths in document["changed"].items() for path in paths]
    names = ", ".join(item["name"] for item in document.get("sets") or []) or "no set suits this host"
    return [names, *([f"overlay: {document['overlay']}"] if document.get("overlay") else [])]


def _described(item: dict[str, Any]) -> list[str]:
    lines = [f"{item['name']} ({item['package']} {item['version']})", f"  {item['summary']}"]
    for change in item["changes"]:
        lines += [f"  - {change['what']}", f"      why: {change['why']}"]
        if change.get("upstream"):
            lines.append(f"      {change['upstream']}")
    return lines
