"""Names that break careless quoting: spaces, quotes, newlines, unicode, in every place where a path can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.stage import Stage
from tests.support.jobdir import JobDir

NASTY = {
    "spaces": "a b  c",
    "quotes": "it's \"here\"",
    "newline": "two\nlines",
    "unicode": "köln-東京-🚀",
    "shell": "$(touch owned);`touch owned`&|>*?[x]~!#",
    "dash": "-rf",
    "backslash": "a\\b\\n",
}


@pytest.mark.parametrize("name", NASTY.values(), ids=NASTY.keys())
def test_root_workdir_and_file_names(tmp_path: Path, name: str) -> None:
    script = tmp_path / f"{name.replace('/', '_')}.sh"
    script.write_text("pwd > where; printf '%s' \"$ORCH_WORKDIR\" > told; ls -a > seen\n")
    step = {
        "run": "sh {files}/*.sh && cp {files}/*.sh {workdir}/copied && echo '{not.ours}' && mkdir \"$ORCH_OUTPUT\" && "
        "echo result > \"$ORCH_OUTPUT/it's out\"",
        "files": [str(script)],
    }
    folder = tmp_path / "stage"
    with Stage(folder, step=step, root=folder / f"root {name}") as stage:
        work = stage.work / name / "deeper"
        plan = stage.laptop.plan([stage.step], workdir=str(work))
        job = stage.laptop.launch(plan)
        stage.laptop.run("wait", job, expect=0)
        assert (work / "where").read_text() == f"{work}\n"
        assert (work / "told").read_text() == str(work)
        assert (work / "copied").exists()
        assert not list(folder.rglob("owned")), "a name was run as a command"
        log = stage.laptop.run("logs", job, expect=0)
        assert log.out == "{not.ours}\n"
        assert JobDir(stage.root, job).state == "succeeded"
        destination = folder / "fetched here" / name
        stage.laptop.run("fetch", job, destination, expect=0)
        assert [path.read_text() for path in destination.rglob("it's out")] == ["result\n"]


def test_every_file_of_ours_is_private_whatever_the_umask(tmp_path: Path) -> None:
    with Stage(tmp_path, step={"run": "true"}) as stage:
        job = JobDir(stage.root, stage.laptop.launch(stage.plan))
        stage.laptop.run("wait", job.id, expect=0)
        stage.settled(job)  # nothing of it comes and goes any more
        for path in [job.path, *job.path.rglob("*")]:
            mode = path.lstat().st_mode & 0o777
            assert mode & 0o077 == 0, f"{path.relative_to(stage.root)} has mode {mode:o}"
