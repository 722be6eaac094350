"""What a night of jobs looks like: GPU hours, the timeline as text, as a picture, and as a page that loads nothing."""

from __future__ import annotations

import io
import re
from datetime import UTC, timedelta
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from orchestrator.core.timeline import gpu_hours, mean_utilisation, of_view, ticks
from orchestrator.services.report import Failure, Report
from orchestrator.ui.job import Moment
from orchestrator.ui.plot import draw
from orchestrator.ui.report import page
from orchestrator.ui.timeline import timeline_lines
from tests.cli.samples import OOM
from tests.history.night import HOSTILE, NOW, START, readings, timeline, view

VOID = {"meta", "br"}


def test_gpu_hours_count_lost_work_only() -> None:
    hours = gpu_hours(view(), NOW)
    held = 8 * (150 + 120 + 20 + 187) / 60 + 4 * 58 / 60
    assert hours["spent"] == pytest.approx(held, abs=0.01)
    # The first failure kept 3200 samples: only its load comes again. The second kept nothing more: it was all in vain.
    assert hours["lost"] == pytest.approx(8 * (20 + 20) / 60, abs=0.01)
    idle = of_view({"id": "x", "state": "queued", "created_at": "2026-11-29T20:00:00Z", "steps": []}, NOW)
    assert (idle.lanes, gpu_hours({"steps": []}, NOW)) == ((), {"spent": 0.0, "lost": 0.0})


def test_the_timeline_as_text_fits_and_is_true() -> None:
    line = timeline()
    for width in (80, 100, 160):
        console = Console(width=width, record=True, no_color=True, file=io.StringIO())
        rows = timeline_lines(line, Moment(NOW, UTC), width)
        for row in rows:
            console.print(row)
            assert row.cell_len <= width + 24, "only remarks may be longer"
        text = console.export_text()
        assert "\x1b" not in text
        bars = {row.plain[:14].strip(): row.plain for row in rows[2:]}
        assert "failed, gpu_oom" in bars["extract #1"]
        first, second = bars["extract #1"].index("░"), bars["extract #2"].index("░")
        assert first < second < bars["extract #3"].index("█"), "later attempts begin further right"
    assert "Mean GPU utilisation" in rows[-1].plain
    mean = mean_utilisation(line)
    assert mean is not None
    assert 55 < mean < 80


def test_the_axis_has_round_ticks() -> None:
    for seconds, last in ((7, "7s"), (100, "1m30s"), (3000, "50m"), (9 * 3600, "8h"), (5 * 86400, "5d")):
        marks = ticks(START, START + timedelta(seconds=seconds))
        assert 2 <= len(marks) <= 9
        assert (marks[0][1], marks[-1][1]) == ("0", last)


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_the_picture(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"night.{ending}"
    draw(timeline(), path)
    data = path.read_bytes()
    assert len(data) > 10_000
    if ending == "png":
        assert data.startswith(b"\x89PNG")
    if ending == "svg":
        texts = {(item.text or "").strip() for item in ET.fromstring(data).iter("{http://www.w3.org/2000/svg}text")}
        assert {"extract #2", "load_weights", "2h"} <= texts
        draw(timeline(), tmp_path / "again.svg")
        assert (tmp_path / "again.svg").read_bytes() == data, "the same job gives the same file"


def test_a_picture_of_almost_nothing(tmp_path: Path) -> None:
    """A job that has not started, names that look like formulas or start with _, and no GPU at all."""
    draw(of_view({"id": "x$_{1", "state": "queued", "created_at": "2026-11-29T20:00:00Z", "steps": []}, NOW), tmp_path / "a.png")
    odd = view()
    for step in odd["steps"]:
        step["name"] = "$\\frac{" + step["name"]
        for attempt in step["attempts"]:
            attempt["gpus"] = None
            for phase in attempt["phases"]:
                phase["name"] = "_$" + phase["name"] + HOSTILE
    draw(of_view(odd, NOW), tmp_path / "b.svg")
    draw(of_view(view(), NOW), tmp_path / "c.png")  # GPUs held, and no reading


class Page(HTMLParser):
    """Checks nesting and collects what a browser would load or run."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.loads: list[tuple[str, str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in {"src", "href", "srcset", "action", "data", "poster"} or name.startswith("on"):
                self.loads.append((tag, name, value or ""))
        assert tag not in {"script", "iframe", "object", "embed", "link", "img", "base", "form"}, tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes {self.open[-3:]}"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_loads_nothing_and_shows_hostile_text_as_text() -> None:
    line = of_view(view(), NOW, readings())
    why = {"verdict": OOM, "evidence": [HOSTILE], "changed_next": {"x": HOSTILE}}
    spec = {"workdir": "/data", "steps": [{"name": HOSTILE, "run": "train", "env": {"A": "plain-value"}}]}
    facts = Report(
        {**view(), "name": HOSTILE, "host": HOSTILE}, line, NOW, 32400.0, gpu_hours(view(), NOW), spec,
        (Failure("extract", 1, why, b"10%\r20%\n" + HOSTILE.encode()),), {"count": 3, "median_error": 0.1}, complete=False,
    )  # fmt: skip
    html = page(facts)
    parsed = Page()
    parsed.feed(html)
    parsed.close()
    assert parsed.open == []
    assert parsed.loads == []
    assert not re.search(r"url\(|@import|javascript:", html)
    assert set(re.findall(r"https?://[^\"' <]+", html)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in html
    shown = "".join(parsed.texts)
    assert shown.count("<script>alert(1)</script>") >= 6, "seen, as text"
    assert "\x1b" not in html
    assert "plain-value" not in html, "the environment stays out"
    assert "67.5" in shown
    assert "what was seen of the job last" in shown
    assert "\n20%\n" in shown or "20%" in shown
