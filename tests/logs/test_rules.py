"""The rule table as data: each row is sound, and none is lost to the cheap pre-filters."""

from __future__ import annotations

import re

import pytest

from remote_jobs.logs import FAILURE_CLASSES
from remote_jobs.logs.evidence import TRIGGERS, match_rule, read_body
from remote_jobs.logs.lines import read_prefix
from remote_jobs.logs.phases import ANCHORS, TABLE
from remote_jobs.logs.rules import CLASSES, RULES, Rule
from remote_jobs.logs.rules.rule import (
    CAUSE,
    GENERIC,
    HARD,
    SOFT_KILL,
    STRONG_KILL,
    SYMPTOM,
    WRAPPER,
    needles_of,
)


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


CERTAIN = [
    # what stands there; of several runs the longest, of equals the first
    ("abc", {"abc"}), ("^start", {"start"}), ("end$", {"end"}), ("a.cd", {"cd"}), ("ab.cd", {"ab"}), (r"a\d+bc", {"bc"}),
    (r"\bword\b", {"word"}), (r"Errno 12\b", {"errno 12"}), (r"a\.b", {"a.b"}), (r"a\\b", {"a\\b"}), (r"x\(y\)z", {"x(y)z"}),
    # classes
    ("[abc]long", {"long"}), ("[]x]long", {"long"}), (r"[^\]]long", {"long"}), ("[^]]long", {"long"}), ("[^]x]long", {"long"}), ("x[^]y]long", {"long"}), ("[A]tail", {"tail"}),
    (r"[\]a]tail", {"tail"}), ("[a^]tail", {"tail"}), ("ab[c]d", {"ab"}), ("[a-z]+", set()), ("[(|]tail", {"tail"}),
    # quantifiers
    ("ab?c", {"a"}), ("ab*", {"a"}), ("abc+d", {"abc"}), ("ab{2}c", {"ab"}), ("A{3}bc", {"bc"}), ("ab{0,1}cde", {"cde"}),
    ("abcd*?ef", {"abc"}), ("abcd+?ef", {"abcd"}), ("ab?cd*efg", {"efg"}), ("a{10}bc", {"bc"}), (".{0,60}tail", {"tail"}),
    (r"\s{2,}tail", {"tail"}), ("[a-z]{2}tail", {"tail"}), ("[a-z]*tail", {"tail"}), ("(?:ab)?", set()),
    # groups
    ("(abc|de)", {"abc", "de"}), ("ab(?:cdef)", {"cdef"}), ("abc(?:de)", {"abc"}), ("(?:abc|de)?tail", {"tail"}),
    ("(?:ab)*x", {"x"}), ("(?:ab)+x", {"ab"}), ("(?:ab){2}", {"ab"}), ("(?:ab){0,3}c", {"c"}), ("(?:)abc", {"abc"}),
    ("(?:one|two) three", {" three"}), ("(?:alpha|beta)x?", {"alpha", "beta"}), ("(?:a(?:bc|de)f|ghi)", {"bc", "de", "ghi"}),
    (r"(?:abcdef|\w)gh", {"gh"}), ("(?:abc|d)efg", {"efg"}), ("(?P<n>abc)d", {"abc"}), ("(?P<name>a)(?P=name)bc", {"bc"}),
    # a look-around holds no text of the match
    ("(?=abc)..cx", {"cx"}), ("(?!abc)x", {"x"}), ("(?<=abc)x", {"x"}), ("(?<!abcd)x", {"x"}), (r"(?!skip)found(?P<n>\d)", {"found"}),
    ("abcd(?<=d)efghij", {"efghij"}), (r"abcd(?<!\()efghij", {"efghij"}), ("abcd(?=e)efghij", {"efghij"}),
    # flags
    ("(?i)ABC already", {"abc already"}), ("(?ms)abc", {"abc"}), ("(?i:abc)d", {"abc"}), ("(?im:abc|defg)", {"abc", "defg"}),
    # alternatives: one without a certain text makes all uncertain
    ("ab?c|def", {"a", "def"}), ("a|b|c", {"a", "b", "c"}), ("ab|cd|ab", {"ab", "cd"}), ("abc$|^def", {"abc", "def"}),
    (r"abc|\d+", set()), (r"\d+|x", set()), ("abc|", set()), ("", set()),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "expected"), CERTAIN)
def test_needles_are_certain(pattern, expected):
    assert set(needles_of(pattern)) == expected
    assert list(needles_of(pattern)) == sorted(expected)


@pytest.mark.parametrize("pattern", ["abc)", "a|b)c"])
def test_a_pattern_that_cannot_be_read_is_refused(pattern):
    with pytest.raises(ValueError, match=re.escape(f"cannot read the pattern {pattern!r}")):
        needles_of(pattern)


def test_a_rule_speaks_for_itself_or_for_its_class():
    plain = Rule("r", "network", "x", "it broke", "x", "here")
    assert (plain.retry_advice, plain.advice_text) == CLASSES["network"]
    own = Rule("r", "network", "x", "it broke", "x", "here", advice="do this", retry="no")
    assert (own.retry_advice, own.advice_text) == ("no", "do this")
    assert (plain.rank, plain.teardown_noise, plain.cut_short) == (CAUSE, False, False)
    with pytest.raises(AttributeError):
        plain.rank = 1


def test_ranks_stand_in_the_order_of_judgement():
    assert HARD < CAUSE < STRONG_KILL < SYMPTOM < GENERIC < SOFT_KILL < WRAPPER
    for rule in RULES:
        assert HARD <= rule.rank <= WRAPPER + 1, rule.id
