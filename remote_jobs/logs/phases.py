"""Phases of a job, read from the marker lines of each program and from the product's own ``::orch`` lines.

Why this file exists: "100 % of the shards" is not "ready"; between them lie weight post-processing, compilation,
profiling, graph capture and warm-up. Each row of the table says which text starts or ends which phase. A phase also
ends when a later one of the same flow starts. The texts are those of vLLM 0.11 to 0.33, speculators 0.3 to 0.9,
transformers' Trainer and torchrun (see the facts about log formats).

Must not import anything but the standard library and `protocol`; no I/O.
"""

from __future__ import annotations

import re
from typing import Any, Dict, List, NamedTuple, Optional

from remote_jobs.logs.bars import MAX_SECONDS
from remote_jobs.protocol import MARKER_LINE, read_marker

START = "start"
END = "end"
DONE_AT_ONCE = "at once"


class PhaseRule(NamedTuple):
    """``pattern`` (searched when ``needle`` is in the line) starts or ends ``phase``; group ``took`` is its duration."""

    phase: str
    effect: str
    needle: str
    pattern: str


def _row(phase: str, effect: str, needle: str, pattern: str = "") -> PhaseRule:
    return PhaseRule(phase, effect, needle, pattern or re.escape(needle))


TABLE = (
    # vLLM server and offline
    _row("start", START, "non-default args: "),
    _row("engine_start", START, "LLM engine (v", r"Initializing a (?:V\d )?LLM engine \(v"),
    _row("load_weights", START, "Starting to load model"),
    _row("load_weights", START, "checkpoint shards", r"Loading \w+ checkpoint shards.*:\s+0% |Loading checkpoint shards:\s+0%"),
    _row("prefetch", START, "Prefetching checkpoint files into page cache started"),
    _row("prefetch", END, "Prefetching checkpoint files into page cache finished", r"finished in (?P<took>[\d.]+)s"),
    _row("load_weights", END, "Loading weights took ", r"Loading weights took (?P<took>[\d.]+) seconds"),
    _row("load_weights", END, "Model loading took ", r"Model loading took [\d.]+ Gi?B(?: memory)? and (?P<took>[\d.]+) seconds"),
    _row("load_drafter", START, "Loading drafter model"),
    _row("compile", START, "for vLLM's torch.compile"),
    _row("compile", END, "torch.compile", r"torch\.compile (?:takes|took|and initial profiling\S* run together took) (?P<took>[\d.]+) s in total"),
    _row("profile", START, "Initial profiling/warmup run took "),
    _row("profile", END, "Available KV cache memory"),
    _row("kv_cache", DONE_AT_ONCE, "KV cache size: "),
    _row("warmup", START, "JIT kernel warmup starting"),
    _row("warmup", START, "DeepGEMM warmup", r"DeepGEMM warmup:\s+0%"),
    _row("warmup", END, "JIT kernel warmup finished", r"finished in (?P<took>[\d.]+) s"),
    _row("graph_capture", START, "Capturing ", r"Capturing .*(?:CUDA graphs?|batches).*:\s+0%"),
    _row("graph_capture", END, "Graph capturing finished", r"Graph capturing finished in (?P<took>[\d.]+) secs"),
    _row("graph_capture", END, "Capture cuda graph end"),
    _row("init_engine", DONE_AT_ONCE, " took ", r"init engine \(.*took (?P<took>[\d.]+) s"),
    _row("serve_start", START, "Starting vLLM", r"Starting vLLM (?:API )?server"),
    _row("ready", START, "Application startup complete"),
    _row("ready", START, "The server is fired up and ready to roll"),
    _row("shutdown", START, "[shutdown] ", r"\[shutdown\] (?:API server|EngineCore|MPClient|Process manager)"),
    _row("shutdown", START, "Shutting down FastAPI"),
    _row("extract", START, "Processed prompts", r"Processed prompts:\s+0%"),
    # sglang
    _row("load_weights", START, "Load weight begin"),
    _row("load_weights", END, "Load weight end"),
    # speculators and own steps
    _row("prepare", START, "Starting dataset preprocessing"),
    _row("prepare", END, "Dataset preprocessing complete"),
    _row("save_dataset", START, "Writing dataset to"),
    _row("extract", START, "EAGLE Offline Data Generation"),
    _row("extract", END, "Data generation complete"),
    _row("generate", START, "Generating responses", r"Generating responses:\s+0%"),
    _row("generate", END, "Pipeline complete in", r"Pipeline complete in (?P<took>[\d.]+)s"),
    _row("train", START, "Training epoch ", r"Training epoch 1/\d+ started"),
    _row("train", END, "Training epoch ", r"Training epoch (?P<n>\d+)/(?P=n) completed"),
    _row("validate", START, "Validation epoch ", r"Validation epoch \d+/\d+ started"),
    _row("validate", END, "Validation epoch ", r"Validation epoch \d+/\d+ completed"),
    _row("save_checkpoint", START, "Saving checkpoint to"),
    _row("save_checkpoint", END, "Checkpoint saved to"),
    # transformers' Trainer, torchrun
    _row("load_weights", START, "Loading weights:", r"Loading weights:\s+0%"),
    _row("train", START, "***** Running training *****"),
    _row("train", START, "Total optimization steps = "),
    _row("evaluate", START, "***** Running Evaluation *****"),
    _row("evaluate", START, "***** Running evaluation *****"),
    _row("save_checkpoint", START, "Saving model checkpoint to"),
    _row("train", END, "train_runtime", r"['\"]train_runtime['\"]: ['\"]?(?P<took>[\d.]+)"),
    _row("train", END, "Training completed."),
)
"""All marker texts. Within one line the first matching row counts."""

