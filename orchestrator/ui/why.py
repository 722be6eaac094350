"""`orch why` on one screen: what died, of what, how we know, and what happens next. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from orchestrator.ui.job import Json, changes_words, exit_words, lost_words, state_style, verdict_words
from orchestrator.ui.text import clean, one_line

MAX_EVIDENCE = 8


def why_lines(answer: Json) -> list[Text]:
    """All lines for one attempt."""
    where = f"job {one_line(str(answer.get('job')))}"
    if answer.get("host"):
        where += f" on {one_line(str(answer['host']))}"
    lines = [Text.assemble((where, "bold"))]
    if answer.get("state"):
        lines[0].append("  ").append(str(answer["state"]), state_style(str(answer["state"])))
    if answer.get("step"):
        head = f"step {one_line(str(answer['step']))}"
        if answer.get("attempt"):
            head += f", attempt {answer['attempt']}"
            later = [one for one in answer.get("attempts") or [] if one["step"] == answer["step"]][-1:]
            if later and later[0]["n"] != answer["attempt"]:
                head += f" (the last one, attempt {later[0]['n']}: {later[0]['state']})"
        ended = exit_words(answer.get("exit_status"))
        lines.append(Text(f"{head}{': ' + ended if ended else ''}"))
    lost = lost_words({"lost": answer.get("lost")})
    if lost:
        lines.append(Text(f"lost: {lost}", "bold red"))
    verdict = answer.get("verdict")
    if isinstance(verdict, Mapping):
        lines.extend(verdict_block(verdict))
    elif answer.get("attempt") is None:
        lines.append(Text(f"Nothing was started yet; see: orch status {answer.get('job')}"))
    elif not lost:
        lines.append(Text("No failure is recorded for this attempt."))
    evidence = [item for item in answer.get("evidence") or [] if item]
    if evidence:
        lines.extend([Text(""), Text("evidence", "bold")])
        lines.extend(Text(f"  {evidence_words(item)}") for item in evidence[:MAX_EVIDENCE])
        if len(evidence) > MAX_EVIDENCE:
            lines.append(Text(f"  ... {len(evidence) - MAX_EVIDENCE} more with --json"))
    lines.extend(next_block(answer))
    return lines


def verdict_block(verdict: Json) -> list[Text]:
    """Class, summary, root cause and advice."""
    lines = [
        Text(""),
        Text.assemble(
            (one_line(str(verdict.get("class") or "unknown")), "bold red"),
            f"  {one_line(str(verdict.get('summary') or ''))}",
        ),
    ]
    root = verdict.get("root_cause")
    if isinstance(root, Mapping):
        line = f"log line {root['line']}: " if root.get("line") else ""
        lines.append(Text(f"  {line}{clean(str(root.get('text') or ''))}"))
    if verdict.get("advice"):
        lines.append(Text(f"  -> {one_line(str(verdict['advice']))}", "green"))
    retry = {
        "yes": "trying again may help",
        "no": "trying again will not help",
        "after_change": "only after a change",
    }
    if verdict.get("retry") in retry:
        lines.append(Text(f"  retry: {retry[str(verdict['retry'])]}"))
    return lines


def evidence_words(item: Any) -> str:
    """One piece of evidence: text, or a line of the log."""
    if isinstance(item, Mapping):
        line = f"line {item['line']}: " if item.get("line") else ""
        return f"{line}{clean(str(item.get('text') or item.get('found') or dict(item)))}"
    return clean(str(item))


def next_block(answer: Json) -> list[Text]:
    """What the next attempt changes, all attempts, and where the bundle lies."""
    lines: list[Text] = [Text("")]
    changes = changes_words(answer.get("changed_next"))
    if changes:
        lines.append(Text(f"next attempt: {changes}"))
    if answer.get("reason"):
        lines.append(Text(f"decision: {one_line(str(answer['reason']))}"))
    attempts = answer.get("attempts") or []
    if len(attempts) > 1:
        for one in attempts:
            parts = [
                f"{one_line(str(one.get('step')))} attempt {one.get('n')}",
                str(one.get("state")),
                exit_words(one.get("exit_status")) if one.get("state") != "succeeded" else "",
                verdict_words(one) if one.get("class") else "",
                changes_words(one.get("changes")),
            ]
            lines.append(Text("  " + ", ".join(part for part in parts if part)))
    for one in answer.get("also_failed") or []:
        words = [f"{one_line(str(one.get('step')))}", exit_words(one.get("exit_status")), str(one.get("class") or "")]
        lines.append(Text(f"failed after it: {', '.join(one_line(word) for word in words if word)}"))
    if answer.get("offer"):
        lines.append(Text(one_line(str(answer["offer"]))))
    if answer.get("incident"):
        lines.append(Text(f"incident bundle on the host: {one_line(str(answer['incident']))}"))
        lines.append(Text(f"  bring it here: orch fetch {answer.get('job')} DEST --what logs"))
    return lines if len(lines) > 1 else []
