"""Launch and control on the host: claim a job id, write the spec, start a supervisor; post requests.

Idempotent: `mkdir` of the job's folder claims the id, so a resend after a dropped link adopts what is there and
never starts a second copy.  Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import shutil
import subprocess
import sys
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, TypeVar

from remote_jobs import protocol
from remote_jobs.agent import control, logind, reboot
from remote_jobs.agent.jobdir import JobDir, Layout, Lock, create_json, fsync_dir, is_memory_fs, lock_holder
from remote_jobs.agent.look import Looker
from remote_jobs.agent.slurm import client, verbs

_START_TIMEOUT_S = 20.0
T = TypeVar("T")


class AgentError(Exception):
    """An answer that says no: code, message, what to do."""

    def __init__(self, code: str, message: str, hint: str = "", **extra: Any) -> None:
        super().__init__(message)
        self.code, self.message, self.hint, self.extra = code, message, hint, extra


def disk_error(exc: OSError, doing: str) -> AgentError:
    """An OSError in our words; a full disk is named as such."""
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return AgentError("disk_full", "{}: no space left on the host ({})".format(doing, exc), "free some space there")
    return AgentError("io", "{}: {}".format(doing, exc), "check the folder's permissions on the host")


def launch(
    layout: Layout, looker: Looker, spec_record: Mapping[str, Any], secrets: Mapping[str, Any], *, skip_gate: bool
) -> Dict[str, Any]:
    """Start a job or adopt the one that has this id: {job, adopted, state, warnings}.

    Raises:
        AgentError: version, tmpfs, disk_full, io, gate_closed, exists_other, supervisor_failed.
    """
    try:
        protocol.check_version(spec_record, "the launch request")
    except protocol.ProtocolVersionError as exc:
        raise AgentError("version", str(exc), "upgrade the older side") from None
    spec = protocol.from_dict(protocol.JobSpec, spec_record)
    job = layout.job(spec.id)
    if is_memory_fs(layout.root) and not spec.allow_tmpfs:
        raise AgentError(
            "tmpfs",
            "{} lies in memory (tmpfs): jobs and logs there are gone after a reboot".format(layout.root),
            "set `root:` in the inventory to a disk, or `allow_tmpfs: true` to accept that",
        )
    if not os.path.exists(job.spec_path):
        if spec.slurm is not None:
            _ask_slurm(spec)
        elif not skip_gate:
            _check_gate(layout, spec)
    try:
        adopted = _claim(job, spec_record)
    except OSError as exc:
        raise disk_error(exc, "making the job's folder {}".format(job.path)) from exc
    started = False
    if spec.slurm is not None:
        if adopted and not _over(job) and verbs.renew(job, spec_record):
            looker.forget(job.id)
        if not _over(job):
            _link_files(layout, job, spec)
            try:
                started = _through_slurm(lambda: verbs.start(layout, job, job.spec(), secrets))
            except AgentError as exc:
                if exc.code == "slurm_refused":
                    exc.hint = verbs.REFUSED_HINT.format(spec.host)
                    if not adopted:
                        shutil.rmtree(job.path, ignore_errors=True)  # nothing of it ever ran
                raise
    elif not _over(job) and not lock_holder(job.lock_path())[0] and not job.read_events():
        _link_files(layout, job, spec)
        _start_supervisor(layout, job, secrets)
        started = True
    jobs, unreadable = looker.jobs([spec.id])
    if spec.id not in jobs:
        raise AgentError("io", "the job's folder cannot be read back: {}".format(unreadable.get(spec.id)))
    return {
        "job": spec.id,
        "adopted": adopted,
        "started": started,
        "state": jobs[spec.id]["state"],
        "warnings": [*logind.warnings(), *filter(None, [reboot.offer(layout, spec)])],
    }


def _ask_slurm(spec: protocol.JobSpec) -> None:
    """What Slurm would refuse is said before anything is made."""
    with contextlib.suppress(client.Unanswered):  # the submission will say so
        try:
            verbs.test_only(spec)
        except client.Refused as exc:
            text = "Slurm would refuse the job: {}".format(exc)
            raise AgentError("slurm_refused", text, verbs.REFUSED_HINT.format(spec.host)) from None


def _through_slurm(work: Callable[[], T]) -> T:
    """Run something that asks Slurm; its errors in our words.

    Raises:
        AgentError: slurm_refused, slurm_unanswered, io.
    """
    try:
        return work()
    except client.Refused as exc:
        raise AgentError("slurm_refused", "Slurm refuses: {}".format(exc), "the job stays, and is submitted again later") from None
    except client.Unanswered as exc:
        raise AgentError("slurm_unanswered", "Slurm does not answer: {}".format(exc), "type the same again later") from None
    except OSError as exc:
        raise disk_error(exc, "submitting the job") from exc


def _check_gate(layout: Layout, spec: protocol.JobSpec) -> None:
    """A foreign process on the first step's GPUs closes the gate before the job is claimed; our own jobs queue."""
    first = next((step for step in spec.step_specs() if not step.needs), None)
    if first is None or first.gpus <= 0:
        return
    from remote_jobs.agent import gpu_access

    reading = gpu_access.read_gate(layout, spec, None)
    if first.gpus < (spec.host_gpus or 0) and len(gpu_access.usable(reading) or []) >= first.gpus:
        return
    if not reading.get("open") and reading.get("foreign") and not gpu_access.starts_smaller(first, reading):
        raise AgentError(
            "gate_closed",
            "the GPUs are not free: {}".format("; ".join(reading.get("reasons") or [])),
            "see who holds them: orch gpus {}; or wait for them: orch launch --wait 30m".format(spec.host),
            gate=reading.get("gpus"),
        )


