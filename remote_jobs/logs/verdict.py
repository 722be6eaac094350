"""Choose the verdict: root cause before symptom, symptom before wrapper, never a victim; and nothing for a healthy log.

Why this file exists: retries are decided here. Input is plain data (findings, exit status, signs of finished work),
output is the design's ``failure`` object or None. Pure functions.

Must not import anything but the standard library and its siblings; no I/O.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Tuple

from remote_jobs.logs.evidence import STALE_ACTIVITY, Finding
from remote_jobs.logs.rules import CLASSES
from remote_jobs.logs.rules.context import WORK
from remote_jobs.logs.rules.rule import (
    ALWAYS,
    CATCH_ALL,
    CAUSE,
    COLLECTIVE,
    GENERIC,
    HARD,
    NEVER,
    SEEN_SOFT_KILL,
    SOFT_KILL,
    STRONG_KILL,
    SYMPTOM,
    WRAPPER,
)

_SIGNALS = {
    1: ("killed", "SIGHUP: the terminal or SSH session that it hung on closed"),
    2: ("killed", "SIGINT: someone pressed Ctrl-C"),
    3: ("killed", "SIGQUIT"),
    4: ("code_incompatibility", "SIGILL: a library was built for another CPU"),
    6: ("unknown", "SIGABRT: native code gave up"),
    7: ("shm", "SIGBUS: a mapped page could not be provided, usually a full /dev/shm"),
    8: ("segfault", "SIGFPE: native code divided by zero"),
    9: ("killed", "SIGKILL: someone's kill -9, or the OOM killer"),
    11: ("segfault", "SIGSEGV: native code crashed"),
    14: ("killed", "SIGALRM"),
    15: ("killed", "SIGTERM: someone asked it to stop"),
    24: ("killed", "SIGXCPU: the CPU time limit was reached"),
    25: ("disk_full", "SIGXFSZ: the file size limit was reached"),
}
_SHELL_CODES = {
    124: ("killed", "exit status 124: `timeout` ended it"),
    126: ("config", "exit status 126: the program could not be executed"),
    127: ("missing_file", "exit status 127: the program was not found"),
}
TALKS_ON = 6
"""Units of work (INFO lines) behind a raised exception that no wrapper follows: the program goes on talking."""
LAST_WORDS = 30
"""Lines at the end in which even a warning may name the cause, once the process is known to have failed."""


_GOT_SIGNAL = re.compile(r"got signal: (\d{1,2})\b")


@dataclass
class Circumstances:
    """Everything besides the findings that a verdict depends on."""

    exit_status: Optional[int] = None
    last_line: int = 0
    activity: int = 0
    done_line: Optional[int] = None
    stopped_line: Optional[int] = None
    main_bar_done_line: Optional[int] = None
    nan_tail: Optional[Tuple[int, str]] = None  # the last metric lines all show NaN: (first such line, its text)
    prompt: Optional[Tuple[int, str]] = None
    host: List[str] = field(default_factory=list)  # dmesg or memory.events lines from the time of the end


def signal_of(exit_status: Optional[int]) -> Optional[int]:
    """Signal behind an exit status: -9 and 137 are both 9; None for a normal exit."""
    if exit_status is None:
        return None
    if exit_status < 0:
        return -exit_status
    if exit_status > 128 and exit_status - 128 in _SIGNALS:
        return exit_status - 128
    return None


def judge(findings: List[Finding], around: Circumstances) -> Optional[Dict[str, Any]]:
    """The ``failure`` object of a log, or None when nothing failed (or nothing shows that it ended)."""
    if around.exit_status == 0:
        return _cut_short(findings, around)
    if around.exit_status is None:
        if around.prompt is not None and not _ended_after(findings, around.prompt[0]):
            return _prompt(around.prompt)
        if not _shows_end(findings, around):
            return _nan(around.nan_tail) if around.nan_tail is not None else None
    best = _root_cause(findings, around)
    vague = best is None or best.rule.rank >= WRAPPER or best.rule.failure_class == "unknown"
    if vague and around.nan_tail is not None:
        return _nan(around.nan_tail)
    host_oom = _host_oom(around)
    signal = signal_of(around.exit_status)
    if host_oom and (best is None or best.rule.failure_class in {"killed", "unknown", "nccl"} or signal == 9):
        return _failure("host_oom", "host-oom-killer", "The kernel's OOM killer ended a process.", None, [host_oom])
    if best is None or (not best.ends and signal not in (None, 6) and best.rule.rank != HARD):
        if around.prompt is not None:
            return _prompt(around.prompt)
        return _by_status(around, findings)
    if best.rule.rank >= WRAPPER:
        return _only_wrappers(best, findings, around)
    return _from_finding(best, findings, around)


# ------------------------------------------------------------------------------------------------- does it show an end


def _ended_after(findings: List[Finding], line: int) -> bool:
    return any(found.ends and found.line > line for found in findings)


def _shows_end(findings: List[Finding], around: Circumstances) -> bool:
    """Without an exit status: do the findings show an end that nothing healthy follows?"""
    ends = [found for found in findings if found.ends]
    if not ends:
        return _last_words(findings, around)
    last = ends[-1]
    hard = any(found.rule.rank <= HARD for found in ends)
    if around.done_line is not None and around.done_line > last.line:
        return False
    if around.activity - last.activity >= 3 * WORK and not (hard and around.activity - last.activity < STALE_ACTIVITY):
        return False
    if last.rule.shows_end != ALWAYS and around.activity - last.activity >= TALKS_ON:
        return False
    if around.last_line - last.line > 400 and last.rule.rank < WRAPPER:
        return False
    marks = [line for line in (around.done_line, around.main_bar_done_line, around.stopped_line) if line is not None]
    if marks and all(found.line > min(marks) for found in ends):
        explicit = around.done_line is not None and around.done_line < ends[0].line
        if all(_is_teardown(found, explicit=explicit) for found in ends):
            return False
    return True


def _last_words(findings: List[Finding], around: Circumstances) -> bool:
    """A named cause on the very last lines (`cp: ...: No space left on device`), with nothing behind it.

    A line logged as an error may stand a little further up; side services (metrics, uploads) fail over the network
    without anybody minding, so those count only at the very end.
    """
    for found in findings:
        loud = found.loud and found.rule.failure_class != "network"
        if found.line < around.last_line - (LAST_WORDS if loud else 3):
            continue
        named = found.rule.rank < STRONG_KILL or (loud and found.rule.failure_class == "nccl")
        quiet = around.activity - found.activity < WORK
        if named and quiet and not found.handled and found.rule.shows_end != NEVER:
            return True
    return False


def _is_teardown(found: Finding, *, explicit: bool) -> bool:
    """Is this how programs fall apart once their work is done?"""
    if found.rule.teardown_noise:
        return True
    return explicit and (found.rule.rank >= GENERIC or found.rule.failure_class in {"nccl", "network"})


# ---------------------------------------------------------------------------------------------------------- choosing


def _root_cause(findings: List[Finding], around: Circumstances) -> Optional[Finding]:
    usable = [found for found in findings if not _stale(found, findings, around)]
    ends = [found for found in usable if found.ends]
    causes = [found for found in ends if found.rule.rank < WRAPPER]
    pool = causes or [found for found in usable if found.rule.rank < WRAPPER and not found.handled]
    if not causes and around.exit_status is not None:
        recent = around.last_line - LAST_WORDS
        pool = pool or [found for found in usable if found.rule.rank < WRAPPER and found.line >= recent]
    if not pool:
        return ends[0] if ends else (usable[0] if usable and around.exit_status is not None else None)
    best = min(pool, key=_order)
    earlier = [found for found in usable if found.line < best.line and not found.handled]
    if best.rule.shows_end == ALWAYS and best.rule.failure_class == "unknown":
        # C++ or Rust gave up: what was printed right before says why, if anything does.
        said = [found for found in earlier if found.rule.rank < STRONG_KILL and found.line >= best.line - LAST_WORDS]
        if said:
            return min(said, key=_order)
    if best.rule.rank >= CAUSE:
        for found in earlier:
            if found.rule.rank == STRONG_KILL and found.ends and best.rule.failure_class in {"network", "nccl", "unknown"}:
                return found
            soft = found.rule.rank in (SOFT_KILL, SEEN_SOFT_KILL) and found.rule.failure_class == "killed"
            generic = GENERIC <= found.rule.rank <= CATCH_ALL and found.ends and found.clean
            if generic and COLLECTIVE <= best.rule.rank <= SYMPTOM:
                return found  # the rank that raised first; its peers only lost the connection
            if soft and best.rule.failure_class != "killed" and (best.rule.rank >= SYMPTOM or found.ends):
                return found
    return best


def _order(found: Finding) -> Tuple[int, int, int]:
    rank = found.rule.rank
    # Exceptions known by type only are equals: the first in time wins. So are the CAUSE rules' near ranks.
    band = GENERIC if GENERIC <= rank <= SEEN_SOFT_KILL else CAUSE if CAUSE <= rank < STRONG_KILL else rank
    return (band, 0 if found.clean or band != CAUSE else 1, found.line)


def _stale(found: Finding, findings: List[Finding], around: Circumstances) -> bool:
    """Much healthy work lies between this finding and the end: the program got over it."""
    if found.rule.rank == HARD:
        return False
    last = next((other for other in reversed(findings) if other.ends), None)
    reference = last.activity if last is not None else around.activity
    return reference - found.activity > STALE_ACTIVITY


def _cut_short(findings: List[Finding], around: Circumstances) -> Optional[Dict[str, Any]]:
    """Exit status 0: only a log that itself says that the work is unfinished is a failure."""
    for found in findings:
        if not found.rule.cut_short or found.handled:
            continue
        if around.done_line is not None and around.done_line > found.line:
            continue
        return _from_finding(found, findings, around)
    return None


# --------------------------------------------------------------------------------------------------------- answering


def _failure(
    failure_class: str,
    signature: str,
    summary: str,
    root: Optional[Tuple[int, str]],
    evidence: List[str],
    advice: str = "",
    retry: str = "",
) -> Dict[str, Any]:
    default_retry, default_advice = CLASSES[failure_class]
    return {
        "class": failure_class,
        "retry": retry or default_retry,
        "root_cause": None if root is None else {"line": root[0], "text": root[1]},
        "signature": signature,
        "summary": summary,
        "advice": advice or default_advice,
        "evidence": evidence,
    }


def _quote(found: Finding) -> str:
    return "line {}: {}".format(found.line, found.text.strip()[:400])


def _evidence(best: Finding, findings: List[Finding], around: Circumstances) -> List[str]:
    lines = [_quote(best)]
    for found in findings:
        if found.ends and found.rule.id != best.rule.id and len(lines) < 4:
            lines.append(_quote(found))
    if around.exit_status is not None:
        lines.append("exit status {}".format(around.exit_status))
    return lines


def _from_finding(best: Finding, findings: List[Finding], around: Circumstances) -> Dict[str, Any]:
    rule = best.rule
    first = rule.proves.split(" ", 1)[0]
    start = first if "_" in first else first[:1].upper() + first[1:]  # a parameter is written as it is typed
    summary = start + rule.proves[len(first) :] + "."
    if best.worker:
        summary = "{} (seen in {})".format(summary[:-1], best.worker) + "."
    asked = _GOT_SIGNAL.search(best.text)
    if asked is not None and int(asked.group(1)) in _SIGNALS:
        summary += " {}.".format(_SIGNALS[int(asked.group(1))][1])
    return _failure(
        rule.failure_class,
        rule.id,
        summary,
        (best.line, best.text.strip()),
        _evidence(best, findings, around),
        rule.advice_text,
        rule.retry_advice,
    )


def _only_wrappers(best: Finding, findings: List[Finding], around: Circumstances) -> Dict[str, Any]:
    evidence = _evidence(best, findings, around)
    if any(found.rule.id in {"vllm-init-wrapper", "vllm-dead-wrapper", "sglang-wrapper"} for found in findings):
        return _failure(
            "killed",
            "engine-vanished",
            "The engine stopped without any worker naming an error: a process of it was killed (kill -9 or the OOM killer).",
            None,
            evidence,
        )
    if signal_of(around.exit_status) is not None:
        return _by_status(around, findings)
    return _failure("unknown", best.rule.id, "A child process failed, and the log does not hold its cause.", None, evidence)


def _by_status(around: Circumstances, findings: List[Finding]) -> Dict[str, Any]:
    """Nothing in the log names a cause: the exit status is all there is."""
    status = around.exit_status
    evidence = [] if status is None else ["exit status {}".format(status)]
    signal = signal_of(status)
    if signal is not None:
        failure_class, meaning = _SIGNALS.get(signal, ("killed", "signal {}".format(signal)))
        summary = "The log does not name a cause; the process ended by {}.".format(meaning)
        advice = CLASSES[failure_class][1]
        return _failure(failure_class, "signal-{}".format(signal), summary, None, evidence, advice)
    if status in _SHELL_CODES:
        failure_class, meaning = _SHELL_CODES[status]
        return _failure(failure_class, "status-{}".format(status), "The log does not name a cause; {}.".format(meaning), None, evidence)
    evidence += [_quote(found) for found in findings[-3:]]
    return _failure("unknown", "no-cause", "The process failed and the log does not say why.", None, evidence)


def _prompt(prompt: Tuple[int, str]) -> Dict[str, Any]:
    line, text = prompt
    return _failure(
        "waiting_for_input",
        "prompt",
        "The program waits for an answer that nobody can give.",
        (line, text),
        ["line {}: {}".format(line, text)],
    )


def _nan(tail: Tuple[int, str]) -> Dict[str, Any]:
    line, text = tail
    return _failure(
        "numerical",
        "nan-metrics",
        "The loss became NaN and stayed so.",
        (line, text),
        ["line {}: {}".format(line, text[:400])],
    )


def _host_oom(around: Circumstances) -> Optional[str]:
    for text in around.host:
        low = text.lower()
        if "out of memory" in low or "oom-kill" in low or "oom_kill" in low:
            return text
    return None
