"""THE schema: every record that crosses the wire or lies in a job directory, shared by both sides.

Why one file: the supervisor on the host outlives the controller that started it, so both ends must be able to
read what the other (older or newer) wrote.  Rules:

* Standard library only, Python 3.8: this file travels to the host.
* Readers ignore unknown fields, keep unknown event kinds, and refuse an unknown ``v`` by naming both versions.
* One writer per file.  Atomic means: temporary file in the same folder, fsync, rename.
* A process is (boot id, pid, start ticks), never a bare pid.

The wire between controller and agent is JSON lines over one exec channel.  A message whose object holds
``payload_bytes: N`` is followed by exactly N raw bytes (file transfer); everything else is one line.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Dict, FrozenSet, List, Mapping, Optional, Type, TypeVar

VERSION = 1
"""Version of the job directory and of the look protocol. Raised only when an old reader would misread."""

# --------------------------------------------------------------------------------------- file names (job directory)

SPEC_FILE = "spec.json"
EVENTS_FILE = "events.jsonl"
STATE_FILE = "state.json"
RESULT_FILE = "result.json"
LOCK_FILE = "lock"
SECRETS_FILE = "secrets.json"
RESERVE_FILE = "reserve"
SUPERVISOR_LOG = "supervisor.log"
CONTROL_DIR = "control"
WAKE_FIFO = "control/wake"
FILES_DIR = "files"
STEPS_DIR = "steps"
ATTEMPTS_DIR = "attempts"
ATTEMPT_FILE = "attempt.json"
LOG_FILE = "log"
INCIDENT_DIR = "incident"

JOBS_DIR = "jobs"
RELEASES_DIR = "releases"
BLOBS_DIR = "blobs"
HISTORY_DIR = "history"

MARKER_ENV = "ORCH_JOB"
"""Every process of a job carries this variable, with the job id as its value."""
STEP_ENV = "ORCH_STEP"
MARKER_LINE = "::orch "
"""Steps report by lines that start with this text, followed by one JSON object."""
MAX_COUNT = 1 << 53
"""Larger counts are not meant; JSON readers in other languages hold none of them exactly (RFC 8259, section 6)."""
MAX_PHASE_NAME = 100
DEFAULT_ROOT = "~/.orchestrator"


def step_dir(index: int, name: str) -> str:
    """Folder of a step inside the job directory; ``index`` counts from 1 in plan order."""
    return "{}/{}-{}".format(STEPS_DIR, index, name)


def attempt_dir(index: int, name: str, attempt: int) -> str:
    """Folder of one attempt (counted from 1) inside the job directory."""
    return "{}/{}/{}".format(step_dir(index, name), ATTEMPTS_DIR, attempt)


# ------------------------------------------------------------------------------------------------------------ states


class JobState(str, Enum):
    """What a job did, as far as its events tell. How we know it and whether the host answers are other axes."""

    QUEUED = "queued"
    GATED = "gated"
    RUNNING = "running"
    RETRY_WAIT = "retry_wait"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"


class StepState(str, Enum):
    """State of one step; ``ready`` is a service whose probe answered, ``skipped`` a step that was not needed."""

    QUEUED = "queued"
    GATED = "gated"
    RUNNING = "running"
    READY = "ready"
    RETRY_WAIT = "retry_wait"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"
    SKIPPED = "skipped"


class AttemptState(str, Enum):
    """State of one try of one step."""

    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"


JOB_TERMINAL: FrozenSet[str] = frozenset({"succeeded", "failed", "stopped"})
STEP_TERMINAL: FrozenSet[str] = frozenset({"succeeded", "failed", "stopped", "skipped", "lost"})
ATTEMPT_TERMINAL: FrozenSet[str] = frozenset({"succeeded", "failed", "stopped", "lost"})


class EventKind(str, Enum):
    """Kinds of lines in events.jsonl. Past tense: an event says what has happened."""

    CREATED = "created"  # first event: {spec_sha256, release, supervisor: ProcessId}
    STEP_QUEUED = "step_queued"  # waits for a claim: {reason}
    STEP_GATED = "step_gated"  # the gate is closed: {reasons: [...], until}
    ATTEMPT_STARTED = "attempt_started"  # {process: ProcessId, argv, changes, gpus}
    PHASE_CHANGED = "phase_changed"  # {phase, state: running|done|failed}
    STEP_READY = "step_ready"  # a service's probe answered
    STOP_SENT = "stop_sent"  # a rung of the stop ladder: {signal, reason}
    HANG_SUSPECTED = "hang_suspected"  # {reason, quiet_s}
    ATTEMPT_ENDED = "attempt_ended"  # the main process is gone: {state, exit_status, reason}
    ATTEMPT_JUDGED = "attempt_judged"  # what it died of, or that it is fine: {state, verdict}
    STRAGGLERS = "stragglers"  # processes that outlived their attempt: {processes: [...]}
    RETRY_SCHEDULED = "retry_scheduled"  # {at, delay_s, changes, reason}
    STEP_SUCCEEDED = "step_succeeded"
    STEP_FAILED = "step_failed"  # {reason, verdict}
    STEP_STOPPED = "step_stopped"
    STEP_SKIPPED = "step_skipped"  # {reason}
    STOP_REQUESTED = "stop_requested"  # control file read, of one step or of the job: {control, reason}
    RETRY_REQUESTED = "retry_requested"  # a backoff ends now, of one step or of all: {control, set}
    EXTENDED = "extended"  # a time limit was moved: {control, timeout_s}
    REAPED = "reaped"  # own orphans ended: {processes: [...]}
    RECOVERED = "recovered"  # a new supervisor took over a lost job: {supervisor, left_running}
    REOPENED = "reopened"  # a terminal job was taken up again by `orch retry`
    NOTE = "note"  # anything a person should know: {text}
    FINISHED = "finished"  # final: {state}


STEP_TRANSITIONS: Mapping[str, Mapping[str, str]] = {
    "queued": {
        "step_queued": "queued",
        "step_gated": "gated",
        "attempt_started": "running",
        "step_failed": "failed",
        "step_stopped": "stopped",
        "step_skipped": "skipped",
        "step_succeeded": "succeeded",
        "reopened": "queued",
    },
    "gated": {
        "step_queued": "queued",
        "step_gated": "gated",
        "attempt_started": "running",
        "step_failed": "failed",
        "step_stopped": "stopped",
        "step_skipped": "skipped",
        "retry_scheduled": "retry_wait",
        "reopened": "queued",
    },
    "running": {
        "step_ready": "ready",
        "stop_sent": "stopping",
        "attempt_ended": "running",
        "step_queued": "queued",
        "retry_scheduled": "retry_wait",
        "step_succeeded": "succeeded",
        "step_failed": "failed",
        "step_stopped": "stopped",
        "reopened": "queued",
    },
    "ready": {
        "stop_sent": "stopping",
        "attempt_ended": "running",
        "step_queued": "queued",
        "step_failed": "failed",
        "reopened": "queued",
    },
    "retry_wait": {
        "step_queued": "queued",
        "step_gated": "gated",
        "attempt_started": "running",
        "step_failed": "failed",
        "step_stopped": "stopped",
        "step_skipped": "skipped",
        "reopened": "queued",
    },
    "stopping": {
        "step_queued": "queued",
        "stop_sent": "stopping",
        "attempt_ended": "stopping",
        "retry_scheduled": "retry_wait",
        "step_succeeded": "succeeded",
        "step_failed": "failed",
        "step_stopped": "stopped",
        "reopened": "queued",
    },
    # Terminal states absorb everything but an explicit `orch retry`.
    "succeeded": {"reopened": "succeeded", "step_queued": "queued"},  # a service may be needed again
    "failed": {"reopened": "queued"},
    "stopped": {"reopened": "queued"},
    "skipped": {"reopened": "queued"},
    "lost": {"reopened": "queued"},
}
"""Step state x event kind -> step state. Events not listed for a state leave it unchanged when they are not about
states (note, phase_changed ...) and are illegal otherwise."""

STATE_EVENTS: FrozenSet[str] = frozenset(kind for row in STEP_TRANSITIONS.values() for kind in row)


class IllegalTransition(ValueError):
    """An event that its step's state does not allow; the message names state, event and step."""


