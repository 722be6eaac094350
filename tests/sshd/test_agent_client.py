"""The agent client on real servers and on hostile ones: one connection, resends, limits, and what a drop means."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.errors import (
    ChannelTimeout,
    ConfigError,
    HostError,
    HostKeyUnknown,
    HostRefused,
    NoPython,
    OrchError,
    ProtocolError,
    Unreachable,
)
from orchestrator.core.inventory import Host, Inventory
from orchestrator.hosts import release, session, stream
from orchestrator.hosts.agent import AgentClient, refusal
from orchestrator.hosts.openssh import ProcessStream
from orchestrator.hosts.pool import HostPool
from tests.sshd.logins import PasswordServer, Person
from tests.sshd.server import Sshd, wait_until


def inventory(sshd: Sshd, root: Path, **more: Any) -> Inventory:
    """One host, gpubox."""
    return Inventory(hosts={"gpubox": Host(**sshd.inventory_entry(root=str(root), **more))})


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One root on the "host" for all tests: installing the release anew costs each a second."""
    return tmp_path_factory.mktemp("agent-client") / "root"


@pytest.fixture(params=["paramiko", "openssh"])
def transport(request: pytest.FixtureRequest) -> str:
    """Both transports speak the same protocol: one suite for both."""
    return str(request.param)


@pytest.fixture
def pool(sshd: Sshd, root: Path, transport: str) -> Iterator[HostPool]:
    """A pool with one real host."""
    more = {"transport": "openssh"} if transport == "openssh" else {}
    opened = HostPool(inventory(sshd, root, **more), Person())
    yield opened
    opened.close()


# ------------------------------------------------------------------------------------------------ on a real server


def test_one_connection_for_everybody(pool: HostPool, sshd: Sshd) -> None:
    """Twelve threads, first use included: one login, one command, all answered, no wires crossed."""
    client = pool.agent("gpubox")
    assert pool.agent("gpubox") is client
    assert client.connection_state == "connecting"
    assert sshd.connections() == 0, "lazily opened"
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(lambda n: client.request("have", sha256=[f"{n:064x}"]), range(60)))
    assert [answer["missing"][0]["sha256"] for answer in answers] == [f"{n:064x}" for n in range(60)]
    assert (sshd.connections(), sshd.executions()) == (1, 1)
    assert client.connection_state == "connected"
    assert client.round_trip_s is not None
    assert client.round_trip_s < 5


def test_the_release_travels_once(sshd: Sshd, tmp_path: Path, transport: str) -> None:
    """A second run of orch sends next to nothing, and leaves what is installed alone."""
    more = {"transport": "openssh"} if transport == "openssh" else {}
    pool = HostPool(inventory(sshd, tmp_path / "root", **more), Person())
    first = pool.agent("gpubox").hello()
    pool.close()
    assert first["release"] == release.build().hash
    folder = tmp_path / "root" / "releases"
    inode = (folder / release.build().hash).stat().st_ino
    again = HostPool(pool.inventory, Person())
    sent: list[int] = []
    client = again.agent("gpubox")
    opened = client._open

    def counting(ask: Any) -> Any:
        stream_ = opened(ask)
        send = stream_.send
        stream_.send = lambda data: (sent.append(len(data)), send(data))[1]  # type: ignore[method-assign]
        return stream_

    client._open = counting
    assert client.request("hello")["hello"]["release"] == first["release"]
    again.close()
    assert 0 < sum(sent) < 1000
    assert [entry.stat().st_ino for entry in folder.iterdir()] == [inode]


def test_payloads_of_any_bytes_and_size(pool: HostPool, tmp_path: Path) -> None:
    """Up by put, down by get: every byte value, several MiB, in chunks."""
    import hashlib

    data = os.urandom(16) + bytes(range(256)) * (3 * 4096) + b"\n{}\n"
    digest = hashlib.sha256(data).hexdigest()
    client = pool.agent("gpubox")
    half = len(data) // 2
    client.request("put", data[:half], sha256=digest, size=len(data), offset=0, last=False)
    [missing] = client.request("have", sha256=[digest])["missing"]
    assert missing["offset"] == half
    client.request("put", data[half:], sha256=digest, size=len(data), offset=half, last=True)
    assert client.request("have", sha256=[digest])["missing"] == []
    file = tmp_path / "file"
    file.write_bytes(data)
    got = b""
    while len(got) < len(data):
        answer = client.request("get", path=str(file), offset=len(got), length=1 << 20)
        got += answer["payload"]
    assert got == data


