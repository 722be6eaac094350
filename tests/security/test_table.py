"""docs/security.md names for each threat the tests that hold it off; each test of this folder belongs to a threat."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "docs" / "security.md"


def names_here() -> set[str]:
    """`file.py::test` of everything in this folder but this file."""
    found = set()
    for path in HERE.glob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and path.name != Path(__file__).name:
                found.add(f"{path.name}::{node.name}")
    return found


def rows() -> list[list[str]]:
    """Cells of the threat table."""
    text = DOCUMENT.read_text().partition("## Threats")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_each_threat_names_tests_that_exist() -> None:
    project = DOCUMENT.parents[1]
    for threat, _, names in rows():
        found = re.findall(r"`([\w/]+\.py)::(\w+)`", names)
        assert found, threat
        for file, name in found:
            path = HERE / file if "/" not in file else project / "tests" / file
            assert f"def {name}(" in path.read_text(), f"{file}::{name}"


def test_each_test_here_belongs_to_a_threat() -> None:
    named = {f"{file}::{name}" for row in rows() for file, name in re.findall(r"`([\w/]+\.py)::(\w+)`", row[2])}
    assert names_here() - named == set()
