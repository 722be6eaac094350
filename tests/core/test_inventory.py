"""Good inventories, and where they are looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.core.inventory import load_inventory
from orchestrator.core.paths import inventory_candidates, ledger_path, orch_home
from orchestrator.core.schema import Secret

PROJECT = Path(__file__).parents[2]


def test_sample_inventory_is_sound() -> None:
    assert load_inventory(PROJECT / "inventory.yaml").host("gpubox").gpus == 8


def test_a_host_may_be_just_a_name(tmp_path: Path) -> None:
    path = tmp_path / "i.yaml"
    path.write_text("hosts:\n  gpubox:\n  desk: {gpus: 0}\n")
    inventory = load_inventory(path)
    assert inventory.host("gpubox").ssh == "gpubox"
    assert inventory.host("gpubox").gpus is None
    assert (inventory.host("desk").root, inventory.host("desk").transport) == ("~/.orchestrator", "paramiko")
    assert inventory.path == path


@pytest.mark.parametrize(
    "ssh",
    [
        "gpubox",
        "me@box",
        "me@box:2222",
        "box:22",
        "[::1]:22",
        "me@[fe80::1%eth0]:22",
        "ssh://me@box:22",
        "fe80::1",
        "a.b-c_d",
    ],
)
def test_ssh_destinations(ssh: str, tmp_path: Path) -> None:
    path = tmp_path / "i.yaml"
    path.write_text(f"hosts: {{a: {{ssh: '{ssh}'}}}}")
    assert load_inventory(path).host("a").ssh == ssh


def test_local_paths_are_relative_to_the_inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "i.yaml"
    path.write_text("hosts: {a: {identity_file: keys/id, known_hosts: ~/kh, env: {A: 1.10, T: {file: t}}}}")
    monkeypatch.setenv("HOME", "/home/me")
    host = load_inventory(path).host("a")
    assert host.identity_file == str(tmp_path / "keys/id")
    assert host.known_hosts == "/home/me/kh"
    assert host.env == {"A": "1.10", "T": Secret("file", "t")}


def test_search_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    user = inventory_candidates({})[-1]
    user.parent.mkdir(parents=True)
    user.write_text("hosts: {user: }")
    monkeypatch.delenv("ORCH_INVENTORY", raising=False)
    assert list(load_inventory().hosts) == ["user"]
    (tmp_path / "inventory.yaml").write_text("hosts: {here: }")
    assert list(load_inventory().hosts) == ["here"]
    (tmp_path / "other.yaml").write_text("hosts: {named: }")
    monkeypatch.setenv("ORCH_INVENTORY", str(tmp_path / "other.yaml"))
    assert list(load_inventory().hosts) == ["named"]
    assert list(load_inventory(tmp_path / "inventory.yaml").hosts) == ["here"]


def test_orch_home() -> None:
    assert orch_home({"ORCH_HOME": "/x"}) == Path("/x")
    assert ledger_path({"ORCH_HOME": "/x"}) == Path("/x/ledger.sqlite3")
    assert orch_home({"ORCH_HOME": ""}).is_absolute()
