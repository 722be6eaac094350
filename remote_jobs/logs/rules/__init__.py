"""THE ordered table of failure rules: every rule of every topic, in one tuple.

Order matters in one way only: of two rules of equal rank that match the same line, the first one speaks for it.
"""

from __future__ import annotations

from typing import Tuple

from remote_jobs.logs.rules import gpu, host, own_steps, program
from remote_jobs.logs.rules.rule import CLASSES, FAILURE_CLASSES, Rule

RULES: Tuple[Rule, ...] = own_steps.RULES + gpu.RULES + host.RULES + program.RULES
"""All rules."""

__all__ = ["CLASSES", "FAILURE_CLASSES", "RULES", "Rule"]
