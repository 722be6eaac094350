"""How a verdict is chosen among findings, one row per rule of judgement, each on both sides of its limit.

The known logs of test_known_logs.py say that the whole is right; these say where each line is drawn.
"""

from __future__ import annotations

from typing import Any

import pytest

from remote_jobs.logs.evidence import STALE_ACTIVITY, Finding
from remote_jobs.logs.rules import Rule
from remote_jobs.logs.rules.context import WORK
from remote_jobs.logs.rules.rule import (
    ALWAYS,
    BROAD_CAUSE,
    CATCH_ALL,
    CAUSE,
    COLLECTIVE,
    GENERIC,
    HARD,
    LAUNCHER,
    NEVER,
    SEEN_SOFT_KILL,
    SOFT_KILL,
    STRONG_KILL,
    SYMPTOM,
    WRAPPER,
)
from remote_jobs.logs.verdict import LAST_WORDS, TALKS_ON, Circumstances, judge, signal_of


def a(failure_class: str = "config", rank: int = CAUSE, *, line: int = 10, named: str = "", **more: Any) -> Finding:
    """A finding that shows an end, unless said otherwise; its rule is called like its class."""
    of_rule = {key: more.pop(key) for key in ("shows_end", "teardown_noise", "cut_short", "advice", "retry") if key in more}
    rule = Rule(named or failure_class, failure_class, "x", "it broke", "x", "here", rank=rank, **of_rule)
    known = {"text": f" said at {line} ", "ends": True, "handled": False, "clean": True, "worker": None, "pid": None, "activity": 0}
    return Finding(rule=rule, line=line, **{**known, **more})


def verdict(*findings: Finding, **around: Any) -> str | None:
    """Signature of the verdict: the rule's id, or that of a verdict without a rule."""
    around = {"last_line": max([found.line for found in findings], default=0), **around}
    failure = judge(list(findings), Circumstances(**around))
    return failure["signature"] if failure else None


def line_of(*findings: Finding, **around: Any) -> int:
    """Line of the root cause."""
    failure = judge(list(findings), Circumstances(**{"last_line": findings[-1].line, **around}))
    assert failure is not None
    return int(failure["root_cause"]["line"])


@pytest.mark.parametrize(
    ("status", "signal"),
    [(None, None), (0, None), (1, None), (-1, 1), (-9, 9), (-64, 64), (128, None), (129, 1), (137, 9), (139, 11), (133, None), (255, None)],
)
def test_the_signal_behind_a_status(status: int | None, signal: int | None) -> None:
    assert signal_of(status) == signal


# ------------------------------------------------------------------------------------------------------ exit status 0


def test_a_success_is_doubted_only_where_the_log_says_that_the_work_is_unfinished() -> None:
    short = a("network", cut_short=True)
    assert verdict(exit_status=0) is None
    assert verdict(a(), exit_status=0) is None
    assert verdict(a(), short, exit_status=0) == "network"
    assert verdict(a("network", cut_short=True, handled=True), exit_status=0) is None
    assert verdict(short, exit_status=0, done_line=11) is None
    assert verdict(short, exit_status=0, done_line=10) == "network"
    assert verdict(short, exit_status=0, done_line=9) == "network"
    assert verdict(short, a("auth", cut_short=True, line=20), exit_status=0, done_line=15) == "auth"


# ------------------------------------------------------------------------------------------------- without exit status


def test_without_a_status_nothing_is_a_failure_but_what_shows_an_end() -> None:
    assert verdict() is None
    assert verdict(a()) == "config"
    assert verdict(nan_tail=(7, "loss: nan")) == "nan-metrics"
    assert verdict(a(ends=False), last_line=500, nan_tail=(7, "loss: nan")) == "nan-metrics"
    assert verdict(a(), nan_tail=(7, "loss: nan")) == "config"