def advance(state: str, kind: str, step: str = "?") -> str:
    """Return the step state after an event.

    Raises:
        IllegalTransition: the table does not allow this event in this state.
    """
    if kind not in STATE_EVENTS:
        return state
    try:
        return STEP_TRANSITIONS[state][kind]
    except KeyError:
        raise IllegalTransition("{} is not legal in {} (step {})".format(kind, state, step)) from None


def job_state(step_states: List[str], *, finished: Optional[str] = None, stopping: bool = False) -> str:
    """State of a job from the states of its steps; a final event or a stop in progress wins."""
    if finished:
        return finished
    if stopping:
        return "stopping"
    for state in ("running", "stopping", "retry_wait", "gated", "ready"):
        if state in step_states:
            return "running" if state in ("ready", "stopping") else state
    return "queued" if set(step_states) == {"queued"} else "running"


# ------------------------------------------------------------------------------------------------------------ records

T = TypeVar("T")


class ProtocolVersionError(ValueError):
    """Bytes written by another version of orch that this one cannot read."""


def read_marker(text: str) -> Optional[Dict[str, Any]]:
    """What a step says of itself: {phase, state[, done][, total]}, of which only what can be meant; None: nothing.

    Args:
        text: what stands behind `MARKER_LINE`. Any program can print any text there.
    """
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or not isinstance(said.get("phase"), str):
        return None
    state = said.get("state")
    marker: Dict[str, Any] = {"phase": _whole(said["phase"]), "state": _whole(state) if isinstance(state, str) else ""}
    for key in ("done", "total"):
        if is_count(said.get(key)):
            marker[key] = said[key]
    return marker


