"""The rule table as data: each row is sound, and none is lost to the cheap pre-filters."""

from __future__ import annotations

import re

import pytest

from remote_jobs.logs import FAILURE_CLASSES
from remote_jobs.logs.evidence import TRIGGERS, match_rule, read_body
from remote_jobs.logs.lines import read_prefix
from remote_jobs.logs.phases import ANCHORS, TABLE
from remote_jobs.logs.rules import RULES
from remote_jobs.logs.rules.rule import needles_of


def body(text):
    return text[read_prefix(text).size :]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_rule_speaks_for_its_own_test_line(rule):
    assert match_rule(body(rule.example)) is rule
    assert not read_body(body(rule.example)).noise


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_rule_is_complete(rule):
    assert re.fullmatch(r"[a-z0-9-]+", rule.id)
    assert rule.failure_class in FAILURE_CLASSES
    assert rule.retry_advice in {"yes", "no", "after_change"}
    assert rule.proves
    assert rule.source
    assert rule.advice_text
    needles = needles_of(rule.pattern)
    assert needles
    assert any(needle in rule.example.lower() for needle in needles)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_the_block_search_finds_the_line(rule):
    assert any(trigger.decode() in rule.example.lower() for trigger in TRIGGERS)


def test_there_are_many_rules_and_ids_are_unique():
    assert len(RULES) >= 150
    assert len({rule.id for rule in RULES}) == len(RULES)
    assert {rule.failure_class for rule in RULES} == set(FAILURE_CLASSES)


def test_every_phase_text_holds_an_anchor_of_the_block_search():
    for row in TABLE:
        assert "0%" in row.pattern or any(anchor.decode() in row.needle.lower() for anchor in ANCHORS), row


def test_triggers_have_no_digits_and_are_lower_case():
    # The block search deletes digits first and searches lower-case text.
    for text in (*TRIGGERS, *ANCHORS):
        assert text == text.lower()
        assert not re.search(rb"\d", text)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("abc", {"abc"}),
        ("ab?c|def", {"a", "def"}),
        (r"(?:one|two) three", {" three"}),
        (r"(?:alpha|beta)x?", {"alpha", "beta"}),
        (r"(?i)ADDRESS already", {"address already"}),
        (r"\d+|x", set()),
        (r"Errno 12\b", {"errno 12"}),
        (r"(?!skip)found(?P<n>\d)", {"found"}),
    ],
)
def test_needles_are_certain(pattern, expected):
    assert set(needles_of(pattern)) == expected
