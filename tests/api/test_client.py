"""The Python API on a real sshd: what a notebook or a scheduler of somebody else's would do with it."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

import orchestrator
from orchestrator import Client, Job, explain
from orchestrator.core.errors import NoSuchJob, UsageError, WaitTimeout
from orchestrator.views import AttemptView, JobView, StepView
from tests.sshd.server import Sshd, free_port
from tests.support.jobdir import JobDir, agents, kill
from tests.support.laptop import Laptop


def test_a_job_through_the_api(shared_sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, work = tmp_path / "root", tmp_path / "work"
    laptop = Laptop(tmp_path / "laptop", {"box": shared_sshd.inventory_entry(root=str(root))})
    monkeypatch.setenv("ORCH_HOME", str(laptop.store))
    port = free_port()
    plan = laptop.plan(
        [
            {
                "name": "web",
                "run": f"exec python3 -m http.server {port} --bind 127.0.0.1",
                "service": {"ready": {"port": port}, "timeout_s": 60},
            },
            {"name": "use", "needs": ["web"], "run": "until [ -e go ]; do sleep 0.05; done; echo out of luck; exit 3", "retry": {"attempts": 1}},
        ],
        workdir=str(work),
    )  # fmt: skip
    remarks: list[str] = []
    try:
        with Client(laptop.inventory, say=remarks.append) as client:
            assert client.hosts == ["box"]
            job = client.launch(plan, preflight=False)
            with pytest.raises(WaitTimeout):
                job.wait(timeout_s=0.2)
            JobDir(root, job.id).wait_for_kind("step_ready")
            with job.forward() as opened, urllib.request.urlopen(f"http://127.0.0.1:{opened.port}/", timeout=30) as answer:
                assert b"Directory listing" in answer.read()
            (work / "go").touch()
            seen: list[str] = []
            view = job.wait(saw=lambda newer: seen.append(newer["state"]))
            assert view["state"] == seen[-1] == "failed"
            assert job.view()["steps"][1]["attempts"][0]["exit_status"] == 3
            assert job.why()["step"] == "use"
            assert job.log(step="use", tail=1) == b"out of luck\n"
            assert [item["id"] for item in client.jobs()] == [job.id]
            assert client.history()["jobs"][0]["attempts"] == 2
            assert client.job(job.id[:8]) == Job(client, job.id, "box")
            assert [lane.step for lane in job.timeline().lanes] == ["web", "use"]
            assert "out of luck" in job.report()
            job.retry()
            assert job.stop(wait=True)["state"] in {"stopped", "failed"}
            with pytest.raises(NoSuchJob):
                client.job("nothing-like-it")
            # The types say what the documents hold.
            full = job.view()
            assert set(JobView.__annotations__) <= set(full)
            assert set(StepView.__annotations__) <= set(full["steps"][0])
            optional = {"kept"}
            assert set(AttemptView.__annotations__) - optional <= set(full["steps"][1]["attempts"][0])
    finally:
        for path in (root / "jobs").glob("*"):
            JobDir(root, path.name).end_everything()
        for pid in agents(root):
            kill(pid)


def test_a_number_that_cannot_be_is_wrong_usage(shared_sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with the commands: refused with words, before anything is sent, and nothing is started."""
    root = tmp_path / "root"
    laptop = Laptop(tmp_path / "laptop", {"box": shared_sshd.inventory_entry(root=str(root))})
    monkeypatch.setenv("ORCH_HOME", str(laptop.store))
    plan = laptop.plan([{"name": "work", "run": "echo one; echo two"}], workdir=str(tmp_path))
    try:
        with Client(laptop.inventory) as client:
            for attempts in (0, -3, 1001, 2.5):
                with pytest.raises(UsageError, match="attempts cannot be") as refused:
                    client.launch(plan, attempts=attempts)  # type: ignore[arg-type]
                assert refused.value.hint == "a whole number from 1 to 1000"
            with pytest.raises(UsageError, match="no time to wait"):
                client.launch(plan, wait_gate_s=-1)
            assert client.jobs() == []
            job = client.launch(plan, preflight=False, attempts=1)
            job.wait()
            for more_s in (-5, 0, math.nan, math.inf):
                with pytest.raises(UsageError, match="no time to add"):
                    job.extend(more_s)
            for port in (0, 70000):
                with pytest.raises(UsageError, match=f"the port on the host cannot be {port}"):
                    job.forward(port=port)
            with pytest.raises(UsageError, match="the local port cannot be 70000"):
                job.forward(port=80, local=70000)
            for limit in (0, -1):
                with pytest.raises(UsageError, match=f"limit cannot be {limit}"):
                    client.history(limit=limit)
            for timeout_s in (-1, math.nan, math.inf, True, "5"):
                with pytest.raises(UsageError, match="no time to wait"):
                    job.wait(timeout_s=timeout_s)  # type: ignore[arg-type]
                with pytest.raises(UsageError, match="no time to wait"):
                    job.stop(timeout_s=timeout_s)  # type: ignore[arg-type]
            for name in (5, 1.5, b"5", None):
                with pytest.raises(UsageError, match="names no job"):
                    client.job(name)  # type: ignore[arg-type]
            with pytest.raises(UsageError, match="tail cannot be -1"):
                job.log(tail=-1)
            with pytest.raises(UsageError, match="attempt cannot be 0"):
                job.log(attempt=0)
            assert job.log(tail=0) == b""
            assert job.log(tail=1) == b"two\n"
    finally:
        for path in (root / "jobs").glob("*"):
            JobDir(root, path.name).end_everything()
        for pid in agents(root):
            kill(pid)


def test_explain_needs_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
    failure = explain(log, exit_status=1)["failure"]
    assert failure["class"] == "gpu_oom"


def test_the_package_is_cheap_to_import_and_documented() -> None:
    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, orchestrator; print(sorted(m for m in sys.modules if m.startswith('orchestrator')))"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert loaded.strip() == "['orchestrator']"
    with pytest.raises(AttributeError):
        orchestrator.Clinet  # noqa: B018
    for kind in (Client, Job):
        for name, member in inspect.getmembers(kind):
            if not name.startswith("_"):
                assert inspect.getdoc(member), f"{kind.__name__}.{name}"
