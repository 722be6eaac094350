"""One HTML page about a job, to send to somebody: everything inside, nothing loaded, every text from a host escaped.

Pure: the caller gathered the facts and writes the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any

from orchestrator.core.timeline import mean_utilisation
from orchestrator.core.times import parse_time
from orchestrator.services.report import Failure, Report
from orchestrator.ui.drawing import legend, svg
from orchestrator.ui.history import score_line
from orchestrator.ui.job import bar_counts, bar_label, exit_words
from orchestrator.ui.plot import STATES
from orchestrator.ui.text import clean_lines, duration, one_line

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; --line: #8885; --soft: #8882; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1060px; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
.meta { opacity: .75; margin: .2rem 0 1rem } .state { border-radius: 4px; color: #fff; padding: .1rem .5rem }
table { border-collapse: collapse; width: 100% } th, td { border-bottom: 1px solid var(--line); padding: .3rem .5rem; text-align: left; vertical-align: top }
th { font-weight: 600; opacity: .8 } td { overflow-wrap: anywhere; min-width: 2.5rem } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
pre { background: var(--soft); border-radius: 4px; font-size: 12px; max-height: 28rem; overflow: auto; padding: .6rem; white-space: pre-wrap; overflow-wrap: anywhere }
.legend span { display: inline-block; margin-right: 1rem } .legend i { display: inline-block; width: .8em; height: .8em; margin-right: .3em; border-radius: 2px }
details { margin: .4rem 0 } summary { cursor: pointer } .tiles { display: flex; flex-wrap: wrap; gap: .8rem }
.tiles div { background: var(--soft); border-radius: 6px; padding: .5rem .9rem } .tiles b { display: block; font-size: 1.2rem }
svg { width: 100%; height: auto }
"""


def page(report: Report) -> str:
    """The whole page."""
    view, line = report.view, report.timeline
    colour = STATES.get(str(view["state"]), "#555")
    incomplete = "" if report.complete else "<p><b>The host did not answer:</b> this is what was seen of the job last.</p>"
    body = [
        f"<h1>{_text(view.get('name'))} <span class=state style='background:{colour}'>{_text(view['state'])}</span></h1>",
        f"<p class=meta>{_text(view['id'])} on {_text(view.get('host'))}, in {_text(view.get('workdir') or '-')}</p>",
        incomplete,
        _tiles(report),
        "<h2>Timeline</h2>",
        f"<p class=meta>{_time(line.start)} to {_time(line.end)}</p>",
        svg(line),
        _legend(report),
        "<h2>Steps</h2>",
        _steps(report),
        _failures(report.failures),
        _notes(view),
        _spec(report.spec),
        f"<p class=meta>Made by <code>orch report</code> on {report.made_at:%Y-%m-%d %H:%M} UTC.</p>",
    ]
    title = f"{_text(view.get('name'))}: {_text(view['state'])}"
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name=viewport content="width=device-width, initial-scale=1"><meta name=referrer content=no-referrer>'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body>\n" + "\n".join(filter(None, body)) + "\n</body></html>\n"
    )


def _text(value: Any) -> str:
    return escape(one_line(str(value if value is not None else "-")))


def _time(at: Any) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def _tiles(report: Report) -> str:
    attempts = sum(len(step.get("attempts") or []) for step in report.view.get("steps") or [])
    tiles = [("took", duration(report.took_s)), ("attempts", str(attempts))]
    if report.gpu_hours["spent"]:
        tiles += [("GPU hours", f"{report.gpu_hours['spent']:.1f}"), ("of them lost", f"{report.gpu_hours['lost']:.1f}")]
    mean = mean_utilisation(report.timeline)
    if mean is not None:
        tiles.append(("mean GPU use", f"{mean:.0f}%"))
    words = "".join(f"<div><b>{escape(value)}</b>{escape(name)}</div>" for name, value in tiles)
    score = score_line(report.forecasts)
    return f"<div class=tiles>{words}</div>" + (f"<p class=meta>{escape(score)}</p>" if score else "")


