"""Mutation testing by cosmic-ray's operators: `make mutate`, or `.venv/bin/python scripts/mutate.py [AREA...]`.

Environment: SHARE (per cent, default 100) takes a random part of each module's mutants; LINES=50,64 only those of these
lines, to look at survivors again; MINUTES bounds each area.
Survivors are printed as diffs; look at each: it is a missing test, or code that does nothing.

Why not `cosmic-ray exec`: it starts a whole pytest for each mutant, and most of its time is imports.  Here one process
imports what is not ours, once, and forks for each mutant; only our modules and tests are imported anew.  Works in a
copy, since the mutants are written over the sources.
"""

from __future__ import annotations

import ast
import gc
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

AREAS: dict[str, tuple[str, list[str]]] = {
    "states": ("remote_jobs/protocol.py", ["tests/core/test_protocol.py", "tests/core/test_fold.py"]),
    "fold": ("remote_jobs/agent/fold.py", ["tests/core/test_fold.py"]),
    "policy": ("remote_jobs/agent/policy.py", ["tests/supervisor/test_policy.py", "tests/supervisor/test_policy_changes.py"]),
    "retry": ("orchestrator/core/retry.py", ["tests/core/test_retry.py"]),
    "verdict": ("remote_jobs/logs/verdict.py", ["tests/logs/test_verdict.py"]),
    "rules": ("remote_jobs/logs/rules", ["tests/logs/test_rules.py", "tests/logs/test_rule_order.py"]),
}
"""Area -> its module or package, and the tests that shall notice any change of it."""

LEFT_OUT = ("core/NumberReplacer", "core/RemoveDecorator")
"""Operators not used: limits and ranks in tables are judgement, and a class without @dataclass cannot start."""
BASELINE_S, TIMES_SLOWER = 120.0, 8
"""A mutant's tests may take so many times longer than without it (it may loop for ever), and those at most BASELINE_S."""


class _WithoutAnnotations(ast.NodeTransformer):
    """Annotations are never evaluated here (`from __future__ import annotations`)."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)


def _meaning(code: str) -> str | None:
    """The code without what has no effect; None when it cannot be compiled."""
    try:
        return ast.dump(_WithoutAnnotations().visit(ast.parse(code)))
    except SyntaxError:
        return None


def mutants(code: str) -> Iterator[tuple[str, str]]:
    """(operator, code) of every mutant that means something else than ``code``."""
    tree, seen = get_ast(code), {_meaning(code), None}
    for name in operator_names():
        operator_class = get_operator(name)
        if name in LEFT_OUT or operator_class.arguments():
            continue
        operator = operator_class()
        for occurrence in range(sum(1 for node in ast_nodes(tree) for _ in operator.mutation_positions(node))):
            mutant = mutate_code(code, operator, occurrence)
            meaning = _meaning(mutant) if mutant is not None else None
            if meaning not in seen:
                seen.add(meaning)
                yield name, mutant


def in_child(work: Callable[[], int], log: Path, timeout_s: float) -> int | None:
    """Exit status of ``work`` in a forked child, its output in ``log``; None: it took too long."""
    child = os.fork()
    if child == 0:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        status = 70
        try:
            status = work()
        finally:
            os._exit(status)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def run_tests(tests: list[str]) -> int:
    """Pytest's exit status, in this process."""
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "--assert=plain", "--hypothesis-seed=0"]
    return int(pytest.main([*options, *tests]))


def baseline(tests: list[str], names: Path) -> int:
    """The tests without any mutant; leaves the names of all modules but theirs, to be imported beforehand."""
    sys.dont_write_bytecode = False  # so that the mutants' runs compile nothing but the mutant
    status, theirs = run_tests(tests), ("tests", "conftest", "__main__")
    names.write_text("\n".join(name for name in sys.modules if name.split(".")[0] not in theirs), "utf-8")
    return status


