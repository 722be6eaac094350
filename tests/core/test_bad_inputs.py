"""No bad plan or inventory gets past the laptop, and each says where and what, as tests/data/bad_*/cases.yaml tells."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from orchestrator.core.errors import MAX_SHOWN, ConfigError
from orchestrator.core.inventory import load_inventory
from orchestrator.core.plan import load_plan

DATA = Path(__file__).parents[1] / "data"
GOOD = """\
name: good
steps:
  - name: extract
    uses: extract
    gpus: 8
    needs: []
    with: {model: m, dataset: d.jsonl, layers: [2, 30]}
"""


def cases(folder: str) -> list[Any]:
    found = YAML(typ="safe").load((DATA / folder / "cases.yaml").read_text("utf-8"))
    return [pytest.param(case, id=name) for name, case in found.items()]


def check_error(error: ConfigError, path: Path, case: dict[str, Any]) -> None:
    text = str(error)
    for part in case["parts"]:
        assert part in text, text
    places = [(problem.file, problem.line) for problem in error.problems]
    if case["line"] is not None:
        assert (str(path), case["line"]) in places, places
        assert f"{path}:{case['line']}" in text, "the message itself must name file and line"
    assert error.exit_status == 2
    document = error.to_json()
    assert document["schema"] == 1
    assert set(document["error"]) == {"code", "message", "hint"}


def test_there_are_enough_cases() -> None:
    assert len(cases("bad_plans")) + len(cases("bad_inventories")) >= 130


@pytest.mark.parametrize("case", cases("bad_plans"))
def test_bad_plan(case: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(case.get("text", GOOD), "utf-8")
    with pytest.raises(ConfigError) as caught:
        load_plan(path, case.get("sets", []))
    check_error(caught.value, path, case)


@pytest.mark.parametrize("case", cases("bad_inventories"))
def test_bad_inventory(case: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "inventory.yaml"
    path.write_text(case["text"], "utf-8")
    with pytest.raises(ConfigError) as caught:
        load_inventory(path)
    check_error(caught.value, path, case)


@pytest.mark.parametrize("load", [load_plan, load_inventory])
@pytest.mark.parametrize(
    ("content", "parts"),
    [
        pytest.param(b"\x7fELF\x02\x01\x00\x00", ["binary"], id="binary"),
        pytest.param(b"name: caf\xe9\n", ["0xe9", "UTF-8", ":1"], id="latin1"),
        pytest.param(b"name: a\n" * 60_000, ["longer than 256 KiB"], id="huge"),
        pytest.param(b"[" * 5000, ["nested more than 40 levels"], id="deep_lists"),
        pytest.param(b"{a: " * 5000, ["nested more than 40 levels"], id="deep_mappings"),
        pytest.param(b"a: &a [" + b"x," * 50 + b"]\n" + b"".join(
            b"%c: &%c [%s]\n" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 30)) for i in range(8)
        ), ["aliases"], id="alias_bomb"),
        pytest.param(b"a: " + b"9" * 5000, ["not a number that can be used"], id="long_number"),
        pytest.param("a: 1\n".encode("utf-16"), ["unknown key"], id="utf16_is_read"),
    ],
)  # fmt: skip
def test_hostile_bytes(load: Any, content: bytes, parts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(path)
    for part in parts:
        assert part in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("load", [load_plan, load_inventory])
def test_files_that_are_none(load: Any, tmp_path: Path) -> None:
    (tmp_path / "eagle3.yaml").write_text("x")
    with pytest.raises(ConfigError, match=r"did you mean .*eagle3\.yaml"):
        load(tmp_path / "eagel3.yaml")
    with pytest.raises(ConfigError, match=r"folder, not (a plan|an inventory) file\n.*eagle3.yaml"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="no such"):
        load(tmp_path / "nowhere" / "plan.yaml")
    with pytest.raises(ConfigError):
        load(tmp_path / ("x" * 5000))
    with pytest.raises(ConfigError):
        load("a\0b")
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    with pytest.raises(ConfigError, match="cannot read"):
        load(loop)
    with pytest.raises(ConfigError, match=r"longer than|binary"):
        load("/dev/zero")


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(GOOD)
    path.chmod(0)
    if os.geteuid() == 0:  # root reads everything: a folder that is a file fails in the same way
        path = tmp_path / "plan.yaml" / "inner.yaml"
    with pytest.raises(ConfigError, match="cannot read the plan"):
        load_plan(path)


def test_all_problems_of_a_file_are_shown_together_in_order(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        "name: a\nworkdirr: /x\nsteps:\n  - name: x\n    uses: serve\n    gpus: many\n"
        "    with: {tensor_paralel_size: 8, port: 0}\n  - {name: x, run: y, needs: [z]}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_plan(path, ["nope.a=1"])
    lines = [problem.line for problem in caught.value.problems]
    assert lines == [None, 2, 6, 7, 7, 8, 8]
    assert "has 7 problems" in str(caught.value)


def test_a_file_full_of_mistakes_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        "name: a\nsteps:\n" + "".join(f"  - {{name: s{i}, run: x, gpus: no}}\n" for i in range(100))
    )
    with pytest.raises(ConfigError, match=r"100 problems") as caught:
        load_plan(path)
    assert len(str(caught.value).splitlines()) == MAX_SHOWN + 2
    assert "and 80 more" in str(caught.value)


def test_no_inventory_names_the_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ORCH_INVENTORY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"inventory.yaml.*exists(.|\n)*orch init"):
        load_inventory()


def test_unknown_host_names_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "inventory.yaml"
    path.write_text("hosts: {gpubox: {}, desk: {gpus: 0}}")
    with pytest.raises(ConfigError, match=r"did you mean .gpubox.. hosts: gpubox, desk"):
        load_inventory(path).host("gpubx")