def _claim(job: JobDir, spec_record: Mapping[str, Any]) -> bool:
    """Make the folder and write the spec; True when another launch with this id had done so before."""
    os.makedirs(os.path.dirname(job.path), mode=0o700, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(job.path, 0o700)
        fsync_dir(os.path.dirname(job.path))
    if spec_record.get("slurm") is not None:
        verbs.claim_folder(job)
    if not os.path.exists(job.spec_path):
        for name in (protocol.STEPS_DIR, protocol.FILES_DIR, protocol.CONTROL_DIR):
            os.makedirs(job.at(name), mode=0o700, exist_ok=True)
        if create_json(job.spec_path, spec_record):  # of several agents at once, one makes it
            return False
    if job.spec().plan_sha256 != spec_record.get("plan_sha256"):
        raise AgentError(
            "exists_other",
            "job {} exists on this host with another plan".format(job.id),
            "launch again with --new for a fresh id",
        )
    return True


def _over(job: JobDir) -> bool:
    return os.path.exists(job.result_path)


def _link_files(layout: Layout, job: JobDir, spec: protocol.JobSpec) -> None:
    """Put the plan's `files:` into <job>/files from the blob store (a copy: a job may edit its files)."""
    for item in spec.files:
        file = protocol.from_dict(protocol.FileSpec, item)
        target = os.path.normpath(job.at(protocol.FILES_DIR, file.name))
        if not target.startswith(job.at(protocol.FILES_DIR) + os.sep):
            raise AgentError("bad_request", "file name {!r} leaves the job's folder".format(file.name))
        source = os.path.join(layout.blobs, file.sha256)
        try:
            os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
            tmp = "{}.tmp.{}".format(target, os.getpid())  # several agents may place it at once
            shutil.copyfile(source, tmp)
            os.chmod(tmp, 0o700 if file.mode & 0o100 else 0o600)
            os.replace(tmp, target)
        except FileNotFoundError:
            raise AgentError("bad_request", "{} was not uploaded".format(file.name), "launch again") from None
        except OSError as exc:
            raise disk_error(exc, "placing {}".format(file.name)) from exc


def _start_supervisor(layout: Layout, job: JobDir, secrets: Mapping[str, Any]) -> None:
    """Start `supervise` detached and wait until it holds the lock and has written its first state.

    Raises:
        AgentError: supervisor_failed, with the end of its log.
    """
    lock = Lock(job.lock_path())
    if not lock.acquire():
        return  # another agent's start won the race
    lock.release()
    read_fd, write_fd = os.pipe()
    argv = [sys.executable, "-I", "-S", _entry(), "supervise", "--root", layout.root, "--job", job.id]
    try:
        child = subprocess.Popen(
            [*logind.escape_prefix(), *argv],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env={**os.environ, "ORCH_ACK_FD": str(write_fd), protocol.MARKER_ENV + "_SUPERVISOR": job.id},
            pass_fds=(write_fd,), start_new_session=True,
        )  # fmt: skip
    finally:
        os.close(write_fd)
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(json.dumps({"secrets": dict(secrets)}).encode("utf-8") + b"\n")
        child.stdin.close()
    answer = b""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and not answer.endswith(b"\n"):
        ready, _, _ = select.select([read_fd], [], [], max(0.0, deadline - time.monotonic()))
        chunk = os.read(read_fd, 4096) if ready else b""
        if not chunk:
            break
        answer += chunk
    os.close(read_fd)
    stderr = b""
    if not answer and child.stderr is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            _, stderr = child.communicate(timeout=1.0)
    if child.stderr is not None:
        child.stderr.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=2.0)
    text = answer.decode("utf-8", "replace").strip()
    if text in ("ok", "held"):
        return
    said = text or stderr.decode("utf-8", "replace")[-2000:] or _tail(job.at(protocol.SUPERVISOR_LOG))
    raise AgentError(
        "supervisor_failed",
        "the supervisor on the host did not start: {}".format(said or "no answer"),
        "its log is {}".format(job.at(protocol.SUPERVISOR_LOG)),
    )