def test_a_prompt_counts_until_something_ends_behind_it() -> None:
    assert verdict(prompt=(10, "Password:")) == "prompt"
    assert verdict(a(line=11), prompt=(10, "Password:")) == "config"
    for line in (9, 10):
        assert verdict(a(line=line), prompt=(10, "Password:")) == "prompt"
    assert verdict(a(line=11, ends=False), prompt=(10, "Password:")) == "prompt"


def test_work_goes_on_behind_it_so_it_was_no_end() -> None:
    says_so, raised = a(shows_end=ALWAYS), a()
    assert verdict(raised, activity=TALKS_ON - 1) == "config"
    assert verdict(raised, activity=TALKS_ON) is None
    assert verdict(says_so, activity=TALKS_ON) == "config"
    assert verdict(says_so, activity=3 * WORK - 1) == "config"
    assert verdict(says_so, activity=3 * WORK) is None
    later = a(shows_end=ALWAYS, activity=50)
    assert verdict(later, activity=50 + 3 * WORK - 1) == "config"
    assert verdict(later, activity=50 + 3 * WORK) is None
    for before in (1, 7, 50):
        assert verdict(a(activity=before), activity=before + TALKS_ON - 1) == "config"
        assert verdict(a(activity=before), activity=before + TALKS_ON) is None
        assert verdict(a(activity=before), activity=before + TALKS_ON + 1) is None


def test_the_kernels_word_outlives_more_work() -> None:
    hard = a("gpu_hardware", HARD, shows_end=ALWAYS, activity=7)
    assert verdict(hard, activity=7 + STALE_ACTIVITY - 1) == "gpu_hardware"
    assert verdict(hard, activity=7 + STALE_ACTIVITY) is None
    assert verdict(hard, activity=8 + STALE_ACTIVITY) is None
    assert verdict(hard, a(line=12, shows_end=ALWAYS, activity=7), activity=7 + 3 * WORK) == "gpu_hardware", "whoever speaks last"


def test_an_end_that_many_lines_follow_was_none() -> None:
    assert verdict(a(), last_line=410) == "config"
    assert verdict(a(), last_line=411) is None
    assert verdict(a(line=300), last_line=700) == "config"
    assert verdict(a(line=300), last_line=701) is None
    for rank in (WRAPPER, WRAPPER + 1):
        assert verdict(a("unknown", rank, named="launcher"), last_line=411) == "launcher", "launchers print much when they give up"


def test_what_falls_apart_behind_finished_work_is_no_failure() -> None:
    generic, noise = a("unknown", GENERIC), a(teardown_noise=True)
    assert verdict(a(), done_line=11) is None
    assert verdict(a(), done_line=10) == "config"
    assert verdict(generic, done_line=5) is None
    assert verdict(a("unknown", CATCH_ALL), done_line=5) is None
    assert verdict(a("unknown", GENERIC - 1), done_line=5) == "unknown"
    assert verdict(a("nccl"), done_line=5) is None
    assert verdict(a("network"), done_line=5) is None
    assert verdict(a("config"), done_line=5) == "config"
    assert verdict(noise, a(line=12), done_line=5) == "config", "one that counts is enough"
    assert verdict(generic, done_line=10) == "unknown", "on the same line"
    assert verdict(a("unknown", GENERIC, line=3), a("unknown", GENERIC, line=10), done_line=5) == "unknown", "one was before"
    assert verdict(a("unknown", GENERIC, line=5), a("unknown", GENERIC, line=10), done_line=5) == "unknown"


@pytest.mark.parametrize("mark", ["stopped_line", "main_bar_done_line"])
def test_a_full_bar_or_a_stopped_server_excuses_only_known_noise(mark: str) -> None:
    assert verdict(a(teardown_noise=True), **{mark: 5}) is None
    for line in (10, 12):
        assert verdict(a(teardown_noise=True), **{mark: line}) == "config", "it was not behind it"
    assert verdict(a("unknown", GENERIC), **{mark: 5}) == "unknown"
    assert verdict(a("unknown", GENERIC), **{mark: 5}, done_line=7) is None
    assert verdict(a("unknown", GENERIC), a("unknown", GENERIC, line=15), **{mark: 5}, done_line=12) == "unknown"
    assert verdict(a("unknown", GENERIC), a("unknown", GENERIC, line=15), **{mark: 5}, done_line=10) == "unknown"


