"""Logs of real runs, printed again sixty times faster by a real job, watched by the real program on a terminal.

The training of ten seconds is only halved: nothing can be seen of it at sixty times.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.terminal import Terminal
from tests.faults.stage import Stage
from tests.support.laptop import ORCH

REAL = Path(__file__).parents[1] / "data" / "logs" / "real"
KNOWN = {row["id"]: row for row in map(json.loads, (REAL / "logs.jsonl").read_text().splitlines())}
REPLAY = Path(__file__).with_name("replay.py")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage(tmp_path_factory.mktemp("replay") / "stage") as ready:
        yield ready


def percents(label: str, screens: list[str]) -> list[int]:
    """What the screens said of one bar, in order."""
    rows = (re.search(rf"{re.escape(label)}[^\n]*?[━─]+ +(\d+)%", text) for text in screens)
    return [int(row[1]) for row in rows if row]


@pytest.mark.parametrize(
    ("name", "speed", "phases", "label"),
    [
        ("vllm026_h200_tp2_extract_ok", 60, {"load_weights", "graph_capture"}, ""),
        ("vllm032_cpu_api_sigkilled_midload", 60, {"load_weights"}, "Loading safetensors checkpoint shards"),
        ("vllm026_h200_truncated_shard", 60, {"load_weights"}, ""),
        ("speculators09_train_ok", 2, {"train"}, "Training epoch"),
    ],
)
def test_a_real_run_at_a_minute_a_second(stage: Stage, name: str, speed: int, phases: set[str], label: str) -> None:
    known = KNOWN[name]
    work = stage.folder / name
    work.mkdir()
    run = f"until [ -e go ]; do sleep 0.05; done; exec python3 {{files}}/replay.py {{files}}/{name}.log {speed} {known['exit_status']}"
    step = {"name": "work", "run": run, "files": [str(REPLAY), str(REAL / f"{name}.log")], "retry": {"attempts": 1}}
    job = stage.laptop.launch(stage.laptop.plan([step], name=name.replace("_", "-"), workdir=str(work)))
    screens: list[str] = []
    argv = [ORCH, "watch", job]
    with Terminal(argv, environment=stage.laptop.environment, cwd=stage.laptop.folder, columns=110, rows=40) as terminal:
        terminal.shows(f"{job}  running")
        (work / "go").touch()
        while terminal.read(1.0):
            if terminal.text != (screens[-1] if screens else ""):
                screens.append(terminal.text)
        status = terminal.ended()

    expected = known["expected"]["failure_class"]
    everything = "\n".join(screens)
    assert status == (0 if known["exit_status"] == 0 else 1)
    assert not {phase for phase in phases if phase not in everything}, "each phase was seen"
    if expected is None:
        assert f"{job}  succeeded" in screens[-1]
    else:
        accepted = [expected, *known["expected"]["also_accept"]]
        assert re.search(rf"{job}  failed", screens[-1]), screens[-1]
        assert re.search("|".join(f"{kind}:" for kind in accepted), screens[-1]), screens[-1]
    if label:
        seen = percents(label, screens)
        assert seen, "the bar was drawn"
        assert seen == sorted(seen), "a bar never goes back"
    if "train" in name:
        assert re.search(r"loss 0\.\d+ [▁-█]", everything), "the loss and its sparkline"
    frames = [text for text in screens if "orch watch" in text]
    assert all(text.splitlines()[-1].startswith("q leave") for text in frames), "no frame was torn"
    assert b"\x1b[2J" in terminal.raw
    assert terminal.raw.count(b"\x1b[2J") <= 2, "the screen is cleared at its start only: nothing flickers"
