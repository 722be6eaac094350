"""Job ids: `<plan name>-<yyyymmdd>-<6 characters>`, made on the laptop; the host's mkdir claims them."""

from __future__ import annotations

import re
import secrets
import unicodedata
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from orchestrator.core.errors import AmbiguousJob, NoSuchJob
from orchestrator.core.schema import nearest

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's base 32: no i, l, o, u, so an id can be read out loud."""
SUFFIX_LENGTH = 6
MAX_SLUG = 40
JOB_ID = re.compile(rf"[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?-\d{{8}}-[{ALPHABET}]{{{SUFFIX_LENGTH}}}")


def slug(name: str) -> str:
    """A plan's name as part of a folder's name: lower case, a-z, 0-9, dots and single dashes, at most 40 characters."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode("ascii").lower()
    text = re.sub(r"[^a-z0-9.]+", "-", plain)
    text = re.sub(r"\.{2,}", ".", text)[:MAX_SLUG].strip("-.")
    return text or "job"


def new_job_id(name: str, now: datetime, choose: Callable[[str], str] = secrets.choice) -> str:
    """A new id for a plan.

    Args:
        name: the plan's name.
        now: the date that the id shows (taken in UTC).
        choose: source of randomness: picks one character of a text.
    """
    day = now.astimezone(UTC).strftime("%Y%m%d")
    return f"{slug(name)}-{day}-" + "".join(choose(ALPHABET) for _ in range(SUFFIX_LENGTH))


def is_job_id(text: str) -> bool:
    """Whether a text is a whole job id, safe as a folder's name."""
    return len(text) <= 100 and JOB_ID.fullmatch(text) is not None


def match_job(text: str, ids: Iterable[str]) -> str | None:
    """The id that an abbreviation means: itself, the one it begins, or the one whose last part it begins.

    Raises:
        AmbiguousJob: several ids fit.
    """
    known = list(dict.fromkeys(ids))
    if text in known:
        return text
    fits = [job for job in known if text and job.startswith(text)]
    if not fits and len(text) >= 3:
        fits = [job for job in known if job.rsplit("-", 1)[-1].startswith(text)]
    if len(fits) > 1:
        shown = ", ".join(fits[:8]) + (f" and {len(fits) - 8} more" if len(fits) > 8 else "")
        raise AmbiguousJob(f"{text!r} fits several jobs: {shown}", "type more of the id", candidates=fits)
    return fits[0] if fits else None


def resolve_job(text: str, ids: Iterable[str]) -> str:
    """As :func:`match_job`, but no match is an error.

    Raises:
        NoSuchJob: nothing fits; the hint names the most alike.
        AmbiguousJob: several ids fit.
    """
    known = list(ids)
    found = match_job(text, known)
    if found is None:
        alike = nearest(text, known)
        raise NoSuchJob(
            f"no job is called {text!r}", f"did you mean {alike}?" if alike else "orch status lists the jobs"
        )
    return found
