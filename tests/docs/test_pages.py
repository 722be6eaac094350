"""What the pages say is so: tables as in the code, links that lead somewhere, commands and plans that work when typed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from orchestrator.cli.app import app
from orchestrator.core.inventory import Host
from orchestrator.core.notify import Target
from orchestrator.core.plan import Done, Gate, Plan, Ready, Service, Split, Step, load_plan
from remote_jobs import protocol

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")]
    + list((ROOT / "docs").glob("*.md"))
    + list((ROOT / "docs" / "decisions").glob("*.md"))
)
TYPED = [page for page in PAGES if page.parent.name != "decisions" and page.name != "cli.md"]
"""Pages whose commands people copy. Decisions tell the past; cli.md is generated."""


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> Iterator[str]:
    """Fenced blocks of a language."""
    for match in re.finditer(r"^ *```(\w*)\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE):
        if match[1] == language:
            yield match[2]


def test_generated_tables_are_those_of_the_code() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "generate.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_operation_and_event_is_explained() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text()
    table = text.split("| operation |")[1].split("## Records")[0]
    assert [op.value for op in protocol.Op if f"`{op.value}`" not in table] == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_to_files_that_are_there(page: Path) -> None:
    missing = [
        target
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
        if not re.match(r"[a-z]+:", target) and not (page.parent / target).exists()
    ]
    assert missing == []


def typed(page: Path) -> Iterator[str]:
    """Every `orch ...` of a page: lines of blocks, and whole code spans."""
    text = page.read_text()
    for block in [*blocks(page, ""), *blocks(page, "sh"), *blocks(page, "console")]:
        for line in block.splitlines():
            if re.match(r"\s*(\$ )?(orch|\.venv/bin/orch) ", line):
                yield line.split(" #")[0].strip().removeprefix("$ ")
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from re.findall(r"`(orch [a-z][^`]*)`", prose)


@pytest.mark.parametrize("page", TYPED, ids=named)
def test_commands_and_options_exist(page: Path) -> None:
    """A page that names a command or an option that is not there costs its reader the afternoon."""
    root: Any = typer.main.get_command(app)
    wrong = []
    for line in typed(page):
        words = shlex.split(line.split(" | ")[0].replace("...", ""))[1:]
        context, command = typer.Context(root), root
        while words and hasattr(command, "list_commands"):
            if words[0].startswith("-"):
                break
            name = words.pop(0)
            found = command.get_command(context, name)
            if found is None:
                if not getattr(command, "invoke_without_command", False):
                    wrong.append(f"{line}: no command {name}")
                break
            command = found
        known = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]}
        known |= {"--help", "-h", "--version"}
        asked = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        wrong += [f"{line}: no option {option}" for option in sorted(asked - known)]
    assert wrong == []


@pytest.mark.parametrize("page", TYPED, ids=named)
def test_whole_plans_can_be_loaded(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(blocks(page, "yaml")):
        if not block.startswith("name:"):
            continue
        for script in re.findall(r"files: \[(\S+)\]", block):
            (tmp_path / script).write_text("")
        path = tmp_path / f"{number}.yaml"
        path.write_text(block)
        load_plan(path)


def test_every_key_of_plan_and_inventory_is_explained() -> None:
    text = (ROOT / "docs" / "plan.md").read_text()
    models = [Plan, Step, Split, Service, Ready, Done, Gate, Target, Host]
    keys = {field.alias or name for model in models for name, field in model.model_fields.items()}
    assert sorted(key for key in keys if not re.search(rf"`{key}`|[{{,(] ?{key}:|`{key}: ", text)) == []


def test_the_readme_is_short_and_every_document_is_linked_from_it() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 250
    pages = [page.name for page in (ROOT / "docs").glob("*.md")] + ["CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md"]
    assert [name for name in pages if name not in text] == []


def test_no_machine_of_ours_is_named() -> None:
    """Paths of the machine that a page was written on help nobody."""
    assert [named(page) for page in PAGES if re.search(r"/work/|/root/", page.read_text())] == []
