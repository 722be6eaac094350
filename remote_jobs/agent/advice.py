"""The advice of a verdict, as something to type: with the ids in the place of JOB and HOST, which who wrote it did not know.

Standard library only.
"""

from __future__ import annotations

import re
import shlex
from typing import Any, Dict, Mapping, Optional

_TYPED = re.compile(r"\borch (\w+) (JOB|HOST)\b")
OF_A_STEP = ("logs", "why")
"""Commands that show one attempt, and need the step to show the one that is spoken of."""


def addressed(verdict: Optional[Mapping[str, Any]], *, job: str, host: str, step: Optional[str]) -> Optional[Dict[str, Any]]:
    """The verdict of a step of this job with advice that can be typed; None for none."""
    if verdict is None:
        return None

    def typed(found: "re.Match[str]") -> str:
        command, what = found.groups()
        words = ["orch", command, host if what == "HOST" else job]
        words += ["--step", step] if step is not None and command in OF_A_STEP else []
        return " ".join(shlex.quote(word) for word in words)

    return {**verdict, "advice": _TYPED.sub(typed, str(verdict.get("advice") or ""))}