def _entry() -> str:
    """Path of the host entry (the release folder, or the package's parent when run from sources)."""
    from remote_jobs.agent.command import release_dir

    entry = release_dir()
    return entry if os.path.exists(os.path.join(entry, "__main__.py")) else os.path.join(
        entry, "remote_jobs", "agent", "__main__.py"
    )


def _tail(path: str) -> str:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 2000))
        return file.read().decode("utf-8", "replace")
    return ""


def meant(items: Sequence[Mapping[str, Any]], step: Any) -> List[str]:
    """Names of the steps, of a job's state, that a name means: one, or of a split step that the job has only a share of
    the ranges that it has; empty when it has no such step.
    """
    if any(item["name"] == step for item in items):
        return [str(step)]
    return [str(item["name"]) for item in items if (item.get("part") or {}).get("of") == step]


def no_step(state: Mapping[str, Any], step: Any) -> AgentError:
    """The answer to a step that a job does not have."""
    names = ", ".join(str(item["name"]) for item in state["steps"])
    return AgentError("no_step", "job {} has no step {!r}".format(state["id"], step), "its steps: {}".format(names))


def never_started(job_id: str) -> AgentError:
    """The answer for a job whose launch broke off before its plan was there."""
    text = "the launch of {} is not finished".format(job_id)
    return AgentError("wrong_state", text, "if it was cut short, start it anew with: orch launch PLAN")


