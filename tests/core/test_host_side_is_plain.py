"""What travels to the host imports the standard library and itself only, and is Python 3.8.

Always: the grammar of 3.8 (ast) and the imports. Where a real 3.8 is on this machine: every module is imported by it,
as the host would, without site-packages. Library calls newer than 3.8 are vermin's business in `make lint`.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
SOURCES = sorted(
    [
        PROJECT / "remote_jobs" / "protocol.py",
        PROJECT / "remote_jobs" / "__init__.py",
        *(PROJECT / "remote_jobs" / "agent").rglob("*.py"),
        *(PROJECT / "remote_jobs" / "logs").rglob("*.py"),
        # The agent builds patch overlays, so these run under the host's Python as well.
        *(PROJECT / "remote_jobs" / "patches").glob("*.py"),
    ]
)
OWN = ("remote_jobs.protocol", "remote_jobs.agent", "remote_jobs.logs", "remote_jobs.patches")
NEWER_THAN_38 = {"graphlib", "zoneinfo", "tomllib"}
CONTROLLER_FORBIDDEN = {"fcntl", "pwd", "grp", "termios", "resource", "tty", "pty", "crypt", "spwd", "syslog"}


def module_name(path: Path) -> str:
    parts = path.relative_to(PROJECT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "no relative imports"
            yield node.module or ""
            if node.module in {"remote_jobs", "remote_jobs.agent", "remote_jobs.logs", "remote_jobs.patches"}:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_and_grammar(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"), str(path), feature_version=(3, 8))
    for name in imports(tree):
        top = name.split(".", maxsplit=1)[0]
        if top == "remote_jobs":
            assert name == "remote_jobs" or name.startswith(OWN), f"{path} imports {name}"
        else:
            assert top in sys.stdlib_module_names, f"{path} imports {name}"
            assert top not in NEWER_THAN_38, f"{path} imports {name}, which Python 3.8 does not have"


def find_python38() -> str | None:
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    candidates = [shutil.which("python3.8"), *map(str, sorted(pyenv.glob("3.8.*/bin/python3.8")))]
    for candidate in candidates:
        if candidate:
            found = subprocess.run(
                [candidate, "-c", "import sys; print(sys.version_info[:2])"], capture_output=True, text=True
            )
            if found.stdout.strip() == "(3, 8)":
                return candidate
    return None


def test_every_module_is_imported_by_the_oldest_python_here() -> None:
    """By a real 3.8 where there is one, else by this Python, both isolated as on the host."""
    python = find_python38() or sys.executable
    names = [module_name(path) for path in SOURCES if path.name != "__main__.py"]
    code = (
        "import importlib, sys, warnings\n"
        "warnings.simplefilter('error')\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "for name in sys.argv[2:]: importlib.import_module(name)\n"
        "outside = [n for n, m in sys.modules.items() if 'site-packages' in (getattr(m, '__file__', None) or '')]\n"
        "assert not outside, outside\n"
    )
    done = subprocess.run(
        [python, "-I", "-S", "-B", "-c", code, str(PROJECT), *names],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, f"{python}: {done.stderr}"


def test_the_controller_imports_nothing_that_windows_or_macos_lack() -> None:
    """Import every module of the controller while what Windows or macOS lack is refused to it, but not to libraries."""
    names = [
        module_name(path)
        for path in sorted((PROJECT / "orchestrator").rglob("*.py"))
        if path.name != "__main__.py"
    ]
    code = (
        "import builtins, importlib, sys\n"
        "real, lacking = builtins.__import__, set(sys.argv[1].split(','))\n"
        "def guarded(name, globals=None, *rest):\n"
        "    if (globals or {}).get('__name__', '').startswith('orchestrator') and name.split('.')[0] in lacking:\n"
        "        raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "    return real(name, globals, *rest)\n"
        "builtins.__import__ = guarded\n"
        "for name in sys.argv[2:]: importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, ",".join(sorted(CONTROLLER_FORBIDDEN)), *names],
        capture_output=True, text=True, timeout=60, cwd=PROJECT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_core_does_no_network_and_starts_nothing() -> None:
    heavy = {"socket", "subprocess", "asyncio", "paramiko", "fabric", "rich", "typer", "sqlite3", "threading"}
    for path in sorted((PROJECT / "orchestrator" / "core").rglob("*.py")):
        for name in imports(ast.parse(path.read_text("utf-8"), str(path))):
            assert name.split(".", maxsplit=1)[0] not in heavy, f"{path} imports {name}"
