"""What must not be in the code at all: unpickling, evaluating, shells, host keys taken on trust."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
SOURCES = [
    path
    for top in ("orchestrator", "remote_jobs")
    for path in sorted((PROJECT / top).rglob("*.py"))
    if "patches/data" not in path.as_posix()
]
IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "telnetlib", "ftplib", "commands"}
CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "tempfile.mktemp", "yaml.load", "yaml.unsafe_load",
    "yaml.full_load", "numpy.load", "np.load", "pandas.read_pickle", "subprocess.getoutput", "subprocess.getstatusoutput",
}  # fmt: skip
NAMES = {"AutoAddPolicy", "WarningPolicy", "extractall"}
SHELL = {"orchestrator/hosts/sockets.py": "ProxyCommand: ssh_config(5) says that it is a line for the user's own shell"}
OWN = {"yaml.load": "orchestrator/core/yaml.py is our own module: ruamel.yaml's safe loader"}


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of a name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def faults(tree: ast.AST, place: str) -> Iterator[str]:
    """What a file must not do."""
    ours = "orchestrator.core.yaml" in ast.dump(tree) or "from orchestrator.core import yaml" in ast.unparse(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            yield from (f"imports {name}" for name in names if name.split(".")[0] in IMPORTS)
        elif isinstance(node, (ast.Name, ast.Attribute)) and (node.id if isinstance(node, ast.Name) else node.attr) in NAMES:
            yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Call):
            called, words = dotted(node.func), {word.arg: word.value for word in node.keywords}
            nothing = called == "os.system" and ast.unparse(node.args[0]) == "''"  # makes an old Windows console obey
            if called in CALLS and not (called in OWN and ours) and not nothing:
                yield f"line {node.lineno}: calls {called}"
            if isinstance(words.get("shell"), ast.Constant) and words["shell"].value and place not in SHELL:  # type: ignore[union-attr]
                yield f"line {node.lineno}: shell=True"
            if isinstance(words.get("verify"), ast.Constant) and words["verify"].value is False:  # type: ignore[union-attr]
                yield f"line {node.lineno}: verify=False"
            if called == "torch.load" and not (isinstance(words.get("weights_only"), ast.Constant) and words["weights_only"].value is True):  # type: ignore[union-attr]
                yield f"line {node.lineno}: torch.load without weights_only=True"
            if called.endswith("from_pretrained") and isinstance(words.get("trust_remote_code"), ast.Constant) and words["trust_remote_code"].value:  # type: ignore[union-attr]
                yield f"line {node.lineno}: trust_remote_code=True"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PROJECT).as_posix())
def test_nothing_of_this_in_the_code(path: Path) -> None:
    place = path.relative_to(PROJECT).as_posix()
    assert list(faults(ast.parse(path.read_text()), place)) == []


def test_the_finder_finds() -> None:
    bad = "import pickle\neval('1')\nimport subprocess\nsubprocess.run('x', shell=True)\ntorch.load('x')\nclient.set_missing_host_key_policy(AutoAddPolicy())\nimport yaml\nyaml.load(x)"
    assert len(list(faults(ast.parse(bad), "x.py"))) == 6


def test_the_only_exec_is_the_loaders_own_text() -> None:
    """The bootstrap carries its loader as an argument of python -c; what it runs is in this repository."""
    places = [path for path in SOURCES if "exec(" in path.read_text().replace("os.exec", "")]
    found = {path.relative_to(PROJECT).as_posix() for path in places}
    assert {name for name in found if any(word in (PROJECT / name).read_text() for word in (";exec(zlib", "\nexec("))} == {
        "orchestrator/hosts/release.py"
    }
