"""Connections through the user's own ssh configuration to real servers: strict, through hops, and never hanging."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.core.errors import (
    ChannelTimeout,
    ConfigError,
    HostError,
    HostKeyChanged,
    HostKeyUnknown,
    Unreachable,
)
from orchestrator.hosts.connection import Connection
from orchestrator.hosts.known_hosts import fingerprint, parse
from orchestrator.hosts.prompt import Memory
from orchestrator.hosts.ssh_config import ResolvedHost, parse_destination, resolve, resolve_chain
from tests.netem import Wan
from tests.sshd.logins import Person
from tests.sshd.server import Sshd, free_port, make_key, wait_until


def connect(chain: list[ResolvedHost]) -> Connection:
    """An open connection whose logins need nobody."""
    return Connection("gpubox", chain, Person().ask, Memory()).open()


def says(chain: list[ResolvedHost], command: str = "echo in") -> str:
    """What a command prints."""
    connection = connect(chain)
    try:
        stream = connection.start(command)
        out = b""
        while data := stream.recv(65536):
            out += data
        return out.decode().strip()
    finally:
        connection.close()


def chain_of(sshd: Sshd, extra: str = "") -> list[ResolvedHost]:
    """The chain for the alias ``box`` with extra configuration lines."""
    return resolve_chain(sshd.alias, config_file=str(sshd.write_ssh_config(extra)))


# ------------------------------------------------------------------------------------------------ host keys


def test_the_known_key_is_accepted(shared_sshd: Sshd) -> None:
    """The ordinary case."""
    assert says(chain_of(shared_sshd)) == "in"


def test_an_unknown_key_is_refused_until_accepted(sshd: Sshd) -> None:
    """Refused with the fingerprint; then accepted once, without a login; then known. ssh itself agrees."""
    sshd.known_hosts.write_text("")
    chain = chain_of(sshd)
    [key] = parse(sshd.known_hosts_line())
    with pytest.raises(HostKeyUnknown) as unknown:
        connect(chain)
    assert fingerprint(key.blob) in unknown.value.message
    assert sshd.connections() == 0
    accepted = Connection("gpubox", chain, Person().ask, Memory()).learn_keys()
    assert len(accepted) == 1
    assert fingerprint(key.blob) in accepted[0]
    assert sshd.connections() == 0, "learning a key needs no login"
    assert Connection("gpubox", chain, Person().ask, Memory()).learn_keys() == []
    assert says(chain) == "in"
    strict = [
        "ssh",
        "-F",
        str(sshd.ssh_config),
        "-o",
        "StrictHostKeyChecking=yes",
        "-o",
        "BatchMode=yes",
        "box",
        "true",
    ]
    assert subprocess.run(strict, check=False).returncode == 0


@pytest.mark.parametrize("setting", ["no", "accept-new", "off"])
def test_a_lax_ssh_configuration_changes_nothing(setting: str, sshd: Sshd) -> None:
    """StrictHostKeyChecking no is for people's shells; secrets and scripts travel here."""
    sshd.known_hosts.write_text("")
    with pytest.raises(HostKeyUnknown):
        connect(chain_of(sshd, f"StrictHostKeyChecking {setting}"))
    assert sshd.known_hosts.read_text() == ""


def test_a_changed_key_is_refused_and_never_accepted(sshd: Sshd, tmp_path: Path) -> None:
    """Before any login, also when asked to accept new ones."""
    make_key(tmp_path / "other")
    other = " ".join((tmp_path / "other.pub").read_text().split()[:2])
    sshd.known_hosts.write_text(f"[{sshd.address}]:{sshd.port} {other}\n")
    before = sshd.known_hosts.read_text()
    for act in (Connection.open, Connection.learn_keys):
        with pytest.raises(HostKeyChanged, match="HAS CHANGED"):
            act(Connection("gpubox", chain_of(sshd), Person().ask, Memory()))
    assert sshd.known_hosts.read_text() == before
    assert sshd.connections() == 0