def test_last_words() -> None:
    def said(failure_class: str = "disk_full", rank: int = CAUSE, *, line: int, **more: Any) -> str | None:
        activity = more.pop("now", 0)
        return verdict(a(failure_class, rank, line=line, ends=False, **more), last_line=100, activity=activity)

    assert said(line=97) == "disk_full"
    assert said(line=96) is None
    assert said(line=100 - LAST_WORDS, loud=True) == "disk_full"
    assert said(line=99 - LAST_WORDS, loud=True) is None
    assert said("network", line=97, loud=True) == "network"
    assert said("network", line=96, loud=True) is None, "side services fail over the network without anybody minding"
    assert said(rank=STRONG_KILL - 1, line=99) == "disk_full"
    assert said(rank=STRONG_KILL, line=99) is None
    assert said(shows_end=ALWAYS, line=99) == "disk_full"
    assert said(rank=SYMPTOM, line=99, loud=True) is None
    assert said("nccl", SYMPTOM, line=99, loud=True) == "nccl"
    assert said("port_in_use", SYMPTOM, line=99, loud=True) is None
    assert said("port_in_use", line=100 - LAST_WORDS, loud=True) == "port_in_use"
    assert said("nccl", SYMPTOM, line=99) is None
    assert said(line=99, activity=5, now=5 + WORK - 1) == "disk_full"
    assert said(line=99, activity=5, now=5 + WORK) is None
    assert said(line=99, activity=5, now=6 + WORK) is None
    assert said(line=99, handled=True) is None
    assert said(line=99, shows_end=NEVER) is None
    old = a(line=1, ends=False, named="old")
    assert verdict(old, a("disk_full", line=99, ends=False), last_line=100) is not None


# ------------------------------------------------------------------------------------------------------- exit status


@pytest.mark.parametrize(
    ("status", "signature", "failure_class"),
    [
        (1, "no-cause", "unknown"), (126, "status-126", "config"), (127, "status-127", "missing_file"), (124, "status-124", "killed"),
        (-9, "signal-9", "killed"), (137, "signal-9", "killed"), (-6, "signal-6", "unknown"), (-25, "signal-25", "disk_full"),
        (-50, "signal-50", "killed"),
    ],
)  # fmt: skip
def test_a_silent_death_is_told_by_its_status(status: int, signature: str, failure_class: str) -> None:
    failure = judge([], Circumstances(exit_status=status))
    assert failure is not None
    assert (failure["signature"], failure["class"], failure["root_cause"]) == (signature, failure_class, None)
    assert failure["evidence"] == [f"exit status {status}"]
    assert failure["advice"]


def test_the_words_for_a_silent_death() -> None:
    def summary(status: int) -> Any:
        failure = judge([], Circumstances(exit_status=status))
        return failure and failure["summary"]

    assert summary(1) == "The process failed and the log does not say why."
    assert summary(127) == "The log does not name a cause; exit status 127: the program was not found."
    assert summary(-15) == "The log does not name a cause; the process ended by SIGTERM: someone asked it to stop."
    assert summary(-50) == "The log does not name a cause; the process ended by signal 50."


def test_nan_explains_a_death_that_nothing_better_explains() -> None:
    nan = {"nan_tail": (7, "loss: nan"), "exit_status": 1}
    assert verdict(**nan) == "nan-metrics"
    assert verdict(a("unknown"), **nan) == "nan-metrics"
    assert verdict(a("nccl", WRAPPER), **nan) == "nan-metrics"
    assert verdict(a("nccl", WRAPPER - 1), **nan) == "nccl"
    assert verdict(a("config"), **nan) == "config"
    assert verdict(a("waiting_for_input"), **nan) == "waiting_for_input"


