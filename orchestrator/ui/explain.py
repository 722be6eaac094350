"""`orch explain` in a few lines for people: where the log stands, when its bars will be done, or what it died of. Pure.

The input is the JSON of `orch explain`. The lines that prove a verdict are shown with their numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from orchestrator.ui.job import bar_counts, bar_percent
from orchestrator.ui.text import clean, duration, one_line
from remote_jobs.agent.phasebars import whole
from remote_jobs.agent.policy import AGAIN, CHANGE, STOP, usual

MAX_BARS = 6
MAX_EVIDENCE = 5
_STYLE = {"done": "green", "running": "cyan", "failed": "bold red"}
RETRY_WORDS = {
    "yes": "the same command may succeed",
    "no": "trying again will not help",
    "after_change": "only after a change",
}
IN_A_JOB = {
    AGAIN: "; in a job orch tries again by itself",
    CHANGE: "; in a job orch makes one by itself where it can, and tries again",
    STOP: "",
}
"""What the retry policy makes of a failure that asks for a change: a log alone does not say whether it was a job's."""
HOW = {"port_in_use": ", a built-in step with another port", "gpu_busy": ", once the GPUs are free"}


def explain_lines(answer: Mapping[str, Any]) -> list[Text]:
    """All lines: the state first, then phases, bars, cause and advice."""
    lines = [_headline(answer), *_phase_lines(answer.get("phases") or []), *_bar_lines(answer.get("bars") or [])]
    waiting = answer.get("waiting_for_input")
    if waiting:
        lines.append(Text(f"  line {waiting['line']}: {clean(waiting['text'])}", "yellow"))
    if answer.get("failure"):
        lines.extend(_failure_lines(answer["failure"]))
    return lines


def _headline(answer: Mapping[str, Any]) -> Text:
    failure = answer.get("failure")
    if failure:
        return Text.assemble(("failed", "bold red"), f": {failure['class']}, {one_line(failure['summary'])}")
    if answer.get("waiting_for_input"):
        return Text("waits for an answer on its standard input", "bold yellow")
    running = [phase for phase in answer.get("phases") or [] if phase["state"] == "running"]
    if running and running[-1]["name"] == "ready":
        return Text("ready", "bold green")
    open_bars = [bar for bar in answer.get("bars") or [] if bar["eta_s"]]
    if open_bars:
        bar = open_bars[-1]
        ahead = f"about {duration(bar['eta_s'])} to go"
        if bar.get("eta_low_s") is not None:
            ahead += f" ({duration(bar['eta_low_s'])} to {duration(bar['eta_high_s'])}, confidence {bar['eta_confidence']})"
        return Text.assemble(("no failure", "green"), f"; {_name(bar)}: {ahead}")
    return Text("no failure", "green")


def _phase_lines(phases: list[Mapping[str, Any]]) -> list[Text]:
    if not phases:
        return []
    line = Text("phases: ")
    for number, phase in enumerate(phases[-12:]):
        took = f" {duration(phase['took_s'])}" if phase.get("took_s") is not None else ""
        line.append(", " if number else "").append(f"{one_line(phase['name'])}{took}", _STYLE.get(phase["state"], ""))
        if phase["state"] != "done":
            line.append(f" ({phase['state']}{_counts(phase)})")
    return [line]


def _counts(phase: Mapping[str, Any]) -> str:
    """``, 17/25 68%`` of a phase that says how far it is: any program may have printed the numbers."""
    done, total = whole(phase.get("done")), whole(phase.get("total"))
    if done is None:
        return ""
    bar = {"done": done, "total": total or None}
    percent = bar_percent(bar)
    return f", {bar_counts(bar)}" + ("" if percent is None else f" {percent:.0f}%")


def _name(bar: Mapping[str, Any]) -> str:
    name = one_line(bar["label"]) or "bar"
    return f"{name} #{bar['instance']}" if bar["instance"] > 1 else name


def _bar_lines(bars: list[Mapping[str, Any]]) -> list[Text]:
    lines = []
    shown = bars[-MAX_BARS:]
    if len(bars) > len(shown):
        lines.append(Text(f"  ({len(bars) - len(shown)} earlier bars with --json)"))
    for bar in shown:
        total = "" if bar["total"] is None else f"/{bar['total']}"
        parts = [f"{bar['done']}{total}"]
        if bar["percent"] is not None:
            parts.append(f"{bar['percent']}%")
        if bar["elapsed_s"] is not None:
            parts.append(f"after {duration(bar['elapsed_s'])}")
        if bar["s_per_item"]:
            parts.append(f"{bar['s_per_item']:g} s each")
        if bar["eta_s"]:
            printed = "" if bar["remaining_s"] is None else f", it says {duration(bar['remaining_s'])}"
            parts.append(f"{duration(bar['eta_s'])} to go{printed}")
        worker = f" [{one_line(bar['worker'])}]" if bar.get("worker") else ""
        lines.append(Text(f"  line {bar['line']}: {_name(bar)}{worker} {', '.join(parts)}"))
    return lines


def _failure_lines(failure: Mapping[str, Any]) -> list[Text]:
    lines = []
    root = failure.get("root_cause")
    if root:
        lines.append(Text(f"  line {root['line']}: {clean(root['text'])}", "bold"))
    else:
        lines.append(Text("  the log does not hold the cause"))
    proof = [clean(item) for item in failure.get("evidence") or []]
    if root and proof and proof[0].startswith(f"line {root['line']}:"):
        proof = proof[1:]
    lines.extend(Text(f"  {item}") for item in proof[:MAX_EVIDENCE])
    lines.append(Text(f"  -> {one_line(failure['advice'])}", "green"))
    lines.append(Text(f"  retry: {_retry_words(failure)} (rule {failure['signature']})"))
    return lines


def _retry_words(failure: Mapping[str, Any]) -> str:
    words = str(RETRY_WORDS.get(failure["retry"], failure["retry"]))
    if failure["retry"] != "after_change":
        return words
    return words + IN_A_JOB[usual(failure)[0]] + HOW.get(failure["class"], "")
