"""When each phase of an attempt began, how long it took, and how long a running one usually takes from here.

Why this file exists: a log rarely says when a phase began, but who follows it sees that happen; so "load_weights,
12 minutes, 3 left" needs no words in the log.  Pure: the clock is an argument.  Standard library only.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

_KEPT = 256


class PhaseClock:
    """Feed it the phases each time the log grew; `annotate` adds times to them.

    Args:
        usual: usual duration (s) by phase name on this host, asked for once when the first phase appears.
    """

    def __init__(self, usual: Callable[[], Mapping[str, float]] = dict) -> None:
        self._usual = usual
        self._usual_s: Optional[Mapping[str, float]] = None
        self._began: Dict[Tuple[Any, ...], Tuple[float, float]] = {}
        self._took: Dict[Tuple[Any, ...], float] = {}

    def take(self, phases: Sequence[Mapping[str, Any]], mono: float, wall: float) -> None:
        """Note which phases began or ended. ``mono`` and ``wall``: both clocks now, in s."""
        if phases and self._usual_s is None:
            self._usual_s = self._usual()
        for phase in phases:
            key = _key(phase)
            if key not in self._began and len(self._began) < _KEPT:
                self._began[key] = (mono, wall)
            if phase.get("state") != "running" and key in self._began and key not in self._took:
                self._took[key] = mono - self._began[key][0]

    def annotate(self, phases: Sequence[Mapping[str, Any]], mono: float) -> List[Dict[str, Any]]:
        """The phases with ``started_at`` (ISO UTC), ``took_s`` once over, and ``left_s`` while one of known length runs.

        What the log itself says about a duration wins.
        """
        found = []
        for phase in phases:
            record, key = dict(phase), _key(phase)
            if key in self._began:
                began_mono, began_wall = self._began[key]
                record["started_at"] = _iso(began_wall)
                if record.get("took_s") is None and key in self._took:
                    record["took_s"] = round(self._took[key], 1)
                usual_s = (self._usual_s or {}).get(str(phase.get("name")))
                if record.get("state") == "running" and usual_s is not None:
                    record["left_s"] = round(max(0.0, usual_s - (mono - began_mono)), 1)
            found.append(record)
        return found


def _key(phase: Mapping[str, Any]) -> Tuple[Any, ...]:
    return (phase.get("name"), phase.get("started_line"))


def _iso(wall: float) -> str:
    return datetime.fromtimestamp(wall, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