@pytest.mark.parametrize("text", ["[1.2] Out of memory: Killed process 7", "oom-kill:constraint=CONSTRAINT_MEMCG", "memory.events: oom_kill 1"])
def test_the_hosts_oom_record_explains_what_the_log_does_not(text: str) -> None:
    host = ["usb 1-1: new device", text, "oom_kill 99"]
    failure = judge([a("killed")], Circumstances(exit_status=1, host=host, last_line=10))
    assert failure is not None
    assert (failure["signature"], failure["class"], failure["evidence"]) == ("host-oom-killer", "host_oom", [text])
    assert verdict(exit_status=1, host=host) == "host-oom-killer"
    for vague in ("unknown", "nccl"):
        assert verdict(a(vague), exit_status=1, host=host) == "host-oom-killer"
    assert verdict(a("config"), exit_status=1, host=host) == "config", "it ended another process"
    assert verdict(a("config"), exit_status=-9, host=host) == "host-oom-killer"
    assert verdict(a("config"), exit_status=-15, host=host) == "config"
    assert verdict(exit_status=-9, host=["usb 1-1: new device"]) == "signal-9"


def test_a_signal_outweighs_what_did_not_end_the_program() -> None:
    said = a(ends=False)
    assert verdict(said, exit_status=1) == "config"
    assert verdict(said, exit_status=-9) == "signal-9"
    assert verdict(said, exit_status=-6) == "config", "abort() is how native code ends after it said why"
    assert verdict(a(), exit_status=-9) == "config"
    assert verdict(a("gpu_hardware", HARD, ends=False), exit_status=-9) == "gpu_hardware"
    assert verdict(said, exit_status=-9, prompt=(3, "Password:")) == "prompt"
    assert verdict(exit_status=1, prompt=(3, "Password:")) == "prompt"
    assert verdict(a(), exit_status=1, prompt=(3, "Password:")) == "config"


# ---------------------------------------------------------------------------------------------------------- choosing


def test_the_cause_before_the_wrapper_and_the_unended() -> None:
    wrapper, unended = a("unknown", WRAPPER, line=1, named="wrapper"), a("disk_full", line=2, ends=False)
    assert verdict(wrapper, a(line=3)) == "config"
    assert verdict(unended, a("unknown", GENERIC, line=3)) == "unknown", "what ended it before what was only said"
    assert verdict(wrapper, unended, exit_status=1) == "disk_full"
    assert verdict(wrapper, unended) == "disk_full"
    assert verdict(wrapper, a("disk_full", line=2, ends=False, handled=True), last_line=10) == "wrapper", "it was handled"
    assert verdict(wrapper, a("auth", WRAPPER, line=2, named="second")) == "wrapper", "the first of wrappers"


def test_with_a_status_even_what_was_handled_counts_among_the_last_lines() -> None:
    handled = a("disk_full", line=70, ends=False, handled=True)
    assert verdict(handled, exit_status=1, last_line=70 + LAST_WORDS) == "disk_full"
    wrapper = a("unknown", WRAPPER, line=5, named="wrapper")
    assert verdict(wrapper, handled, exit_status=1, last_line=70 + LAST_WORDS) == "disk_full"
    assert verdict(wrapper, handled, exit_status=1, last_line=69 + LAST_WORDS) == "disk_full"
    assert verdict(wrapper, handled, exit_status=1, last_line=71 + LAST_WORDS) == "wrapper"
    assert verdict(wrapper, a("unknown", WRAPPER + 1, line=70, named="second"), exit_status=1) == "wrapper"
    assert verdict(a("unknown", WRAPPER + 1, line=69, named="second", ends=False), handled, exit_status=1, last_line=99) == "disk_full"
    assert verdict(wrapper, a("auth", WRAPPER, line=99, ends=False, named="second"), exit_status=1) == "wrapper"
    quiet_wrapper = a("unknown", WRAPPER, line=69, ends=False, named="wrapper")
    assert verdict(quiet_wrapper, handled, exit_status=1, last_line=100) == "disk_full"
    unhandled = a("auth", line=1, ends=False)
    assert verdict(unhandled, handled, exit_status=1, last_line=100) == "auth", "what was not handled comes first"
    assert verdict(quiet_wrapper, a("auth", WRAPPER, line=70, ends=False, named="second"), exit_status=1) == "wrapper"


