"""The controller of orch. `from orchestrator import Client` is the Python API; importing the package alone costs nothing."""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers know the name; the module `typing` would cost `orch --help` some milliseconds
if TYPE_CHECKING:
    from orchestrator.client import Client as Client
    from orchestrator.client import Job as Job
    from orchestrator.client import explain as explain

__all__ = ["Client", "Job", "explain"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from orchestrator import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
