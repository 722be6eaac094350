"""The bench can be started, and what the pages take from its results has the names that it gives."""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path

import pytest

from bench.__main__ import SECTIONS
from bench.peers import contest
from bench.peers.contestants import FIELD, HERE
from bench.report import Report, Row

BENCH = HERE.parent


@pytest.mark.parametrize("section", SECTIONS)
def test_every_section_can_be_loaded(section: str) -> None:
    assert callable(importlib.import_module(SECTIONS[section]).run)


def test_every_contestant_has_its_driver() -> None:
    assert [one.name for one in FIELD if not (HERE / one.driver).exists()] == []


def test_the_rows_that_the_readme_shows_have_the_names_that_the_bench_gives(tmp_path: Path) -> None:
    generate = importlib.import_module("docs.generate")
    sources = {name: Path(importlib.import_module(module).__file__ or "").read_text() for name, module in SECTIONS.items()}
    unknown = [(section, what) for section, what in generate.SHOWN if not _made(what, sources[section])]
    assert unknown == []


def _made(what: str, source: str) -> bool:
    """Whether a string of a section's source yields this name."""
    for node in ast.walk(ast.parse(source)):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        words = [str(part.value) if isinstance(part, ast.Constant) else None for part in parts]
        if sum(len(word or "") for word in words) < 5:
            continue
        if re.fullmatch("".join(".*" if word is None else re.escape(word) for word in words), what):
            return True
    return False


def test_kept_results_hold_one_section(tmp_path: Path) -> None:
    report = Report()
    report.add(Row("know", "exit", "s", [0.1], 0.25, peer=[1.0], peer_name="ssh"))
    report.add(Row("watch", "cpu", "s", [0.1]))
    score = contest.Score("orch", submit_s=[0.2, 0.4], known_s=[0.1], outcomes=["failed -9"])
    report.show("peers", contest.HEAD, [contest.cells(score, score)], [], [])
    report.save(tmp_path / "know.json", section="know")
    kept = json.loads((tmp_path / "know.json").read_text())
    assert [row["section"] for row in kept["rows"]] == ["know"]
    assert kept["tables"] == []
    assert "yes" in report.table()


def test_outcomes_are_told_apart() -> None:
    def told(*outcomes: str) -> str:
        return contest.Score("x", outcomes=list(outcomes)).sigkill

    assert told("failed exit status 137") == "yes"
    assert told("gone") == "ended, not how"
    assert told("ok finished [0]") == "no: success"
    assert told("failed", "gone") == "failed/gone"
    assert told() == "-"
