"""Put the tables of the code and the kept figures of the bench into the pages, between their markers.

    .venv/bin/python docs/generate.py            # rewrite what differs: PAGES
    .venv/bin/python docs/generate.py --check    # exit 1 and say which page differs

A block is `<!-- generated: NAME -->` ... `<!-- end -->`; NAME is a function of this file. The text around the blocks is
written by people. tests/docs fails when a page differs from the code.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from bench.__main__ import SECTIONS  # noqa: E402 - a script in docs/ finds the packages through the line above
from orchestrator.core.steps import BUILTIN, INHERITS_MODEL  # noqa: E402
from remote_jobs import protocol  # noqa: E402

PAGES = ("protocol.md", "states.md", "plan.md", "figures.md", "../README.md")
RESULTS = DOCS.parent / "bench" / "results"
SHOWN = (
    ("start", "orch --help, CPU"),
    ("launch", "open connection -> running, loopback"),
    ("launch", "`orch launch`, from the shell -> running, loopback"),
    ("know", "exit -> controller knows, loopback"),
    ("know", "exit -> controller knows, RTT 150 ms"),
    ("watch", "laptop CPU a minute"),
    ("watch", "host CPU a minute, agent + supervisor"),
    ("watch", "supervisor RSS, peak"),
    ("watchers", "connections per host"),
    ("watchers", "event to screen, median"),
    ("blackhole", "wrong answers, black hole of 600 s"),
    ("wan", "exit -> `orch wait` says so, RTT 150 ms, 1% lost"),
    ("scale", "`orch status`, 50 hosts"),
    ("scale", "`orch status`, 200 running jobs"),
    ("scale", "`orch logs --tail 100`, log of 10,000 MB"),
    ("overnight", "jobs that ended in the right state"),
)
"""Rows of the README's table: (section, how the row is called)."""
BLOCK = re.compile(r"<!-- generated: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def code(text: object) -> str:
    """As code."""
    return f"`{text}`"


def comments(cls: type) -> dict[str, str]:
    """The comment behind each member of an enum or field of a dataclass; long ones may go on in the next lines."""
    found = {}
    for line in inspect.getsource(cls).splitlines():
        match = re.match(r"    (\w+)\s*[:=].*?(?:  # (.*))?$", line)
        if match:
            found[match[1]] = (match[2] or "").strip()
    return found


def events() -> str:
    """Every kind of event with its data."""
    said = comments(protocol.EventKind)
    rows = []
    for kind in protocol.EventKind:
        text = said[kind.name]
        data = re.search(r"\{.*\}", text)
        words = re.sub(r":?\s*\{.*\}", "", text).strip()
        rows.append([code(kind.value), words, code(data[0]) if data else ""])
    return table(["event", "meaning", "data"], rows)


def record(cls: type) -> str:
    """The fields of one record."""
    said = comments(cls)
    rows = []
    for field in dataclasses.fields(cls):
        default: object = "required"
        if field.default is not dataclasses.MISSING:
            default = code(repr(field.default))
        elif field.default_factory is not dataclasses.MISSING:
            default = code(field.default_factory())
        rows.append([code(field.name), code(field.type), str(default), said.get(field.name, "")])
    doc = " ".join(inspect.getdoc(cls).split()) if cls.__doc__ else ""
    return f"### {cls.__name__}\n\n{doc}\n\n" + table(["field", "type", "default", ""], rows)


def records() -> str:
    """All records."""
    classes = [
        value for value in vars(protocol).values()
        if isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__ == protocol.__name__
    ]  # fmt: skip
    return "\n\n".join(record(cls) for cls in classes)


def names() -> str:
    """File and folder names."""
    rows = [
        [code(name), code(value)]
        for name, value in vars(protocol).items()
        if name.endswith(("_FILE", "_DIR", "_FIFO", "_LOG")) and isinstance(value, str)
    ]
    return table(["constant", "name"], rows)


def operations() -> str:
    """What an agent answers."""
    return ", ".join(code(op.value) for op in protocol.Op)


def graces() -> str:
    """Seconds between TERM and KILL."""
    rows = [[code(kind), f"{seconds:g} s, then KILL"] for kind, seconds in protocol.GRACE_S.items()]
    ladder = ", ".join(f"{signal} {seconds:g} s" for signal, seconds in protocol.TWO_TERM_LADDER)
    rows += [[code(kind), ladder] for kind in sorted(protocol.TWO_TERM_STEPS)]
    return table(["step", "TERM, then"], rows)


def transitions() -> str:
    """Step state x event -> step state."""
    rows = [
        [code(state), code(event), code(after)]
        for state, row in protocol.STEP_TRANSITIONS.items()
        for event, after in row.items()
    ]
    return table(["step is", "event", "step becomes"], rows)


def diagram() -> str:
    """The same as a picture: one arrow per pair of states, without those that stay or reopen."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for state, row in protocol.STEP_TRANSITIONS.items():
        for event, after in row.items():
            if event != "reopened" and after != state:
                arrows.setdefault((state, after), []).append(event)
    lines = [f"  {before} --> {after}: {', '.join(kinds)}" for (before, after), kinds in arrows.items()]
    ends = [f"  {state} --> [*]" for state in protocol.STEP_TRANSITIONS if state in protocol.STEP_TERMINAL]
    return "\n".join(["```mermaid", "stateDiagram-v2", "  [*] --> queued", *lines, *ends, "```"])


def states() -> str:
    """Which states there are for jobs, steps and attempts, and which of them are final."""

    def row(cls: type[Enum], terminal: frozenset[str]) -> list[str]:
        values = [str(member.value) for member in cls]
        active = ", ".join(code(value) for value in values if value not in terminal)
        return [cls.__name__, active, ", ".join(code(value) for value in values if value in terminal)]

    return table(
        ["", "on the way", "final"],
        [
            row(protocol.JobState, protocol.JOB_TERMINAL | {"lost"}),
            row(protocol.StepState, protocol.STEP_TERMINAL),
            row(protocol.AttemptState, protocol.ATTEMPT_TERMINAL),
        ],
    )


def parameters() -> str:
    """What each built-in step takes in `with:`."""
    rows = []
    for name, step in BUILTIN.items():
        taken = [f"{key} [{upstream}]" for key, (upstream, _) in step.takes.items()]
        taken += ["model [serve]"] if name in INHERITS_MODEL else []
        names = ", ".join(code(key) for key in step.names())
        rows.append([code(name), names + (", flags" if step.flags else ""), ", ".join(taken)])
    return table(["step", "`with:`", "taken from"], rows)


def kept(section: str) -> dict[str, Any] | None:
    """What `python -m bench SECTION --keep` wrote; None when it was never run."""
    path = RESULTS / f"{section}.json"
    return json.loads(path.read_text()) if path.exists() else None


def where(record: dict[str, Any]) -> str:
    """When, at which commit and on what."""
    machine = record["machine"]
    return (
        f"{machine['at'][:10]}, commit {machine['commit']}, {machine['cpus']} CPUs, Linux {machine['kernel']}, "
        f"Python {machine['python']}, load {machine['load_1m']} at the end"
    )


def figures() -> str:
    """The rows that the README shows; those never measured are left out."""
    rows = []
    for section, what in SHOWN:
        record = kept(section)
        for row in record["rows"] if record else ():
            if row["what"] == what:
                _, _, median, _, limit, _, peer, ratio = row["cells"]
                rows.append([what, median, limit, f"{peer} ({ratio})" if peer else "", code(f'make bench B={section}')])
    return table(["what", "median", "promised", "peer in the same run", "command"], rows) if rows else "Not measured yet."


def peers() -> str:
    """The table of `python -m bench peers`."""
    record = kept("peers")
    if record is None:
        return "Not measured yet: `make bench B=peers`."
    shown = record["tables"][0]
    return f"{table(shown['head'], shown['cells'])}\n\n{where(record)}; `make bench B=peers`, {record['took_s'] // 60 + 1} minutes."


def peer_notes() -> str:
    """Settings of the peers, and what went otherwise than expected."""
    record = kept("peers")
    return "\n".join(f"- {note}" for note in record["tables"][0]["notes"]) if record else ""


def all_figures() -> str:
    """Every kept row."""
    parts = []
    for section in SECTIONS:
        record = kept(section)
        if record and record["rows"]:
            rows = [row["cells"][1:] for row in record["rows"]]
            head = ["what", "median", "min..max (n)", "limit", "", "peer, same run", "ratio"]
            parts.append(f"## {section}\n\n`make bench B={section}` ({record['took_s']} s): {where(record)}.\n\n{table(head, rows)}")
    return "\n\n".join(parts) or "Not measured yet."


BLOCKS: dict[str, Callable[[], str]] = {
    each.__name__: each
    for each in (
        events, records, names, operations, graces, transitions, diagram, states, figures, peers, peer_notes, all_figures,
        parameters,
    )
}  # fmt: skip


def current(text: str) -> str:
    """A page with its blocks as the code has them now."""
    return BLOCK.sub(lambda block: f"<!-- generated: {block[1]} -->\n{BLOCKS[block[1]]()}\n<!-- end -->", text)


def main(arguments: list[str]) -> int:
    """Rewrite, or check."""
    stale = [name for name in PAGES if current((DOCS / name).read_text()) != (DOCS / name).read_text()]
    if "--check" in arguments:
        for name in stale:
            print(f"docs/{name} differs from the code or from bench/results: python docs/generate.py", file=sys.stderr)
        return 1 if stale else 0
    for name in stale:
        page = DOCS / name
        page.write_text(current(page.read_text()))
        print(f"rewrote docs/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
