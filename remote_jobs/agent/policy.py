"""Retry policy as data and one pure function: verdict -> what happens next.

Defaults stand here and nowhere else; a plan's `retry:` overrides them per class, e.g.
``retry: {attempts: 3, gpu_oom: {gpu_memory_utilization: {add: -0.05, min: 0.7}}}``.
Rules (design, "Hard edges"): `attempts` counts all tries and caps every class; outside causes are exempt from
the same-fingerprint rule; an after-change verdict with nothing to change is not retried; attempts that made new
progress (samples, checkpoints) do not use up the budget.  Pure: no I/O, no clock.  Standard library only.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from remote_jobs.agent import fewer_gpus, limits
from remote_jobs.agent.fold import fingerprint
from remote_jobs.protocol import StepSpec

if TYPE_CHECKING:
    import random

BACKOFF_FIRST_S = 5.0
BACKOFF_CAP_S = 600.0
BACKOFF_JITTER = 0.2
STATED_CHANGES = 3
"""Tries of a class that is not tried again by itself, once the plan states what to change after it."""

AGAIN, CHANGE, STOP = "again", "change", "stop"

# class -> (action, tries without new progress when the plan does not say)
POLICY: Mapping[str, Tuple[str, int]] = {
    "network": (AGAIN, 3),
    "killed": (AGAIN, 3),
    "port_in_use": (AGAIN, 3),
    "gpu_busy": (AGAIN, 3),
    "filesystem": (AGAIN, 3),
    "nccl": (AGAIN, 2),
    "segfault": (AGAIN, 2),
    "device_assert": (AGAIN, 2),
    "unknown": (AGAIN, 2),
    "gpu_oom": (CHANGE, 4),
    "kv_cache_too_small": (CHANGE, 3),
    "host_oom": (CHANGE, 3),
    "shm": (CHANGE, 2),
    "disk_full": (CHANGE, 2),
    "gpu_hardware": (STOP, 1),
    "driver": (STOP, 1),
    "code_incompatibility": (STOP, 1),
    "import_error": (STOP, 1),
    "config": (STOP, 1),
    "data_corrupt": (STOP, 1),
    "missing_file": (STOP, 1),
    "auth": (STOP, 1),
    "numerical": (STOP, 1),
    "waiting_for_input": (STOP, 1),
}

OUTSIDE_CAUSES = frozenset({"killed", "network", "port_in_use", "gpu_busy"})
"""Causes that say nothing about the command: the same fingerprint twice does not stop these."""

# class -> step -> parameter -> how to move it. `default` is what the program uses when the plan is silent.
CHANGES: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]] = {
    "gpu_oom": {
        "serve": {"gpu_memory_utilization": {"add": -0.05, "min": 0.7, "default": 0.9}},
        "extract": {
            "gpu_memory_utilization": {"add": -0.05, "min": 0.7, "default": 0.9},
            "max_num_batched_tokens": {"mul": 0.5, "min": 2048, "default": 8192},
            "batch_size": {"mul": 0.5, "min": 1, "default": 8},
        },
        "train": {"total_seq_len": {"mul": 0.5, "min": 1024, "default": 8192}},
    },
    "host_oom": {
        "extract": {"batch_size": {"mul": 0.5, "min": 1, "default": 8}},
        "generate": {"concurrency": {"mul": 0.5, "min": 1, "default": 64}},
        "train": {"num_workers": {"mul": 0.5, "min": 0, "default": 8}},
    },
    "shm": {"train": {"num_workers": {"mul": 0.0, "min": 0, "default": 8}}},
}
BY_RULE: Mapping[str, Tuple[str, int]] = {"xid-contained": (AGAIN, 2), "engine-ready-limit": (CHANGE, 3)}
"""Rules that differ from their class: a contained memory error, whose GPU goes on; a limit that can be raised."""
_KV_LENGTH = re.compile(r"estimated maximum model length is (\d+)")
_UNITS = {"max_num_batched_tokens": 256, "total_seq_len": 128}


@dataclass
class Decision:
    """What happens after a failed attempt. ``changes``: parameter -> new value for the next attempt."""

    retry: bool
    reason: str
    delay_s: float = 0.0
    changes: Dict[str, Any] = field(default_factory=dict)


def backoff_s(failures: int, rng: "random.Random") -> float:
    """Delay before the next try: 5, 10, 20 ... capped at 600 s, +-20 % so that many jobs do not return at once."""
    base = min(BACKOFF_CAP_S, BACKOFF_FIRST_S * 2.0 ** max(0, failures - 1))
    return base * rng.uniform(1 - BACKOFF_JITTER, 1 + BACKOFF_JITTER)


def parameters(changes: Mapping[str, Any]) -> Dict[str, Any]:
    """The changes that are parameters of the step's program, not GPUs, variables or limits that orch keeps itself."""
    ours = (fewer_gpus.GPUS, fewer_gpus.WITHOUT, limits.READY_WITHIN)
    return {key: value for key, value in changes.items() if key not in ours and not limits.is_variable(key)}