def test_native_code_that_gave_up_was_told_why_right_before() -> None:
    gave_up = a("unknown", GENERIC, line=100, shows_end=ALWAYS, named="terminate")
    said = a("disk_full", line=100 - LAST_WORDS, ends=False)
    assert verdict(said, gave_up) == "disk_full"
    assert verdict(a("disk_full", line=99 - LAST_WORDS, ends=False), gave_up) == "terminate"
    assert verdict(a("disk_full", line=99, ends=False, handled=True), gave_up) == "terminate"
    for rank in (STRONG_KILL, SYMPTOM):
        assert verdict(a("nccl", rank, line=99, ends=False), gave_up) == "terminate"
    assert verdict(said, a("unknown", GENERIC, line=100, named="raised")) == "raised", "a Python exception says it itself"
    assert verdict(said, a("segfault", GENERIC, line=100, shows_end=ALWAYS)) == "segfault"
    assert verdict(a("auth", BROAD_CAUSE, line=98, ends=False, clean=False), a("config", line=99, ends=False), gave_up) == "config"
    assert verdict(gave_up, a("disk_full", line=100, ends=False)) == "terminate", "not on the same line"
    assert verdict(said, a("waiting_for_input", line=100, shows_end=ALWAYS)) == "waiting_for_input", "that says it itself"


@pytest.mark.parametrize(("failure_class", "wins"), [("network", True), ("nccl", True), ("unknown", True), ("config", False)])
def test_a_kill_explains_what_its_peers_then_complain_about(failure_class: str, wins: bool) -> None:
    complaint = a(failure_class, CAUSE, line=20)
    assert verdict(a("killed", STRONG_KILL), complaint) == ("killed" if wins else failure_class)
    assert verdict(a("killed", STRONG_KILL, ends=False), complaint) == failure_class
    assert verdict(complaint, a("killed", STRONG_KILL, line=21)) == failure_class, "it came later"
    assert verdict(a("killed", LAUNCHER), complaint) == failure_class
    assert verdict(a("auth", CAUSE, clean=False), complaint) == failure_class, "no kill, and not as clear"
    assert verdict(a("killed", STRONG_KILL), a(failure_class, HARD, line=20)) == failure_class


def test_someone_asked_it_to_stop_and_the_rest_is_the_consequence() -> None:
    asked = a("killed", SOFT_KILL, named="asked")
    assert verdict(asked, a("nccl", SYMPTOM, line=20)) == "asked"
    assert verdict(asked, a("config", CAUSE, line=20)) == "asked", "its process ended of it"
    quiet = a("killed", SOFT_KILL, ends=False, named="asked")
    assert verdict(quiet, a("config", CAUSE, line=20)) == "config"
    assert verdict(quiet, a("nccl", SYMPTOM, line=20)) == "asked"
    assert verdict(quiet, a("nccl", SYMPTOM + 1, line=20)) == "asked"
    assert verdict(quiet, a("nccl", COLLECTIVE, line=20)) == "nccl"
    assert verdict(a("killed", SEEN_SOFT_KILL, named="asked"), a("config", line=20)) == "asked"
    assert verdict(a("killed", SOFT_KILL + 2, named="asked"), a("config", line=20)) == "config"
    assert verdict(a("killed", SOFT_KILL - 1, named="asked"), a("config", line=20)) == "config"
    assert verdict(a("auth", SOFT_KILL, named="asked"), a("config", line=20)) == "config"
    assert verdict(asked, a("killed", SYMPTOM, line=20)) == "killed", "a better word for the same"
    assert verdict(a("killed", SOFT_KILL, handled=True, named="asked"), a("config", line=20)) == "config"


