"""The demo's SSH host: nobody else gets in, and nothing stays when it goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import paramiko
import pytest

from orchestrator.services import demo_host
from tests.support.waiting import wait_until


@dataclass
class Host:
    process: subprocess.Popen[str]
    folder: Path
    port: int
    token: str

    def connect(self, key: paramiko.PKey | None = None, **options: object) -> paramiko.SSHClient:
        client = paramiko.SSHClient()
        client.load_host_keys(str(self.folder / demo_host.KNOWN_HOSTS))
        client.set_missing_host_key_policy(paramiko.RejectPolicy())
        key = key or paramiko.Ed25519Key.from_private_key_file(str(self.folder / demo_host.CLIENT_KEY))
        client.connect(
            "127.0.0.1",
            self.port,
            username="me",
            pkey=key,
            look_for_keys=False,
            allow_agent=False,
            timeout=10,
        )
        return client

    def run(self, client: paramiko.SSHClient, command: str) -> tuple[int, str, str]:
        _, out, err = client.exec_command(command, timeout=20)
        text, errors = out.read().decode(), err.read().decode()
        return out.channel.recv_exit_status(), text, errors


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    folder = tmp_path / "ho st"
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", demo_host.__name__, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    ready = json.loads(process.stdout.readline())
    yield Host(process, folder, ready["port"], ready["token"])
    if process.poll() is None:
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe
        pipe.close()
    demo_host.end_marked_processes(ready["token"])


def test_commands_run_with_pipes_status_and_a_home_of_their_own(host: Host) -> None:
    with host.connect() as client:
        assert host.run(client, "echo out; echo err >&2; exit 7") == (7, "out\n", "err\n")
        assert host.run(client, "pwd; echo $HOME")[1] == f"{host.folder}/home\n{host.folder}/home\n"
        assert host.run(client, "kill -9 $$")[0] == -1, "a signal is reported as one"
        stdin, out, _ = client.exec_command("cat; echo after")
        stdin.write(b"\x00\xff bytes\n")
        stdin.channel.shutdown_write()
        assert out.read() == b"\x00\xff bytes\nafter\n"
        assert len(host.run(client, "head -c 3000000 /dev/zero")[1]) == 3_000_000


def test_only_our_key_gets_in_and_only_from_here(host: Host) -> None:
    with pytest.raises(paramiko.AuthenticationException):
        host.connect(paramiko.RSAKey.generate(2048))
    client = paramiko.SSHClient()
    client.load_host_keys(str(host.folder / demo_host.KNOWN_HOSTS))
    with pytest.raises(paramiko.SSHException):
        client.connect(
            "127.0.0.1", host.port, username="me", password="x", look_for_keys=False, allow_agent=False
        )
    assert (host.folder / demo_host.CLIENT_KEY).stat().st_mode & 0o077 == 0
    with open("/proc/net/tcp") as stream:
        listening = [line.split()[1] for line in stream if line.split()[3] == "0A"]
    assert [at for at in listening if at.endswith(f":{host.port:04X}")] == [f"0100007F:{host.port:04X}"]


def test_no_forwarding_and_no_file_transfer(host: Host) -> None:
    with host.connect() as client:
        transport = client.get_transport()
        assert transport
        with pytest.raises(paramiko.ChannelException):
            transport.open_channel("direct-tcpip", ("127.0.0.1", host.port), ("127.0.0.1", 1))
        with pytest.raises(paramiko.SSHException):
            transport.request_port_forward("127.0.0.1", 0)
        with pytest.raises(paramiko.SSHException):
            client.open_sftp()


DETACH = "setsid -f sleep 600 </dev/null >/dev/null 2>&1; setsid -f sh -c 'trap \"\" TERM; while :; do sleep 1; done' </dev/null >/dev/null 2>&1"


def test_a_detached_process_outlives_the_connection_and_ends_with_the_host(host: Host) -> None:
    with host.connect() as client:
        assert host.run(client, DETACH)[0] == 0
    wait_until(
        lambda: len(demo_host.marked_processes(host.token)) >= 2, "detached processes carry the host's mark"
    )
    alive = demo_host.marked_processes(host.token)
    assert host.process.stdin
    host.process.stdin.close()
    assert host.process.wait(60) == 0
    assert demo_host.marked_processes(host.token) == []
    for pid in alive:
        assert not os.path.exists(f"/proc/{pid}") or pid not in demo_host.marked_processes(host.token)


def test_keep_outlives_its_starter_until_it_is_told(host: Host) -> None:
    assert host.process.stdin
    host.process.stdin.write("keep\n")
    host.process.stdin.close()
    with host.connect() as client:
        assert host.run(client, "echo still here")[1] == "still here\n"
    host.process.terminate()
    assert host.process.wait(60) == 0