def test_a_revoked_key_is_refused(sshd: Sshd) -> None:
    """A @revoked line wins over the line that knows the key; so does RevokedHostKeys."""
    line = sshd.known_hosts_line()
    sshd.known_hosts.write_text(line + f"@revoked * {line.split(' ', 1)[1]}")
    with pytest.raises(HostKeyChanged, match="REVOKED"):
        connect(chain_of(sshd))
    sshd.known_hosts.write_text(line)
    revoked = sshd.folder / "revoked"
    shutil.copy(sshd.host_key().with_suffix(".pub"), revoked)
    with pytest.raises(HostKeyChanged, match="REVOKED"):
        connect(chain_of(sshd, f"RevokedHostKeys {revoked}"))
    make_key(sshd.folder / "unrelated")
    shutil.copy(sshd.folder / "unrelated.pub", revoked)
    assert says(chain_of(sshd, f"RevokedHostKeys {revoked}")) == "in"
    krl = ["ssh-keygen", "-q", "-k", "-f", str(revoked)]
    subprocess.run([*krl, str(sshd.folder / "unrelated.pub")], check=True, capture_output=True)
    assert says(chain_of(sshd, f"RevokedHostKeys {revoked}")) == "in"
    subprocess.run([*krl, "-u", str(sshd.host_key().with_suffix(".pub"))], check=True, capture_output=True)
    for file in (revoked, sshd.folder / "missing"):
        with pytest.raises(HostKeyChanged, match="REVOKED"):
            connect(chain_of(sshd, f"RevokedHostKeys {file}"))


def test_any_of_several_host_keys_will_do(tmp_path: Path) -> None:
    """The host has three; knowing one of them is enough, whichever it is."""
    kinds = ("ed25519", "ecdsa", "rsa")
    with Sshd(tmp_path / "sshd", host_key_types=kinds) as sshd:
        for kind in kinds:
            sshd.known_hosts.write_text(sshd.known_hosts_line(kind))
            assert says(chain_of(sshd)) == "in", kind


def test_hashed_wildcard_and_markers_in_one_file(sshd: Sshd) -> None:
    """What real files look like: comments, @cert-authority of others, hashed names, patterns."""
    kind_and_key = sshd.known_hosts_line().split(" ", 1)[1]
    rest = f"# mine\n@cert-authority *.example.org {kind_and_key}\n"
    sshd.known_hosts.write_text(rest + f"[127.0.0.*]:{sshd.port},!10.* {kind_and_key}")
    assert says(chain_of(sshd)) == "in"
    sshd.known_hosts.write_text(rest + sshd.known_hosts_line())
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(sshd.known_hosts)], check=True, capture_output=True)
    assert says(chain_of(sshd)) == "in"


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
def test_host_certificates(kind: str, tmp_path: Path) -> None:
    """Signed by a known authority: accepted. For another name, expired, by a stranger, a user's: refused, with why."""
    folder = tmp_path / "sshd"
    authority, stranger = make_key(tmp_path / "ca"), make_key(tmp_path / "stranger")
    certificate = folder / f"host_{kind}-cert.pub"
    with Sshd(folder, host_key_types=(kind,), options={"HostCertificate": f'"{certificate}"'}) as sshd:
        ca_line = f"@cert-authority * {authority.with_suffix('.pub').read_text()}"

        def sign(*options: str, by: Path = authority, names: str = "127.0.0.1,box") -> None:
            public = str(sshd.host_key().with_suffix(".pub"))
            command = ["ssh-keygen", "-q", "-s", str(by), "-I", "box", *options]
            subprocess.run(
                [*command, *(["-n", names] if names else []), public], check=True, capture_output=True
            )
            sshd.restart()

        sshd.known_hosts.write_text(ca_line)
        chain = chain_of(sshd)
        sign("-h")
        assert says(chain) == "in"
        sshd.known_hosts.write_text(ca_line + "@revoked * " + stranger.with_suffix(".pub").read_text())
        refusals = [
            (("-h",), authority, "elsewhere", "it is for elsewhere"),
            (("-h", "-V", "20200101:20210101"), authority, "127.0.0.1", "validity"),
            (("-h",), stranger, "127.0.0.1", "revoked"),
        ]
        for options, by, names, reason in refusals if kind == "ed25519" else refusals[:1]:
            sign(*options, by=by, names=names)
            with pytest.raises(HostKeyUnknown, match=reason):
                connect(chain)
        sshd.known_hosts.write_text(ca_line + sshd.known_hosts_line())
        assert says(chain) == "in", "a plain line for the key still counts"


