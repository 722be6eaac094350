"""Every error that a person can meet, with its exit status, in one tree.

A message says what was being done, for which job on which host, and what was seen; the hint says what to type or
change next. `orchestrator.cli` turns these into text or JSON and an exit status; nothing else catches them broadly.

    OrchError
    ├── UsageError (2)          wrong command line
    │   ├── NoSuchJob           no job has this id or prefix
    │   ├── AmbiguousJob        several have
    │   └── WrongState          what the job does, or did, leaves nothing to stop, retry or extend
    ├── ConfigError (2)         plan, inventory or --set: file, line, allowed, nearest spelling
    │   └── MissingSecret       a secret's source gave nothing
    ├── LocalError (2)          this laptop: its disk, its ledger, its folders
    ├── HostError (3)           the host; `transient` says whether trying again can help
    │   ├── Unreachable         no route, refused port, timeout, dropped link (transient)
    │   ├── AuthRefused         the host does not accept us
    │   ├── HostKeyUnknown      first meeting: not in known_hosts
    │   ├── HostKeyChanged      another key than the one known: stop
    │   ├── NoPython            no Python >= 3.8 over there
    │   ├── HostFull            no space left, or root on a tmpfs
    │   ├── HostRefused         the agent understood and said no
    │   └── ChannelTimeout      connected, but no answer in time (transient)
    ├── ProtocolError (3)       bytes of another version, or not ours at all
    ├── Incomplete (1)          parts of an output are missing or damaged
    ├── GateClosed (4)          someone else holds the GPUs
    ├── PreflightFailed (4)     a check failed before anything was started
    ├── JobFailed (1)           the job ended badly (failed, stopped)
    ├── JobLost (5)             its supervisor is gone, or nothing is known
    ├── WaitTimeout (124)       `wait --timeout` ran out
    └── Interrupted (130)       Ctrl-C; the job is untouched

Must not import anything but the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

MAX_SHOWN = 20
"""Problems of one file that are printed; the rest are counted."""


class OrchError(Exception):
    """Root of the tree.

    Attributes:
        code: stable word for programs, the ``error.code`` of ``--json``.
        exit_status: what the process ends with.
        message: what was being done and what was seen.
        hint: what to type or change next, or None.
    """

    code: ClassVar[str] = "error"
    exit_status: ClassVar[int] = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message

    def to_json(self) -> dict[str, Any]:
        """The document that ``--json`` prints for a failure."""
        return {"schema": 1, "error": {"code": self.code, "message": self.message, "hint": self.hint}}


class UsageError(OrchError):
    """The command line asks for something that does not exist or does not fit together."""

    code = "usage"
    exit_status = 2


class NoSuchJob(UsageError):
    """No job seen from here, or on the hosts asked, has this id or prefix."""

    code = "no_job"


class AmbiguousJob(UsageError):
    """A job prefix that fits several jobs; ``candidates`` holds their ids."""

    code = "ambiguous_job"

    def __init__(self, message: str, hint: str | None = None, candidates: Sequence[str] = ()) -> None:
        super().__init__(message, hint)
        self.candidates = list(candidates)


class WrongState(UsageError):
    """The job runs, is over or is lost, and so this cannot be done to it; asking again changes nothing."""

    code = "wrong_state"


@dataclass(frozen=True)
class Problem:
    """One thing wrong in one place. ``file`` None and ``line`` None mean the place is the command line."""

    message: str
    hint: str | None = None
    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        where = "" if self.file is None else f"{self.file}:{self.line}: " if self.line else f"{self.file}: "
        return f"{where}{self.message}" + (f" ({self.hint})" if self.hint else "")


class ConfigError(OrchError):
    """A plan, an inventory or a ``--set`` that cannot be used; all problems found are in ``problems``.

    ``file`` and ``line`` are those of the first problem.
    """

    code = "config"
    exit_status = 2

    def __init__(
        self,
        message: str,
        hint: str | None = None,
        *,
        file: str | None = None,
        line: int | None = None,
        problems: Sequence[Problem] = (),
    ) -> None:
        self.problems = list(problems) or [Problem(message, hint, file, line)]
        self.file = self.problems[0].file
        self.line = self.problems[0].line
        super().__init__(message if problems else str(Problem(message, None, file, line)), hint)

    @classmethod
    def of(cls, problems: Sequence[Problem], what: str) -> ConfigError:
        """One error for all problems of a file. ``what`` names it, such as ``the plan eagle3.yaml``."""
        if len(problems) == 1:
            only = problems[0]
            return cls(str(Problem(only.message, None, only.file, only.line)), only.hint, problems=problems)
        lines = [str(problem) for problem in problems[:MAX_SHOWN]]
        if len(problems) > MAX_SHOWN:
            lines.append(f"... and {len(problems) - MAX_SHOWN} more")
        head = f"{what} has {len(problems)} problems:"
        return cls("\n  ".join([head, *lines]), problems=problems)


class MissingSecret(ConfigError):
    """The source of a secret (environment variable, file, keyring) gave nothing; nothing was sent to the host."""

    code = "missing_secret"


class LocalError(OrchError):
    """Something on this laptop: a folder that cannot be written, a ledger that cannot be opened."""

    code = "local"
    exit_status = 2


class HostError(OrchError):
    """The host did not do as asked. ``transient``: the same request may succeed a little later."""

    code = "host"
    exit_status = 3
    transient_default: ClassVar[bool] = False

    def __init__(
        self, message: str, hint: str | None = None, *, host: str | None = None, transient: bool | None = None
    ) -> None:
        super().__init__(message, hint)
        self.host = host
        self.transient = self.transient_default if transient is None else transient


class Unreachable(HostError):
    """No connection: name, route, port or link. Says nothing about the job."""

    code = "unreachable"
    transient_default = True


class AuthRefused(HostError):
    """The host answers, but accepts none of our keys or passwords."""

    code = "auth_refused"


class HostKeyUnknown(HostError):
    """The host's key is in no known_hosts file yet; the message shows its fingerprint."""

    code = "host_key_unknown"


