"""The demo's host: an SSH server on the loopback address that nobody but the demo's own key can enter.

    python -m orchestrator.services.demo_host FOLDER

Runs as a process of its own, as a real host would. Makes fresh host and client keys in FOLDER, prints one JSON line
{"port", "pid", "token"} once it listens, and serves exec requests as the user who started it, with FOLDER/home as home
and FOLDER/tmp for temporary files. No port or agent forwarding, no file transfer subsystem: orch needs none. It ends when
its standard input does, unless the line "keep" came first, and takes every process that it started along, detached ones
too: each carries ORCH_DEMO_HOST=<token>.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import time
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

TOKEN_ENV = "ORCH_DEMO_HOST"
CLIENT_KEY = "id_ed25519"
KNOWN_HOSTS = "known_hosts"
READ_BYTES = 65536
END_GRACE_S = 3.0
_DROPPED_ENV = frozenset(
    {"PYTHONUNBUFFERED", "SSH_AUTH_SOCK", "SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY", "VIRTUAL_ENV"}
)


async def serve(folder: Path) -> None:
    """Listen until told to end."""
    import asyncssh

    token = secrets.token_hex(8)
    home, temporary = folder / "home", folder / "tmp"
    home.mkdir(parents=True, exist_ok=True)
    temporary.mkdir(exist_ok=True)
    host_key = asyncssh.generate_private_key("ssh-ed25519")
    client_key = asyncssh.generate_private_key("ssh-ed25519")
    key_file = folder / CLIENT_KEY
    key_file.touch(mode=0o600)
    client_key.write_private_key(key_file)
    client_key.write_public_key(folder / f"{CLIENT_KEY}.pub")
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in _DROPPED_ENV and not name.startswith("ORCH_")
    }
    env.update({"HOME": str(home), "TMPDIR": str(temporary), TOKEN_ENV: token})

    async def handle(process: Any) -> None:
        await _run(process, env, home)

    server = await asyncssh.create_server(
        asyncssh.SSHServer,
        "127.0.0.1",
        0,
        server_host_keys=[host_key],
        authorized_client_keys=str(folder / f"{CLIENT_KEY}.pub"),
        process_factory=handle,
        encoding=None,
        agent_forwarding=False,
        x11_forwarding=False,
        keepalive_interval=15,
    )
    port = server.sockets[0].getsockname()[1]
    public = host_key.export_public_key().decode().split()
    (folder / KNOWN_HOSTS).write_text(f"[127.0.0.1]:{port} {public[0]} {public[1]}\n")
    sys.stdout.write(json.dumps({"port": port, "pid": os.getpid(), "token": token}) + "\n")
    sys.stdout.flush()

    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, ended.set)
    watcher = asyncio.create_task(_watch_stdin(ended))
    await ended.wait()
    watcher.cancel()
    server.close()
    end_marked_processes(token)


async def _watch_stdin(ended: asyncio.Event) -> None:
    """Set `ended` when our parent has gone, unless it said `keep`."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        if line.strip() == b"keep":
            return
    ended.set()


async def _run(process: Any, env: dict[str, str], home: Path) -> None:
    """Serve one exec request: a shell with three pipes, in a session of its own so that it outlives the connection."""
    import asyncssh

    command = process.command or "exec /bin/sh"
    child = await asyncio.create_subprocess_exec(
        "/bin/sh",
        "-c",
        command,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        start_new_session=True,
        env=env,
        cwd=home,
    )
    feed = asyncio.create_task(_pump(process.stdin, child.stdin, close=True))
    await asyncio.gather(_pump(child.stdout, process.stdout), _pump(child.stderr, process.stderr))
    status = await child.wait()
    feed.cancel()
    with contextlib.suppress(OSError, asyncssh.Error):  # the client may be gone; the command ran all the same
        if status >= 0:
            process.exit(status)
        else:
            process.exit_with_signal(signal.Signals(-status).name.removeprefix("SIG"))


async def _pump(reader: Any, writer: Any, *, close: bool = False) -> None:
    """Copy bytes until the end; a reader or writer that goes away ends the copy and nothing else."""
    import asyncssh

    with contextlib.suppress(OSError, asyncssh.Error):
        while data := await reader.read(READ_BYTES):
            writer.write(data)
            await writer.drain()
    if close:
        with contextlib.suppress(OSError):
            writer.close()


# --------------------------------------------------------------------------------------- processes that carry our mark


def marked_processes(token: str) -> list[int]:
    """Ids of the processes, ourselves apart, whose environment carries this demo host's token (Linux: /proc)."""
    mark = f"{TOKEN_ENV}={token}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as stream:
            if mark in stream.read().split(b"\0"):
                found.append(int(entry))
    return found


def end_marked_processes(token: str) -> int:
    """End everything that this demo host started: TERM, a short grace, KILL. Returns how many there were."""
    first = marked_processes(token)
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + END_GRACE_S
        for pid in marked_processes(token):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        while marked_processes(token) and time.monotonic() < deadline:
            time.sleep(0.05)
    return len(first)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
