"""The advice of a verdict, as something to type: with the names in the place of JOB, HOST and STEP, which who wrote it did not know.

Standard library only.
"""

from __future__ import annotations

import re
import shlex
from typing import Any, Dict, Mapping, Optional

_TYPED = re.compile(r"\borch (\w+) (JOB|HOST)\b(?P<named> --step )?")
_STEP = re.compile(r"\bSTEP\b(?=\.)")
OF_A_STEP = ("logs", "why")
"""Commands that show one attempt, and need the step to show the one that is spoken of."""


def addressed(verdict: Optional[Mapping[str, Any]], *, job: str, host: str, step: Optional[str]) -> Optional[Dict[str, Any]]:
    """The verdict of a step of this job with advice that can be typed; None for none."""
    if verdict is None:
        return None

    def typed(found: "re.Match[str]") -> str:
        command, what = found.group(1, 2)
        words = ["orch", command, host if what == "HOST" else job]
        named = found.group("named")  # the advice is about another step
        words += ["--step", step] if step is not None and command in OF_A_STEP and not named else []
        return " ".join(shlex.quote(word) for word in words) + (named or "")

    advice = _TYPED.sub(typed, str(verdict.get("advice") or ""))
    return {**verdict, "advice": advice if step is None else _STEP.sub(lambda _: shlex.quote(step), advice)}
