"""The look server: answers JSON lines on stdin/stdout until its controller goes away.

One loop, no locks around state: quick requests are answered inline, long polls wait in a list, slow ones (GPU
readings, preflight, hashing) run in threads that only compute and hand their answer to the loop.
It exits at end of input, or after three minutes without a request.  Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import select
import sys
import threading
import time
import traceback
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from remote_jobs import protocol
from remote_jobs.agent import history, launching, notices, probe, transfer
from remote_jobs.agent import why as why_module
from remote_jobs.agent.changes import Changes
from remote_jobs.agent.jobdir import Layout, is_network_fs
from remote_jobs.agent.launching import AgentError
from remote_jobs.agent.look import Looker
from remote_jobs.agent.sampler import Sampler
from remote_jobs.agent.slurm.keeper import Keeper

IDLE_EXIT_S = 180.0
POLL_S = 0.07
"""Between two glances at the files, when the kernel does not tell of changes or tells of very many."""
IDLE_CHECK_S = 5.0
LOST_EVERY_S = 1.0
_MAX_LINE_BYTES = 64 << 20
_MAX_WAIT_S = 120.0

Answer = Tuple[Dict[str, Any], bytes]


class Input:
    """Non-blocking reader of requests: JSON lines, each followed by its payload when it has one."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._data = bytearray()
        self._message: Optional[Dict[str, Any]] = None
        self.ended = False
        os.set_blocking(fd, False)

    def fill(self) -> None:
        """Take what has arrived."""
        try:
            while True:
                chunk = os.read(self.fd, 1 << 18)
                if not chunk:
                    self.ended = True
                    return
                self._data += chunk
                if len(self._data) > _MAX_LINE_BYTES:
                    self.ended = True
                    return
        except BlockingIOError:
            return
        except OSError:
            self.ended = True

    def next(self) -> Optional[Tuple[Dict[str, Any], bytes]]:
        """The next whole request with its payload, or None."""
        while True:
            if self._message is None:
                end = self._data.find(b"\n")
                if end < 0:
                    return None
                line = bytes(self._data[:end])
                del self._data[: end + 1]
                if not line.strip():
                    continue
                try:
                    message = json.loads(line.decode("utf-8"))
                except ValueError:
                    return {"id": None, "op": "?"}, b""
                self._message = message if isinstance(message, dict) else {"id": None, "op": "?"}
            size = self._message.get("payload_bytes") or 0
            if not isinstance(size, int) or size < 0:  # where the next request begins cannot be known any more
                self.ended = True
                return None
            if len(self._data) < size:
                return None
            payload = bytes(self._data[:size])
            del self._data[:size]
            message, self._message = self._message, None
            return message, payload


