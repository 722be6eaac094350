"""A wide-area link in user space: delay, loss and black holes between two network namespaces of our own.

The kernels we test on have no netem, so two TUN devices are joined by a process (see support/shuttle.py).  Needs root
and `ip` (Debian: iproute2).  Nothing outside the two namespaces is touched.

    with Wan(tmp_path, delay_ms=75) as wan:
        with Sshd(tmp_path / "sshd", address=wan.far_address, command_prefix=wan.far) as sshd:
            laptop = Laptop(tmp_path / "laptop", ..., command_prefix=wan.near)
            wan.set(up=False)       # packets vanish silently, as behind a closed lid
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.shuttle import FAR_ADDRESS, NEAR_ADDRESS

_numbers = itertools.count(1)
_SHUTTLE = Path(__file__).parent / "support" / "shuttle.py"


class Wan:
    """Two namespaces and the cable between them.

    Args:
        folder: where the control socket goes (a short path: unix sockets allow 107 bytes).
        delay_ms: one-way delay; the round trip takes twice that.
        loss: share of packets lost, each way.
    """

    far_address = FAR_ADDRESS
    near_address = NEAR_ADDRESS

    def __init__(self, folder: Path, *, delay_ms: float = 0.0, loss: float = 0.0) -> None:
        name = f"orch{os.getpid()}x{next(_numbers)}"
        self.spaces = (f"{name}n", f"{name}f")
        self.near = ("ip", "netns", "exec", self.spaces[0])
        self.far = ("ip", "netns", "exec", self.spaces[1])
        self._folder = folder
        self._control = f"/tmp/{name}.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self._first = {"delay_ms": delay_ms, "loss": loss}

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            for space in self.spaces:
                subprocess.run(["ip", "netns", "add", space], check=True)
            self._process = subprocess.Popen(
                [sys.executable, str(_SHUTTLE), *self.spaces, self._control], stdout=subprocess.PIPE
            )
            assert self._process.stdout is not None
            if self._process.stdout.readline() != b"up\n":
                raise AssertionError(  # noqa: TRY301 - the clean-up below is for this as well
                    "the shuttle between the namespaces did not start (root? /dev/net/tun? iproute2?)"
                )
            self.set(**self._first)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, stderr=subprocess.DEVNULL)
        with contextlib.suppress(OSError):
            os.unlink(self._control)

    def set(self, **settings: float) -> None:
        """Change `delay_ms`, `loss` or `up` (0 = black hole); in force when this returns."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mine:
            mine.settimeout(5.0)
            mine.bind("")  # an abstract name, so that the answer finds us
            mine.sendto(json.dumps({key: float(value) for key, value in settings.items()}).encode(), self._control)
            mine.recv(16)
