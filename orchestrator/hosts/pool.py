"""One agent client per host of the inventory, opened when first asked and shared by everybody."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from orchestrator.core.inventory import Host, Inventory
from orchestrator.hosts.agent import AgentClient
from orchestrator.hosts.openssh import ProcessStream, command_line
from orchestrator.hosts.prompt import Ask, Memory, Prompter, TerminalPrompter
from orchestrator.hosts.release import bootstrap, build
from orchestrator.hosts.ssh_config import resolve_chain
from orchestrator.hosts.stream import ByteStream

if TYPE_CHECKING:
    from orchestrator.hosts.connection import Connection


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
        return "; ".join(connection(name, host, self._prompter.ask, self._memory).learn_keys()) or None

    def close(self) -> None:
        """Close every connection."""
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()


def connection(name: str, host: Host, ask: Ask, memory: Memory) -> Connection:
    """An unopened connection to a host of the inventory, by the user's ssh configuration."""
    from orchestrator.hosts.connection import Connection  # fabric and paramiko take 0.2 s to import

    chain = resolve_chain(host.ssh, identity_file=host.identity_file, known_hosts=host.known_hosts)
    return Connection(name, chain, ask, memory)


def open_stream(name: str, host: Host, ask: Ask, memory: Memory) -> ByteStream:
    """Connect to a host by its transport and start the bootstrap there.

    Raises:
        HostError, ConfigError: as the transports say.
    """
    command = bootstrap(build(), host.root, host.agent_python)
    if host.transport == "openssh":
        argv = command_line(host.ssh, command, identity_file=host.identity_file, known_hosts=host.known_hosts)
        return ProcessStream(name, argv)
    opened = connection(name, host, ask, memory).open()
    try:
        return opened.start(command)
    except BaseException:
        opened.close()
        raise