def is_count(value: Any) -> bool:
    """Is this a number of things that can be meant: not negative, not NaN, not beyond `MAX_COUNT`?"""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def _whole(text: str) -> str:
    """The beginning of a name, without half characters (a lone surrogate can be written in JSON, not in UTF-8)."""
    return text[:MAX_PHASE_NAME].encode("utf-8", "replace").decode("utf-8")


def check_version(record: Mapping[str, Any], what: str) -> None:
    """Refuse a record of an unknown version.

    Raises:
        ProtocolVersionError: names the version found and the version this side speaks.
    """
    found = record.get("v")
    if found != VERSION:
        raise ProtocolVersionError(
            "{} has version {!r}, this orch reads version {}: use the orch release that wrote it, or a newer one".format(
                what, found, VERSION
            )
        )


def from_dict(cls: Type[T], record: Mapping[str, Any]) -> T:
    """Build a dataclass from a JSON object; unknown keys are ignored (they come from a newer writer)."""
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return cls(**{key: value for key, value in record.items() if key in known})


def to_dict(record: Any) -> Dict[str, Any]:
    """JSON object of a dataclass record."""
    return dataclasses.asdict(record)


def dumps(record: Mapping[str, Any]) -> bytes:
    """One JSON line, newline included; no raw newline can be inside."""
    return json.dumps(record, ensure_ascii=True, separators=(",", ":")).encode("ascii") + b"\n"


@dataclass
class ProcessId:
    """Identity of a process that survives pid reuse and reboots (start_ticks: field 22 of /proc/PID/stat)."""

    pid: int
    start_ticks: int
    boot_id: str


@dataclass
class StepSpec:
    """One step as the host sees it: the plan's step, with defaults filled in and paths still as written."""

    name: str
    uses: Optional[str] = None  # built-in step (remote_jobs/steps/<uses>.py)
    run: Optional[str] = None  # or a shell command line
    params: Dict[str, Any] = field(default_factory=dict)  # the plan's `with:`
    needs: List[str] = field(default_factory=list)
    gpus: int = 0
    env: Dict[str, str] = field(default_factory=dict)
    exports: Dict[str, str] = field(default_factory=dict)  # limits raised by the preflight; `env` wins over them
    secrets: List[str] = field(default_factory=list)  # names only; values travel apart
    retry: Dict[str, Any] = field(default_factory=dict)  # attempts, and one block per failure class
    done: Optional[Dict[str, Any]] = None  # {count: glob, equals|at_least: n}
    service: Optional[Dict[str, Any]] = None  # {ready: {http|port|log}, timeout_s}; built-in serve has one
    grace_s: Optional[float] = None
    timeout_s: Optional[float] = None
    hang_s: Optional[float] = None  # silence limit; None = learned, 0 = never
    output: Optional[str] = None
    python: Optional[str] = None
    patches: Any = None  # auto | none | [set, ...]
    nodes: int = 1
    split: int = 1  # the step joins so many ranges, each a step of its own
    part: Optional[Dict[str, Any]] = None  # of a range: {of: the joining step, index: from 1, count}


