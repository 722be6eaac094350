"""Overlays and in-place changes, on a small package of our own: what is touched, what is refused, what is proved."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_jobs.patches import diff, overlay
from remote_jobs.protocol import JobSpec, StepSpec

PATCHES = Path(overlay.__file__).parent
ORIGINAL = "def answer():\n    return 41\n"
PATCHED = "def answer():\n    return 42\n"


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Bench:
    """An installed package `frobnicate` 1.2.3, a folder of people's own sets, and orch's root."""

    def __init__(self, folder: Path) -> None:
        self.site, self.root, self.sets = folder / "site", folder / "root", folder / "my sets"
        self.folder = folder
        package = self.site / "frobnicate"
        (package / "deep").mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "core.py").write_text(ORIGINAL)
        (package / "data.bin").write_bytes(b"\0\1")
        (package / "deep" / "__init__.py").write_text("from frobnicate.core import answer\n")
        info = self.site / "frobnicate-1.2.3.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: frobnicate\nVersion: 1.2.3\n")
        self.write_set("the-answer")

    @property
    def core(self) -> Path:
        return self.site / "frobnicate" / "core.py"

    def write_set(self, name: str, **changes: Any) -> None:
        folder = self.sets / name
        folder.mkdir(parents=True, exist_ok=True)
        lines = difflib.unified_diff(
            ORIGINAL.splitlines(True), PATCHED.splitlines(True), "a/core.py", "b/core.py"
        )
        (folder / "core.patch").write_text("".join(lines))
        file = {
            "path": "frobnicate/core.py",
            "sha256": sha256(ORIGINAL),
            "patch": "core.patch",
            "patched_sha256": sha256(PATCHED),
        }
        described = {
            "name": name, "summary": "Right answers", "package": "frobnicate", "version": "1.2.3", "partner": "frobnicate",
            "requires": [{"signature": "frobnicate/core.py::answer", "lacks": ["question"]}],
            "files": [file], "changes": [{"what": "42", "why": "41 is wrong"}], **changes,
        }  # fmt: skip
        (folder / "set.json").write_text(json.dumps(described))

    def env(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.site), "PYTHONDONTWRITEBYTECODE": "1"}

    def ask(self, action: str, *arguments: str) -> tuple[int, dict[str, Any]]:
        argv = [sys.executable, PATCHES, action, "--root", self.root, "--sets-dir", self.sets, *arguments]
        done = subprocess.run(argv, env=self.env(), capture_output=True, text=True, check=False)
        return done.returncode, json.loads(done.stdout)

    def state(self, name: str = "the-answer") -> dict[str, Any]:
        _, answer = self.ask("check", "--set", name)
        [found] = answer["sets"]
        return found

    def tree(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.site)): path.read_bytes()
            for path in self.site.rglob("*")
            if path.is_file()
        }


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def run_with(bench: Bench, env: dict[str, str], code: str) -> str:
    argv = [sys.executable, "-c", code]
    return subprocess.run(
        argv, env={**bench.env(), **env}, capture_output=True, text=True, check=True
    ).stdout.strip()


SPAWNED = """
import multiprocessing
from frobnicate.deep import answer
import frobnicate.core
def work(queue): queue.put((answer(), frobnicate.core.__file__))
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    child = context.Process(target=work, args=(queue,))
    child.start()
    print(answer(), *queue.get())
    child.join()
