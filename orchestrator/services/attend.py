"""A watch that tells others too: it sends what waits for Apprise, and knows the point at which to stop (`--until`).

Lies between the watch, which only looks, and the renderers, which only ask `done`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from orchestrator.core.states import OVER
from orchestrator.core.until import Until
from orchestrator.services.notify import Address, Deliverer, own_addresses, send
from orchestrator.services.resolve import FoundJob
from orchestrator.services.watch import Update, Watch

if TYPE_CHECKING:
    from orchestrator.services.session import Session

SEND_WITHIN_S = 20.0
NEVER_REACHED = 1


class AttentiveWatch(Watch):
    """A `Watch` with notifications.

    Args:
        session: inventory, ledger and connections.
        jobs: these; none: every active job of the hosts.
        until: leave when every watched job has reached this point or has ended.
        tell: send a message when a job reaches ``until`` (its end, without one), through Apprise.
        more: what `Watch` takes.

    Raises:
        UsageError: ``tell``, and there is nobody to tell.
    """

    def __init__(
        self,
        session: Session,
        jobs: Sequence[FoundJob],
        *,
        until: Until | None = None,
        tell: bool = False,
        **more: Any,
    ) -> None:
        super().__init__(session, jobs, **more)
        self.until = until
        self._marks = until or Until("done", "done")
        self._addresses: list[Address] = own_addresses(session, [(job.id, job.host) for job in jobs]) if tell else []
        self._deliverer = Deliverer(session)
        self._sending: list[threading.Thread] = []

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        over = kind is None and self.done()
        self._deliverer.close(drain=over)
        for thread in self._sending if over else ():
            thread.join(SEND_WITHIN_S)

    def next(self, timeout_s: float) -> list[Update]:
        """See `Watch.next`; also tells whoever wants to hear of it."""
        updates = super().next(timeout_s)
        for update in updates:
            view = self.view.jobs.get(update.job or "")
            if view is None or not view.get("reachable", True):
                continue
            self._deliverer.saw(view)
            words = self._marks.see(view)
            if words is not None and self._addresses:
                thread = threading.Thread(target=self._tell, args=(view, words), daemon=True)
                thread.start()
                self._sending.append(thread)
        return updates

    def _tell(self, view: Mapping[str, Any], words: str) -> None:
        bad = view.get("state") in {"failed", "lost"}
        for address in self._addresses:
            error = send(
                address,
                f"{view['name']} on {view['host']}: {words}",
                f"orch {'why' if bad else 'status'} {view['id']}",
                "failure" if bad else "success",
            )
            if error is not None:
                self.session.say(f"orch: notify: {address.name}: {error}")

    def done(self) -> bool:
        """True when every job watched has reached the point or ended."""
        if self.until is None or self.until.kind == "done":
            return super().done()
        if super().done():
            return True
        views = list(self.view.jobs.values())
        named = {job for jobs in self._asked.values() for job in jobs}
        if not named <= {str(view["id"]) for view in views} or not self.until.reached:
            return False
        return all(self.until.over(view) for view in views)

    def exit_status(self) -> int:
        """As `Watch.exit_status`; 0 when every job reached the point, 1 when one ended well without ever reaching it."""
        if self.until is None or self.until.kind == "done":
            return super().exit_status()
        missed = [view for view in self.view.jobs.values() if str(view["id"]) not in self.until.reached]
        if self.view.jobs and not missed:
            return 0
        for view in missed:
            if view["state"] in OVER:
                self.session.say(f"orch: {view['id']} {view['state']} without reaching {self.until.text}")
        return super().exit_status() or NEVER_REACHED