def test_the_rank_that_raised_first_before_the_peers_that_lost_it() -> None:
    raised = a("unknown", GENERIC, named="raised")
    for rank, wins in ((COLLECTIVE - 1, False), (COLLECTIVE, True), (SYMPTOM, True), (SYMPTOM + 1, False)):
        assert verdict(raised, a("nccl", rank, line=20)) == ("raised" if wins else "nccl"), rank
    for rank, wins in ((GENERIC - 1, False), (GENERIC, True), (CATCH_ALL, True), (CATCH_ALL + 1, False)):
        assert verdict(a("unknown", rank, named="raised"), a("nccl", SYMPTOM, line=20)) == ("raised" if wins else "nccl"), rank
    assert verdict(a("unknown", GENERIC, ends=False, named="raised"), a("nccl", SYMPTOM, line=20)) == "nccl"
    assert verdict(a("unknown", GENERIC, clean=False, named="raised"), a("nccl", SYMPTOM, line=20)) == "nccl"


def test_of_equals_the_first_and_of_causes_the_clean_one() -> None:
    assert line_of(a(rank=CAUSE + 4, line=10), a(rank=CAUSE, line=11)) == 10, "near ranks are equals"
    assert line_of(a(rank=STRONG_KILL, line=10), a(rank=CAUSE, line=11)) == 11
    assert line_of(a(rank=GENERIC, line=10), a(rank=SEEN_SOFT_KILL, line=11)) == 10
    for rank in (CATCH_ALL, SOFT_KILL, SEEN_SOFT_KILL):
        assert line_of(a(rank=rank, line=10), a(rank=GENERIC, line=11)) == 10
    assert line_of(a(rank=SOFT_KILL + 2, line=10), a(rank=GENERIC, line=11)) == 11
    assert line_of(a(rank=GENERIC, line=10), a(rank=GENERIC - 1, line=11)) == 11
    assert line_of(a(rank=CAUSE, line=10, clean=False), a(rank=BROAD_CAUSE, line=11)) == 11
    assert line_of(a(rank=GENERIC, line=10, clean=False), a(rank=GENERIC, line=11)) == 10
    assert line_of(a(rank=CAUSE, line=10), a(rank=CAUSE - 1, line=11)) == 11
    assert line_of(a(line=10, ends=False), a(line=11, ends=False, loud=True), exit_status=1) == 10


def test_what_much_healthy_work_followed_is_not_the_cause() -> None:
    for before in (3, 11, 100):
        old, end = a("disk_full", line=1, activity=before), a("unknown", GENERIC, line=50, activity=before + STALE_ACTIVITY)
        assert verdict(old, end, exit_status=1) == "disk_full"
        assert verdict(old, end._replace(activity=before + STALE_ACTIVITY + 1), exit_status=1) == "unknown"
    end = end._replace(activity=3 + STALE_ACTIVITY)
    hard = a("gpu_hardware", HARD, line=1)
    assert verdict(hard, end._replace(activity=4 + STALE_ACTIVITY), exit_status=1) == "gpu_hardware"
    said = a("disk_full", line=1, ends=False, activity=3)
    assert verdict(said, exit_status=1, activity=3 + STALE_ACTIVITY) == "disk_full"
    assert verdict(said, exit_status=1, activity=4 + STALE_ACTIVITY) == "no-cause"
    assert verdict(end, exit_status=1, activity=1000) == "unknown", "an end is measured by itself, not by what came behind"


# --------------------------------------------------------------------------------------------------------- answering


def failure_of(*findings: Finding, **around: Any) -> dict[str, Any]:
    failure = judge(list(findings), Circumstances(**{"exit_status": 1, "last_line": 99, **around}))
    assert failure is not None
    return failure


