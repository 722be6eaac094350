"""The XML of many driver generations and states of a GPU, made from the real one."""

from __future__ import annotations

import pytest

from remote_jobs.agent import gpus
from tests.gate.xml_variants import text_of, variants

VARIANTS = variants()


def test_there_are_at_least_twenty_variants() -> None:
    assert len(VARIANTS) >= 20


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name: str) -> None:
    variant = VARIANTS[name]
    report = gpus.parse(text_of(variant))
    document = report.to_json()
    assert [gpu["clean"] for gpu in document["gpus"]] == variant["clean"], document["why"]  # type: ignore[attr-defined]
    assert document["clean"] is variant["overall"], document["why"]
    assert variant.get("why", "") in str(document["why"])
    for gpu in document["gpus"]:  # type: ignore[attr-defined]
        assert gpu["clean"] or gpu["why"] in str(document["why"])
    if "expected" in variant:
        judged = report.to_json(expected=variant["expected"])
        assert judged["clean"] is variant["overall_expected"]
        assert variant["why_expected"] in str(judged["why"])


def test_faults_are_the_health_and_busy_gpus_are_healthy() -> None:
    def health(name: str) -> list[str]:
        return [gpu["health"] for gpu in gpus.parse(text_of(VARIANTS[name])).to_json()["gpus"]]  # type: ignore[attr-defined]

    assert health("own_orphan_like_process") == ["ok", "ok"]
    assert health("volatile_ecc")[1].startswith("3 uncorrected")
