"""One agent client per host of the inventory, opened when first asked and shared by everybody."""

from __future__ import annotations

import threading
from collections.abc import Callable

from orchestrator.core.errors import HostKeyUnknown, OrchError
from orchestrator.core.inventory import Host, Inventory
from orchestrator.hosts.agent import AgentClient
from orchestrator.hosts.connection import Connection
from orchestrator.hosts.openssh import ProcessStream, command_line
from orchestrator.hosts.prompt import Memory, NoTerminal, Prompter, TerminalPrompter
from orchestrator.hosts.release import bootstrap, build
from orchestrator.hosts.ssh_config import resolve_chain
from orchestrator.hosts.stream import ByteStream


class HostPool:
    """The clients of one run of orch.

    Args:
        inventory: where the hosts are described.
        prompter: asks a person for passwords and codes; default: the terminal.
    """

    def __init__(self, inventory: Inventory, prompter: Prompter | None = None) -> None:
        self.inventory = inventory
        self._prompter = prompter or TerminalPrompter()
        self._memory = Memory()
        self._clients: dict[str, AgentClient] = {}
        self._lock = threading.Lock()

    def agent(self, name: str) -> AgentClient:
        """The client of a host; connects at its first request, not here.

        Raises:
            ConfigError: no such host in the inventory.
        """
        host = self.inventory.host(name)
        with self._lock:
            if name not in self._clients:
                self._clients[name] = AgentClient(
                    name, lambda ask: open_stream(name, host, ask, self._memory), self._prompter
                )
            return self._clients[name]

    def accept_new_key(self, name: str) -> str | None:
        """Remember the unknown host keys on the way to a host; what was written, or None when all were known.

        Raises:
            HostKeyChanged: a changed key is never accepted. HostError: the host cannot be reached.
        """
        host = self.inventory.host(name)
        connection = _connection(name, host, _nobody, self._memory, accept_new=True)
        try:
            connection.open()
        except HostKeyUnknown:
            raise
        except OrchError:
            # A refused login does not take back a key that was accepted on the way to it.
            if not connection.accepted:
                raise
        finally:
            connection.close()
        return "; ".join(connection.accepted) or None

    def close(self) -> None:
        """Close every connection."""
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()


def _nobody(_text: str, _secret: bool) -> str:  # noqa: FBT001
    raise NoTerminal("no questions while host keys are accepted")


def _connection(
    name: str, host: Host, ask: Callable[[str, bool], str], memory: Memory, *, accept_new: bool = False
) -> Connection:
    chain = resolve_chain(host.ssh, identity_file=host.identity_file, known_hosts=host.known_hosts)
    return Connection(name, chain, ask, memory, accept_new=accept_new)


def open_stream(name: str, host: Host, ask: Callable[[str, bool], str], memory: Memory) -> ByteStream:
    """Connect to a host by its transport and start the bootstrap there.

    Raises:
        HostError, ConfigError: as the transports say.
    """
    command = bootstrap(build(), host.root, host.agent_python)
    if host.transport == "openssh":
        argv = command_line(host.ssh, command, identity_file=host.identity_file, known_hosts=host.known_hosts)
        return ProcessStream(name, argv)
    connection = _connection(name, host, ask, memory)
    connection.open()
    try:
        return connection.start(command)
    except BaseException:
        connection.close()
        raise
