"""`orch watch` as people run it: in tmux, over a link that breaks, with several jobs; and where nobody looks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.terminal import Terminal
from tests.faults.stage import Controller, Stage
from tests.support.laptop import ORCH
from tests.support.waiting import wait_until
from tests.watch.tmux import Tmux

TRAINING = (
    "i=0; until [ -e go ]; do i=$((i+1)); echo \"step $i loss 0.$((900-i)) tokens/s: 1$((i%7))00\"; "
    "printf 'Epoch: %d%%|#| %d/1000 [00:01<00:09, 10.00it/s]\\r' $((i/10)) $i; sleep 0.2; done"
)

SHOWN = (
    r"2 running", r"loss 0\.\d+ \S", r"tokens/s \d,?\d+ \S", r"Epoch  [━─]+ +\d+%  \d+/1,000",
    r"box  connected  looked [\d.]+s ago, next (in \ds|now)",
)  # fmt: skip
"""Of two such jobs, the figures of the chosen one with their sparklines. They come from log and state: not all at once."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage(tmp_path_factory.mktemp("watch") / "stage") as ready:
        yield ready


def launch(stage: Stage, name: str) -> tuple[str, Path]:
    """A job that trains until its work folder holds `go`."""
    work = stage.folder / name
    work.mkdir()
    steps = [{"name": "prepare", "run": "true"}, {"name": "train", "run": TRAINING, "needs": ["prepare"]}]
    return stage.laptop.launch(stage.laptop.plan(steps, name=name, workdir=str(work))), work


def watch(stage: Stage, folder: Path, *arguments: str, **more: int) -> Tmux:
    return Tmux(folder, [ORCH, "watch", *arguments], environment=stage.laptop.environment, cwd=stage.laptop.folder, **more)


def test_two_jobs_keys_sizes_and_a_cut_link(stage: Stage, tmp_path: Path) -> None:
    (first, first_work), (second, second_work) = launch(stage, "one"), launch(stage, "two")
    with watch(stage, tmp_path) as pane:
        text = pane.until(
            lambda text: all(re.search(one, text) for one in SHOWN), "two jobs, loss and bar of the chosen one, the host"
        )
        [chosen] = re.findall(r"> (\S+)", text)
        other = first if chosen == second else second

        pane.keys("Down")
        pane.shows(f"> {other}")
        pane.keys("k")
        pane.shows(f"> {chosen}")
        pane.keys("l")
        pane.until(lambda text: re.search(r"log of train, attempt 1\n.*step \d+ loss", text), "the log")
        assert "\r" not in pane.text
        pane.keys("p")
        pane.shows("/bin/bash -c")
        pane.keys("l", "p")
        pane.until(lambda text: "log of" not in text and "/bin/bash -c" not in text, "both are hidden again")

        for columns, rows in ((60, 20), (200, 50), (100, 30)):
            pane.resize(columns, rows)
            text = pane.until(
                lambda text, rows=rows: (  # whole: tmux moves the old lines before ours are painted anew
                    text.count("\n") == rows
                    and text.count("orch watch") == 1
                    and f"> {chosen}  running" in text
                    and text.splitlines()[-1].startswith("q leave")
                ),
                f"a frame of {columns}x{rows}, and nothing of the old size",
            )

        stage.cable.refuse(True)
        stage.cable.cut_now()
        text = pane.shows("reconnecting")
        assert f"> {chosen}  running" in text, "a link is no job"
        assert "host unreachable, last seen" in pane.shows("last seen")
        stage.cable.refuse(False)
        pane.shows("box  connected", within_s=40)

        assert re.search(r"\x1b\[[0-9;]*3\dm", pane.coloured)
        (first_work / "go").touch()
        (second_work / "go").touch()
        pane.shows("2 succeeded")
        pane.keys("q")
        assert pane.ended() == 0


def test_stop_asks_and_ctrl_z_gives_the_screen_back(stage: Stage, tmp_path: Path) -> None:
    job, _ = launch(stage, "three")
    with watch(stage, tmp_path, job) as pane:
        pane.shows("train")
        pid = pane.pid
        pane.keys("s")
        pane.shows(f"stop {job} on box? [y/N]")
        pane.keys("n")
        pane.until(lambda text: "[y/N]" not in text, "the question is gone")
        pane.keys("C-z")
        wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "it is stopped")
        pane.until(lambda text: "q leave" not in text, "the person's own screen is back")
        (tmp_path / "fg").touch()
        pane.shows(f"{job}  running")
        pane.keys("s")
        pane.shows("[y/N]")
        pane.keys("y")
        assert pane.ended() == 1
        pane.shows(f"{job}  stopped")
    assert stage.laptop.status(job)["state"] == "stopped"


def test_no_colour_no_unicode_ci_and_a_pipe(stage: Stage) -> None:
    job, work = launch(stage, "four")
    argv, cwd = [ORCH, "watch", job], stage.laptop.folder
    bare = {**stage.laptop.environment, "NO_COLOR": "1", "LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    with Terminal(argv, environment=bare, cwd=cwd) as terminal:
        terminal.until(lambda text: "Epoch  #" in text or "Epoch  ." in text, "a bar in plain letters")
        assert not re.search(rb"\x1b\[[0-9;]*[34]\dm", terminal.raw), "no colours"
        terminal.raw.decode("ascii")
        terminal.type("q")
        assert terminal.ended() == 0
    with Terminal(argv, environment={**stage.laptop.environment, "CI": "true"}, cwd=cwd, columns=200) as terminal:
        terminal.until(lambda text: "attempt 1 started" in text, "dated lines")
        assert b"\x1b[?1049h" not in terminal.raw
    with stage.laptop.started("watch", job) as process:
        controller = Controller(process)
        wait_until(lambda: b"attempt 1 started" in controller.out, "dated lines")
        (work / "go").touch()
        answer = controller.ended()
    assert answer.status == 0
    lines = answer.out.splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ box " + job, line) for line in lines), answer
    assert sum("train: attempt 1 started" in line for line in lines) == 1, "one line per change"
    assert "\x1b" not in answer.out + answer.err
    assert lines[-1].endswith(lines[-1].partition(": succeeded")[2])