# ------------------------------------------------------------------------------------------------ ssh configuration


def test_include_match_and_aliases(sshd: Sshd, tmp_path: Path) -> None:
    """What paramiko's own parser cannot: Include, Match exec, an alias of an alias, HostKeyAlias."""
    inner = tmp_path / "inner"
    inner.write_text(
        f"Match originalhost far exec true\n  HostName {sshd.address}\nHost far\n  Port {sshd.port}\n"
        f"  User {sshd.user}\n  IdentityFile {sshd.client_key}\n  IdentitiesOnly yes\n  HostKeyAlias the-box\n"
        f"  UserKnownHostsFile {sshd.known_hosts}\n"
    )
    outer = tmp_path / "outer"
    outer.write_text(
        f"Include {inner}\nHost *\n  ConnectTimeout 7\n  ServerAliveInterval 3\n  ServerAliveCountMax 4\n"
    )
    sshd.known_hosts.write_text("the-box " + sshd.known_hosts_line().split(" ", 1)[1])
    chain = resolve_chain("far", config_file=str(outer))
    assert (chain[0].connect_timeout_s, chain[0].dead_after_s) == (7.0, 12)
    assert says(chain) == "in"


def test_the_inventorys_own_key_and_known_hosts_win(sshd: Sshd, tmp_path: Path) -> None:
    """Over the configuration's; a configuration that is wrong in both does no harm."""
    config = tmp_path / "config"
    config.write_text(
        f"Host *\n  IdentityFile {tmp_path}/none\n  UserKnownHostsFile {tmp_path}/nothing\n  Port 9\n"
    )
    chain = resolve_chain(
        sshd.destination,
        identity_file=str(sshd.client_key),
        known_hosts=str(sshd.known_hosts),
        config_file=str(config),
    )
    assert says(chain) == "in"