def _legend(report: Report) -> str:
    items = "".join(f"<span><i style='background:{colour}'></i>{escape(name)}</span>" for name, colour in legend(report.timeline))
    return f"<p class=legend>{items}</p>" if items else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: frozenset[int] = frozenset()) -> str:
    """Cells are HTML already."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}{' class=n' if i in numbers else ''}>{cell}</{tag}>" for i, cell in enumerate(cells))

    return (
        f"<table><thead><tr>{line(head, 'th')}</tr></thead><tbody>"
        + "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
        + "</tbody></table>"
    )


def _steps(report: Report) -> str:
    rows = []
    for step in report.view.get("steps") or []:
        attempts = step.get("attempts") or [{}]
        for attempt in attempts:
            verdict = attempt.get("verdict") or {}
            what = f"<b>{_text(verdict['class'])}</b>: {_text(verdict.get('summary'))}" if verdict.get("class") else ""
            if attempt.get("changes"):
                what += f"<br>changed: <code>{_text(json.dumps(attempt['changes'], default=str))}</code>"
            rows.append(
                [
                    _text(step["name"]) + (" (service)" if step.get("service") else ""),
                    _text(attempt.get("n", "-")),
                    _text(attempt.get("state") or step.get("state")),
                    _text(_took(attempt, report.made_at)),
                    _text(exit_words(attempt["exit_status"])) if attempt.get("exit_status") is not None else "",
                    "<br>".join(_text(f"{bar_label(bar)} {bar_counts(bar)}") for bar in (attempt.get("bars") or [])[-3:]),
                    what,
                ]
            )
    head = ("Step", "#", "State", "Took", "Exit", "Progress", "What it died of, what was changed")
    return _table(head, rows, frozenset({1, 3}))


def _took(attempt: Mapping[str, Any], now: datetime) -> str:
    start, end = parse_time(attempt.get("started_at")), parse_time(attempt.get("ended_at"))
    return duration(((end or now) - start).total_seconds()) if start else "-"


def _failures(failures: Sequence[Failure]) -> str:
    if not failures:
        return ""
    parts = ["<h2>What failed</h2>"]
    for failure in failures:
        verdict = failure.why.get("verdict") or {}
        root = verdict.get("root_cause") or {}
        evidence = [one_line(str(item)) for item in failure.why.get("evidence") or []]
        changed = failure.why.get("changed_next")
        tail = "\n".join(clean_lines(failure.log_tail.decode("utf-8", "replace")))
        parts.append(
            f"<details open><summary>{_text(failure.step)}, attempt {failure.attempt}: <b>{_text(verdict.get('class') or 'unknown')}</b> "
            f"{_text(verdict.get('summary') or '')}</summary>"
            + (f"<p>line {_text(root.get('line'))}: <code>{_text(root.get('text'))}</code></p>" if root else "")
            + (f"<p>{_text(verdict.get('advice'))}</p>" if verdict.get("advice") else "")
            + (f"<p>next attempt: <code>{_text(json.dumps(changed, default=str))}</code></p>" if changed else "")
            + ("<ul>" + "".join(f"<li>{escape(item)}</li>" for item in evidence) + "</ul>" if evidence else "")
            + (f"<details><summary>end of the log</summary><pre>{escape(tail)}</pre></details>" if tail else "")
            + "</details>"
        )
    return "".join(parts)


def _notes(view: Mapping[str, Any]) -> str:
    notes = view.get("notes") or []
    if not notes:
        return ""
    return "<h2>Notes</h2>" + _table(("At", "What"), [[_text(note.get("at")), _text(note.get("text"))] for note in notes])


def _spec(spec: Mapping[str, Any]) -> str:
    """What ran. The spec holds names of secrets, never values; plain variables of the environment are left out all the same."""
    if not spec:
        return ""
    steps = [
        {key: value for key, value in step.items() if value not in (None, "", [], {}, 1) and key not in {"env", "exports"}}
        for step in spec.get("steps") or []
    ]
    shown = {key: spec.get(key) for key in ("workdir", "python", "release", "controller", "plan_sha256")} | {"steps": steps}
    text = json.dumps(shown, indent=2, ensure_ascii=False, default=str)
    text = "\n".join(clean_lines(text))
    return f"<h2>Plan</h2><details><summary>as it ran</summary><pre>{escape(text)}</pre></details>"
