"""Servers with logins that a private sshd cannot offer (passwords, one-time codes), and a person who answers.

asyncssh serves password and keyboard-interactive; a paramiko server serves "a key, then a code", which asyncssh's
server cannot.  Both speak on 127.0.0.1 only and run /bin/sh for whoever got in.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import asyncssh
import paramiko
from paramiko.common import cMSG_CHANNEL_SUCCESS

from orchestrator.hosts.prompt import NoTerminal


class Person:
    """Answers questions by the words in them, and remembers being asked.

    Args:
        answers: part of the question -> answer, or a list of answers given one after the other.
    """

    def __init__(self, **answers: str | list[str]) -> None:
        self.answers = {word.lower(): [a] if isinstance(a, str) else list(a) for word, a in answers.items()}
        self.asked: list[tuple[str, bool]] = []

    def ask(self, text: str, *, secret: bool) -> str:
        """The next answer for the first word that occurs in ``text``; nobody is there when none does."""
        self.asked.append((text, secret))
        for word, left in self.answers.items():
            if word in text.lower():
                return left.pop(0) if len(left) > 1 else left[0]
        raise NoTerminal("stdin is not a terminal")


async def _serve(process: asyncssh.SSHServerProcess[bytes]) -> None:
    child = await asyncio.create_subprocess_exec(
        "/bin/sh", "-c", process.command or "true", stdin=-1, stdout=-1, stderr=-1, start_new_session=True
    )

    async def pump(source: Any, sink: Any, *, end: bool = False) -> None:
        try:
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        except (OSError, asyncssh.Error):
            pass
        if end:
            sink.close()

    inward = asyncio.create_task(pump(process.stdin, child.stdin, end=True))
    try:
        await asyncio.gather(pump(child.stdout, process.stdout), pump(child.stderr, process.stderr))
        process.exit(await child.wait())
    finally:
        inward.cancel()
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
        await child.wait()
        child._transport.close()  # type: ignore[attr-defined]  # its pipes: asyncio has no public way


class PasswordServer:
    """An asyncssh server for one user; ``kind`` is "password" or "keyboard-interactive" (a password, then a code).

    Attributes:
        attempts: logins tried so far.
        codes: one-time codes that are still good; each works once.
    """

    def __init__(self, folder: Path, kind: str, password: str = "right", codes: tuple[str, ...] = ()) -> None:
        self.folder, self.kind, self.password, self.codes = folder, kind, password, list(codes)
        self.attempts = 0
        self.port = 0
        self.known_hosts = folder / "known_hosts"
        self._loop = asyncio.new_event_loop()
        self._server: Any = None
        self._connections: list[Any] = []

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        key = asyncssh.generate_private_key("ssh-ed25519")
        outer = self

        class Login(asyncssh.SSHServer):
            def connection_made(self, conn: Any) -> None:
                outer._connections.append(conn)

            def password_auth_supported(self) -> bool:
                return outer.kind == "password"

            def validate_password(self, _username: str, password: str) -> bool:
                outer.attempts += 1
                return password == outer.password

            def kbdint_auth_supported(self) -> bool:
                return outer.kind == "keyboard-interactive"

            def get_kbdint_challenge(self, _username: str, _lang: str, _submethods: str) -> Any:
                prompts = [("Password: ", False)] + ([("Verification code: ", True)] if outer.codes else [])
                return "Two steps", "As on the card\x1b[31m", "", prompts

            def validate_kbdint_response(self, _username: str, responses: Any) -> bool:
                outer.attempts += 1
                good = responses[0] == outer.password
                if len(responses) > 1:
                    good = good and responses[1] in outer.codes
                    if good:
                        outer.codes.remove(responses[1])
                return good

        async def start() -> None:
            self._server = await asyncssh.create_server(
                Login, "127.0.0.1", 0, server_host_keys=[key], process_factory=_serve, encoding=None
            )

        ready = threading.Event()

        def run() -> None:
            asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(start())
            ready.set()
            self._loop.run_forever()

        self._thread = threading.Thread(target=run, name="password-server", daemon=True)
        self._thread.start()
        assert ready.wait(10), "the password server did not start"
        self.port = self._server.sockets[0].getsockname()[1]
        public = " ".join(key.export_public_key().decode().split()[:2])
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {public}\n")
        return self

    def drop_connections(self) -> None:
        """Abort every connection, as a failing network would."""
        for connection in self._connections:
            self._loop.call_soon_threadsafe(connection.abort)
        self._connections.clear()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop_connections()
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

        async def settle() -> None:
            pending = asyncio.all_tasks() - {asyncio.current_task()}
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            for _ in range(10):  # aborted transports close their sockets in callbacks of the loop
                await asyncio.sleep(0)

        self._loop.run_until_complete(settle())
        self._loop.close()


class _Answering(paramiko.Transport):
    """Tells when it has answered a request of a channel: a command that ends sooner would close it without an answer."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.answered = threading.Event()

    def _send_user_message(self, data: paramiko.Message) -> None:
        super()._send_user_message(data)
        if data.asbytes()[:1] == cMSG_CHANNEL_SUCCESS:
            self.answered.set()


class _KeyThenCode(paramiko.ServerInterface):
    def __init__(self, outer: KeyThenCodeServer) -> None:
        self.outer = outer
        self.key_accepted = False

    def get_allowed_auths(self, username: str) -> str:
        return "keyboard-interactive" if self.key_accepted else "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        self.key_accepted = key.asbytes() == self.outer.public_blob
        return paramiko.AUTH_PARTIALLY_SUCCESSFUL if self.key_accepted else paramiko.AUTH_FAILED

    def check_auth_interactive(self, username: str, submethods: str) -> Any:
        if not self.key_accepted:
            return paramiko.AUTH_FAILED
        return paramiko.InteractiveQuery("", "", ("One-time code: ", False))

    def check_auth_interactive_response(self, responses: list[str]) -> int:
        return paramiko.AUTH_SUCCESSFUL if responses == [self.outer.code] else paramiko.AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        def run() -> None:
            done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, check=False)
            channel.get_transport().answered.wait(10)
            with contextlib.suppress(
                OSError, EOFError, paramiko.SSHException
            ):  # the client may be gone by then
                channel.sendall(done.stdout)
                channel.send_exit_status(done.returncode)
                channel.close()

        threading.Thread(target=run, daemon=True).start()
        return True


class KeyThenCodeServer:
    """A paramiko server that wants the given key and then the given one-time code."""

    def __init__(self, folder: Path, client_key: Path, code: str) -> None:
        self.code = code
        self.public_blob = paramiko.PKey.from_path(client_key).asbytes()
        self._host_key = paramiko.ECDSAKey.generate()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.known_hosts = folder / "known_hosts_2fa"
        self.known_hosts.write_text(
            f"[127.0.0.1]:{self.port} {self._host_key.get_name()} {self._host_key.get_base64()}\n"
        )
        self._transports: list[paramiko.Transport] = []
        self._thread = threading.Thread(target=self._accept, name="key-then-code", daemon=True)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            transport = _Answering(sock)
            transport.add_server_key(self._host_key)
            self._transports.append(transport)
            try:
                transport.start_server(server=_KeyThenCode(self))
            except (paramiko.SSHException, EOFError):
                continue

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for transport in self._transports:
            transport.close()
        self._thread.join(10)
