"""Logging in as ssh would: keys, passphrases, agent, certificates, passwords, codes; asked once, or never."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.core.errors import AuthRefused, HostError
from orchestrator.hosts.connection import Connection
from orchestrator.hosts.prompt import Memory, Prompter
from orchestrator.hosts.ssh_config import ResolvedHost, resolve_chain
from tests.sshd.logins import KeyThenCodeServer, PasswordServer, Person
from tests.sshd.server import Sshd, make_key


def login(sshd: Sshd, person: Prompter | None = None, memory: Memory | None = None, config: str = "") -> str:
    """Log in by the alias ``box`` with extra configuration lines; what `echo` on the host says."""
    file = sshd.write_ssh_config(config)
    chain = resolve_chain(sshd.alias, config_file=str(file))
    return run(Connection("gpubox", chain, (person or Person()).ask, memory or Memory()))


def run(connection: Connection) -> str:
    """Open, run one command, close."""
    connection.open()
    try:
        stream = connection.start("echo in")
        return stream.recv(100).decode().strip()
    finally:
        connection.close()


def direct(port: int, known_hosts: Path, key: Path | None = None) -> list[ResolvedHost]:
    """The chain for me@127.0.0.1:port, offering ``key`` or none."""
    return resolve_chain(
        f"me@127.0.0.1:{port}", identity_file=str(key or "/nonexistent"), known_hosts=str(known_hosts)
    )


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Path]:
    """A private ssh-agent; the path of its socket."""
    path = tmp_path / "agent.sock"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert "SSH_AUTH_SOCK" in process.stdout.readline()
    yield path
    process.terminate()
    process.wait(10)
    process.stdout.close()


def add(agent: Path, *keys: Path) -> None:
    """Load keys into the agent."""
    subprocess.run(
        ["ssh-add", "-q", *map(str, keys)], env={**os.environ, "SSH_AUTH_SOCK": str(agent)}, check=True
    )


# ------------------------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize("kind", ["ed25519", "rsa", "ecdsa"])
def test_key_types(kind: str, sshd: Sshd, tmp_path: Path) -> None:
    """Every type that sshd's defaults accept."""
    key = make_key(tmp_path / "key", kind)
    shutil.copy(key.with_suffix(".pub"), sshd.authorized_keys)
    sshd.client_key = key
    assert login(sshd) == "in"


def test_an_old_pem_key(sshd: Sshd, tmp_path: Path) -> None:
    """Keys in OpenSSL's format, as old tutorials make them."""
    key = tmp_path / "pem"
    command = ["ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-m", "PEM", "-N", "", "-f", str(key)]
    subprocess.run(command, check=True)
    assert b"BEGIN RSA" in key.read_bytes()
    shutil.copy(key.with_suffix(".pub"), sshd.authorized_keys)
    sshd.client_key = key
    assert login(sshd) == "in"


def test_a_passphrase_is_asked_once(sshd: Sshd, tmp_path: Path) -> None:
    """A wrong one is asked again, a right one is remembered for reconnects; it is never echoed."""
    key = make_key(tmp_path / "locked", passphrase="sesame")
    shutil.copy(key.with_suffix(".pub"), sshd.authorized_keys)
    sshd.client_key = key
    person, memory = Person(passphrase=["wrong", "sesame"]), Memory()
    assert login(sshd, person, memory) == "in"
    assert [secret for _, secret in person.asked] == [True, True]
    assert str(key) in person.asked[0][0]
    assert login(sshd, person, memory) == "in"
    assert len(person.asked) == 2


def test_a_locked_key_without_a_terminal(sshd: Sshd, tmp_path: Path) -> None:
    """A clear error that names the key and what to do; nothing hangs."""
    key = make_key(tmp_path / "locked", passphrase="sesame")
    sshd.client_key = key
    with pytest.raises(AuthRefused) as refused:
        login(sshd)
    assert str(key) in refused.value.message
    assert "encrypted" in refused.value.message
    assert "ssh-agent" in str(refused.value.hint)


def test_an_open_key_is_tried_before_a_locked_one(sshd: Sshd, tmp_path: Path) -> None:
    """Nobody is asked for the passphrase of a key that is not needed."""
    locked = make_key(tmp_path / "locked", passphrase="sesame")
    person = Person(passphrase="sesame")
    assert login(sshd, person, config=f"IdentityFile {locked}") == "in"
    assert person.asked == []


def test_a_refused_login_lists_what_was_tried(sshd: Sshd, tmp_path: Path) -> None:
    """The key's path, the missing file, what the server takes, and the command that shows more."""
    sshd.client_key = make_key(tmp_path / "stranger")
    with pytest.raises(AuthRefused) as refused:
        login(sshd, config=f"IdentityFile {tmp_path}/missing")
    for word in (f"key {tmp_path}/stranger (refused)", f"{tmp_path}/missing (no such file)", "publickey"):
        assert word in refused.value.message
    assert "ssh -v box" in str(refused.value.hint)


