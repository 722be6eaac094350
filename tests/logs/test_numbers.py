"""Whatever numbers a program prints, what is read of them fits the record that the laptop takes in."""

from __future__ import annotations

import json

from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.core.answers import check_record
from remote_jobs.logs.eta import History
from remote_jobs.logs.follow import Follower

WHOLE = st.one_of(st.integers(0, 200), st.integers(0, 10**25), st.integers(1, 400).map(lambda digits: int("9" * digits)))
NUMBER = st.one_of(
    WHOLE.map(str),
    st.floats(allow_nan=True, allow_infinity=True).map(str),
    st.floats(0, 1e12).map(lambda value: f"{value:.9f}"),
    st.sampled_from(["?", "0", "-1", "1e999", "1.5k", "3M", "7Y", "00", "1,000", "0." + "0" * 300 + "1"]),
)
CLOCK = st.one_of(
    st.sampled_from(["?", "00:01", "99:99", "1:02:03", "3 days, 1:00:00"]),
    st.builds("{}:{}:00".format, WHOLE, WHOLE),
    st.builds("{} days, 00:10".format, WHOLE),
)
LABEL = st.sampled_from(["Loading checkpoint shards", "Extracting hidden states", "x", "", "Epoch 1"])
UNIT = st.sampled_from(["it/s", "s/it", "B/s", "ktok/s", ""])
LINE = st.one_of(
    st.builds("{}: {}%|## | {}/{} [{}<{}, {}{}]".format, LABEL, NUMBER, NUMBER, NUMBER, CLOCK, CLOCK, NUMBER, UNIT),
    st.builds("{}: {}it [{}, {}{}]".format, LABEL, NUMBER, CLOCK, NUMBER, UNIT),
    st.builds("step {}/{} global_step={}".format, NUMBER, NUMBER, NUMBER),
    st.builds("{}{} seconds".format, st.sampled_from(["Loading weights took ", "init engine (x) took ", "Pipeline complete in "]), NUMBER),
    st.builds('::orch {{"phase": "a", "state": "progress", "done": {}, "total": {}}}'.format, NUMBER, NUMBER),
)


NO_TIME_AT_FIRST = [("x: 10%|# | 1/10 [9999999999:00<00:01, 1.00it/s]", "\r"), ("x: 10%|# | 1/10 [00:02<00:08, 1.00it/s]", "\r")]


@settings(deadline=None)
@example(lines=NO_TIME_AT_FIRST, known=False)
@given(lines=st.lists(st.tuples(LINE, st.sampled_from("\r\n")), max_size=30), known=st.booleans())
def test_any_numbers_make_a_record_that_can_be_meant(lines: list[tuple[str, str]], known: bool) -> None:
    usual = {"Loading checkpoint shards": History(1e6, 3)} if known else {}
    follower = Follower(usual)
    follower.feed("".join(line + end for line, end in lines).encode())
    seen = follower.snapshot()
    attempt = {"n": 1, "bars": seen["bars"], "phases": seen["phases"]}
    check_record("job-1", {"state": {"steps": [{"name": "work", "state": "running", "attempts": [attempt]}]}})
    json.dumps(seen, allow_nan=False)
