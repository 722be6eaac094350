"""ISO times of the records, read. Also loaded on the laptop (causes.py), so it must import nothing else of the agent.

Standard library only.
"""

from __future__ import annotations

import time
from typing import Any, Optional


def epoch(text: Any) -> Optional[float]:
    """Epoch seconds of an ISO UTC time with Z; None when it is none."""
    import calendar  # here: it brings locale and datetime along, for which every start of a supervisor would pay

    try:
        return float(calendar.timegm(time.strptime(str(text)[:19], "%Y-%m-%dT%H:%M:%S")))
    except ValueError:
        return None


def seconds_between(start: Any, end: Any) -> Optional[float]:
    """From one ISO time to another, 0 where they are the other way round; None when one of them is none."""
    first, last = epoch(start), epoch(end)
    return None if first is None or last is None else max(0.0, last - first)