def test_without_an_ssh_program(sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """user@host:port works; an alias is a clear error."""
    monkeypatch.setenv("PATH", str(tmp_path))
    own = {"identity_file": str(sshd.client_key), "known_hosts": str(sshd.known_hosts)}
    assert says(resolve_chain(sshd.destination, **own)) == "in"
    with pytest.raises(ConfigError, match="no ssh program"):
        resolve("gpubox")


def test_two_jump_hosts(tmp_path: Path) -> None:
    """A chain as `ssh -J` would build it; each hop is judged by its own key and counted by its own server."""
    with Sshd(tmp_path / "a") as first, Sshd(tmp_path / "b") as second, Sshd(tmp_path / "c") as target:
        config = tmp_path / "config"
        blocks = []
        for name, server, jump in (("a", first, ""), ("b", second, ""), ("c", target, "ProxyJump a,b")):
            block = server.write_ssh_config(jump).read_text().replace("Host box", f"Host {name}")
            blocks.append(block)
        config.write_text("".join(blocks))
        chain = resolve_chain("c", config_file=str(config))
        assert [hop.port for hop in chain] == [first.port, second.port, target.port]
        assert says(chain) == "in"
        assert [server.connections() for server in (first, second, target)] == [1, 1, 1]
        second.known_hosts.write_text("")
        with pytest.raises(HostKeyUnknown, match=str(second.port)):
            connect(chain)
        assert target.connections() == 1
        target.known_hosts.write_text("")
        accepted = Connection("gpubox", chain, Person().ask, Memory()).learn_keys()
        assert len(accepted) == 2, "unknown hops are learnt on the way"
        second.stop()
        with pytest.raises(HostError, match="gpubox"):
            connect(chain)


def test_jumps_in_a_circle(tmp_path: Path) -> None:
    """Said, not followed for ever."""
    config = tmp_path / "config"
    config.write_text("Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n")
    with pytest.raises(ConfigError, match="circle"):
        resolve_chain("a", config_file=str(config))


def test_proxy_command(sshd: Sshd, tmp_path: Path) -> None:
    """Any program between; its end is ours; its tokens are filled in."""
    relay = tmp_path / "relay.py"
    relay.write_text(
        "import socket, sys, threading, os\n"
        "s = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "def up():\n"
        "    while d := os.read(0, 65536): s.sendall(d)\n"
        "    s.shutdown(1)\n"
        "threading.Thread(target=up, daemon=True).start()\n"
        "while d := s.recv(65536): os.write(1, d)\n"
    )
    chain = chain_of(sshd, f"ProxyCommand exec python3 {relay} %h %p 100%%")
    connection = connect(chain)
    [pid] = [int(p) for p in os.listdir("/proc") if p.isdigit() and str(relay) in command_line(int(p))]
    assert b"100%" in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert connection.start("echo in").recv(10) == b"in\n"
    connection.close()
    wait_until(lambda: str(relay) not in command_line(pid), "the proxy command has ended")
    with pytest.raises(Unreachable):
        connect(chain_of(sshd, "ProxyCommand exit 1"))


def command_line(pid: int) -> str:
    """argv of a process, or "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpubox", ("gpubox", None, None)),
        ("me@box", ("box", "me", None)),
        ("me@box:2222", ("box", "me", 2222)),
        ("box:22", ("box", None, 22)),
        ("me@[2001:db8::1]:2200", ("2001:db8::1", "me", 2200)),
        ("2001:db8::1", ("2001:db8::1", None, None)),
        ("ssh://me@box:2222/", ("box", "me", 2222)),
        ("me@corp.com@box", ("box", "me@corp.com", None)),
    ],
)
def test_destinations(text: str, expected: tuple[str, str | None, int | None]) -> None:
    """All the ways to write one."""
    where = parse_destination(text)
    assert (where.host, where.user, where.port) == expected


@pytest.mark.parametrize(
    "text", ["", " ", "-oProxyCommand=touch /tmp/x", "me@-x", "a b", "box:0", "box:99999", "a\nb"]
)
def test_what_is_no_destination(text: str) -> None:
    """Nothing that ssh could take for an option or two words."""
    with pytest.raises(ConfigError):
        parse_destination(text)


def test_a_broken_configuration_is_said(tmp_path: Path) -> None:
    """ssh's own words, file and line included."""
    config = tmp_path / "config"
    config.write_text("Host a\n  Prot 22\n")
    with pytest.raises(ConfigError, match="line 2"):
        resolve("a", config_file=str(config))


# ------------------------------------------------------------------------------------------------ limits


@contextmanager
def listener(*, banner: bytes | None = None, close: bool = False) -> Iterator[int]:
    """A port that accepts and then says ``banner``, nothing, or hangs up."""
    server = socket.create_server(("127.0.0.1", 0))
    taken: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                sock, _ = server.accept()
            except OSError:
                return
            if banner:
                sock.sendall(banner)
            if close:
                sock.close()
            else:
                taken.append(sock)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join(5)
    for sock in taken:
        sock.close()


def limited(port: int, connect_timeout_s: float = 1.5) -> list[ResolvedHost]:
    """A destination on loopback with a short connect timeout."""
    return [ResolvedHost("box", "127.0.0.1", "me", port, connect_timeout_s=connect_timeout_s)]


@pytest.mark.parametrize(
    "banner", [None, b"SSH-2.0-x\r\n", b"welcome\r\n"], ids=["silent", "no kex", "chatty"]
)
def test_a_silent_server_costs_its_limit(banner: bytes | None) -> None:
    """Accepts, and then nothing: an error within the connect timeout (plus paramiko's two seconds a line)."""
    with listener(banner=banner) as port:
        started = time.monotonic()
        with pytest.raises(Unreachable):
            connect(limited(port))
        assert time.monotonic() - started < 6


def test_refused_dropped_and_unknown_names_are_told_apart() -> None:
    """Each message says what was seen."""
    with pytest.raises(Unreachable, match="refused"):
        connect(limited(free_port()))
    with listener(close=True) as port, pytest.raises(Unreachable, match="closed"):
        connect(limited(port))
    with pytest.raises(Unreachable, match="cannot be resolved"):
        connect([ResolvedHost("box", "no-such-host.invalid", "me")])
    with listener(banner=b"HTTP/1.1 400 Bad Request\r\n" * 120) as port, pytest.raises(Unreachable):
        connect(limited(port))


def test_a_server_that_freezes_while_starting_a_command(sshd: Sshd) -> None:
    """Opening a channel and starting a command have limits of their own (paramiko: an hour, and none)."""
    connection = connect(chain_of(sshd))
    sshd.freeze(frozen=True)
    started = time.monotonic()
    with pytest.raises((ChannelTimeout, Unreachable)):
        connection.start("true", timeout_s=1.0)
    assert time.monotonic() - started < 4
    started = time.monotonic()
    connection.close()
    assert time.monotonic() - started < 2, "closing does not wait for a frozen peer"
    sshd.freeze(frozen=False)


def test_a_full_server_says_so(tmp_path: Path) -> None:
    """MaxSessions reached: transient, with the name of the setting."""
    with Sshd(tmp_path / "sshd", options={"MaxSessions": "1"}) as sshd:
        connection = connect(chain_of(sshd))
        connection.start("sleep 30")
        with pytest.raises(HostError, match="MaxSessions") as full:
            connection.start("true")
        assert full.value.transient
        connection.close()


def test_a_killed_session_ends_the_stream(sshd: Sshd) -> None:
    """A RST is noticed at once; the next command says that the link is gone."""
    connection = connect(chain_of(sshd))
    stream = connection.start("cat")
    stream.send(b"x")
    assert stream.recv(1) == b"x"
    sshd.kill_sessions()
    assert stream.recv(1) == b""
    with pytest.raises(Unreachable):
        connection.start("true")
    connection.close()


def test_socket_options(sshd: Sshd) -> None:
    """NODELAY, keepalive and the limit for unacknowledged data are set before the first byte."""
    connection = connect(chain_of(sshd, "ServerAliveInterval 4\nServerAliveCountMax 5"))
    assert connection._socket is not None
    get = connection._socket.getsockopt
    assert get(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert get(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert get(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 4
    assert get(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
    connection.close()


IN_THE_HOLE = """
import sys, time
from tests.sshd.test_connection import *
config = sys.argv[1]
chain = resolve_chain("box", config_file=config)
first = connect(chain)
stream = first.start("cat")
stream.send(b"x"); stream.recv(1)
idle = connect(chain)
print("connected", flush=True)
sys.stdin.readline()
at = time.monotonic()
try: connect(chain)
except Unreachable as error: print("new", round(time.monotonic() - at, 1), flush=True)
assert stream.recv(1) == b""
print("reading", round(time.monotonic() - at, 1), flush=True)
while idle.is_open: time.sleep(0.05)
print("idle", round(time.monotonic() - at, 1), flush=True)
"""


@pytest.mark.timeout(90)
def test_a_black_hole_is_noticed(tmp_path: Path) -> None:
    """Packets vanish silently: a new connection fails by its timeout, open ones end by keepalive, idle or not."""
    with (
        Wan(tmp_path / "wan", delay_ms=10) as wan,
        Sshd(tmp_path / "sshd", address=wan.far_address, command_prefix=wan.far) as sshd,
    ):
        sshd.write_ssh_config("ConnectTimeout 2\nServerAliveInterval 1\nServerAliveCountMax 4")
        command = [*wan.near, os.sys.executable, "-c", IN_THE_HOLE, str(sshd.ssh_config)]  # type: ignore[attr-defined]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as client:
            assert client.stdin
            assert client.stdout
            assert client.stdout.readline() == "connected\n"
            wan.set(up=0)
            client.stdin.write("go\n")
            client.stdin.flush()
            took = dict(line.split() for line in client.stdout.read().splitlines())
        assert float(took["new"]) < 4
        assert float(took["reading"]) < 9, took
        assert float(took["idle"]) < 9, took