def _moved(name: str, value: float, how: Mapping[str, Any]) -> Union[int, float, None]:
    """Value after one change, or None when nothing is left to change.

    A bound stops a change and never turns it around: a value beyond its bound stays.  Only a stated `min`, or
    `mul: 0`, takes a positive value down to 0, and only a stated `min` goes on from there.
    """
    least, most = float(how.get("min", -math.inf)), float(how.get("max", math.inf))
    factor = float(how.get("mul", 1.0))
    target = _twelve_digits(value * factor + float(how.get("add", 0.0)))
    if target == _twelve_digits(value):
        return None
    down = target < value
    new: Union[int, float] = min(max(target, least), most)
    # A whole number stays one, unless the rule itself speaks of fractions (gpu_memory_utilization: 1).
    if isinstance(value, int) and all(float(how.get(key, 0)).is_integer() for key in ("add", "min", "max")):
        unit = _UNITS.get(name, 1) if new >= _UNITS.get(name, 1) else 1
        new = (math.floor if down else math.ceil)(new / unit) * unit
        new = int(min(max(new, least), most))
    if new <= 0 <= value and "min" not in how and factor != 0:
        return None
    return new if (new < value if down else new > value) else None


def _twelve_digits(number: float) -> float:
    """Without the last bits of binary fractions, however small the number: 0.9 - 0.05 is 0.85, 3e-5 / 2 is 1.5e-5."""
    return float("{:.12g}".format(number))


def change_parameters(
    step: StepSpec, klass: str, current: Mapping[str, Any], verdict: Mapping[str, Any]
) -> Dict[str, Any]:
    """Parameters of the next attempt after such a failure; empty when nothing can, or need, be changed.

    What the plan states comes first; then what the failure itself says to use.

    Args:
        step: the step; `run` steps have no parameters, only `set` on environment-like keys of the plan's block.
        current: the parameters that failed.
        verdict: explain's failure object (its texts may name the value to use).
    """
    block = step.retry.get(klass) or {}
    plan_block = {key: how for key, how in block.items() if isinstance(how, dict) and key != fewer_gpus.KEY}
    rules: Mapping[str, Mapping[str, Any]] = plan_block or CHANGES.get(klass, {}).get(step.uses or "", {})
    for name, how in rules.items():
        value = current.get(name, how.get("default"))
        if "set" in how:
            if current.get(name) != how["set"]:
                return {name: how["set"]}
            continue
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        # batch_size is only moved where the plan sets it: not every backend knows the flag.
        if name == "batch_size" and name not in current and not plan_block:
            continue
        new = _moved(name, value, how)
        if new is not None:
            return {name: new}
    if klass == "kv_cache_too_small" and step.uses and "max_model_len" not in plan_block:
        return _named_length(current, verdict)
    return {}


def _named_length(current: Mapping[str, Any], verdict: Mapping[str, Any]) -> Dict[str, Any]:
    """The longest context that fits, where vLLM's message says it."""
    texts = [str((verdict.get("root_cause") or {}).get("text") or "")]
    texts += [str(item) for item in verdict.get("evidence") or ()]
    lengths = [int(match.group(1)) for text in texts for match in _KV_LENGTH.finditer(text)]
    if lengths and lengths[-1] not in (0, current.get("max_model_len")):
        return {"max_model_len": lengths[-1]}
    return {}


def _cap(step: StepSpec, klass: str, action: str, default: int) -> int:
    """Tries allowed: the plan's `attempts` caps every class; a class block may say its own number below it."""
    block = step.retry.get(klass)
    own = block.get("attempts") if isinstance(block, dict) else None
    total = step.retry.get("attempts")
    if own is not None:
        default = int(own)
    elif action != STOP:
        default = default if total is None else int(total)
    else:  # the plan says what to change where we would give up
        default = STATED_CHANGES if total is None else int(total)
    return min(default, int(total)) if total is not None else default