@dataclass
class FileSpec:
    """A file of the plan's `files:`; it lands in <job>/files/<name>."""

    name: str
    sha256: str
    size: int
    mode: int = 0o600


@dataclass
class JobSpec:
    """spec.json: written once by the agent on the controller's word, before the start."""

    id: str
    name: str
    host: str
    workdir: str
    plan_sha256: str
    created_at: str
    release: str
    steps: List[Dict[str, Any]]  # StepSpec objects
    files: List[Dict[str, Any]] = field(default_factory=list)  # FileSpec objects
    env: Dict[str, str] = field(default_factory=dict)
    python: Optional[str] = None  # interpreter of the built-in steps
    host_gpus: Optional[int] = None  # GPUs the inventory expects on this host
    gate: Dict[str, Any] = field(default_factory=dict)  # wait_s, memory_mib, reap
    log_limit_bytes: int = 5 * 1024**3
    allow_tmpfs: bool = False
    restart_after_reboot: bool = False
    slurm: Optional[Dict[str, Any]] = None  # how to ask Slurm for nodes; None: the job runs on this host directly
    notify: List[Any] = field(default_factory=list)
    controller: str = ""
    v: int = VERSION

    def step_specs(self) -> List[StepSpec]:
        """The steps as records, in plan order."""
        return [from_dict(StepSpec, step) for step in self.steps]


@dataclass
class Event:
    """One line of events.jsonl. ``at`` is the host's wall clock (ISO UTC), ``mono`` its monotonic clock in s."""

    seq: int
    at: str
    mono: float
    kind: str
    step: Optional[str] = None
    attempt: Optional[int] = None
    data: Dict[str, Any] = field(default_factory=dict)
    v: int = VERSION


@dataclass
class LogCursor:
    """Where a reader stands in one attempt's log: (inode, byte offset). ``offset`` -1 asks for the last ``tail_bytes``."""

    job: str
    step: str
    attempt: int  # 0 = the newest
    inode: int = 0
    offset: int = -1
    tail_bytes: int = 16384
    max_bytes: int = 65536


@dataclass
class LookRequest:
    """One look: all jobs of a host in one answer. With ``wait_s`` the answer comes at once when something changed."""

    jobs: Optional[List[str]] = None  # ids; None = every job of this host
    seen: Dict[str, int] = field(default_factory=dict)  # job id -> last event seq known to the asker
    logs: List[Dict[str, Any]] = field(default_factory=list)  # LogCursor objects
    wait_s: float = 0.0
    processes: bool = False
    gpus: bool = False
    active_only: bool = False  # leave out jobs that ended


class Op(str, Enum):
    """Requests that the agent answers. Every request is {"id": n, "op": ..., **arguments}; every answer
    {"id": n, "ok": true, ...} or {"id": n, "ok": false, "error": {"code", "message", "hint"}}.
    """

    HELLO = "hello"
    LOOK = "look"
    LAUNCH = "launch"
    CONTROL = "control"
    PREFLIGHT = "preflight"
    GPUS = "gpus"
    PROBE = "probe"
    HAVE = "have"
    PUT = "put"
    LIST = "list"
    GET = "get"
    DIGEST = "digest"
    WHY = "why"
    HISTORY = "history"
    PATCH = "patch"
    GC = "gc"
    NOTIFY = "notify"


GRACE_S: Mapping[str, float] = {"run": 15.0, "generate": 15.0, "train": 130.0, "vocab_map": 15.0, "evaluate": 15.0}
"""Seconds between TERM and KILL by step kind; serve and extract use the two-TERM ladder instead."""
TWO_TERM_STEPS: FrozenSet[str] = frozenset({"serve", "extract"})
TWO_TERM_LADDER = (("TERM", 5.0), ("TERM", 10.0), ("KILL", 5.0))
