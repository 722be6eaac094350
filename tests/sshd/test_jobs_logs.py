"""Logs as they really come: a gigabyte, carriage returns only, broken UTF-8, truncated and renamed while written."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.stage import Controller, Stage
from tests.support.proxy import DOWN
from tests.support.waiting import wait_until


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with Stage(tmp_path, step={"files": [], "retry": {"attempts": 1}}) as ready:
        yield ready


def launch(stage: Stage, run: str) -> str:
    stage.plan = stage.laptop.plan([{**stage.step, "run": run}], **stage.top)
    return stage.launch().id


def test_a_gigabyte_never_travels(stage: Stage) -> None:
    """1 GiB of lines: the job ends at once, status stays small, and the tail is there in a moment."""
    job = launch(stage, "yes 'a line of a chatty job that nobody will read in full' | head -c 1073741824; echo; echo the end")
    stage.laptop.run("wait", job, expect=0)
    log = stage.the_job().log(1, "work")
    assert log.stat().st_size > 1 << 30
    started = time.monotonic()
    answer = stage.laptop.run("logs", job, "--tail", "3", expect=0)
    assert answer.out.splitlines()[-1] == "the end"
    assert time.monotonic() - started < 20
    assert stage.cable.carried(DOWN) < 1 << 20
    stage.laptop.run("status", job, "--json", expect=0)
    assert stage.cable.carried(DOWN) < 1 << 20
    log.unlink()


def test_carriage_returns_only(stage: Stage) -> None:
    """No newline at all for 20 000 updates: the last state of the bar is known while it runs."""
    bar = "import time\nfor i in range(20001): print(f'\\rLoading: {i*100//20000:3d}%|#| {i}/20000 [00:01<00:01, 99.0it/s]', end='')\n"
    (stage.folder / "bar.py").write_text(bar + "import os\nwhile not os.path.exists('go'): time.sleep(.03)\n")
    stage.step["files"] = [str(stage.folder / "bar.py")]
    job = launch(stage, "python3 {files}/bar.py")

    def last_bar() -> object:
        attempts = stage.laptop.status(job)["steps"][0]["attempts"]
        bars = attempts[0]["bars"] if attempts else []
        return bars and bars[-1]["done"] == 20000 and bars[-1]["total"] == 20000

    wait_until(last_bar, "the bar stands at 20000 of 20000", every_s=0.2)
    tail = stage.laptop.run("logs", job, "--tail", "1", expect=0).out
    assert "20000/20000" in tail
    assert len(tail) < 1 << 20
    (stage.work / "go").touch()
    stage.laptop.run("wait", job, expect=0)


def test_invalid_utf8_and_nul_bytes(stage: Stage) -> None:
    job = launch(stage, "printf 'good\\n\\377\\376 \\200bad\\000\\n\\303'; printf 'K\\303\\266ln\\n'; exit 3")
    stage.laptop.run("wait", job, expect=1)
    log = stage.the_job().log(1, "work")
    assert log.read_bytes() == b"good\n\xff\xfe \x80bad\x00\n\xc3K\xc3\xb6ln\n"
    answer = stage.laptop.run("logs", job, expect=0)
    assert answer.out == log.read_bytes().decode(errors="replace")
    assert stage.laptop.status(job)["steps"][0]["attempts"][0]["exit_status"] == 3
    stage.laptop.run("why", job, "--json", expect=0)


def test_truncated_under_us(stage: Stage) -> None:
    """Somebody empties the log of a running job; a follower goes on with what comes after, and the job is none the worse."""
    job = launch(stage, "for i in $(seq 200); do echo before $i; done; until [ -e go ]; do sleep 0.03; done; echo after")
    log = stage.the_job().log(1, "work")
    wait_until(lambda: log.exists() and b"before 200" in log.read_bytes(), "the first part is written")
    with stage.laptop.started("logs", job, "-f") as process:
        controller = Controller(process)
        wait_until(lambda: b"before 200" in controller.out, "the follower has the first part")
        log.write_bytes(b"")
        (stage.work / "go").touch()
        answer = controller.ended()
    assert answer.status == 0
    assert answer.out.count("before 200\n") == 1
    assert answer.out.endswith("after\n")
    stage.laptop.run("wait", job, expect=0)


def test_rotated_under_us(stage: Stage) -> None:
    """logrotate renames the log and makes a new one; the old one's lines and the new one's both reach a follower."""
    job = launch(stage, "echo old line; until [ -e go ]; do sleep 0.03; done; exit 4")
    log = stage.the_job().log(1, "work")
    wait_until(lambda: log.exists() and b"old line" in log.read_bytes(), "the first part is written")
    with stage.laptop.started("logs", job, "-f") as process:
        controller = Controller(process)
        wait_until(lambda: b"old line" in controller.out, "the follower has the first part")
        log.rename(log.with_name("log.1"))
        log.write_bytes(b"new line\n")
        (stage.work / "go").touch()
        answer = controller.ended()
    assert answer.status == 0
    assert answer.out == "old line\nnew line\n"
    assert stage.laptop.run("wait", job).status == 1
    assert stage.laptop.status(job)["steps"][0]["attempts"][0]["exit_status"] == 4
