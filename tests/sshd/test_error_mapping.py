"""Every exception class of the libraries below has a translation, so that no traceback reaches a person."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import socket
from types import ModuleType

import fabric
import paramiko
import pytest
from paramiko import ssh_exception as ssh

from orchestrator.core.errors import AuthRefused, HostError, OrchError, ProtocolError, Unreachable
from orchestrator.hosts.errors import TABLE, handler, mapped, translate
from orchestrator.hosts.stream import HandshakeDropped

WINDOWS_ONLY = {"paramiko._winapi", "paramiko.win_pageant", "paramiko.win_openssh", "fabric.util.win32"}


def exception_classes(package: ModuleType) -> set[type[BaseException]]:
    """All exception classes that a package defines, found by importing every module of it."""
    found: set[type[BaseException]] = set()
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name in WINDOWS_ONLY or module.name.endswith("__main__"):
            continue
        for _, item in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(item, BaseException) and item.__module__.startswith(package.__name__):
                found.add(item)
    return found


@pytest.mark.parametrize("package", [paramiko, fabric], ids=["paramiko", "fabric"])
def test_every_class_of_the_library_is_named_in_the_table(package: ModuleType) -> None:
    """A new class in a new release must be looked at by a person: inheriting an entry is not enough."""
    classes = exception_classes(package)
    assert len(classes) >= 3
    assert {cls for cls in classes if cls not in TABLE} == set()


def test_the_most_specific_entry_wins() -> None:
    """Subclasses of subclasses find the nearest entry; what is not ours stays unknown."""

    class Newer(ssh.ChannelException):
        pass

    assert handler(Newer) is TABLE[ssh.ChannelException]
    assert handler(KeyboardInterrupt) is None


ROWS: list[tuple[BaseException, type[OrchError], bool | None, str]] = [
    (socket.gaierror(-2, "Name or service not known"), Unreachable, True, "cannot be resolved"),
    (TimeoutError("timed out"), Unreachable, True, "no answer in time"),
    (ConnectionRefusedError(111, "Connection refused"), Unreachable, True, "refused"),
    (ConnectionResetError(104, "reset"), HandshakeDropped, True, "closed"),
    (EOFError(), HandshakeDropped, True, "EOFError"),
    (OSError(113, "No route to host"), Unreachable, True, "No route"),
    (
        ssh.NoValidConnectionsError({("::1", 22): ConnectionRefusedError(111, "x")}),
        Unreachable,
        True,
        "refused",
    ),
    (ssh.SSHException("Error reading SSH protocol banner"), HandshakeDropped, True, "banner"),
    (ssh.SSHException("Timeout opening channel."), Unreachable, True, "in time"),
    (ssh.SSHException("No existing session"), Unreachable, True, "in time"),
    (ssh.AuthenticationException("Authentication timeout."), Unreachable, True, "in time"),
    (ssh.AuthenticationException("Authentication failed."), AuthRefused, False, "failed"),
    (ssh.BadAuthenticationType("Bad", ["password"]), AuthRefused, False, "password"),
    (ssh.ChannelException(2, "Connect failed"), HostError, True, "MaxSessions"),
    (ssh.ChannelException(1, "Administratively prohibited"), HostError, False, "forbids"),
    (ssh.IncompatiblePeer("no acceptable kex"), HostError, False, "transport: openssh"),
    (ssh.MessageOrderError("bad"), ProtocolError, None, "broke"),
]


@pytest.mark.parametrize(("raised", "expected", "transient", "word"), ROWS, ids=lambda value: str(value)[:40])
def test_translation(
    raised: BaseException, expected: type[OrchError], transient: bool | None, word: str
) -> None:
    """The kind, whether trying again can help, and words that a person can act on."""
    error = translate(raised, "gpubox", "connecting to me@box")
    assert type(error) is expected
    assert "gpubox" in error.message
    assert "connecting to me@box" in error.message
    assert word in str(error)
    if isinstance(error, HostError):
        assert error.transient is transient
        assert error.host == "gpubox"


def test_mapped_keeps_the_cause_and_our_own_errors() -> None:
    """The foreign exception stays visible for debugging; what is already ours passes unchanged."""
    with pytest.raises(Unreachable) as found, mapped("gpubox", "connecting"):
        raise ConnectionRefusedError(111, "x")
    assert isinstance(found.value.__cause__, ConnectionRefusedError)
    own = AuthRefused("no", host="gpubox")
    with pytest.raises(AuthRefused) as same, mapped("gpubox", "connecting"):
        raise own
    assert same.value is own
    with pytest.raises(KeyboardInterrupt), mapped("gpubox", "connecting"):
        raise KeyboardInterrupt
