"""Pages made from the program are what the program says, and the published schemas accept what the reader accepts."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from orchestrator.cli.commands import TABLE
from orchestrator.core.inventory import load_inventory
from orchestrator.core.json_schema import inventory_schema, plan_schema
from orchestrator.core.plan import load_plan

PROJECT = Path(__file__).parents[2]
Validator = jsonschema.Draft202012Validator
PLAN, INVENTORY = Validator(plan_schema()), Validator(inventory_schema())


def _reference() -> Any:
    spec = importlib.util.spec_from_file_location("docs_reference", PROJECT / "docs" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_up_to_date() -> None:
    assert _reference().differing() == [], "run: python docs/reference.py"


def test_the_page_of_the_command_line_is_complete() -> None:
    page = (PROJECT / "docs" / "cli.md").read_text()
    for name in TABLE:
        section = page.split(f"\n## orch {name}\n")[1].split("\n## ")[0]
        assert "```sh\n" in section, f"orch {name} has no example"


BETWEEN_US = {"ORCH_ACK_FD", "ORCH_DEMO_HOST", "ORCH_TRAIN_METRICS", "ORCH_NOTIFY_JOB"}
"""Between orch's own processes; the last is one of `ORCH_NOTIFY_*`."""


def test_every_variable_that_the_code_knows_is_on_the_page() -> None:
    """Names as whole literals: read, set or handed on, on the laptop, on the host or by a step."""
    literals = {
        node.value
        for package in ("orchestrator", "remote_jobs")
        for path in (PROJECT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    known = {text for text in literals if re.fullmatch(r"ORCH_[A-Z0-9_{}]+|NO_COLOR", text)}
    reference = _reference()
    documented = {*reference.ENVIRONMENT, *reference.HOST_ENVIRONMENT, *reference.STEP_ENVIRONMENT}
    assert known - BETWEEN_US == documented


def load(text: str) -> Any:
    return YAML(typ="safe").load(text)


GOOD_PLANS = [
    *(path.read_text() for path in sorted((PROJECT / "plans").glob("*.yaml"))),
    """
name: everything
host: box
workdir: ~/work
python: /opt/python
env: {A: text, N: 8, T: true, SECRET: {from: env}, FILE: {file: ./x}, RING: {keyring: a/b}, OTHER: {env: B}}
gate: {wait: 30m, memory_mib: 100, reap: own}
log_limit: 5GiB
restart_after_reboot: true
notify:
  - slack://TokenA/TokenB
  - https://example.org/hook
  - {apprise: {env: CHAT}, on: failure, eta_slip: 1h}
  - {webhook: {file: url}, on: [success, failure, stopped, retry, hang, step, lost], format: text, headers: {X-A: {env: B}}}
  - {command: ./tell, env: {A: b}}
  - {heartbeat: https://example.org/beat, every: 5m, end: https://example.org/pause}
steps:
  - {name: up, run: serve, service: {ready: {http: "http://x/"}, timeout_s: 10m}, needs: , files: }
  - {name: a, run: echo, needs: up, gpus: 2, grace_s: 90, timeout_s: 1h30m, hang_s: 0, done: {count: "*.x", at_least: 2}}
  - {name: b, uses: serve, with: {model: m, max_model_len: 32k, enable_prefix_caching: true}, patches: none}
  - {name: c, uses: serve, with: {model: m, some_newer_flag: 1}, patches: [one], retry: {attempts: 2, gpu_oom: {max_num_seqs: 4}}}
""",
    "name: a\nnotify: mailto://me@example.org\nsteps: [{name: x, run: y, env: , retry: }]",
]
BAD_PLANS = {
    "an unknown key": "name: a\nstep: []\nsteps: [{name: x, run: y}]",
    "a misspelt key of a step": "name: a\nsteps: [{name: x, run: y, need: []}]",
    "both ways": "name: a\nsteps: [{name: x, run: y, uses: serve, with: {model: m}}]",
    "neither way": "name: a\nsteps: [{name: x}]",
    "text for a number": "name: a\nsteps: [{name: x, run: y, gpus: '8'}]",
    "an unknown failure class": "name: a\nsteps: [{name: x, run: y, retry: {oom: {}}}]",
    "no such parameter": "name: a\nsteps: [{name: x, uses: generate, with: {datset: d}}]",
    "a wrong parameter": "name: a\nsteps: [{name: x, uses: serve, with: {model: m, tensor_parallel_size: two}}]",
    "no such event": "name: a\nnotify: {webhook: 'https://x', on: [sucess]}\nsteps: [{name: x, run: y}]",
    "no URL": "name: a\nnotify: me\nsteps: [{name: x, run: y}]",
    "a secret from nowhere": "name: a\nenv: {A: {from: here}}\nsteps: [{name: x, run: y}]",
}
GOOD_INVENTORIES = [
    "hosts: {gpubox: {ssh: gpubox, gpus: 8, root: /data/orchestrator, python: /opt/vllm/bin/python, scheduler: direct}}",
    "hosts: {a: , b: {gpus: 8}, c: {ssh: 'u@h:22', env: {A: 1}, notify: [ntfy://x], min_look_interval_s: 1m, transport: openssh}}",
    "hosts: {cluster: {ssh: login1, gpus: 8, scheduler: slurm, partition: gpu, account: proj, sbatch: [--exclusive]}}",
]


@pytest.mark.parametrize("text", GOOD_PLANS)
def test_the_schema_accepts_what_the_reader_accepts(text: str, tmp_path: Path) -> None:
    PLAN.validate(load(text))
    (tmp_path / "plan.yaml").write_text(text)
    load_plan(tmp_path / "plan.yaml")


@pytest.mark.parametrize("text", BAD_PLANS.values(), ids=BAD_PLANS)
def test_the_schema_finds_slips_in_the_editor(text: str, tmp_path: Path) -> None:
    with pytest.raises(jsonschema.ValidationError):
        PLAN.validate(load(text))


@pytest.mark.parametrize("text", GOOD_INVENTORIES)
def test_inventories(text: str, tmp_path: Path) -> None:
    INVENTORY.validate(load(text))
    (tmp_path / "inventory.yaml").write_text(text)
    load_inventory(tmp_path / "inventory.yaml")
    for slip in ("host: {}", "hosts: {a: {gpu: 8}}", "hosts: {a: {scheduler: pbs}}", "hosts: {a: {gpus: many}}"):
        with pytest.raises(jsonschema.ValidationError):
            INVENTORY.validate(load(slip))


def test_the_schemas_are_schemas() -> None:
    for validator in (PLAN, INVENTORY):
        Validator.check_schema(validator.schema)


def test_every_key_is_explained() -> None:
    """Editors show these words: add a line to WORDS in orchestrator/core/json_schema.py for a new key."""
    for schema in (PLAN.schema, INVENTORY.schema):
        for name, part in (*schema["$defs"].items(), ("top", schema)):
            for key, value in (part.get("properties") or {}).items():
                assert value.get("description"), f"{name}.{key}"