def warm(names: list[str]) -> None:
    """Import everything, then forget our own modules: of those only what others keep stays (compiled expressions)."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:  # of a plugin that only exists once it is loaded
            continue
    for name in [name for name in sys.modules if name.split(".")[0] in {"orchestrator", "remote_jobs"}]:
        del sys.modules[name]


def look_at(area: str, share: float, lines: set[int], limit_s: float) -> bool:
    """Try an area's mutants in the current folder, a copy, and print its survivors; False: the tests fail without one."""
    target, tests = AREAS[area]
    sys.path.insert(0, os.getcwd())
    log, names = Path("mutate.log"), Path("mutate.modules")
    began = time.monotonic()
    if in_child(lambda: baseline(tests, names), log, BASELINE_S) != 0:
        print(log.read_text("utf-8"), f"{area}: the tests fail without any mutant", sep="\n")
        return False
    timeout_s = TIMES_SLOWER * (time.monotonic() - began)
    warm(names.read_text("utf-8").split())
    sys.dont_write_bytecode = True  # known by second and size: one mutant's could pass for the next one's
    gc.freeze()
    tried_s = 0.0
    for file in sorted(Path(target).rglob("*.py")) if Path(target).is_dir() else [Path(target)]:
        code = file.read_text("utf-8")
        todo = list(mutants(code))
        every = len(todo)
        if lines:
            todo = [(name, mutant) for name, mutant in todo if not lines.isdisjoint(changed_numbers(code, mutant))]
        if share < 100:
            todo = random.Random(7).sample(todo, round(len(todo) * share / 100))
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            compiled.unlink()
        survivors, tried, began = [], 0, time.monotonic()
        for operator, mutant in todo:
            if tried_s + time.monotonic() - began > limit_s:
                break
            file.write_text(mutant, "utf-8")
            if in_child(lambda: run_tests(tests), log, timeout_s) == 0:
                survivors.append((operator, mutant))
            tried += 1
        file.write_text(code, "utf-8")
        for operator, mutant in survivors:
            print(f"-- survived: {file} {operator}", *changed_lines(code, mutant), sep="\n", flush=True)
        took = time.monotonic() - began
        tried_s += took
        print(
            f"== {area}: {file}: {every} mutants, {tried} tried, {tried - len(survivors)} killed, "
            f"{len(survivors)} survived, {took:.0f} s",
            flush=True,
        )
    return True


def changed_numbers(code: str, mutant: str) -> list[int]:
    """Numbers of the lines that differ."""
    pairs = zip(code.split("\n"), mutant.split("\n"), strict=False)
    return [number for number, (old, new) in enumerate(pairs, start=1) if old != new]


def changed_lines(code: str, mutant: str) -> Iterator[str]:
    """Both versions of the lines that differ, with their numbers."""
    for number in changed_numbers(code, mutant):
        yield f"{number:5d} - {code.split(chr(10))[number - 1]}"
        yield f"{number:5d} + {mutant.split(chr(10))[number - 1]}"


def main() -> int:
    """Every area asked for, each in a copy and a process of its own; 1: the tests of one fail without a mutant."""
    project, status = Path(__file__).resolve().parent.parent, 0
    share, limit_s = float(os.environ.get("SHARE", "100")), 60 * float(os.environ.get("MINUTES", "1000"))
    lines = {int(number) for number in os.environ.get("LINES", "").split(",") if number}
    for area in sys.argv[1:] or AREAS:
        with tempfile.TemporaryDirectory() as copy:
            for name in ("orchestrator", "remote_jobs", "tests"):
                shutil.copytree(project / name, Path(copy, name), ignore=shutil.ignore_patterns("__pycache__"))
            for name in ("conftest.py", "pyproject.toml"):
                shutil.copy(project / name, copy)
            os.chdir(copy)
            child = os.fork()
            if child == 0:
                os._exit(0 if look_at(area, share, lines, limit_s) else 1)
            status |= os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            os.chdir(project)
    return int(status != 0)


if __name__ == "__main__":
    sys.exit(main())