def test_the_evidence_is_the_cause_and_up_to_three_other_ends() -> None:
    ends = [a("nccl", SYMPTOM, line=20 + n, named=f"peer{n}") for n in range(5)]
    best = a(line=30)
    quiet, twin = a("auth", line=31, ends=False), a(line=32)
    failure = failure_of(*ends[:2], best, quiet, twin, *[found._replace(line=found.line + 20) for found in ends[2:]])
    assert failure["evidence"] == ["line 30: said at 30", "line 20: said at 20", "line 21: said at 21", "line 42: said at 22", "exit status 1"]
    assert failure["root_cause"] == {"line": 30, "text": "said at 30"}
    assert (failure["summary"], failure["class"], failure["signature"]) == ("It broke.", "config", "config")
    assert verdict(a(), exit_status=None) == "config"
    assert failure_of(a(named="zz"), a("nccl", SYMPTOM, line=20, named="peer"))["evidence"][1] == "line 20: said at 20"
    unended = judge([a()], Circumstances(last_line=10))
    assert unended is not None
    assert unended["evidence"] == ["line 10: said at 10"]


def test_quotes_are_short() -> None:
    failure = failure_of(a(text="x" * 500))
    assert failure["evidence"][0] == "line 10: " + "x" * 400
    assert failure_of(nan_tail=(3, "n" * 500))["evidence"] == ["line 3: " + "n" * 400]


def test_advice_and_retry_are_the_rules_or_those_of_its_class() -> None:
    own = failure_of(a(advice="do this", retry="yes"))
    assert (own["advice"], own["retry"]) == ("do this", "yes")
    usual = failure_of(a())
    assert (usual["advice"], usual["retry"]) == ("Correct the named setting; the same command fails the same way.", "after_change")


def test_the_summary_names_worker_and_signal() -> None:
    assert failure_of(a(worker="Worker_TP3"))["summary"] == "It broke (seen in Worker_TP3)."
    assert failure_of(a(text="torchrun got signal: 15"))["summary"] == "It broke. SIGTERM: someone asked it to stop."
    assert failure_of(a(text="torchrun got signal: 63"))["summary"] == "It broke."
    named = Finding(**{**a()._asdict(), "rule": Rule("r", "config", "x", "max_model_len is too large", "x", "here")})
    assert failure_of(named)["summary"] == "max_model_len is too large."


def test_only_wrappers_means_that_the_cause_is_not_in_the_log() -> None:
    launcher = a("nccl", WRAPPER, named="launcher")
    lone = failure_of(launcher)
    assert (lone["class"], lone["signature"], lone["root_cause"]) == ("unknown", "launcher", None)
    assert lone["evidence"] == ["line 10: said at 10", "exit status 1"]
    assert failure_of(launcher, exit_status=-9)["signature"] == "signal-9"
    for wrapper in ("vllm-init-wrapper", "vllm-dead-wrapper", "sglang-wrapper"):
        vanished = failure_of(launcher, a("unknown", WRAPPER, line=12, named=wrapper), exit_status=-9)
        assert (vanished["signature"], vanished["class"], vanished["root_cause"]) == ("engine-vanished", "killed", None)


def test_a_death_without_cause_quotes_the_last_three_findings() -> None:
    stale = [a(line=n, ends=False) for n in range(1, 6)]
    failure = failure_of(*stale, activity=1000)
    assert failure["evidence"] == ["exit status 1", "line 3: said at 3", "line 4: said at 4", "line 5: said at 5"]


def test_a_question_and_a_lost_loss_are_quoted_where_they_stand() -> None:
    asked = failure_of(prompt=(3, "Password:"))
    assert (asked["class"], asked["root_cause"], asked["evidence"]) == (
        "waiting_for_input", {"line": 3, "text": "Password:"}, ["line 3: Password:"],
    )  # fmt: skip
    lost = failure_of(nan_tail=(3, "loss: nan"))
    assert (lost["class"], lost["root_cause"], lost["evidence"]) == ("numerical", {"line": 3, "text": "loss: nan"}, ["line 3: loss: nan"])
