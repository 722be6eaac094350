"""Secrets end to end, through a real sshd: their values are in the job's environment and nowhere else."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from tests.sshd.server import Sshd
from tests.support.jobdir import JobDir
from tests.support.laptop import Laptop
from tests.support.waiting import wait_until

BACKEND = """
from keyring.backend import KeyringBackend

class Backend(KeyringBackend):
    priority = 1
    def get_password(self, service, username):
        return "s3cret-from-the-keyring" if (service, username) == ("hub", "me") else None
    def set_password(self, service, username, password):
        raise NotImplementedError
"""
VALUES = {"A": "s3cret-from-env!'\"$x", "B": "s3cret-from-a-file", "C": "s3cret-from-the-keyring"}
STEP = """
import os, sys, time, pathlib
assert [os.environ[k] for k in "ABC"] == [v.strip() for v in pathlib.Path("expected").read_text().split("\\n")]
print("all three are here", flush=True)
if os.environ["ORCH_ATTEMPT"] == "1":
    os.execv(sys.executable, [sys.executable, "-c", "import time, sys; time.sleep(1.5); sys.exit('RuntimeError: boom')"])
pathlib.Path("second").touch()
while not pathlib.Path("go").exists():
    time.sleep(0.05)
sys.exit("RuntimeError: boom again")
"""


def everything(folder: Path) -> dict[Path, bytes]:
    """Every file below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}


def command_lines() -> bytes:
    """The argv of every process of this machine, ours and sshd's among them."""
    found = b""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            found += Path(f"/proc/{pid}/cmdline").read_bytes() + b"\n"
        except OSError:
            continue
    return found


def test_the_values_are_nowhere_but_in_the_environment(sshd: Sshd, tmp_path: Path) -> None:
    root, work, tools = tmp_path / "root", tmp_path / "work", tmp_path / "tools"
    work.mkdir()
    tools.mkdir()
    (tools / "hidden_keyring.py").write_text(BACKEND)
    (work / "expected").write_text("\n".join(VALUES.values()))
    (tmp_path / "laptop").mkdir()
    (tmp_path / "laptop" / "token.txt").write_text(VALUES["B"] + "\n")
    (tmp_path / "laptop" / "step.py").write_text(STEP)
    laptop = Laptop(
        tmp_path / "laptop",
        {"box": sshd.inventory_entry(root=str(root))},
        environment={
            "TOKEN_A": VALUES["A"],
            "PYTHONPATH": str(tools),
            "PYTHON_KEYRING_BACKEND": "hidden_keyring.Backend",
        },
    )
    env = {"A": {"env": "TOKEN_A"}, "B": {"file": "token.txt"}, "C": {"keyring": "hub/me"}}
    step = {"name": "work", "run": f"{sys.executable} {{files}}/step.py", "files": ["step.py"], "env": env, "retry": {"attempts": 2}}
    plan = laptop.plan([step], workdir=str(work))

    seen, stop = [b""], threading.Event()

    def look_at_processes() -> None:
        while not stop.wait(0.03):
            lines = command_lines()
            seen[0] = lines if b"s3cret" in lines else seen[0]

    watcher = threading.Thread(target=look_at_processes)
    watcher.start()
    try:
        launched = laptop.run("launch", plan, "--no-preflight", "--json", expect=0)
        job = JobDir(root, launched.json["job"])
        wait_until(
            lambda: (work / "second").exists() and job.state == "running",
            "the second attempt runs, and all that its start writes is there", within_s=60,
        )  # fmt: skip
        kept = job.path / "secrets.json"
        assert kept.stat().st_mode & 0o777 == 0o600  # a later attempt needs them; the file goes with the job's end
        during = {path: data for path, data in everything(root).items() if path != kept}
        answers = [laptop.run("status", job.id, "--json"), laptop.run("logs", job.id)]
        (work / "go").touch()
        answers.append(laptop.run("wait", job.id, expect=1))
        answers += [laptop.run("why", job.id), laptop.run("why", job.id, "--json"), laptop.run("status", job.id, "--processes")]
        answers.append(laptop.run("fetch", job.id, tmp_path / "fetched", "--what", "all"))
    finally:
        stop.set()
        watcher.join()
    wait_until(lambda: not job.supervisors(), "the supervisor has cleaned up after the end")
    assert not kept.exists()
    assert b"all three are here" in during[job.path / "steps/1-work/attempts/1/log"]
    bundles = [path for path in everything(root) if path.name == "bundle.json"]
    assert len(bundles) == 2
    assert b'"A":"***"' in bundles[0].read_bytes()
    places = {**during, **everything(root), **everything(laptop.store), **everything(tmp_path / "fetched")}
    places |= {sshd.log: sshd.log.read_bytes()}
    assert [path for path, data in places.items() if b"s3cret" in data] == []
    assert seen[0] == b"", "a process had a secret in its argv"
    assert [str(answer) for answer in [launched, *answers] if "s3cret" in str(answer)] == []
