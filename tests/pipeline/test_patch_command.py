"""`orch patch` against a host with real vLLM and speculators, through sshd: what suits is named, built and proved."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sshd.server import Sshd
from tests.support.laptop import Laptop

pytestmark = pytest.mark.timeout(600, func_only=True)  # fixtures may have to build the host environment
FOR_THIS_HOST = {"speculators-cpu-training", "vllm-cpu-hidden-states", "vllm-cpu-mla-rotary"}


@pytest.fixture
def laptop(tmp_path: Path, host_python: Path, shared_sshd: Sshd) -> Laptop:
    """A laptop that knows one host, with our environment as its Python."""
    entry = shared_sshd.inventory_entry(root=str(tmp_path / "root"), python=str(host_python), gpus=0)
    return Laptop(tmp_path / "laptop", {"box": entry})


def test_list_check_apply_and_revert(laptop: Laptop, tmp_path: Path) -> None:
    listed = laptop.run("patch", "list", "--json", expect=0).json["sets"]
    assert {item["name"] for item in listed} > FOR_THIS_HOST
    assert all(change["why"] for item in listed for change in item["changes"])
    checked = laptop.run("patch", "check", "box", "--json", expect=0).json
    assert checked["versions"]["vllm"] == "0.32.0+cpu"
    assert {item["name"] for item in checked["sets"] if item["state"] == "suits"} == FOR_THIS_HOST
    for item in checked["sets"]:
        assert item["state"] == "suits" or "0.9.0" in item["why"] or "0.32.0" in item["why"], item
    built = laptop.run("patch", "apply", "box", "--json", expect=0).json
    assert Path(built["overlay"]).is_relative_to(tmp_path / "root")
    assert {item["name"] for item in built["sets"]} == FOR_THIS_HOST
    assert built["overlay"] in built["env"]["PYTHONPATH"]
    again = laptop.run("patch", "apply", "box", "--json", expect=0).json
    assert (again["overlay"], again["sha256"]) == (built["overlay"], built["sha256"])
    assert "nothing was applied in place" in laptop.run("patch", "revert", "box", expect=0).out
    for action in ("list", "check", "apply", "revert"):
        refused = laptop.run("patch", action, "box", "--set", "no-such-set", expect=2)
        assert refused.err.startswith("orch: there is no patch set 'no-such-set'\n  sets: ")
    one = min(FOR_THIS_HOST)
    for action in ("list", "check"):
        assert [item["name"] for item in laptop.run("patch", action, "--set", one, "--json", expect=0).json["sets"]] == [one]
    assert "--set NAME --in-place" in laptop.run("patch", "apply", "box", "--in-place", expect=2).err