"""


def test_the_overlay_is_in_force_in_the_process_and_in_spawned_workers(bench: Bench, tmp_path: Path) -> None:
    before = bench.tree()
    status, answer = bench.ask("prepare")
    assert status == 0, answer
    assert [item["name"] for item in answer["sets"]] == ["the-answer"]
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    argv = [sys.executable, str(script)]
    seen = subprocess.run(
        argv, env={**bench.env(), **answer["env"]}, capture_output=True, text=True, check=True
    )
    assert seen.stdout.split() == ["42", "42", f"{answer['overlay']}/frobnicate/core.py"]
    assert bench.tree() == before, "site-packages were touched"
    assert run_with(bench, {}, "from frobnicate.core import answer; print(answer())") == "41"


def test_only_what_is_patched_is_a_real_file(bench: Bench) -> None:
    _, answer = bench.ask("prepare")
    package = Path(answer["overlay"]) / "frobnicate"
    real = [
        path.relative_to(package) for path in package.rglob("*") if path.is_file() and not path.is_symlink()
    ]
    assert real == [Path("core.py")]
    assert not (package / "deep").is_symlink()
    assert (package / "data.bin").resolve() == (bench.site / "frobnicate" / "data.bin").resolve()


def test_another_original_is_another_overlay_and_a_drifted_one_is_refused(bench: Bench) -> None:
    bench.core.write_text(ORIGINAL + "# mine\n")
    assert bench.state()["state"] == "drift"
    status, answer = bench.ask("prepare", "--set", "the-answer")
    assert status == 1
    assert "the-answer is refused" in answer["error"]["message"]
    assert str(bench.core) in answer["error"]["message"]
    status, answer = bench.ask("prepare")
    assert (status, answer["overlay"]) == (0, None)
    assert "the-answer is not used" in answer["notes"][0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": "1.2.4"}, "frobnicate is 1.2.3, the set is for 1.2.4"),
        ({"package": "absent"}, "absent is not installed"),
        ({"requires": [{"signature": "frobnicate/core.py::answer", "has": ["question"]}]}, "has no question"),
        ({"requires": [{"defines": "frobnicate/core.py::Nothing"}]}, "no Nothing in frobnicate/core.py"),
        ({"requires": [{"version": "frobnicate", "matches": "^9", "meaning": "9"}]}, "wanted is 9"),
        (
            {
                "calls": [
                    {"file": "frobnicate/core.py", "call": "x", "signature": "frobnicate/core.py::answer"}
                ]
            },
            "no call of x",
        ),
    ],
)
def test_what_does_not_suit_says_why(bench: Bench, changes: dict[str, Any], reason: str) -> None:
    bench.write_set("the-answer", **changes)
    found = bench.state()
    assert found["state"] == "unsuitable"
    assert reason in found["why"]


def test_a_broken_set_is_refused_in_words(bench: Bench) -> None:
    bench.write_set(
        "the-answer",
        files=[{"path": "../escape.py", "sha256": "", "patch": "core.patch", "patched_sha256": ""}],
    )
    status, answer = bench.ask("check")
    assert status == 1
    assert "must be a .py file below site-packages" in answer["error"]["message"]


def test_two_jobs_may_build_it_at_once(bench: Bench) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: bench.ask("prepare"), range(4)))
    assert [status for status, _ in answers] == [0] * 4
    assert len({answer["overlay"] for _, answer in answers}) == 1
    assert not [name for name in os.listdir(bench.root / "overlays") if ".tmp." in name]


def test_in_place_with_backup_and_revert(bench: Bench) -> None:
    before = bench.tree()
    status, answer = bench.ask("apply", "--set", "the-answer", "--in-place")
    assert (status, answer) == (0, {"changed": {"the-answer": [str(bench.core)]}})
    assert bench.core.read_text() == PATCHED
    assert (bench.state()["state"], bench.state()["in_place"]) == ("applied", True)
    assert bench.ask("prepare", "--set", "the-answer")[1]["overlay"] is None, (
        "applied in place: nothing left to do"
    )
    assert bench.ask("revert", "--set", "the-answer")[0] == 0
    assert bench.tree() == before


def test_revert_never_throws_later_work_away(bench: Bench) -> None:
    bench.ask("apply", "--set", "the-answer", "--in-place")
    bench.core.write_text(PATCHED + "# later\n")
    status, answer = bench.ask("revert", "--set", "the-answer")
    assert status == 1
    assert "was changed after the patch" in answer["error"]["message"]
    assert bench.core.read_text().endswith("# later\n")


def test_the_supervisor_gets_variables_or_a_reason(bench: Bench) -> None:
    """What the supervisor calls before an attempt, with people's own sets below the root."""
    (bench.root).mkdir()
    bench.sets.rename(bench.root / "patches")
    step = StepSpec(name="work", run="true", python=sys.executable, patches="auto")
    spec = JobSpec(
        id="j", name="j", host="h", workdir="/", plan_sha256="", created_at="", release="", steps=[]
    )
    env = overlay.for_step(step, spec, str(bench.folder), str(bench.root), bench.env())
    assert env["ORCH_PATCHES"].startswith("the-answer@")
    assert run_with(bench, env, "from frobnicate.core import answer; print(answer())") == "42"
    step.patches = ["nobody"]
    with pytest.raises(ValueError, match="no patch set 'nobody'"):
        overlay.for_step(step, spec, str(bench.folder), str(bench.root), bench.env())
    step.patches, step.python = "auto", "/no/such/python"
    with pytest.raises(ValueError, match="/no/such/python"):
        overlay.for_step(step, spec, str(bench.folder), str(bench.root), bench.env())


TEXTS = st.lists(st.sampled_from(["a\n", "b\n", "\n", " c\n", "-d\n", "+e\n", "@@ f\n"]), max_size=12)


@given(TEXTS, TEXTS)
def test_a_diff_applied_gives_the_new_text(old: list[str], new: list[str]) -> None:
    made = "".join(difflib.unified_diff(old, new, "a/x.py", "b/x.py"))
    if made:
        assert diff.apply("".join(old), made) == "".join(new)


def test_a_diff_that_does_not_fit_is_an_error() -> None:
    made = "".join(difflib.unified_diff(["a\n", "b\n"], ["a\n", "c\n"], "a/x.py", "b/x.py"))
    with pytest.raises(diff.DiffError, match="line 2 is 'x"):
        diff.apply("a\nx\n", made)
    with pytest.raises(diff.DiffError, match="no hunk"):
        diff.apply("a\n", "nothing here\n")
