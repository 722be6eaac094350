"""No bad plan or inventory reaches the host: refused on the laptop with exit status 2, and sshd never hears of it.

The cases are those of tests/core; here every third goes through the real `orch`, with a working host behind it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.faults.stage import Stage
from tests.support.laptop import Answer

DATA = Path(__file__).parents[1] / "data"
SIDE_BY_SIDE = 3


def cases(folder: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = YAML(typ="safe").load((DATA / folder / "cases.yaml").read_text("utf-8"))
    return {name: case for name, case in list(found.items())[::3] if "text" in case}


def test_nothing_bad_reaches_the_host(tmp_path: Path) -> None:
    with Stage(tmp_path / "stage", step={"run": "true", "files": []}) as stage:

        def bad_plan(item: tuple[str, dict[str, Any]]) -> Answer:
            name, case = item
            path = stage.folder / f"bad-{name}.yaml"
            path.write_text(case["text"], "utf-8")
            sets = [word for text in case.get("sets", []) for word in ("--set", text)]
            return stage.laptop.run("launch", path, "--host", "box", *sets)

        def bad_inventory(item: tuple[str, dict[str, Any]]) -> Answer:
            name, case = item
            path = stage.folder / f"bad-inventory-{name}.yaml"
            path.write_text(case["text"], "utf-8")
            return stage.laptop.run("launch", stage.plan, "--inventory", path)

        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            answers = [*pool.map(bad_plan, cases("bad_plans").items()), *pool.map(bad_inventory, cases("bad_inventories").items())]
        assert len(answers) >= 30
        for answer in answers:
            assert answer.status == 2, answer
            assert answer.one_screen, answer
            assert answer.out == "", answer
            assert "bad-" in answer.err, answer
        assert stage.cable.connections == 0
        assert not stage.root.exists()
        job = stage.launch()  # and the host was there all the time
        stage.laptop.run("wait", job.id, expect=0)