class HostKeyChanged(HostError):
    """The host shows another key than the known one: perhaps reinstalled, perhaps someone in between."""

    code = "host_key_changed"


class NoPython(HostError):
    """No Python >= 3.8 was found on the host, so the agent cannot run."""

    code = "no_python"


class HostFull(HostError):
    """No space (or no inodes, no quota) on the host, or its root lies on a tmpfs."""

    code = "host_full"


class HostRefused(HostError):
    """The agent answered with an error of its own; ``reason`` is the agent's code."""

    code = "host_refused"

    def __init__(
        self,
        message: str,
        hint: str | None = None,
        *,
        host: str | None = None,
        transient: bool | None = None,
        reason: str = "",
    ) -> None:
        super().__init__(message, hint, host=host, transient=transient)
        self.reason = reason


class ChannelTimeout(HostError):
    """The connection stands, but an answer did not come within the stated limit."""

    code = "channel_timeout"
    transient_default = True


class ProtocolError(OrchError):
    """The other side wrote something that this version cannot read; both versions are named where known."""

    code = "protocol"
    exit_status = 3


class Incomplete(OrchError):
    """What was to be put together is not all there, or damaged."""

    code = "incomplete"
    exit_status = 1


class GateClosed(OrchError):
    """GPUs are held by something that is not ours; ``gate`` is the `orch gpus` document."""

    code = "gate_closed"
    exit_status = 4

    def __init__(self, message: str, hint: str | None = None, gate: Mapping[str, Any] | None = None) -> None:
        super().__init__(message, hint)
        self.gate = dict(gate or {})


class PreflightFailed(OrchError):
    """At least one check failed, so nothing was started; ``checks`` is the list of `orch preflight`."""

    code = "preflight_failed"
    exit_status = 4

    def __init__(
        self, message: str, hint: str | None = None, checks: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        super().__init__(message, hint)
        self.checks = [dict(check) for check in checks]


class JobFailed(OrchError):
    """The job ended as failed or stopped."""

    code = "job_failed"
    exit_status = 1


class JobLost(OrchError):
    """The supervisor is gone without a final event, or the job's state cannot be known."""

    code = "job_lost"
    exit_status = 5


class WaitTimeout(OrchError):
    """The time given to `orch wait --timeout` ran out; the job goes on."""

    code = "wait_timeout"
    exit_status = 124


class Interrupted(OrchError):
    """Ctrl-C. The job was not touched."""

    code = "interrupted"
    exit_status = 130
