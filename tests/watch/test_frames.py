"""What is on the screen, to the letter: whole frames at 60, 100 and 200 columns, without colour, at a fixed time.

A frame that should look different is written anew with ORCH_WRITE_FRAMES=1; look at the difference before you commit it.
"""

from __future__ import annotations

import copy
import io
import os
from datetime import timedelta
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from orchestrator.cli.painter import Painter
from orchestrator.services.views import HostView, LogTail, WatchView
from orchestrator.ui.changes import Change, job_changes
from orchestrator.ui.live import render
from orchestrator.ui.machines import link_lines
from orchestrator.ui.screen import Screen, gauge, window
from orchestrator.ui.sparks import figures_line, sparkline
from tests.cli.samples import MOMENT, NOW, attempt, bar, job, step, watch_view

FRAMES = Path(__file__).parent / "frames"
LOG = (Path(__file__).parents[1] / "data" / "logs" / "real" / "vllm026_h200_tp2_extract_ok.log").read_bytes()
LOSSES = tuple(2.0 / (1 + index / 9) + 0.05 * (index % 3) for index in range(90))


def pipeline() -> tuple[WatchView, Screen]:
    """The one job of the README in its second attempt: figures, GPUs, what happened lately."""
    view = watch_view()
    view.hosts["gpubox"].next_look_at = NOW + timedelta(seconds=5)
    for index, gpu in enumerate((view.hosts["gpubox"].gpus or {})["gpus"]):
        gpu["power_w"] = 612 + index
    running = view.jobs["eagle3-20261129-abc234"]["steps"][2]["attempts"][1]
    running["phases"][1].update(left_s=815.0)
    running["bars"] = [bar(eta_low_s=780.0, eta_high_s=1000.0)]
    view.log = LogTail("eagle3-20261129-abc234", "extract", 2, b"", {"loss": LOSSES, "prompt tokens/s": (67012.0, 70793.0, 68069.4)})
    return view, Screen(recent=job_changes(None, job(), MOMENT))


def crowd() -> tuple[WatchView, Screen]:
    """Six hosts and thirty jobs, one of them chosen; one host is away, one refuses us."""
    view = WatchView()
    for number in range(6):
        view.hosts[f"box{number}"] = HostView(f"box{number}", "connected", None, NOW - timedelta(seconds=number), NOW + timedelta(seconds=4), 0.02)
    view.hosts["box4"].link, view.hosts["box4"].problem = "reconnecting", "box4: no route to host"
    view.hosts["box5"].link, view.hosts["box5"].problem = "refused", "box5: the host key has changed"
    for number in range(30):
        one = job(id=f"sweep-20261129-{number:06}", host=f"box{number % 5}")
        if number % 5 == 4:
            one.update(reachable=False, age_s=125.0)
        elif number % 7 == 3:
            one.update(state="failed", ended_at="2026-11-29T13:40:00Z", eta=None)
            one["steps"][2]["state"] = "failed"
            one["steps"][2]["attempts"] = one["steps"][2]["attempts"][:1]
        view.jobs[one["id"]] = one
    view.hosts["box2"].gpus = watch_view().hosts["gpubox"].gpus
    return view, Screen(chosen="sweep-20261129-000012", recent=[Change("2026-11-29T13:59:58Z", "box4", "", "", "reconnecting: no route to host", "warn")])


def log_shown() -> tuple[WatchView, Screen]:
    """The log beside the processes; the link is broken, and nothing is called failed for that."""
    view = watch_view(job(reachable=False, age_s=42.0), log=LOG[:20000])
    host = view.hosts["gpubox"]
    host.link, host.problem, host.looked_at = "reconnecting", "gpubox: the link was dropped", NOW - timedelta(seconds=42)
    host.next_look_at = NOW + timedelta(seconds=2)
    return view, Screen(log=True, processes=True, question="stop eagle3-20261129-abc234 on gpubox?")


SCENES = {"pipeline": pipeline, "crowd": crowd, "log": log_shown}


def drawn(scene: str, width: int, height: int = 36, **choices: object) -> list[Text]:
    view, screen = SCENES[scene]()
    screen.width, screen.height = width, height
    for name, value in choices.items():
        setattr(screen, name, value)
    return render(view, screen, MOMENT)