def usual(verdict: Mapping[str, Any]) -> Tuple[str, int]:
    """Action after such a failure, and tries without new progress, when the plan does not say."""
    klass = str(verdict.get("class") or "unknown")
    return BY_RULE.get(str(verdict.get("signature")), POLICY.get(klass, (AGAIN, 2)))


def decide(
    step: StepSpec,
    verdict: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
    params: Mapping[str, Any],
    rng: "random.Random",
    survey: Optional[Mapping[str, Any]] = None,
    changed: Mapping[str, Any] = MappingProxyType({}),
    env: Mapping[str, str] = MappingProxyType({}),
) -> Decision:
    """What happens after the newest attempt of ``history`` failed with ``verdict``.

    Args:
        step: the step with its `retry:` block.
        verdict: explain's failure object of the newest attempt.
        history: failed attempts since the last reopening, oldest first, newest last: {verdict, progress} where
            progress is the number of samples or checkpoints kept at its end.
        params: the parameters that the newest attempt ran with.
        rng: source of the jitter.
        survey: after a failure of hardware, which GPUs work and which are to blame (gate.survey).
        changed: what that attempt ran with beyond the plan.
        env: its environment.
    """
    klass = str(verdict.get("class") or "unknown")
    action, default = usual(verdict)
    block, own_action = step.retry.get(klass), action
    if action == STOP and isinstance(block, dict) and block:
        action = CHANGE if any(isinstance(value, dict) for value in block.values()) else AGAIN
    total = step.retry.get("attempts")
    if total is not None and len(history) >= int(total):
        return Decision(False, "attempt {} of {} failed ({})".format(len(history), total, klass))
    judged_hopeless = verdict.get("retry") == "no" and klass != "unknown" and klass not in OUTSIDE_CAUSES
    if action == STOP or (action == AGAIN and judged_hopeless):
        return Decision(False, "{}: trying again cannot help".format(klass))
    spent = _tries_without_progress(history)
    cap = _cap(step, klass, own_action, default)
    if spent >= cap:
        return Decision(False, "{} tries without new progress, the limit for {} is {}".format(spent, klass, cap))
    changes, why = change_parameters(step, klass, params, verdict), ""
    if action == CHANGE and klass == fewer_gpus.CLASS and fewer_gpus.least(step) is not None:
        fewer, why = fewer_gpus.change(step, params, survey or {}, changed.get(fewer_gpus.WITHOUT) or [])
        changes = {**changes, **fewer} if fewer else {}
    changes = {**changes, **limits.raised(step, verdict, changed, env)}
    if klass == "port_in_use" and "port" in params and not changes:
        changes = {"port": int(params["port"]) + 1 + rng.randrange(200)}
    if action == CHANGE and not changes:
        return Decision(False, "{}: {}".format(klass, why or "needs a change and there is nothing left to change"))
    if klass not in OUTSIDE_CAUSES and not changes and _same_twice(history):
        return Decision(False, "the same failure twice with no new progress")
    delay_s = 0.0 if klass == "gpu_busy" else backoff_s(spent, rng)
    reason = "{}: {}".format(
        klass, "trying again with {}".format(_shown(changes)) if _shown(changes) else "trying the same command again"
    )
    reason += " ({})".format(why) if why else ""
    return Decision(True, reason, delay_s, changes)


def _tries_without_progress(history: Sequence[Mapping[str, Any]]) -> int:
    """Failed attempts since the last one that kept more than the one before it (at least 1)."""
    spent, best = 0, 0
    for item in history:
        progress = int(item.get("progress") or 0)
        spent = 1 if progress > best else spent + 1
        best = max(best, progress)
    return max(1, spent)


def _same_twice(history: Sequence[Mapping[str, Any]]) -> bool:
    if len(history) < 2:
        return False
    last, before = history[-1], history[-2]
    gained = int(last.get("progress") or 0) > int(before.get("progress") or 0)
    return not gained and fingerprint(last.get("verdict")) == fingerprint(before.get("verdict"))


def _shown(changes: Mapping[str, Any]) -> str:
    pairs: List[str] = [
        "{}={}".format(key, value) for key, value in changes.items() if key != fewer_gpus.WITHOUT
    ]
    return ", ".join(pairs)
