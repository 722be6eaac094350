"""Job ids are safe folder names, sort by plan and day, and can be abbreviated."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.errors import AmbiguousJob, NoSuchJob
from orchestrator.core.ids import is_job_id, match_job, new_job_id, resolve_job, slug

NOW = datetime(2026, 11, 29, 23, 30, tzinfo=UTC)
IDS = ["kimi-20261129-abc123", "kimi-20261129-abd456", "kimi-20261130-xyz789"]


@given(st.text(max_size=300))
def test_every_name_gives_a_safe_id(name: str) -> None:
    job = new_job_id(name, NOW)
    assert is_job_id(job)
    assert len(job) <= 60
    assert "/" not in job
    assert not job.startswith((".", "-"))
    assert ".." not in job


def test_ids_differ() -> None:
    assert len({new_job_id("a", NOW) for _ in range(200)}) == 200


def test_the_day_is_utc() -> None:
    late = datetime(2026, 11, 30, 1, 0, tzinfo=timezone(timedelta(hours=9)))
    assert new_job_id("Kimi K2.5 – Eagle", late, lambda text: text[0]) == "kimi-k2.5-eagle-20261129-000000"


def test_slug_of_nothing() -> None:
    assert slug("日本語") == "job"


@pytest.mark.parametrize(
    "text", ["", "..", "a/b", "kimi", "kimi-2026-abc123", "kimi-20261129-ABC123", "a\n-20261129-abc123"]
)
def test_what_is_no_id(text: str) -> None:
    assert not is_job_id(text)


def test_abbreviations() -> None:
    assert match_job(IDS[0], IDS) == IDS[0]
    assert match_job("kimi-20261130", IDS) == IDS[2]
    assert match_job("xyz", IDS) == IDS[2]
    assert match_job("nope", IDS) is None
    assert match_job("", IDS) is None
    with pytest.raises(
        AmbiguousJob, match="fits several jobs: kimi-20261129-abc123, kimi-20261129-abd456"
    ) as caught:
        match_job("kimi-20261129-ab", IDS)
    assert caught.value.candidates == IDS[:2]


def test_a_whole_id_wins_over_a_longer_one() -> None:
    assert match_job("a-1", ["a-1", "a-12"]) == "a-1"


def test_unknown_id_names_the_nearest() -> None:
    with pytest.raises(NoSuchJob, match="did you mean kimi-20261130-xyz789"):
        resolve_job("kimi-20261130-xyz788", IDS)
    with pytest.raises(NoSuchJob, match="orch status"):
        resolve_job("abc", [])
