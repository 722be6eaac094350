"""What one failure rule is, and the failure classes with their default advice.

Why this file exists: rules are data. Each says which text it reads, what that text proves, and what to do about it,
and carries a test line, so that a rule can be judged and changed without reading the code that applies it.

Must not import anything but the standard library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Dict, List, Optional, Pattern, Tuple

HARD = 0
"""Rank of proofs from below the program (kernel, driver, container): they outrank whatever the program says."""
CAUSE = 10
"""Rank of a specific cause, named by the program that met it."""
BROAD_CAUSE = 11
"""Rank of a cause that a broad text names: read where no specific rule speaks for the line, and then its equal."""
STRONG_KILL = 15
"""Rank of the proof that a process was killed from outside (-9): above what its peers then complain about."""
LAUNCHER = 16
"""Rank of a launcher's word that a rank ended by a signal: it saw the end, not the reason."""
COLLECTIVE = 19
"""Rank of the error of a collective itself: says more than what its peers print."""
SYMPTOM = 20
"""Rank of what peers of a dead or hung process print: a cause only when nothing better is there."""
GENERIC = 30
"""Rank of an exception that is known by its type alone."""
CATCH_ALL = 31
"""Rank of an exception that no rule knows: read last, and then an equal of those known by type."""
SOFT_KILL = 32
"""Rank of "someone asked us to stop" (TERM, HUP, INT): wins over later complaints, never over earlier ones."""
SEEN_SOFT_KILL = 33
"""Rank of such an end as another process tells it."""
WRAPPER = 50
"""Rank of lines that only say that something else failed."""

ALWAYS = "always"
"""The text itself shows that a process of the job ended."""
RAISED = "raised"
"""Shows an end only as the last line of an uncaught traceback, or logged as an error by a process that then stops."""
NEVER = "never"
"""Supports a verdict when the end is known from elsewhere."""

YES = "yes"
NO = "no"
AFTER_CHANGE = "after_change"

CLASSES: Dict[str, Tuple[str, str]] = {
    "gpu_oom": (AFTER_CHANGE, "Use less GPU memory: smaller batch or sequence length, more tensor parallelism, lower gpu_memory_utilization, gradient checkpointing or quantisation."),
    "host_oom": (AFTER_CHANGE, "The host's RAM (or the cgroup limit) ran out: fewer workers or ranks loading at once, a smaller prefetch or cache, or a larger memory limit."),
    "gpu_busy": (AFTER_CHANGE, "Another process holds the GPU: find it with `orch gpus`, wait for it or end it, then run the same command."),
    "kv_cache_too_small": (AFTER_CHANGE, "Lower max_model_len, raise gpu_memory_utilization, or spread the model over more GPUs."),
    "nccl": (YES, "Collective communication broke: try once more; if it repeats, look for the rank that is missing, and at NVLink, InfiniBand and NCCL_SOCKET_IFNAME (NCCL_DEBUG=INFO)."),
    "gpu_hardware": (NO, "The GPU itself failed: take it out of service (nvidia-smi -q, dmesg), reset it or reboot the host, and run elsewhere."),
    "driver": (AFTER_CHANGE, "The NVIDIA driver does not fit or is not running: check nvidia-smi, the driver version against the CUDA build, and nvidia-fabricmanager."),
    "code_incompatibility": (AFTER_CHANGE, "The code and an installed library do not fit together: pin the version it was written for, or patch it."),
    "import_error": (AFTER_CHANGE, "Install the missing module, or repair the environment that the job runs in."),
    "config": (AFTER_CHANGE, "Correct the named setting; the same command fails the same way."),
    "data_corrupt": (AFTER_CHANGE, "A file is damaged or cut short: fetch or make it again (compare sizes with the source), then retry."),
    "missing_file": (AFTER_CHANGE, "A file or folder is not there: check the path on the host where the job runs."),
    "auth": (AFTER_CHANGE, "Access was refused: set a valid token or key, or accept the licence of the repository."),
    "network": (YES, "A network request failed: try again after a pause; offline hosts need local copies and HF_HUB_OFFLINE=1."),
    "disk_full": (AFTER_CHANGE, "Free space (or raise the quota) on the disk that was written to, then retry."),
    "filesystem": (YES, "The file system failed under the job: check the mount (NFS, Lustre), then retry."),
    "port_in_use": (AFTER_CHANGE, "Another process listens on this port: end it or choose another port."),
    "shm": (AFTER_CHANGE, "Shared memory ran out: give the container more (--shm-size or --ipc=host), empty /dev/shm, or use fewer loader workers."),
    "killed": (YES, "The process was ended from outside: find out who did it (scheduler, another user, OOM killer), then run it again, from the last checkpoint if there is one."),
    "segfault": (YES, "Native code crashed: try once more; if it repeats, change the version of the library in the stack, or run with PYTHONFAULTHANDLER=1."),
    "device_assert": (AFTER_CHANGE, "A kernel refused its input or touched wrong memory: run with CUDA_LAUNCH_BLOCKING=1; look for token or label ids beyond the table."),
    "numerical": (AFTER_CHANGE, "Numbers became NaN or infinite: lower the learning rate, clip gradients, use bf16, check the data, and resume from an earlier checkpoint."),
    "waiting_for_input": (AFTER_CHANGE, "The program asks a question that nobody can answer: pass the flag or variable that answers it."),
    "unknown": (YES, "No rule knows this: read the end of the log."),
}
"""Failure class -> (default retry advice, what to do)."""

