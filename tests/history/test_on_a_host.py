"""`orch history JOB` and `orch report` on a real sshd, with GPU readings taken by a real supervisor from a stand-in driver."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gate.smi import FakeSmi
from tests.sshd.server import Sshd
from tests.support.jobdir import JobDir, agents, kill
from tests.support.laptop import Laptop
from tests.support.waiting import wait_until

TOKEN = "hf_S3cretOfTheJob"
RUN = (
    "echo '::orch {\"phase\": \"load\", \"state\": \"start\"}'; "
    "[ $ORCH_ATTEMPT = 2 ] || { echo 'ConnectionError: Connection reset by peer'; exit 1; }; "
    "until [ -e go ]; do sleep 0.05; done"
)


@pytest.fixture
def laptop(tmp_path: Path) -> Iterator[Laptop]:
    smi = FakeSmi(tmp_path / "bin")
    smi.save(query="0, 87, 40000, 80000")
    root = tmp_path / "root"
    claims = tmp_path / "claims"
    claims.mkdir()
    path = f"PATH={tmp_path / 'bin'}:{os.environ['PATH']} ORCH_CLAIMS_DIR={claims}"
    with Sshd(tmp_path / "sshd", options={"SetEnv": f"HOME={tmp_path} {path}"}) as sshd:
        entry = sshd.inventory_entry(root=str(root), gpus=2, agent_python=sys.executable)
        yield Laptop(tmp_path / "laptop", {"box": entry})
        for job in (root / "jobs").glob("*"):
            JobDir(root, job.name).end_everything()
        for pid in agents(root):
            kill(pid)


def test_a_job_in_time(laptop: Laptop, tmp_path: Path) -> None:
    work = tmp_path / "work"
    step = {"name": "work", "run": RUN, "gpus": 1, "retry": {"attempts": 2}, "env": {"HF_TOKEN": {"from": "env"}}}
    laptop.environment["HF_TOKEN"] = TOKEN
    job = laptop.launch(laptop.plan([step], workdir=str(work)))
    directory = JobDir(tmp_path / "root", job)
    directory.wait_for_kind("attempt_started", count=2)
    wait_until((directory.path / "usage.jsonl").exists, "a reading was taken while a GPU was held", within_s=30)
    running = laptop.run("history", job, expect=0)
    assert "work #2" in running.out
    (work / "go").touch()
    laptop.run("wait", job, expect=0)

    [record] = [json.loads(line) for line in (directory.path / "usage.jsonl").read_text().splitlines()]
    assert record["gpus"] in ([[0, 87, 40000, 80000]] * 2, [[0, 87, 40000, 80000]])
    text = laptop.run("history", job, expect=0).out
    assert "failed, network" in text
    assert "GPU 0" in text
    assert "Mean GPU utilisation while held: 87%" in text
    utf8 = dict(laptop.environment)
    laptop.environment |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ascii_only = laptop.run("history", job, expect=0)
    assert (ascii_only.err, ascii_only.out.isascii()) == ("", True)
    signs = str.maketrans("█▓░▇·", "@=x#.")
    assert ascii_only.out == text.translate(signs), "a terminal without blocks shows the same picture"
    laptop.environment = utf8
    found = laptop.run("history", job, "--plot", "job.svg", "--json", expect=0).json
    assert found["plot"] == "job.svg"
    assert 0 < found["job"]["gpu_hours"]["lost"] < found["job"]["gpu_hours"]["spent"]
    assert "GPU use" in (laptop.folder / "job.svg").read_text()
    listed = laptop.run("history", "--json", expect=0).json
    assert listed["gpu_hours"] == found["job"]["gpu_hours"]

    assert laptop.run("report", job, expect=0).out == f"{job}.html\n"
    page = (laptop.folder / f"{job}.html").read_text()
    for words in ("network", "Connection reset by peer", "GPU 0: 87%", "work #2", RUN.split(";")[-2].strip()[:20]):
        assert words in page, words
    assert TOKEN not in page
    assert laptop.run("report", job, "-o", f"{job}.html").status != 0, "a file is not replaced unasked"
    laptop.run("report", job, "-o", f"{job}.html", "--force", expect=0)
    assert laptop.run("history", "--plot", "x.png", expect=2).one_screen
    assert "the ending says which format" in laptop.run("history", job, "--plot", "x.gif", expect=2).err


def test_without_matplotlib_the_text_is_shown_and_the_reason_said(laptop: Laptop, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden" / "matplotlib"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError('not here')")
    work = tmp_path / "work"
    job = laptop.launch(laptop.plan([{"name": "quick", "run": "true"}], workdir=str(work)))
    laptop.run("wait", job, expect=0)
    laptop.environment["PYTHONPATH"] = str(hidden.parent)
    answer = laptop.run("history", job, "--plot", "x.png", expect=2)
    assert "quick #1" in answer.out
    assert "orch-gpu[plot]" in answer.err
    assert not (laptop.folder / "x.png").exists()
    laptop.run("report", job, expect=0)  # the page draws for itself
