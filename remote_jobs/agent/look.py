"""One look: the state of every job on this host, with log deltas, in one bounded answer.

Reads only what supervisors wrote, and the lock that tells whether one lives.  "Lost" is an observation made here
(lock free, no final event), never an event.  Standard library only.
"""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import time
from typing import Any, Dict, List, Mapping, Optional, Set, Tuple

from remote_jobs import protocol
from remote_jobs.agent import changes, procs, recovery
from remote_jobs.agent.fold import fold
from remote_jobs.agent.jobdir import JobDir, Layout, lock_holder, read_json, write_json
from remote_jobs.agent.slurm import shown, submissions

_MAX_LOG_BYTES = 1 << 20
_MAX_ALL_LOGS_BYTES = 4 << 20
_STATE_GRACE_S = 10.0


def _blocks(step: protocol.StepSpec) -> Dict[str, Any]:
    """What a step says in keys of keys: one of them may be changed by a retry, and is judged with the others."""
    return {key: value for key, value in (("done", step.done), ("service", step.service)) if value}


class Looker:
    """Answers looks. Keeps one CPU meter per attempt and the results that can no longer change."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._meters: Dict[str, procs.CpuMeter] = {}
        self._told_lost: Set[Tuple[str, Any]] = set()  # a lost job has no new event: it is told once per asker
        self._glances: Dict[str, Tuple[Any, Tuple[Any, ...]]] = {}
        self._specs: Dict[str, protocol.JobSpec] = {}  # a spec changes only until it is submitted: see `forget`
        self._ended: Dict[str, Tuple[float, Dict[str, Any]]] = {}

    # --------------------------------------------------------------------------------------------------------- changes

    def glance(self, ids: Optional[List[str]]) -> Dict[str, Tuple[Any, ...]]:
        """Cheap summary of each job that has a state: (seq, marks that its bars have passed).

        Only state files that were replaced since the last glance are read; a long poll takes ten a second.
        """
        found: Dict[str, Tuple[Any, ...]] = {}
        for job_id in self._ids(ids):
            path = os.path.join(self.layout.jobs, job_id, protocol.STATE_FILE)
            try:
                status = os.stat(path)
                stamp = (status.st_mtime_ns, status.st_ino)
                cached = self._glances.get(job_id)
                if cached is None or cached[0] != stamp:
                    cached = (stamp, _summary(read_json(path)))
                    self._glances[job_id] = cached
                found[job_id] = self._with_slurm(job_id, cached[1])
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue
        return found

    def _with_slurm(self, job_id: str, summary: Tuple[Any, ...]) -> Tuple[Any, ...]:
        """The summary with a mark that moves when Slurm says something new of the job."""
        if job_id not in self._specs or self._specs[job_id].slurm is None:
            return summary
        stamp = 0
        with contextlib.suppress(OSError):
            stamp = os.stat(os.path.join(self.layout.jobs, job_id, submissions.SEEN_FILE)).st_mtime_ns
        seq, marks, state = summary
        return seq, (*marks, stamp), state

    def abandoned(self, ids: Optional[List[str]]) -> bool:
        """True when a job without final event has no supervisor any more: a death changes no file."""
        for job_id, (seq, _marks, state) in self.glance(ids).items():
            if state in protocol.JOB_TERMINAL or (job_id, seq) in self._told_lost:
                continue
            job = JobDir(os.path.join(self.layout.jobs, job_id), self.layout.root)
            if self._spec(job).slurm is not None:
                continue  # its lock is another machine's; what Slurm says comes with a file
            if not lock_holder(job.lock_path())[0]:
                return True
        return False

    def log_sizes(self, cursors: List[Mapping[str, Any]]) -> bool:
        """True when any asked log has bytes behind its cursor."""
        for cursor in cursors:
            if int(cursor.get("offset", -1)) < 0:
                return True
            with contextlib.suppress(OSError, ValueError):
                path = self._log_path(protocol.from_dict(protocol.LogCursor, cursor))
                if path is not None and os.stat(path[0]).st_size != int(cursor["offset"]):
                    return True
        return False

    def sources(self, ids: Optional[List[str]], cursors: List[Mapping[str, Any]]) -> Dict[str, int]:
        """Paths whose change may be news for a look at these jobs and logs, with what to watch on each."""
        paths = {os.path.join(self.layout.jobs, job_id): changes.RENAMED_INTO for job_id in self._ids(ids)}
        if ids is None:
            paths = {path: mask for path, mask in paths.items() if os.path.basename(path) not in self._ended}
            paths[self.layout.jobs] = changes.ENTRIES
        for cursor in cursors:
            with contextlib.suppress(OSError, ValueError):
                found = self._log_path(protocol.from_dict(protocol.LogCursor, cursor))
                if found is not None and os.path.exists(found[0]):
                    paths[found[0]] = changes.WRITTEN
        return paths

    def told(self, states: Mapping[str, Any]) -> None:
        """Remember which lost jobs an answer has named."""
        for job_id, answer in states.items():
            if answer.get("lost"):
                self._told_lost.add((job_id, (answer.get("state") or {}).get("seq")))

    def forget(self, job_id: str) -> None:
        """Read this job's spec anew: another launch has replaced it."""
        self._specs.pop(job_id, None)

    def _spec(self, job: JobDir) -> protocol.JobSpec:
        if job.id not in self._specs:
            self._specs[job.id] = job.spec()
        return self._specs[job.id]

    def _ids(self, ids: Optional[List[str]]) -> List[str]:
        return self.layout.job_ids() if ids is None else ids

    # ------------------------------------------------------------------------------------------------------------ jobs

    def jobs(
        self,
        ids: Optional[List[str]],
        *,
        processes: bool = False,
        active_only: bool = False,
        seen: Optional[Mapping[str, Any]] = None,
    ) -> Tuple[Dict[str, Any], Dict[str, str]]:
        """({job id: {state, alive, lost, unfinished, spec}}, {job id: why it could not be read}).

        ``active_only`` leaves out ended jobs, but not one that the asker has ``seen`` (id -> seq) before its end.
        """
        found: Dict[str, Any] = {}
        unreadable: Dict[str, str] = {}
        table = procs.Snapshot() if processes else None
        for job_id in self._ids(ids):
            try:
                job = self.layout.job(job_id)
                answer = self._ended_answer(job) or self._job(job, table)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
                unreadable[job_id] = str(exc) or type(exc).__name__
                continue
            if answer is None:
                if ids is not None:
                    unreadable[job_id] = "no job {} on this host".format(job_id)
                continue
            state = answer.get("state") or {}
            over = state.get("state") in protocol.JOB_TERMINAL
            known = int((seen or {}).get(job_id, state.get("seq") or 0))
            if not (active_only and over) or known < int(state.get("seq") or 0):
                found[job_id] = answer
        return found, unreadable

    def _ended_answer(self, job: JobDir) -> Optional[Dict[str, Any]]:
        cached = self._ended.get(job.id)
        if cached is None:
            return None
        with contextlib.suppress(OSError):
            if os.stat(job.state_path).st_mtime == cached[0]:
                return cached[1]
        del self._ended[job.id]
        return None

    def _job(self, job: JobDir, table: Optional[procs.Snapshot]) -> Optional[Dict[str, Any]]:
        if not os.path.isdir(job.path):
            return None
        if not os.path.exists(job.spec_path):
            # The id was claimed and the launch broke off: unfinished, not lost; a resend goes on with it.
            return {"state": None, "alive": False, "lost": None, "unfinished": True, "spec": None}
        spec = self._spec(job)
        alive, owner = lock_holder(job.lock_path())
        state = self._state(job, spec, alive=alive)
        final = state["state"] in protocol.JOB_TERMINAL
        answer: Dict[str, Any] = {
            "state": state,
            "alive": alive,
            "lost": None,
            "unfinished": False,
            "spec": {
                "name": spec.name, "host": spec.host, "plan_sha256": spec.plan_sha256, "created_at": spec.created_at,
                "workdir": spec.workdir, "controller": spec.controller,
                "secrets": {step.name: step.secrets for step in spec.step_specs() if step.secrets},
                "blocks": {step.name: blocks for step in spec.step_specs() for blocks in [_blocks(step)] if blocks},
            },
        }  # fmt: skip
        if final:
            if not alive:  # else its supervisor does, or is just taking the job up again
                self._finish(job, state)
            with contextlib.suppress(OSError):
                self._ended[job.id] = (os.stat(job.state_path).st_mtime, answer)
        elif spec.slurm is not None:
            self._in_slurm(job, state, answer, held=alive)
            if alive and table is not None:
                self._add_processes(job, state, table)
        elif not alive:
            if state["seq"] == 0 and time.time() - os.stat(job.spec_path).st_mtime < _STATE_GRACE_S:
                answer["unfinished"] = True  # its supervisor is just being started
            elif state["seq"] == 0:
                answer["unfinished"] = True
            elif self._foreign_machine(owner):
                state["notes"] = [*state.get("notes", []), {"at": None, "text": "seen from another machine"}]
            else:
                answer["lost"] = self._lost(job, spec, state)
        elif table is not None:
            self._add_processes(job, state, table)
        return answer

    @staticmethod
    def _in_slurm(job: JobDir, state: Dict[str, Any], answer: Dict[str, Any], *, held: bool) -> None:
        """Alive and lost of a job in Slurm: a lock held here proves life, a free one nothing."""
        newest = submissions.newest(job)
        record = submissions.seen(job)
        if newest is not None and record.get("n") != newest.n:
            record = {}  # said of an earlier submission
        alive, lost = shown.overlay(
            state, record, newest.id if newest is not None else None, submitted=newest is not None, held=held
        )
        answer["alive"], answer["lost"] = alive, lost
        if lost is not None:
            state["state"] = "lost"

    def _state(self, job: JobDir, spec: protocol.JobSpec, *, alive: bool) -> Dict[str, Any]:
        """state.json when it is whole and current, else the fold of the events, which is the truth anyway."""
        try:
            state = read_json(job.state_path)
            if isinstance(state, dict) and state.get("id") == job.id and isinstance(state.get("steps"), list):
                protocol.check_version(state, job.state_path)
                if alive or state.get("state") in protocol.JOB_TERMINAL:
                    return state
                newest = max((event["seq"] for event in job.read_events()), default=0)
                if newest <= int(state.get("seq") or 0):
                    return state
        except protocol.ProtocolVersionError:
            raise
        except (OSError, ValueError):
            pass
        return fold(spec, job.read_events()).state

    @staticmethod
    def _finish(job: JobDir, state: Mapping[str, Any]) -> None:
        """result.json is derived: rewrite it when a full disk or a kill kept the supervisor from doing so."""
        whole = False
        with contextlib.suppress(OSError, ValueError):
            whole = isinstance(read_json(job.result_path), dict)
        if not whole:
            with contextlib.suppress(OSError):
                record = {"v": protocol.VERSION, "id": job.id, "state": state["state"], "seq": state["seq"]}
                write_json(job.result_path, {**record, "at": state.get("ended_at")})

    @staticmethod
    def _foreign_machine(owner: Mapping[str, Any]) -> bool:
        """True when the lock was taken on another machine or in another container: here it proves nothing."""
        if not owner.get("hostname"):
            return False
        if owner["hostname"] != socket.gethostname():
            return True
        same_boot = owner.get("boot_id") == procs.boot_id()
        return same_boot and owner.get("pid_ns") not in (None, 0, procs.pid_namespace())

    def _lost(self, job: JobDir, spec: protocol.JobSpec, state: Dict[str, Any]) -> Dict[str, Any]:
        """Mark a state object as lost and say what still runs."""
        booted_elsewhere = bool(state.get("boot_id")) and state["boot_id"] != procs.boot_id()
        left: List[procs.Proc] = []
        main_alive = under_way = False
        for index, (step, item) in enumerate(zip(spec.step_specs(), state["steps"]), start=1):
            newest = item["attempts"][-1] if item["attempts"] else None
            if item["state"] in protocol.STEP_TERMINAL:
                continue
            if newest is not None and newest["state"] not in protocol.ATTEMPT_TERMINAL:
                newest["state"] = "lost"
                under_way = True
                recorded = recovery.recorded_processes(job, index, step.name, newest["n"])
                main_alive = main_alive or any(procs.is_alive(process) for process in recorded)
                left += recovery.left_running(job, index, step, newest["n"])
                item["state"] = "lost"
            elif item["state"] != "queued":
                item["state"] = "lost"
        state["state"] = "lost"
        left += procs.find_job(job.id)  # also what was started a moment before the kill and never written down
        left = list({proc.pid: proc for proc in left}.values())
        crashed = recovery.crash(job)
        who = "the supervisor was killed"
        if crashed:
            who = "the supervisor crashed, a defect of orch ({}; more in {})".format(crashed, job.at(protocol.SUPERVISOR_LOG))
        if booted_elsewhere:
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(procs.boot_time_s()))
            reason = "host rebooted at {}".format(at)
        elif main_alive:
            reason = who + "; the job's main process still runs"
        elif left and not any(item["attempts"] for item in state["steps"]):
            reason = who + " while it started the job; {} process(es) run".format(len(left))
        elif left:
            reason = who + "; the job's main process is gone too, {} process(es) still run".format(len(left))
        elif under_way:
            reason = who + "; nothing of the job runs any more, how it ended is not known"
        else:
            reason = who + " while no step was running"
        rows = procs.CpuMeter().rows(left[:50], time.monotonic())
        return {"reason": reason, "main_alive": main_alive, "boot_changed": booted_elsewhere, "processes": rows}

    def _add_processes(self, job: JobDir, state: Dict[str, Any], table: procs.Snapshot) -> None:
        active = {
            str(item["name"]): attempt
            for item in state["steps"]
            for attempt in item["attempts"]
            if attempt["state"] in ("running", "stopping") and attempt.get("pid")
        }
        mains = {name: int(attempt["pid"]) for name, attempt in active.items()}
        rows = procs.find_job(job.id, at=table, sessions=mains.values()) if mains else []
        owners = procs.owners(rows, mains)
        skip = {(state.get("supervisor") or {}).get("pid"), os.getpid()}
        for name, attempt in active.items():
            mine = [row for row in rows if owners.get(row.pid) == name and row.pid not in skip]
            meter = self._meters.setdefault("{}/{}/{}".format(job.id, name, attempt["n"]), procs.CpuMeter())
            attempt["processes"] = meter.rows(mine, time.monotonic())

    # ------------------------------------------------------------------------------------------------------------ logs

    def logs(self, cursors: List[Mapping[str, Any]]) -> List[Dict[str, Any]]:
        """Deltas of the asked logs, newest bytes last; a 10 GB log never travels."""
        budget = _MAX_ALL_LOGS_BYTES
        answers = []
        for raw in cursors:
            cursor = protocol.from_dict(protocol.LogCursor, raw)
            cursor.max_bytes = max(1, min(int(cursor.max_bytes), _MAX_LOG_BYTES, max(1, budget)))
            answer = self._log(cursor)
            budget -= len(answer.get("data_b64", "")) * 3 // 4
            answers.append(answer)
        return answers

    def _log_path(self, cursor: protocol.LogCursor) -> Optional[Tuple[str, int, str]]:
        """(path, attempt, step) of the log that a cursor means, or None when there is none yet."""
        job = self.layout.job(cursor.job)
        for index, step in enumerate(self._spec(job).step_specs(), start=1):
            if step.name != cursor.step:
                continue
            n = cursor.attempt
            if n <= 0:
                folder = os.path.dirname(job.attempt_path(index, step.name, 1))
                with contextlib.suppress(OSError):
                    n = max((int(name) for name in os.listdir(folder) if name.isdigit()), default=0)
            if n <= 0:
                return None
            return job.attempt_path(index, step.name, n, protocol.LOG_FILE), n, step.name
        return None

    def _log(self, cursor: protocol.LogCursor) -> Dict[str, Any]:
        answer: Dict[str, Any] = {
            "job": cursor.job, "step": cursor.step, "attempt": cursor.attempt, "inode": cursor.inode,
            "offset": max(0, cursor.offset), "end": max(0, cursor.offset), "size": 0, "data_b64": "",
            "skipped_bytes": 0, "caught_up": True, "rotated": False, "missing": True,
        }  # fmt: skip
        try:
            found = self._log_path(cursor)
            if found is None:
                return answer
            path, answer["attempt"], _ = found
            with open(path, "rb") as file:
                return self._delta(file.fileno(), cursor, answer)
        except (OSError, ValueError) as exc:
            answer["error"] = str(exc)
            return answer

    @staticmethod
    def _delta(fd: int, cursor: protocol.LogCursor, answer: Dict[str, Any]) -> Dict[str, Any]:
        status = os.fstat(fd)
        size, offset = status.st_size, cursor.offset
        answer.update({"missing": False, "inode": status.st_ino, "size": size})
        if offset < 0:
            offset = max(0, size - max(0, int(cursor.tail_bytes)))
            answer["skipped_bytes"] = offset
        elif (cursor.inode and cursor.inode != status.st_ino) or offset > size:
            answer["rotated"], offset = True, 0
        data = os.pread(fd, cursor.max_bytes, offset)
        if data and not data.strip(b"\0"):
            # A hole (log_limit punched it out): jump to where data starts again instead of sending zeros.
            with contextlib.suppress(OSError):
                jump = os.lseek(fd, offset, os.SEEK_DATA)
                answer["skipped_bytes"] += jump - offset
                offset = jump
                data = os.pread(fd, cursor.max_bytes, offset)
        answer.update(
            {
                "offset": offset,
                "end": offset + len(data),
                "data_b64": base64.b64encode(data).decode("ascii"),
                "caught_up": offset + len(data) >= size,
            }
        )
        return answer


def _summary(state: Mapping[str, Any]) -> Tuple[Any, ...]:
    """(seq, tenths that the newest attempt's bars have passed, state) of a state object."""
    marks = []
    for item in state["steps"]:
        bars = (item["attempts"][-1].get("bars") or [])[-8:] if item["attempts"] else []
        marks += [
            (bar.get("label"), bar.get("instance"), 10 * int(bar["done"]) // int(bar["total"]))
            for bar in bars
            if bar.get("total") and bar.get("done") is not None
        ]
    return int(state["seq"]), tuple(marks), str(state["state"])
