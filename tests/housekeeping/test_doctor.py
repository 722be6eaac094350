"""`orch doctor`: says what a bug report needs, and nothing that must not be pasted."""

from __future__ import annotations

import getpass
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.services.doctor import MASK, mask
from tests.sshd.server import Sshd
from tests.support.laptop import Laptop


def test_versions_ssh_and_hosts_with_private_things_masked(shared_sshd: Sshd, tmp_path: Path) -> None:
    laptop = Laptop(
        tmp_path / "laptop",
        {
            "box": shared_sshd.inventory_entry(root=str(tmp_path / "root")),
            "away": {"ssh": "someone@192.0.2.55:2222"},
        },
        environment={
            "HF_TOKEN": "hf_verysecretvalue",
            "ORCH_HOME": str(tmp_path / "laptop" / "home" / "store-hf_verysecretvalue"),
        },
    )
    answer = laptop.run("doctor", "box", expect=0)
    for words in ("version", "paramiko", "OpenSSH", "release", "host box", "python"):
        assert words in answer.out
    assert re.search(r"reachable +yes", answer.out)
    assert f"store-{MASK}" in answer.out
    assert "~/store" in answer.out
    everything = answer.out + answer.err
    assert "verysecret" not in everything
    assert str(laptop.home) not in everything

    report = laptop.run("doctor", "--no-hosts", "--json", expect=0).json
    assert report["masked"] is True
    [box, away] = report["hosts"]
    assert box["reachable"] is None
    assert away["route"][0]["where"] == "<user of away>@<address of away>:2222"
    full = laptop.run("doctor", "away", "--no-hosts", "--full", expect=0)
    assert "someone@192.0.2.55:2222" in full.out
    assert "verysecret" not in full.out


def test_without_inventory_or_ssh_it_still_reports(tmp_path: Path) -> None:
    laptop = Laptop(tmp_path, {}, environment={"PATH": "/nowhere"})
    laptop.inventory.write_text("hosts: [")
    answer = laptop.run("doctor", expect=0)
    assert "inventory" in answer.out
    assert "error" in answer.out
    assert "Traceback" not in answer.out + answer.err


def test_an_unreachable_host_is_part_of_the_report(tmp_path: Path) -> None:
    laptop = Laptop(tmp_path, {"gone": {"ssh": f"{getpass.getuser()}@127.0.0.1:1"}})
    answer = laptop.run("doctor", expect=0)
    assert re.search(r"reachable +no", answer.out)


SECRET = st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=8, max_size=30).filter(
    lambda text: not text.isdigit()
)


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "WANDB_API_KEY", "MY_CREDENTIALS"]
)
@given(SECRET)
def test_no_value_that_sounds_secret_is_left(name: str, secret: str) -> None:
    record = {"a": [f"x {secret}", {"b": f"https://h/?q={secret}"}], "c": secret}
    shown = str(mask(record, {}, {name: secret}))
    assert secret not in shown or secret in str({"a": ["x ", {"b": "https://h/?q="}], "c": MASK})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pa55@host/x", f"https://{MASK}@host/x"),
        ("https://hooks.example/x?token=abc&y=1", f"https://hooks.example/x?token={MASK}&y=1"),
        ("me@10.0.0.7:22 refused 10.0.0.7", "<user>@<address>:22 refused <address>"),
        ("mend 10.0.0.71", "mend 10.0.0.71"),
    ],
)
def test_what_is_masked_in_a_text(text: str, shown: str) -> None:
    assert mask(text, {"me": "<user>", "10.0.0.7": "<address>"}, {}).replace(
        "<user>", "<user>"
    ) == shown.replace("<user>@", "me@")
