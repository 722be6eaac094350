"""Side tasks of the supervisor: short-lived forked children that do what may hang, burn memory or crash.

Why: the supervisor must stay small and answer at once, while a verdict runs a hundred regular expressions, a
gate asks a driver that may never answer and a glob walks a network disk.  Each task is a function run in a fork
with limits on CPU time, memory and wall time; its JSON result comes back through a pipe.  The failure of a task
is an answer (None with a reason), never a dead supervisor.  Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import time
import traceback
from typing import Any, Callable, List, Optional, Set

_UNREAPED: Set[int] = set()


def unreaped() -> List[int]:
    """Pids of our side tasks, those included that have answered and are not quite gone yet: none is the job's process."""
    return list(_UNREAPED)


def reaped(pid: int) -> None:
    """Forget a child that was waited for: its pid may be anybody's now."""
    _UNREAPED.discard(pid)


class SideTask:
    """A forked child running ``work()``; the caller polls ``ready()`` and then takes ``result``."""

    def __init__(
        self, work: Callable[[], Any], *, timeout_s: float, cpu_s: int = 60, memory_mib: Optional[int] = 512
    ) -> None:
        self.deadline = time.monotonic() + timeout_s
        self.result: Any = None
        self.error: Optional[str] = None
        self._data = b""
        self._open = True
        read_fd, write_fd = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._child(work, read_fd, write_fd, cpu_s, memory_mib)
        _UNREAPED.add(self.pid)
        os.close(write_fd)
        os.set_blocking(read_fd, False)
        self.fd = read_fd

    @staticmethod
    def _child(work: Callable[[], Any], read_fd: int, write_fd: int, cpu_s: int, memory_mib: Optional[int]) -> None:
        status = 1
        try:
            os.close(read_fd)
            os.setsid()  # its own session: a kill of the group takes nvidia-smi along
            for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
                signal.signal(signum, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
            if memory_mib is not None:
                resource.setrlimit(resource.RLIMIT_AS, (memory_mib << 20, memory_mib << 20))
            try:
                answer = {"result": work()}
            except BaseException as exc:  # the answer of a crashed task is the reason of the crash
                answer = {"error": "{}: {}".format(type(exc).__name__, exc), "trace": traceback.format_exc()[-4000:]}
            data = json.dumps(answer).encode("utf-8")
            while data:
                data = data[os.write(write_fd, data) :]
            status = 0
        finally:
            os._exit(status)

    @property
    def pending(self) -> bool:
        """True while the answer's pipe is open."""
        return self._open

    def ready(self) -> bool:
        """True once the child has answered, died or run out of time. Never blocks; the zombie is reaped elsewhere."""
        if not self._open:
            return True
        with contextlib.suppress(BlockingIOError):
            while True:
                chunk = os.read(self.fd, 65536)
                if not chunk:
                    self._finish()
                    return True
                self._data += chunk
        if time.monotonic() > self.deadline:
            self.cancel()
            self.error = "no answer in time"
            return True
        return False

    def _finish(self) -> None:
        self._close()
        try:
            answer = json.loads(self._data.decode("utf-8"))
        except ValueError:
            self.error = "the task died without an answer"
            return
        self.result, self.error = answer.get("result"), answer.get("error")

    def _close(self) -> None:
        if self._open:
            self._open = False
            os.close(self.fd)

    def cancel(self) -> None:
        """End the child and everything it started; the result stays None."""
        for target in (-self.pid, self.pid):
            with contextlib.suppress(OSError):
                os.kill(target, signal.SIGKILL)
        self._close()