def post_control(
    layout: Layout,
    looker: Looker,
    job_id: str,
    action: str,
    args: Mapping[str, Any],
    wait_s: float,
    key: str = "",
    secrets: Optional[Mapping[str, Any]] = None,
) -> Dict[str, Any]:
    """Ask a job's supervisor for something and wait for its acknowledgement; starts one where none lives.

    ``key`` names the request: one that is sent again after a dropped link is found by it and not obeyed twice.

    Raises:
        AgentError: no_job, no_step, wrong_state (nothing to stop, retry or extend), no_limit, needs_secrets,
            supervisor_failed, disk_full.
    """
    from remote_jobs.agent import allowed, extend

    job = layout.job(job_id)
    jobs, unreadable = looker.jobs([job_id])
    if job_id not in jobs:
        raise AgentError("no_job", unreadable.get(job_id, "no job {}".format(job_id)), "list them: orch status")
    if jobs[job_id]["spec"] is None:
        raise never_started(job_id)  # a request left there would be obeyed by a launch that takes the folder up
    state = jobs[job_id]["state"] or {}
    step, steps = args.get("step"), []
    if step is not None and state.get("steps"):
        steps = meant(state["steps"], step)
        if not steps:
            raise no_step(state, step)
        # Several are ranges of a step that is shared out, and such a job does nothing else.
        step = steps[0] if len(steps) == 1 else None
        args = {**args, "step": step}
    before = _obeyed(job, key)
    if before is not None:
        return {"acknowledged": True, "seq": before["seq"], "state": state}
    name = state.get("state")
    final = name in protocol.JOB_TERMINAL
    if action == "stop" and final:
        return {"acknowledged": True, "seq": state.get("seq"), "state": state, "already": name}
    allowed.check(action, state, steps, alive=bool(jobs[job_id]["alive"]))
    if action == "extend":
        extend.check(job.spec(), state, job.read_events(), args)
    if final and action == "retry":
        _wait_unlocked(job, 5.0)
        if not any(not name.startswith("@") for name in secrets or {}):  # @notify alone is no step's
            _refuse_without_secrets(job)
    try:
        request_id = control.post(job, action, args, key)
    except OSError as exc:
        raise disk_error(exc, "writing the request") from exc
    spec = job.spec()
    if spec.slurm is not None:
        _through_slurm(lambda: verbs.deliver(layout, job, spec, action, secrets or {}))
    elif not lock_holder(job.lock_path())[0] and not (action == "stop" and _final_event(job.read_events())):
        _start_supervisor(layout, job, secrets or {})
    deadline = time.monotonic() + wait_s
    while True:
        alive = lock_holder(job.lock_path())[0]  # before the events: a supervisor writes, then lets go
        events = job.read_events()
        mine = [event for event in events if (event.get("data") or {}).get("control") == request_id]
        over = _final_event(events)
        if action == "stop" and not mine and not alive and over is not None:
            # The job ended while this was asked: the request must not lie there and stop a later retry.
            control.done(job, request_id)
            return {"acknowledged": True, "seq": over["seq"], "state": looker.jobs([job_id])[0][job_id]["state"]}
        if mine or time.monotonic() >= deadline:
            break
        time.sleep(0.02)
    jobs, _ = looker.jobs([job_id])
    answer = {"acknowledged": bool(mine), "state": jobs.get(job_id, {}).get("state")}
    answer["seq"] = mine[0]["seq"] if mine else None
    if action == "extend":
        answer["limits_s"] = extend.limits_s(spec, job.read_events(), step)
    if mine and mine[0].get("kind") == "reopened" and step is not None:
        answer["steps"] = allowed.runs_again(spec, state, (mine[0].get("data") or {}).get("steps") or [])
    if mine and mine[0].get("kind") == "note":
        raise AgentError("bad_request", str((mine[0].get("data") or {}).get("text")))
    return answer


def _refuse_without_secrets(job: JobDir) -> None:
    """The values are deleted when a job ends: an attempt without them would fail of something else."""
    names = sorted({name for step in job.spec().step_specs() for name in step.secrets})
    if names and not os.path.exists(job.at(protocol.SECRETS_FILE)):
        raise AgentError(
            "needs_secrets",
            "job {} needs {} again: the values of its secrets were deleted when it ended".format(
                job.id, ", ".join(names)
            ),
            "set for this command: {} orch retry {}".format(" ".join(name + "=..." for name in names), job.id),
        )


def _final_event(events: Sequence[Mapping[str, Any]]) -> Optional[Mapping[str, Any]]:
    """The event that ended the job, unless it was taken up again since."""
    for event in reversed(events):
        if event.get("kind") in ("finished", "reopened"):
            return event if event["kind"] == "finished" else None
    return None


def _obeyed(job: JobDir, key: str) -> Optional[Mapping[str, Any]]:
    """The event that acknowledged an earlier sending of this request."""
    if not key:
        return None
    for event in job.read_events():
        if str((event.get("data") or {}).get("control", "")).endswith("-" + key):
            return event
    return None


def _wait_unlocked(job: JobDir, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while lock_holder(job.lock_path())[0] and time.monotonic() < deadline:
        time.sleep(0.02)