def test_a_file_that_is_no_key(sshd: Sshd, tmp_path: Path) -> None:
    """Said as such; other keys still count."""
    (tmp_path / "text").write_text("hello\n")
    assert login(sshd, config=f"IdentityFile {tmp_path}/text") == "in"
    sshd.client_key = tmp_path / "text"
    with pytest.raises(AuthRefused, match="unreadable"):
        login(sshd)


# ------------------------------------------------------------------------------------------------ agent, certificates


def test_the_agent_of_the_environment(
    sshd: Sshd, agent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that only the agent holds, when IdentitiesOnly is off."""
    add(agent, sshd.client_key)
    sshd.client_key = tmp_path / "missing"
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent))
    config = sshd.write_ssh_config()
    config.write_text(config.read_text().replace("IdentitiesOnly yes", "IdentitiesOnly no"))
    chain = resolve_chain(sshd.alias, config_file=str(config))
    assert run(Connection("gpubox", chain, Person().ask, Memory())) == "in"


def test_identity_agent_and_identities_only(sshd: Sshd, agent: Path, tmp_path: Path) -> None:
    """Of many keys in the agent only the configured one is offered: sshd would hang up after six."""
    strangers = [make_key(tmp_path / f"stranger{number}") for number in range(7)]
    add(agent, *strangers, sshd.client_key)
    public = tmp_path / "only.pub"
    shutil.copy(sshd.client_key.with_suffix(".pub"), public)
    sshd.client_key = public  # the private half is in the agent alone
    assert login(sshd, config=f"IdentityAgent {agent}") == "in"


def test_an_unlocked_key_in_the_agent_asks_no_passphrase(sshd: Sshd, agent: Path, tmp_path: Path) -> None:
    """The file is encrypted, the agent has it open."""
    key = make_key(tmp_path / "locked")
    add(agent, key)
    subprocess.run(
        ["ssh-keygen", "-q", "-p", "-N", "sesame", "-f", str(key)], check=True, capture_output=True
    )
    shutil.copy(key.with_suffix(".pub"), sshd.authorized_keys)
    sshd.client_key = key
    person = Person()
    assert login(sshd, person, config=f"IdentityAgent {agent}") == "in"
    assert person.asked == []


def test_too_many_keys_is_said_as_such(sshd: Sshd, agent: Path, tmp_path: Path) -> None:
    """sshd hangs up: the message says why and names the setting that helps."""
    add(agent, *[make_key(tmp_path / f"stranger{number}") for number in range(8)])
    config = sshd.write_ssh_config(f"IdentityAgent {agent}")
    config.write_text(config.read_text().replace("IdentitiesOnly yes", "IdentitiesOnly no"))
    chain = resolve_chain(sshd.alias, config_file=str(config))
    with pytest.raises(AuthRefused, match="Too many authentication failures") as refused:
        run(Connection("gpubox", chain, Person().ask, Memory()))
    assert "IdentitiesOnly" in str(refused.value.hint)


def test_a_dead_agent_is_no_obstacle(sshd: Sshd, tmp_path: Path) -> None:
    """An agent socket without an agent: the key file does."""
    assert login(sshd, config=f"IdentityAgent {tmp_path}/nobody.sock") == "in"


@pytest.mark.parametrize("kind", ["ed25519", "rsa", "ecdsa"])
@pytest.mark.parametrize("held", ["file", "agent"])
def test_user_certificates(kind: str, held: str, tmp_path: Path, agent: Path) -> None:
    """A key that only its certificate lets in: beside the key, or the private half in the agent and CertificateFile."""
    authority = make_key(tmp_path / "ca")
    with Sshd(tmp_path / "sshd", options={"TrustedUserCAKeys": str(authority.with_suffix(".pub"))}) as sshd:
        key = make_key(tmp_path / "user", kind)
        sign = [
            "ssh-keygen",
            "-q",
            "-s",
            str(authority),
            "-I",
            "me",
            "-n",
            sshd.user,
            str(key.with_suffix(".pub")),
        ]
        subprocess.run(sign, check=True, capture_output=True)
        sshd.authorized_keys.write_text("")
        sshd.client_key = key
        config = ""
        if held == "agent":
            add(agent, key)
            certificate = (tmp_path / "user-cert.pub").rename(tmp_path / "elsewhere-cert.pub")
            key.unlink()
            config = f"IdentityAgent {agent}\nCertificateFile {certificate}"
        assert login(sshd, config=config) == "in"


# --------------------------------------------------------------------------------------------- what a person types


def test_a_password_is_asked_once(tmp_path: Path) -> None:
    """Wrong, then right; a reconnect asks nothing."""
    with PasswordServer(tmp_path, "password") as server:
        person, memory = Person(password=["wrong", "right"]), Memory()
        chain = direct(server.port, server.known_hosts)
        assert run(Connection("gpubox", chain, person.ask, memory)) == "in"
        assert run(Connection("gpubox", chain, person.ask, memory)) == "in"
        assert [secret for _, secret in person.asked] == [True, True]
        assert "me@127.0.0.1" in person.asked[0][0]
        assert server.attempts == 3


def test_a_password_that_changed_meanwhile_is_asked_again(tmp_path: Path) -> None:
    """The remembered one is forgotten, not tried over and over."""
    with PasswordServer(tmp_path, "password") as server:
        person, memory = Person(password=["right", "newer"]), Memory()
        chain = direct(server.port, server.known_hosts)
        assert run(Connection("gpubox", chain, person.ask, memory)) == "in"
        server.password = "newer"
        assert run(Connection("gpubox", chain, person.ask, memory)) == "in"
        assert (len(person.asked), server.attempts) == (2, 3)


def test_codes_are_asked_each_time_and_passwords_once(tmp_path: Path) -> None:
    """Keyboard-interactive: the password is remembered, the code is not; echo as the server says; no terminal codes."""
    with PasswordServer(tmp_path, "keyboard-interactive", codes=("111", "222")) as server:
        person, memory = Person(password="right", verification=["111", "222"]), Memory()
        chain = direct(server.port, server.known_hosts)
        assert run(Connection("gpubox", chain, person.ask, memory)) == "in"
        assert run(Connection("gpubox", chain, person.ask, memory)) == "in"
        asked = [(re.sub(r".*\) ", "", text, flags=re.DOTALL), secret) for text, secret in person.asked]
        assert asked == [("Password: ", True), ("Verification code: ", False), ("Verification code: ", False)]
        assert not [text for text, _ in person.asked if "\x1b" in text]
        assert server.codes == []


@pytest.mark.parametrize("kind", ["password", "keyboard-interactive"])
def test_nobody_to_ask(kind: str, tmp_path: Path) -> None:
    """Not on a terminal: one clear error, no attempt with an empty password."""
    with PasswordServer(tmp_path, kind) as server:
        with pytest.raises(AuthRefused) as refused:
            run(Connection("gpubox", direct(server.port, server.known_hosts), Person().ask, Memory()))
        assert "not a terminal" in refused.value.message
        assert "terminal" in str(refused.value.hint)
        assert server.attempts == 0


def test_wrong_passwords_end(tmp_path: Path) -> None:
    """Three tries, as ssh does, then the login counts as refused."""
    with PasswordServer(tmp_path, "password") as server:
        person = Person(password="wrong")
        with pytest.raises(AuthRefused):
            run(Connection("gpubox", direct(server.port, server.known_hosts), person.ask, Memory()))
        assert len(person.asked) == 3


def test_a_key_and_then_a_code(tmp_path: Path) -> None:
    """Two factors; the wrong code is refused, the right one lets in."""
    key = make_key(tmp_path / "key")
    with KeyThenCodeServer(tmp_path, key, "123456") as server:
        person = Person(code=["000000", "123456"])
        chain = direct(server.port, server.known_hosts, key)
        assert run(Connection("gpubox", chain, person.ask, Memory())) == "in"
        assert len(person.asked) == 2
        stranger = make_key(tmp_path / "stranger")
        chain = direct(server.port, server.known_hosts, stranger)
        with pytest.raises(AuthRefused):
            run(Connection("gpubox", chain, person.ask, Memory()))


@contextmanager
def terminal(code: str, typed: bytes) -> Iterator[str]:
    """Run Python code on a pseudo-terminal whose user types ``typed`` once something was printed; yields what it shows."""
    pid, master = os.forkpty()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", code])
    shown = b""
    try:
        while b"code" not in shown:
            shown += os.read(master, 1024)
        os.write(master, typed)
        while True:
            try:
                data = os.read(master, 1024)
            except OSError:
                break
            if not data:
                break
            shown += data
    finally:
        os.waitpid(pid, 0)
        os.close(master)
    yield shown.decode()


@pytest.mark.parametrize("secret", [True, False])
def test_the_terminal_itself(secret: bool) -> None:
    """On a real pseudo-terminal: a secret is not echoed, another answer is; the answer arrives unchanged."""
    code = (
        "from orchestrator.hosts.prompt import TerminalPrompter as T;"
        f"a = T().ask('code: ', secret={secret}); print('GOT', len(a), a == 'se cret')"
    )
    with terminal(code, b"se cret\n") as shown:
        assert "GOT 7 True" in shown
        assert ("se cret" in shown) is not secret


def test_no_terminal_no_question() -> None:
    """stdin from /dev/null: the prompter refuses at once, with a controlling terminal or without."""
    code = (
        "from orchestrator.hosts.prompt import *\n"
        "try: TerminalPrompter().ask('code: ', secret=True)\n"
        "except NoTerminal as e: print('refused:', e)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert done.stdout == "refused: stdin is not a terminal\n"


def test_host_errors_are_ours(sshd: Sshd, tmp_path: Path) -> None:
    """Whatever fails in a login is one of our errors (and so has an exit status)."""
    sshd.client_key = make_key(tmp_path / "stranger")
    with pytest.raises(HostError):
        login(sshd)