FAILURE_CLASSES = tuple(CLASSES)


@dataclass(frozen=True)
class Rule:
    """One row of the table. ``pattern`` is searched in one line without its prefix and colours."""

    id: str
    failure_class: str
    pattern: str
    proves: str
    example: str
    source: str
    advice: str = ""
    retry: str = ""
    rank: int = CAUSE
    shows_end: str = RAISED
    teardown_noise: bool = False  # after finished work this is only how the program falls apart
    cut_short: bool = False  # says itself that the work is unfinished, whatever the exit status

    def compiled(self) -> Pattern[str]:
        """The pattern, ready to search."""
        return re.compile(self.pattern)

    @property
    def retry_advice(self) -> str:
        """yes, no or after_change."""
        return self.retry or CLASSES[self.failure_class][0]

    @property
    def advice_text(self) -> str:
        """What to change."""
        return self.advice or CLASSES[self.failure_class][1]


def needles_of(pattern: str) -> Tuple[str, ...]:
    """Lower-case texts of which every match of ``pattern`` contains at least one; () when none are certain.

    A cheap pre-filter: ``needle in line`` costs a twentieth of a regular expression. Understands the subset of the
    syntax that the table uses: literals, classes, groups, alternatives, quantifiers, look-arounds.
    """
    options, at = _alternatives(pattern, 0)
    if at != len(pattern):
        raise ValueError("cannot read the pattern {!r}".format(pattern))
    return tuple(sorted(set(options or ())))


def _alternatives(pattern: str, at: int) -> Tuple[Optional[List[str]], int]:
    found: Optional[List[str]] = []
    while True:
        branch, at = _sequence(pattern, at)
        found = None if found is None or branch is None else found + branch
        if at >= len(pattern) or pattern[at] == ")":
            return found, at
        at += 1  # the bar


def _sequence(pattern: str, at: int) -> Tuple[Optional[List[str]], int]:
    """The best single requirement of a sequence: a run of literals, or a group's alternatives."""
    best: Optional[List[str]] = None
    run = ""
    while at < len(pattern) and pattern[at] not in "|)":
        options: Optional[List[str]] = None
        literal = ""
        char = pattern[at]
        if char == "(":
            inner = at + 1
            skip = pattern.startswith(("?!", "?=", "?<", "?P="), inner)
            if pattern.startswith("?", inner):
                inner = _behind_group_head(pattern, inner)
            options, at = _alternatives(pattern, inner)
            options = None if skip else options
            at += 1
        elif char == "[":
            at += 2 if pattern[at + 1] == "^" else 1
            at += pattern[at] == "]"  # as the first of its class it is one of its characters
            while pattern[at] != "]":
                at += 2 if pattern[at] == "\\" else 1
            at += 1
        elif char == "\\":
            literal = pattern[at + 1] if not pattern[at + 1].isalnum() else ""
            at += 2
        else:
            literal = "" if char in ".^$" else char
            at += 1
        optional = pattern[at : at + 1] in {"?", "*"} or pattern.startswith("{0", at)
        repeated = pattern[at : at + 1] in {"+", "{"}
        if literal and not optional:
            run += literal
        best = _better(best, options if options and not optional else None)
        if not literal or optional or repeated:
            best = _better(best, [run.lower()] if run else None)
            run = ""
        while at < len(pattern) and pattern[at] in "?*+{":
            at = pattern.index("}", at) + 1 if pattern[at] == "{" else at + 1
    return _better(best, [run.lower()] if run else None), at


def _behind_group_head(pattern: str, at: int) -> int:
    """Behind ``?:``, ``?P<name>``, ``?=`` ...; behind ``?i`` (a flag group has nothing inside)."""
    if pattern.startswith("?P<", at):
        return pattern.index(">", at) + 1
    if pattern.startswith(("?<!", "?<="), at):
        return at + 3
    if pattern.startswith(("?:", "?=", "?!"), at):
        return at + 2
    at += 1
    while pattern[at].isalpha():
        at += 1
    return at + 1 if pattern[at] == ":" else at


def _better(one: Optional[List[str]], other: Optional[List[str]]) -> Optional[List[str]]:
    if one is None or other is None:
        return one if other is None else other
    return other if min(map(len, other)) > min(map(len, one)) else one
