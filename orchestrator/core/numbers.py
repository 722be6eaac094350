"""Numbers that a caller gives, checked where they are used: once for the commands and for the Python API.

Must import nothing but the standard library and the errors: services that load quickly use it.
"""

from __future__ import annotations

from orchestrator.core.errors import UsageError

MAX_PORT = 65535


def check_whole(what: str, value: object, least: int, most: int | None = None) -> None:
    """Nothing, when ``value`` is a whole number from ``least`` to ``most`` (None: without an end).

    Raises:
        UsageError: it is not; ``what`` names it.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        span = f"from {least} on" if most is None else f"from {least} to {most}"
        raise UsageError(f"{what} cannot be {value!r}", f"a whole number {span}")


def check_seconds(what: str, value: object, most_s: float, *, zero: bool) -> None:
    """Nothing, when ``value`` is a time of at most ``most_s``, and above 0 unless ``zero`` is one too.

    Raises:
        UsageError: it is not, or no number at all (NaN); ``what`` names it.
    """
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else float("nan")
    if not (0 < number <= most_s or (zero and number == 0)):
        span = "from 0" if zero else "above 0"
        raise UsageError(f"{value!r} s is no {what}", f"a time {span}, up to {most_s / 86400:g} days: 90s, 30m, 2h")
