"""What one run of a command works with: inventory, ledger and connections, opened when first needed.

Everything that a service needs from outside (a person's ear, the clock) comes in through here.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from orchestrator.core.inventory import Host, Inventory
    from orchestrator.hosts.agent import AgentClient
    from orchestrator.hosts.pool import HostPool
    from orchestrator.store.ledger import Ledger


def _quiet(_line: str) -> None:
    pass


class Session:
    """Inventory, ledger and one connection per host; a context manager that closes them."""

    def __init__(
        self,
        inventory_path: Path | None = None,
        *,
        say: Callable[[str], None] = _quiet,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        inventory: Inventory | None = None,
    ) -> None:
        self.inventory_path = inventory_path
        self.say = say
        self.now = now
        self._inventory = inventory
        self._ledger: Ledger | None = None
        self._pool: HostPool | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def inventory(self) -> Inventory:
        """The inventory, read once.

        Raises:
            ConfigError: there is none, or it is wrong.
        """
        if self._inventory is None:
            from orchestrator.core.inventory import load_inventory

            self._inventory = load_inventory(self.inventory_path)
        return self._inventory

    @property
    def ledger(self) -> Ledger:
        """The local index of jobs seen from here."""
        if self._ledger is None:
            from orchestrator.store.ledger import Ledger

            self._ledger = Ledger.open(say=self.say)
        return self._ledger

    @property
    def pool(self) -> HostPool:
        """The connections, one per host, opened lazily."""
        if self._pool is None:
            from orchestrator.hosts.pool import HostPool

            self._pool = HostPool(self.inventory)
        return self._pool

    def agent(self, host: str) -> AgentClient:
        """The agent of a host of the inventory.

        Raises:
            ConfigError: no such host.
        """
        self.host(host)
        return self.pool.agent(host)

    def host(self, name: str) -> Host:
        """A host of the inventory.

        Raises:
            ConfigError: no such host; the hint names the nearest.
        """
        return self.inventory.host(name)

    def host_names(self, only: str | None = None) -> list[str]:
        """All hosts of the inventory, or the one asked for."""
        if only is not None:
            self.host(only)
            return [only]
        return list(self.inventory.hosts)

    def disconnect(self) -> None:
        """Close the connections; the next request opens new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def close(self) -> None:
        """Close connections and the ledger."""
        self.disconnect()
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None


def local_job_ids() -> list[str]:
    """Ids of the jobs in the ledger, newest first; for shell completion."""
    from orchestrator.store.ledger import Ledger

    ledger = Ledger.open()
    try:
        return [row.id for row in ledger.jobs()]
    finally:
        ledger.close()