@pytest.mark.parametrize("width", [60, 100, 200])
@pytest.mark.parametrize("scene", SCENES)
def test_frames_are_as_looked_at(scene: str, width: int) -> None:
    text = "\n".join(line.plain.rstrip() for line in drawn(scene, width)) + "\n"
    path = FRAMES / f"{scene}-{width}.txt"
    if os.environ.get("ORCH_WRITE_FRAMES"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("size", [(20, 6), (60, 15), (80, 24), (132, 43), (200, 60)])
def test_a_frame_is_never_larger_than_the_terminal_and_keeps_its_keys(scene: str, size: tuple[int, int]) -> None:
    lines = drawn(scene, *size)
    assert len(lines) <= size[1]
    assert max(line.cell_len for line in lines) <= size[0]
    assert lines[-1].plain[:6] in {"q leav", "stop e"}


def test_whatever_is_chosen_among_many_is_in_sight() -> None:
    for number in range(30):
        chosen = f"sweep-20261129-{number:06}"
        text = "\n".join(line.plain for line in drawn("crowd", 100, chosen=chosen))
        assert f"> {chosen}" in text
        assert "└ train" in text


def test_lines_out_of_sight_are_counted() -> None:
    rows = [Text(str(number)) for number in range(100)]
    for focus in (range(0), range(3, 6), range(50, 60), range(90, 120), range(20, 90)):
        found = [line.plain for line in window(rows, 20, focus)]
        assert len(found) == 20
        above = int(found[0].split()[1]) if "above" in found[0] else 0
        below = int(found[-1].split()[1]) if "below" in found[-1] else 0
        assert above + below + sum(line.isdigit() for line in found) == 100
        if focus:
            assert str(focus.start) in found


def test_without_colour_a_bar_still_shows_how_far_it_is() -> None:
    for unicode in (True, False):
        screen = Screen(unicode=unicode)
        shapes = [gauge(share, 10, "cyan", screen).plain for share in (0.0, 0.5, 0.999, 1.0)]
        assert len(set(shapes)) == 4, "empty, half, nearly full and full differ"
        assert {len(shape) for shape in shapes} == {10}
    for line in drawn("pipeline", 100, unicode=False):
        line.plain.encode("ascii")


def test_the_time_left_of_a_phase_may_run_out() -> None:
    view, screen = pipeline()
    view.jobs["eagle3-20261129-abc234"]["steps"][2]["attempts"][1]["phases"][1]["left_s"] = 0.0
    assert "load_weights 12m00s, longer than usual" in "\n".join(line.plain for line in render(view, screen, MOMENT))


def test_a_silent_log_is_mentioned() -> None:
    view = watch_view(job(steps=[step("work", "running", [attempt(1, log_quiet_s=720.0)])]))
    assert "no output for 12m00s" in "\n".join(line.plain for line in render(view, Screen(width=100), MOMENT))


def test_after_a_sleep_the_links_are_looked_at_before_they_are_judged() -> None:
    view = watch_view()
    view.hosts["gpubox"].link = "waking"
    view.hosts["gpubox"].looked_at = NOW - timedelta(hours=3)
    [line] = link_lines(view, MOMENT)
    assert line.plain == "gpubox  waking  this laptop slept; looking again  looked 3h00m ago"


# ----------------------------------------------------------------------------------------------------------- sparklines


def test_a_sparkline_spans_its_own_range() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([5.0, 5.0], 8) == "▄▄"
    assert sparkline(list(range(800)), 8) == "▁▂▃▄▅▆▇█", "the whole series, not its end"
    assert sparkline([1.0, float("nan"), 2.0], 8) == "▁ █"
    assert sparkline([float("nan")], 8) == ""
    assert sparkline([0, 7], 8, unicode=False) == "_@"


def test_a_loss_that_is_no_number_is_loud_and_what_does_not_fit_is_left_out() -> None:
    line = figures_line({"loss": (0.5, float("nan"))}, 80, Screen())
    assert line is not None
    assert line.plain == "loss nan ▄ "
    assert any("red" in str(span.style) for span in line.spans)
    short = figures_line({"loss": (0.5, 0.25), "prompt tokens/s": (1200.0, 1300.0)}, 16, Screen())
    assert short is not None
    assert short.plain == "loss 0.25 █▁"
    assert figures_line({"output tokens/s": (0.0, 0.0)}, 80, Screen()) is None


# -------------------------------------------------------------------------------------------------------------- painter


def painter() -> tuple[Painter, io.StringIO]:
    stream = io.StringIO()
    return Painter(Console(file=stream, force_terminal=True, color_system="standard", width=40, height=10)), stream


def test_only_lines_that_changed_are_written() -> None:
    paint, stream = painter()
    paint.paint([Text("one"), Text("two", "red"), Text("three")], (40, 10))
    stream.truncate(0)
    paint.paint([Text("one"), Text("two", "green"), Text("three")], (40, 10))
    assert "two" in stream.getvalue(), "a colour is a change"
    assert "one" not in stream.getvalue()
    assert "three" not in stream.getvalue()
    stream.truncate(0)
    paint.paint([Text("one"), Text("two", "green"), Text("three")], (40, 10))
    assert stream.getvalue() == "", "an equal frame writes nothing"
    paint.paint([Text("one")], (40, 10))
    assert stream.getvalue().count("\x1b[2K") == 2, "lines that are gone are erased"


def test_another_size_is_a_whole_new_frame_and_a_full_line_is_not_erased_at_its_end() -> None:
    paint, stream = painter()
    paint.paint([Text("one")], (40, 10))
    stream.truncate(0)
    paint.paint([Text("one"), Text("x" * 50)], (20, 10))
    shown = stream.getvalue()
    assert "\x1b[2J" in shown
    assert "one" in shown
    assert "x" * 20 + "\x1b[0m\x1b[?2026l" in shown, "no erase in the last column, nothing longer than the terminal"


def test_equal_states_give_equal_frames() -> None:
    view, screen = crowd()
    again = copy.deepcopy(view)
    screen.width, screen.height = 100, 36
    assert [line.plain for line in render(view, screen, MOMENT)] == [line.plain for line in render(again, screen, MOMENT)]