class Server:
    """One agent process for one controller connection."""

    def __init__(self, layout: Layout, release: str, *, stdin: int = 0, stdout: int = 1) -> None:
        self.layout, self.release = layout, release
        self.input = Input(stdin)
        self.out = stdout
        self.looker = Looker(layout)
        self.sampler = Sampler()
        self.changes = Changes(usable=not is_network_fs(layout.root))
        self._told = False
        self._looked_at = 0.0
        self._polls: List[Dict[str, Any]] = []
        self._done: "queue.Queue[Tuple[Any, Answer]]" = queue.Queue()
        self._wake_r, self._wake_w = os.pipe()
        self.keeper = Keeper(layout, lambda: os.write(self._wake_w, b"!"))
        self._busy = 0
        self._last_request = time.monotonic()
        self._quick: Dict[str, Callable[[Mapping[str, Any], bytes], Answer]] = {
            "hello": lambda request, data: ({"hello": probe.hello(self.layout, self.release)}, b""),
            "have": lambda request, data: ({"missing": transfer.have(self.layout, request["sha256"])}, b""),
            "put": self._put,
            "get": lambda request, data: transfer.get(
                request["path"], int(request.get("offset", 0)), int(request["length"]), request.get("mtime_ns")
            ),
            "why": self._why,
            "history": lambda request, data: ({"runs": history.read(self.layout)}, b""),
            "notify": lambda request, data: (notices.answer(self.layout.job(request["job"]), request), b""),
        }
        self._slow: Dict[str, Callable[[Mapping[str, Any], bytes], Answer]] = {
            "launch": self._launch,
            "control": self._control,
            "list": self._list,
            "digest": lambda request, data: (transfer.digest(request["path"]), b""),
            "probe": lambda request, data: (probe.probe(self.layout), b""),
            "gpus": self._gpus,
            "preflight": self._preflight,
            "patch": self._patch,
            "gc": self._gc,
        }

    # ------------------------------------------------------------------------------------------------------------ loop

    def run(self) -> int:
        """Serve until end of input or idleness."""
        self._send({"id": 0, "ok": True, "hello": probe.hello(self.layout, self.release)}, b"")
        while not self.input.ended:
            fds, timeout = self._waits()
            readable, _, _ = select.select(fds, [], [], timeout)
            if self._wake_r in readable:
                os.read(self._wake_r, 4096)
            if self.changes.fd in readable:
                pause_s = self._looked_at + POLL_S - time.monotonic()
                if pause_s > 0:  # a log that is written a thousand times a second wakes nobody that often
                    select.select([self.input.fd, self._wake_r], [], [], pause_s)
                self.changes.take()
            if self.input.fd in readable:
                self.input.fill()
            request = self.input.next()
            while request is not None:
                self._last_request = time.monotonic()
                self._take(*request)
                request = self.input.next()
            self._collect()
            self._serve_polls()
            idle = time.monotonic() - self._last_request
            if idle > IDLE_EXIT_S and not self._polls and not self._busy:
                return 0
        return 0

    def _waits(self) -> Tuple[List[int], float]:
        """(descriptors that wake the loop, s to sleep at most). With inotify a long poll sleeps till its files change."""
        fds = [self.input.fd, self._wake_r]
        if not self._polls:
            return fds, IDLE_CHECK_S
        if not self._told:
            return fds, POLL_S
        due_s = min(poll["until"] for poll in self._polls) - time.monotonic()
        return [*fds, self.changes.fd], min(LOST_EVERY_S, max(0.0, due_s))

    def _take(self, request: Mapping[str, Any], payload: bytes) -> None:
        op, request_id = str(request.get("op")), request.get("id")
        if op == "look":
            self._take_look(dict(request))
        elif op in self._quick:
            self._answer(request_id, self._guard(lambda: self._quick[op](request, payload)))
        elif op in self._slow:
            self._busy += 1
            work = threading.Thread(
                target=self._work, args=(request_id, lambda: self._slow[op](request, payload)), daemon=True
            )
            work.start()
        else:
            error = {"code": "bad_request", "message": "unknown request {!r}".format(op), "hint": "upgrade the host side"}
            self._send({"id": request_id, "ok": False, "error": error}, b"")

    def _work(self, request_id: Any, work: Callable[[], Answer]) -> None:
        self._done.put((request_id, self._guard(work)))
        with contextlib.suppress(OSError):
            os.write(self._wake_w, b"!")

    def _collect(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                request_id, answer = self._done.get_nowait()
                self._busy -= 1
                self._answer(request_id, answer)

    @staticmethod
    def _guard(work: Callable[[], Answer]) -> Answer:
        """Run a request; whatever goes wrong is an answer."""
        try:
            fields, payload = work()
            return {"ok": True, **fields}, payload
        except AgentError as exc:
            error = {"code": exc.code, "message": exc.message, "hint": exc.hint, **exc.extra}
        except protocol.ProtocolVersionError as exc:
            error = {"code": "version", "message": str(exc), "hint": ""}
        except OSError as exc:
            code = "disk_full" if exc.errno in (errno.ENOSPC, errno.EDQUOT) else "io"
            error = {"code": code, "message": str(exc), "hint": ""}
        except (ValueError, KeyError, TypeError) as exc:
            print(traceback.format_exc(), file=sys.stderr, flush=True)
            error = {"code": "bad_request", "message": "{}: {}".format(type(exc).__name__, exc), "hint": ""}
        except Exception as exc:  # an agent that dies answers nobody
            print(traceback.format_exc(), file=sys.stderr, flush=True)
            error = {"code": "io", "message": "{}: {}".format(type(exc).__name__, exc), "hint": ""}
        return {"ok": False, "error": error}, b""

    def _answer(self, request_id: Any, answer: Answer) -> None:
        self._send({"id": request_id, **answer[0]}, answer[1])

    def _send(self, message: Dict[str, Any], payload: bytes) -> None:
        if payload:
            message["payload_bytes"] = len(payload)
        view = memoryview(protocol.dumps(message) + payload)
        try:
            while view:
                try:
                    view = view[os.write(self.out, view) :]
                except BlockingIOError:  # some sshd give one socket for both ends: then our output does not block either
                    select.select([], [self.out], [], _MAX_WAIT_S)
        except OSError:
            self.input.ended = True

    # ------------------------------------------------------------------------------------------------------------ look

    def _take_look(self, request: Dict[str, Any]) -> None:
        try:
            wait_s = min(float(request.get("wait_s") or 0.0), _MAX_WAIT_S)
        except (TypeError, ValueError):
            wait_s = 0.0
        poll = {"request": request, "until": time.monotonic() + wait_s, "marks": None, "lost_at": 0.0, "gpus": bool(request.get("gpus"))}
        if poll["gpus"]:
            self.sampler.want(request.get("expected"))
        self._polls.append(poll)
        self._serve_polls()

    def _serve_polls(self) -> None:
        waiting = []
        self._told = self.changes.watch(self._sources())  # before the files are read: a change in between is news
        self._looked_at = time.monotonic()
        for poll in self._polls:
            try:
                served = self._serve(poll)
            except (AttributeError, KeyError, TypeError, ValueError) as exc:  # fields of the wrong type
                error = {"code": "bad_request", "message": "look: {}".format(exc), "hint": "upgrade the older side"}
                self._answer(poll["request"].get("id"), ({"ok": False, "error": error}, b""))
                served = True
            if not served:
                waiting.append(poll)
        self._polls = waiting

    def _sources(self) -> Dict[str, int]:
        paths: Dict[str, int] = {}
        for poll in self._polls:
            with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):  # answered as a bad request
                paths.update(self.looker.sources(poll["request"].get("jobs"), poll["request"].get("logs") or []))
        return paths

    def _serve(self, poll: Dict[str, Any]) -> bool:
        """Answer a look when something changed or its time is up."""
        request = poll["request"]
        now = time.monotonic()
        if not self.keeper.ready(now):
            return False
        seen = request.get("seen") or {}
        ids = request.get("jobs")
        glance = self.looker.glance(ids)
        if poll["marks"] is None:
            poll["marks"] = {job: summary[1] for job, summary in glance.items()}
        # Jobs that had ended before the asker saw them are no news to who asks for the living.
        past = protocol.JOB_TERMINAL if request.get("active_only") else ()
        news = now >= poll["until"] or any(
            seq > int(seen.get(job, -1)) or marks != poll["marks"].get(job, marks)
            for job, (seq, marks, state) in glance.items()
            if state not in past or job in seen
        )
        cursors = request.get("logs") or []
        news = news or (bool(cursors) and self.looker.log_sizes(cursors))
        if not news and now - poll["lost_at"] > LOST_EVERY_S:
            poll["lost_at"] = now
            news = self.looker.abandoned(ids)
        if not news:
            return False
        answer = self._guard(lambda: self._look(request))
        self.looker.told(answer[0].get("jobs") or {})
        self._answer(request.get("id"), answer)
        return True

    def _look(self, request: Mapping[str, Any]) -> Answer:
        jobs, unreadable = self.looker.jobs(
            request.get("jobs"),
            processes=bool(request.get("processes")),
            active_only=bool(request.get("active_only")),
            seen=request.get("seen"),
        )
        answer: Dict[str, Any] = {
            **probe.clocks(),
            "jobs": jobs,
            "unreadable": unreadable,
            # Quiet cursors are read along and wake nobody: what a view draws from a log that grows all the time.
            "logs": self.looker.logs([*(request.get("logs") or []), *(request.get("quiet_logs") or [])]),
            "gpus": self.sampler.latest() if request.get("gpus") else None,
            "disk": self._disk(jobs) if request.get("disk") else None,
        }
        return answer, b""

    @staticmethod
    def _disk(jobs: Mapping[str, Any]) -> Dict[str, Any]:
        paths = {str((job.get("spec") or {}).get("workdir") or "/") for job in jobs.values()}
        return {path: probe.disk_free(os.path.expanduser(path)) for path in sorted(paths)}

    # ------------------------------------------------------------------------------------------------------------- ops

    def _put(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        done = transfer.put(
            self.layout, request["sha256"], int(request.get("offset", 0)), payload, last=bool(request.get("last"))
        )
        return done, b""

    def _why(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        found = why_module.why(self.layout, self.looker, request["job"], request.get("step"), request.get("attempt"))
        return {"why": found}, b""

    def _launch(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        launched = launching.launch(
            self.layout,
            Looker(self.layout),
            request["spec"],
            request.get("secrets") or {},
            skip_gate=bool(request.get("skip_gate")),
        )
        return launched, b""

    def _control(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        answer = launching.post_control(
            self.layout,
            Looker(self.layout),
            request["job"],
            str(request.get("action")),
            request.get("args") or {},
            float(request.get("wait_s") or 10.0),
            str(request.get("key") or ""),
            request.get("secrets") or {},
        )
        return answer, b""

    def _list(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        found = transfer.list_files(
            self.layout, request.get("job"), request.get("roots") or ["outputs"], request.get("globs") or []
        )
        return found, b""

    def _gpus(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        from remote_jobs.agent import gate

        return gate.report(self.layout.jobs, request.get("expected")), b""

    def _preflight(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        from remote_jobs.agent import preflight

        return preflight.run(self.layout, request), b""

    def _gc(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        from remote_jobs.agent.gc import Collector

        collector = Collector(
            self.layout,
            Looker(self.layout),
            older_than_s=float(request["older_than_s"]),
            apply=request.get("apply") is True,
            own_release=self.release,
        )
        return collector.run(), b""

    def _patch(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        from remote_jobs.patches import host

        return host.answer(self.layout.root, request), b""
