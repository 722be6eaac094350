"""What orch writes is for its owner only, on both sides, whatever the umask says."""

from __future__ import annotations

import os
from pathlib import Path

from tests.faults.stage import Stage
from tests.support.jobdir import JobDir


def test_files_0600_and_folders_0700_whatever_the_umask(tmp_path: Path) -> None:
    (tmp_path / "script.sh").write_text("echo said\n")
    before = os.umask(0)  # inherited by the sshd, its sessions, and every orch below
    try:
        step = {"run": "sh {files}/script.sh; exit 1", "files": [str(tmp_path / "script.sh")], "retry": {"attempts": 1}}
        with Stage(tmp_path / "stage", step=step) as stage:
            job = JobDir(stage.root, stage.laptop.launch(stage.plan))
            stage.laptop.run("wait", job.id, expect=1)
            stage.laptop.run("history", expect=0)
            stage.settled(job)  # nothing of it comes and goes any more
            seen = {
                path: path.lstat().st_mode & 0o777
                for top in (stage.root, stage.laptop.store)
                for path in [top, *top.rglob("*")]
                if not path.is_symlink()
            }
    finally:
        os.umask(before)
    assert {path: oct(mode) for path, mode in seen.items() if mode & 0o077} == {}
    names = {path.name for path in seen}
    assert {"spec.json", "events.jsonl", "state.json", "result.json", "log", "bundle.json", "script.sh", "releases", "blobs", ".complete"} <= names
    assert any(name.startswith("ledger") for name in names)