_COMPILED = [(rule, re.compile(rule.pattern)) for rule in TABLE]
# A phase that runs beside the flow (training goes on around it) neither ends the others nor is ended by them.
_BESIDE = frozenset({"prefetch", "validate", "save_checkpoint", "evaluate"})


ANCHORS = (
    b"torch.compile", b"llm engine", b"starting", b" took ", b" epoch ", b"kv cache size", b"load weight", b"default args",
    b"checkpoint saved", b"writing dataset", b"saving ", b"loading drafter", b"cuda graph end", b"optimization steps",
    b"***** run", b"eagle off", b"fired up", b"page cache", b"available kv", b"complete", b"finished", b"shut",
    b"train_runtime", b"::orch ",
)
"""Texts to look for in a block before any line is looked at (lower case); every needle of the table contains one, but those
that a bar's first state shows (`0%`): each new bar is looked at anyway."""


def _seconds(text: Optional[str]) -> Optional[float]:
    """A duration as printed, or None when it is none that can be meant."""
    if not text or text.count(".") > 1 or text == ".":
        return None
    seconds = float(text)
    return seconds if seconds <= MAX_SECONDS else None


class Phase:
    """A stretch of an attempt."""

    __slots__ = ("ended_line", "name", "progress", "started_line", "state", "took_s")

    def __init__(self, name: str, line: int) -> None:
        self.name = name
        self.state = "running"
        self.started_line = line
        self.ended_line: Optional[int] = None
        self.took_s: Optional[float] = None
        self.progress: Optional[Dict[str, Any]] = None

    def to_json(self) -> Dict[str, Any]:
        """As the design's `explain` prints it; own markers add their counts."""
        record: Dict[str, Any] = {
            "name": self.name,
            "state": self.state,
            "started_line": self.started_line,
            "ended_line": self.ended_line,
            "took_s": self.took_s,
        }
        if self.progress:
            record.update(self.progress)
        return record


class PhaseTracker:
    """Follow the phases of one log. Bounded: at most ``limit`` phases, repeated ones are folded into the last."""

    def __init__(self, limit: int = 200) -> None:
        self.phases: List[Phase] = []
        self.changes = 0
        self._limit = limit

    @property
    def names(self) -> List[str]:
        """Phases seen, in order."""
        return [phase.name for phase in self.phases]

    def take(self, text: str, line: int) -> bool:
        """Look at one line; True when a phase changed."""
        if text.startswith(MARKER_LINE):
            return self._marker(text[len(MARKER_LINE) :], line)
        for rule, pattern in _COMPILED:
            if rule.needle not in text:
                continue
            match = pattern.search(text)
            if match is None:
                continue
            took = match.groupdict().get("took")
            took_s = _seconds(took)
            if rule.effect == START:
                return self._start(rule.phase, line)
            if rule.effect == END:
                return self._end(rule.phase, line, took_s)
            changed = self._start(rule.phase, line)
            return self._end(rule.phase, line, took_s) or changed
        return False

    def _open(self, name: str) -> Optional[Phase]:
        for phase in reversed(self.phases):
            if phase.name == name:
                return phase if phase.state == "running" else None
        return None

    def _start(self, name: str, line: int) -> bool:
        if self._open(name) is not None:
            return False
        if self.phases and self.phases[-1].name == name and name not in _BESIDE and line - (self.phases[-1].ended_line or line) < 3:
            return False  # the second rank says the same
        if name not in _BESIDE:
            for phase in self.phases:
                if phase.state == "running" and phase.name not in _BESIDE:
                    phase.state = "done"
                    phase.ended_line = line
        self.phases.append(Phase(name, line))
        if len(self.phases) > self._limit:
            del self.phases[self._limit // 4]
        self.changes += 1
        return True

    def _end(self, name: str, line: int, took_s: Optional[float]) -> bool:
        phase = self._open(name)
        if phase is None:
            return False
        phase.state = "done"
        phase.ended_line = line
        phase.took_s = took_s
        self.changes += 1
        return True

    def _marker(self, text: str, line: int) -> bool:
        marker = read_marker(text)
        if marker is None:
            return False
        name, state = marker["phase"], marker["state"]
        changed = self._start(name, line)
        phase = self._open(name)
        if phase is None:
            return changed
        counts: Dict[str, Any] = {key: marker[key] for key in ("done", "total") if key in marker}
        if counts:
            phase.progress = {**(phase.progress or {}), **counts}
        if state in ("done", "failed"):
            self._end(name, line, None)
            phase.state = state
            changed = True
        return changed

    def finish(self, *, failed: bool) -> None:
        """The log ended with a failure: the phase that was running failed."""
        for phase in self.phases:
            if phase.state == "running" and failed:
                phase.state = "failed"