def test_a_killed_session_is_renewed_and_the_request_sent_again(pool: HostPool, sshd: Sshd) -> None:
    """While a long poll is under way and between requests; the caller notices nothing but time."""
    client = pool.agent("gpubox")
    client.hello()
    with ThreadPoolExecutor(1) as thread:
        held = thread.submit(client.request, "look", wait_s=1.5, jobs=[])
        client.request("hello")  # the poll is certainly under way: answers keep their order of arrival
        sshd.kill_sessions()
        assert held.result(timeout=30)["ok"]
    assert sshd.connections() == 2
    sshd.kill_sessions()
    wait_until(lambda: client.connection_state != "connected", "the drop is noticed while idle")
    assert client.request("hello")["ok"]
    assert client.unreachable_since is None
    assert client.connections == 3


def test_a_server_that_stays_away_is_unreachable_and_comes_back(pool: HostPool, sshd: Sshd) -> None:
    """A few tries, then an error; the state says since when; when it is back, the same client works."""
    client = pool.agent("gpubox")
    client.hello()
    sshd.stop()
    before = time.time()
    with pytest.raises(Unreachable) as error:
        client.request("hello")
    assert error.value.transient
    assert client.connection_state == "unreachable"
    assert client.unreachable_since is not None
    assert client.unreachable_since >= before - 1
    sshd.start()
    assert client.request("hello")["ok"]
    assert client.connection_state == "connected"


def test_a_refused_port_is_told_at_once(sshd: Sshd, pool: HostPool) -> None:
    """A first connection is not tried again when the answer is clear."""
    sshd.stop()
    started = time.monotonic()
    with pytest.raises(Unreachable, match="refused"):
        pool.agent("gpubox").request("hello")
    assert time.monotonic() - started < 5


def test_a_full_sshd_is_tried_again(tmp_path: Path, root: Path) -> None:
    """MaxStartups drops connections at random while others log in: nobody sees it."""
    with Sshd(tmp_path / "sshd", options={"MaxStartups": "1:50:4"}) as sshd:
        pools = [HostPool(inventory(sshd, root), Person()) for _ in range(4)]
        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(lambda p: p.agent("gpubox").request("hello"), pools))
        assert all(answer["ok"] for answer in answers)
        for opened in pools:
            opened.close()


def test_a_frozen_host_costs_the_stated_limit(pool: HostPool, sshd: Sshd) -> None:
    """SIGSTOP of sshd: the call ends in time, connected or not, and closing does not wait either."""
    client = pool.agent("gpubox")
    client.hello()
    sshd.freeze(frozen=True)
    started = time.monotonic()
    with pytest.raises(ChannelTimeout):
        client.request("hello", timeout_s=1.0)
    assert time.monotonic() - started < 3
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 3
    with pytest.raises(Unreachable, match="closed"):
        client.request("hello")
    sshd.freeze(frozen=False)


