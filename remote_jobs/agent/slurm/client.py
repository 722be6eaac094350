"""Slurm's commands, each with a time limit, and three kinds of answer: yes, no, and none.

A command that Slurm did not answer (controller down, overloaded, time-out) proves nothing about a job: `Unanswered`.
Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from typing import Dict, List, Optional, Sequence

from remote_jobs.agent.slurm import queue

TIMEOUT_S = 20.0
_NO_ANSWER = (
    "unable to contact slurm controller",
    "socket timed out",
    "connection refused",
    "connect failure",
    "communication connection failure",
    "transport endpoint is not connected",
    "zero bytes were transmitted",
    "slurm backup controller in standby",
    "authentication",  # munged is down: nothing about the job
    "resource temporarily unavailable",
    "try again later",
    "slurmdbd",
)
_NEVER_ARRIVED = ("unable to contact slurm controller", "connection refused", "connect failure", "cannot be run")
_NO_JOB = ("invalid job id", "job/step already completing or completed")


class Unanswered(Exception):
    """Slurm did not answer; what it would have said is not known. ``arrived`` is False when it never heard the question."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.arrived = not any(word in text.lower() for word in _NEVER_ARRIVED)


class Refused(Exception):
    """Slurm said no; the text is its own."""


def _environment() -> Dict[str, str]:
    # Settings of the user's shell (SBATCH_PARTITION, SQUEUE_FORMAT ...) must not change what we ask or read.
    env = {key: value for key, value in os.environ.items() if key.split("_")[0] not in ("SBATCH", "SQUEUE", "SACCT", "SCANCEL")}
    env.update(SLURM_TIME_FORMAT="%s", SLURM_BITSTR_LEN="0")  # epoch seconds; lists of tasks in full
    for name in list(env):  # the follow-on of a task or of a requeued job is neither
        if name in ("SLURM_CLUSTERS", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_RESTART_COUNT") or name.startswith("SLURM_ARRAY_"):
            del env[name]
    return env


def call(
    argv: Sequence[str], *, timeout_s: float = TIMEOUT_S, env: Optional[Dict[str, str]] = None, errors: bool = False
) -> str:
    """What a command printed; with ``errors`` on stderr too, where `sbatch --test-only` answers.

    Raises:
        Unanswered: no answer, or the command cannot be run. Refused: it answered with an error.
    """
    try:
        done = subprocess.run(
            list(argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout_s,
            env={**_environment(), **(env or {})}, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Unanswered("{} gave no answer within {:.0f} s".format(argv[0], timeout_s)) from None
    except OSError as exc:
        raise Unanswered("{} cannot be run: {}".format(argv[0], exc.strerror)) from None
    said = done.stderr.decode("utf-8", "replace").strip()
    if done.returncode == 0:
        return done.stdout.decode("utf-8", "replace") + ("\n" + _plain(argv[0], said) if errors else "")
    text = _plain(argv[0], said) or "exit status {}".format(done.returncode)
    if any(word in said.lower() for word in _NO_ANSWER):
        raise Unanswered("{}: {}".format(argv[0], text))
    raise Refused(text)


def _plain(program: str, said: str) -> str:
    """Error text without the program's own prefix on each line."""
    lines = [line.split("error: ", 1)[-1].strip() for line in said.splitlines() if line.strip()]
    return "; ".join(line.replace(program + ": ", "") for line in lines)


def squeue() -> List[queue.Row]:
    """Every job of this user that Slurm's controller still knows, ended ones included: one call for all.

    Raises:
        Unanswered: see there.
    """
    argv = [
        "squeue", "--noheader", "--states=all", "--array", "--user={}".format(os.getuid()), "--format=" + queue.SQUEUE_FORMAT,
    ]  # fmt: skip
    try:
        return queue.parse_squeue(call(argv))
    except Refused as exc:
        raise Unanswered("squeue: {}".format(exc)) from None


def sacct(ids: Sequence[str], since_s: float) -> List[queue.Row]:
    """Ended jobs from the accounting database, one call for all; empty where accounting is off or does not answer.

    Args:
        ids: Slurm's job ids.
        since_s: seconds ago before which none of them was submitted.
    """
    argv = [
        "sacct", "--noheader", "--parsable2", "--allocations", "--duplicates", "--jobs=" + ",".join(ids),
        "--starttime=now-{}seconds".format(max(60, int(since_s))), "--format=" + queue.SACCT_FORMAT,
    ]  # fmt: skip
    try:
        return queue.parse_sacct(call(argv))
    except (Refused, Unanswered):
        return []


def sbatch(argv: Sequence[str], env: Dict[str, str]) -> str:
    """Submit; the job's id. `--parsable` prints ``id`` or ``id;cluster``.

    Raises:
        Unanswered: it may or may not have been submitted. Refused: it was not.
    """
    return call(argv, timeout_s=60.0, env=env).strip().splitlines()[-1].split(";")[0]


def end_time(job: str) -> Optional[float]:
    """When the allocation ends, epoch seconds; None when there is no limit or no answer."""
    try:
        rows = _rows(job)
    except (Unanswered, Refused):
        return None
    return rows[0].end if rows else None


def _rows(job: str) -> List[queue.Row]:
    """The rows of one job, or of one task of an array, while it waits or runs."""
    return queue.parse_squeue(call(["squeue", "--noheader", "--array", "--jobs=" + job, "--format=" + queue.SQUEUE_FORMAT]))


def cancel(job: str, *, waiting_only: bool) -> bool:
    """Take a job out of the queue (`waiting_only`: unless it runs already); False when Slurm does not know it.

    Tasks of an array that wait are one record to Slurm, and a filtered `scancel` of one of them cancels all (22.05). So
    the task gets a record of its own first: by an update to the name that it has, which changes nothing else.

    Raises:
        Unanswered: see there.
    """
    only = ["--state=PENDING"] if waiting_only else []
    try:
        if only and "_" in job:
            rows = _rows(job)
            if not rows or not rows[0].waiting:
                return bool(rows)
            try:
                call(["scontrol", "update", "JobId=" + job, "JobName=" + rows[0].name])
            except Refused:
                only = []  # a site may forbid updates: without a filter the task alone is cancelled, and it waited just now
        call(["scancel", *only, job])
    except Refused as exc:
        if any(word in str(exc).lower() for word in _NO_JOB):
            return False
        raise Unanswered("scancel: {}".format(exc)) from None
    return True


def wake(job: str) -> None:
    """Make the supervisor look at its requests now: a FIFO does not reach another machine, a signal through Slurm does."""
    # It looks by itself once a second. For a task of an array scancel (22.05) delivers the signal at once, is told to try
    # again, and does so for a minute and a half.
    with contextlib.suppress(Unanswered, Refused):
        call(["scancel", "--batch", "--signal=USR1", job], timeout_s=1.0 if "_" in job else 5.0)
