"""Put the tables of the code into docs/protocol.md and docs/states.md, between their markers.

    python docs/generate.py            # rewrite
    python docs/generate.py --check    # exit 1 and say which page differs

A block is `<!-- generated: NAME -->` ... `<!-- end -->`; NAME is a function of this file. The text around the blocks is
written by people. tests/docs fails when a page differs from the code.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from remote_jobs import protocol  # noqa: E402 - a script in docs/ finds the package through the line above

PAGES = ("protocol.md", "states.md")
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


BLOCKS: dict[str, Callable[[], str]] = {
    each.__name__: each
    for each in (events, records, names, operations, graces, transitions, diagram, states)
}


def current(text: str) -> str:
    """A page with its blocks as the code has them now."""
    return BLOCK.sub(lambda block: f"<!-- generated: {block[1]} -->\n{BLOCKS[block[1]]()}\n<!-- end -->", text)


def main(arguments: list[str]) -> int:
    """Rewrite, or check."""
    stale = [name for name in PAGES if current((DOCS / name).read_text()) != (DOCS / name).read_text()]
    if "--check" in arguments:
        for name in stale:
            print(f"docs/{name} differs from remote_jobs/protocol.py: python docs/generate.py", file=sys.stderr)
        return 1 if stale else 0
    for name in stale:
        page = DOCS / name
        page.write_text(current(page.read_text()))
        print(f"rewrote docs/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