def test_a_frozen_host_is_given_up_for_a_new_connection(
    pool: HostPool, sshd: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence, then an unanswered ping, then a new connection: a long poll does not sit out its time on a dead one."""
    monkeypatch.setattr(session, "PING_AFTER_S", 0.5)
    monkeypatch.setattr(session, "DEAD_AFTER_S", 1.5)
    monkeypatch.setattr(session, "TICK_S", 0.1)
    client = pool.agent("gpubox")
    client.hello()
    sshd.freeze(frozen=True)
    started = time.monotonic()
    assert client.request("look", wait_s=2.0, jobs=[])["ok"]
    assert time.monotonic() - started < 15
    assert client.connections == 2
    sshd.freeze(frozen=False)


def test_a_healthy_long_poll_is_kept_alive_by_pings(pool: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the silence that would mean death: one connection, answered at its time."""
    monkeypatch.setattr(session, "PING_AFTER_S", 0.3)
    monkeypatch.setattr(session, "DEAD_AFTER_S", 2.5)
    monkeypatch.setattr(session, "TICK_S", 0.1)
    client = pool.agent("gpubox")
    client.hello()
    started = time.monotonic()
    assert client.request("look", wait_s=3.6, jobs=[])["ok"]
    assert time.monotonic() - started >= 3.5
    assert client.connections == 1


def test_a_suspended_laptop_doubts_its_link(
    pool: HostPool, monkeypatch: pytest.MonkeyPatch, sshd: Sshd
) -> None:
    """After the wall clock jumped ahead of the monotonic one, a silent link is given up after seconds."""
    monkeypatch.setattr(session, "WAKE_DEAD_AFTER_S", 1.0)
    monkeypatch.setattr(session, "TICK_S", 0.1)
    client = pool.agent("gpubox")
    client.hello()
    sshd.freeze(frozen=True)
    assert client._session is not None
    client._session._clock_gap_s -= 3600  # as if the lid had been closed for an hour
    started = time.monotonic()
    assert client.request("look", wait_s=1.0, jobs=[])["ok"]
    assert time.monotonic() - started < 15
    assert client.connections == 2
    sshd.freeze(frozen=False)


def test_the_agents_refusals_are_errors_of_ours(pool: HostPool) -> None:
    """And the session lives on."""
    client = pool.agent("gpubox")
    with pytest.raises(HostRefused) as refused:
        client.request("no-such-request")
    assert refused.value.reason == "bad_request"
    assert client.request("hello")["ok"]
    assert client.connections == 1


def test_errors_of_the_login_come_through_both_transports(pool: HostPool, sshd: Sshd) -> None:
    """Unknown key, wrong key of ours: the same kinds of error, with the command to type."""
    sshd.known_hosts.write_text("")
    with pytest.raises(HostKeyUnknown) as unknown:
        pool.agent("gpubox").hello()
    assert "orch hosts check --accept-new gpubox" in str(unknown.value.hint)
    assert "SHA256:" in str(pool.accept_new_key("gpubox"))
    assert pool.accept_new_key("gpubox") is None
    sshd.authorized_keys.write_text("")
    with pytest.raises(OrchError) as refused:
        pool.agent("gpubox").hello()
    assert refused.value.code == "auth_refused"


@pytest.mark.parametrize(
    "noise", ["echo Welcome", "printf 'no newline'", "yes motd | head -c 50000", "echo '{\"a\": 1}'"]
)
def test_a_talkative_login(pool: HostPool, sshd: Sshd, noise: str) -> None:
    """~/.bashrc prints on every login, JSON even: the agent is heard all the same."""
    (sshd.home / ".bashrc").write_text(noise + "\n")
    (sshd.home / ".profile").write_text(noise + "\n")
    assert pool.agent("gpubox").hello()["release"]


def test_no_host_of_that_name(pool: HostPool) -> None:
    """An error of the inventory, not a KeyError."""
    with pytest.raises(ConfigError, match="nosuch"):
        pool.agent("nosuch")


def test_a_password_host_reconnects_without_asking(tmp_path: Path, root: Path) -> None:
    """The question comes in the waiting thread, its time does not count, and a drop asks nothing again."""
    with PasswordServer(tmp_path / "server", "password") as server:
        entry = {"ssh": f"me@127.0.0.1:{server.port}", "known_hosts": str(server.known_hosts), "gpus": 0}
        entry |= {"identity_file": "/nonexistent", "root": str(root)}
        threads: list[str] = []

        class Slow(Person):
            def ask(self, text: str, *, secret: bool) -> str:
                threads.append(threading.current_thread().name)
                wait_until(lambda: time.monotonic() > until, "the person has found the note", 10)
                return super().ask(text, secret=secret)

        person = Slow(password="right")
        pool = HostPool(Inventory(hosts={"gpubox": Host(**entry)}), person)
        until = time.monotonic() + 3
        client = pool.agent("gpubox")
        assert client.request("hello", timeout_s=20)["ok"]
        assert threads == [threading.main_thread().name]
        server.drop_connections()
        wait_until(lambda: client.connection_state != "connected", "the drop is noticed")
        assert client.request("hello")["ok"]
        assert len(person.asked) == 1
        pool.close()


def test_cold_start_in_few_round_trips(sshd: Sshd, pool: HostPool) -> None:
    """Connection and one exec: nothing else is opened, and no login is tried in vain."""
    pool.agent("gpubox").hello()
    log = sshd.log.read_text()
    assert log.count("Starting session") == 1
    assert log.count("subsystem") == 0
    assert "Failed" not in log


# ------------------------------------------------------------------------------------------------ hostile and broken hosts


def fake(script: str) -> tuple[AgentClient, list[int]]:
    """A client whose "host" is a Python script; also the pids of the processes started for it."""
    pids: list[int] = []

    def open_stream(ask: Callable[..., str]) -> ProcessStream:
        del ask
        opened = ProcessStream("gpubox", [sys.executable, "-u", "-c", script])
        pids.append(opened._process.pid)
        return opened

    return AgentClient("gpubox", open_stream, Person()), pids


HELLO = 'import json, sys, time\nprint(json.dumps({"id": 0, "ok": True, "hello": {"v": 1, "release": "r", "root": "/r", "wall": 1.0}}), flush=True)\n'


def test_an_endless_line_is_refused_with_bounded_memory(tmp_path: Path) -> None:
    """A host that sends a line without end: refused at 64 MiB, the laptop's memory stays small."""
    code = (
        "from tests.sshd.test_agent_client import *\n"
        f"client, _ = fake({HELLO!r} + 'sys.stdin.readline()\\nwhile True: sys.stdout.write(chr(120) * 1048576)')\n"
        "try: client.request('look', timeout_s=60)\n"
        "except ProtocolError as e: print('refused:', e)\n"
        "client.close()\n"
        # ru_maxrss would hold what the parent had at the fork; VmHWM (KiB) starts anew with this program.
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        timeout=100,
        check=True,
        cwd=tmp_path,
    )
    said, peak_kib = done.stdout.splitlines()
    assert "67108864" in said
    assert int(peak_kib) // 1024 < 400


@pytest.mark.parametrize(
    "answer",
    [
        '{"id": 1, "ok": true, "payload_bytes": 99999999999}',
        '{"id": 1, "ok": true, "payload_bytes": -1}',
        '{"id": 1, "ok": true, "payload_bytes": "many"}',
        '{"id": 1, "ok": true, "payload_bytes": true}',
    ],
)
def test_impossible_payloads_are_refused(answer: str) -> None:
    """Nothing is allocated for a size that only an attacker would send."""
    client, _ = fake(HELLO + f"sys.stdin.readline()\nprint({answer!r}, flush=True)\ntime.sleep(30)")
    with pytest.raises(ProtocolError):
        client.request("look", timeout_s=10)
    client.close()


@pytest.mark.parametrize("nonsense", ["[" * 50000, "{" * 50000, '{"id":1', "\x00\xff\xfe", '"text"', "null"])
def test_nonsense_between_answers_is_skipped(nonsense: str) -> None:
    """Late noise of the login, however odd; the real answer counts."""
    body = (
        "sys.stdin.readline()\n"
        f"sys.stdout.write({nonsense!r} + chr(10))\n"
        'print(json.dumps({"id": "x"}), json.dumps({"id": 77, "ok": True}), sep=chr(10))\n'
        'print(json.dumps({"id": 1, "ok": True, "jobs": {}, "x": 5}), flush=True)\ntime.sleep(30)'
    )
    client, _ = fake(HELLO + body)
    assert client.request("look", timeout_s=10)["x"] == 5
    client.close()


def test_endless_noise_before_the_hello_is_refused() -> None:
    """64 KiB of login messages are skipped, not more."""
    client, _ = fake("while True: print('motd ' * 20, flush=True)")
    with pytest.raises(ProtocolError, match="bashrc"):
        client.request("look", timeout_s=30)
    client.close()


def test_an_agent_that_dies_at_once_shows_its_stderr() -> None:
    """The end of stderr is in the message, bounded however much there was."""
    client, _ = fake("import sys; sys.stderr.write('x' * 3000000 + 'ImportError: no ssl'); sys.exit(3)")
    with pytest.raises(HostError, match="ImportError: no ssl") as error:
        client.request("look", timeout_s=20)
    assert len(error.value.message) < 2000


def test_an_agent_that_says_nothing_costs_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both limits hold: the caller's, and that of the start, after which the process is gone."""
    monkeypatch.setattr(session, "HELLO_WITHIN_S", 2.0)
    client, pids = fake("import time; time.sleep(60)")
    started = time.monotonic()
    with pytest.raises(ChannelTimeout, match="no connection in time"):
        client.request("look", timeout_s=0.5)
    assert time.monotonic() - started < 2
    with pytest.raises(ChannelTimeout, match="said nothing"):
        client.request("look", timeout_s=20)
    client.close()
    wait_until(lambda: not any(running(pid) for pid in pids), "the silent agents are gone")


def running(pid: int) -> bool:
    """Is the process there, and not a zombie?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        ({"error": "no_python", "seen": " python3 is 3.6,"}, NoPython, ["3.6", "agent_python"]),
        ({"error": "disk_full", "seen": "[Errno 28]"}, HostError, ["full", "root:"]),
        ({"error": "io", "seen": "Permission denied"}, HostRefused, ["Permission denied", "root:"]),
    ],
)
def test_what_the_bootstrap_cannot_do(said: dict[str, str], kind: type[OrchError], words: list[str]) -> None:
    """Each with what was seen and what to change."""
    client, _ = fake(f"print({json.dumps(said)!r}, flush=True)")
    with pytest.raises(kind) as error:
        client.request("look", timeout_s=20)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("gate_closed", "gate_closed"),
        ("disk_full", "host_full"),
        ("tmpfs", "host_full"),
        ("no_job", "no_job"),
        ("version", "protocol"),
        ("timeout", "channel_timeout"),
        ("no_python", "no_python"),
        ("wrong_state", "wrong_state"),
        ("no_limit", "usage"),
        ("needs_secrets", "missing_secret"),
        ("exists_other", "host_refused"),
        ("something newer", "host_refused"),
    ],
)
def test_refusals(code: str, expected: str) -> None:
    """The agent's codes and our errors."""
    error = refusal({"id": 1, "ok": False, "error": {"code": code, "message": "why", "hint": "do"}}, "gpubox")
    assert (error.code, error.message, error.hint) == (expected, "gpubox: why", "do")


def test_framing_of_any_cut() -> None:
    """Lines and payloads cut anywhere come out whole; a torn last line does not count."""
    wire = (
        stream.encode({"id": 1, "op": "put"}, b"\n\x00{}")
        + b"noise\n"
        + stream.encode({"id": 2})
        + b'{"id": 3'
    )
    for size in (1, 2, 3, 7, 1000):
        pieces = [wire[start : start + size] for start in range(0, len(wire), size)] + [b""]
        framing = stream.Framing(lambda _size, left=pieces: left.pop(0))
        first = framing.message()
        assert isinstance(first, dict)
        assert first["payload"] == b"\n\x00{}"
        assert framing.message() == b"noise"
        assert framing.message() == {"id": 2}
        with pytest.raises(EOFError):
            framing.message()


def test_openssh_keeps_the_users_alias_and_takes_its_control_master(
    sshd: Sshd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, root: Path
) -> None:
    """Through a master that the user opened there is no second login; odd settings of the alias do no harm."""
    control = tmp_path / "ctl"
    sshd.write_ssh_config(
        f"ControlPath {control}\nRemoteCommand sleep 1000\nRequestTTY force\nLocalForward 127.0.0.1:1 127.0.0.1:1"
    )
    master = ["ssh", "-F", str(sshd.ssh_config), "-o", "RemoteCommand=none", "-o", "ClearAllForwardings=yes"]
    with subprocess.Popen([*master, "-MNT", "box"], stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(control.exists, "the master listens")
            monkeypatch.setenv("ORCH_SSH_CONFIG", str(sshd.ssh_config))
            host = Host(ssh="box", gpus=0, root=str(root), transport="openssh")
            pool = HostPool(Inventory(hosts={"gpubox": host}), Person())
            assert pool.agent("gpubox").request("hello")["ok"]
            pool.close()
            assert sshd.connections() == 1
        finally:
            process.terminate()
