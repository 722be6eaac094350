"""The pure renderers: status lines, dated changes, the live view at several widths, why."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest

from orchestrator.cli.keys import split_keys
from orchestrator.services.views import HostView
from orchestrator.ui.changes import host_change, job_changes
from orchestrator.ui.job import Moment
from orchestrator.ui.live import render
from orchestrator.ui.screen import Screen
from orchestrator.ui.status import status_lines
from orchestrator.ui.why import why_lines
from tests.cli.samples import MOMENT, NOW, OOM, attempt, bar, job, step, watch_view

WIDTHS = (60, 80, 100, 140, 200)


def frame(view: Any, **screen: Any) -> list[str]:
    return [line.plain for line in render(view, Screen(**{"width": 120, "height": 45, **screen}), MOMENT)]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("height", [10, 24, 50])
def test_a_frame_fits_every_terminal_and_says_the_essential(width: int, height: int) -> None:
    lines = render(watch_view(log=b"x\n" * 50), Screen(width=width, height=height, processes=True, log=True), MOMENT)
    assert len(lines) <= height
    assert all(line.cell_len <= width for line in lines)
    assert all("\n" not in line.plain and "\x1b" not in line.plain for line in lines)
    text = "\n".join(line.plain for line in lines)
    assert "eagle3-20261129-abc234  running" in text
    assert "14:32 - 14:38" in text
    assert lines[-1].plain.startswith("q leave")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_bar_keeps_percent_counts_and_end_at_every_width(width: int) -> None:
    [line] = [line for line in frame(watch_view(), width=width) if "28/64" in line]
    assert " 44%" in line
    assert "14:13, 13m35s left" in line


def test_a_bar_shows_the_range_of_its_end() -> None:
    view = watch_view()
    view.jobs["eagle3-20261129-abc234"]["steps"][2]["attempts"][1]["bars"] = [bar(eta_low_s=780.0, eta_high_s=1000.0)]
    assert "14:13 - 14:16, 13m35s left" in "\n".join(frame(view))


def test_equal_states_give_equal_frames() -> None:
    assert frame(watch_view()) == frame(watch_view())


def test_a_frame_shows_the_tree_the_verdict_and_what_the_retry_changes() -> None:
    text = "\n".join(frame(watch_view(), processes=True))
    assert "attempt 1  failed  exit 1, gpu_oom: CUDA out of memory while loading weights, 12m00s" in text
    assert "attempt 2  running  20m00s, with gpu_memory_utilization 0.9 -> 0.85" in text
    assert "import 12s > load_weights 12m00s" in text
    assert "4711 me       S    98%   2.1 GiB  python extract.py --evil" in text
    assert "train     queued      needs extract" in text
    assert "job:eagle3-20261129-abc234" in text


def test_without_unicode_a_frame_is_ascii() -> None:
    for line in frame(watch_view(), unicode=False):
        line.encode("ascii")


def test_a_broken_link_is_shown_as_that_and_never_as_a_failed_job() -> None:
    view = watch_view(job(reachable=False, age_s=125.0))
    view.hosts["gpubox"].link, view.hosts["gpubox"].problem = "reconnecting", "no route"
    text = "\n".join(frame(view))
    assert "gpubox  reconnecting" in text
    assert "no route" in text
    assert "running  on gpubox" in text
    assert "last seen 2m05s ago" in text
    assert " failed  on" not in text


def test_too_many_jobs_are_counted_not_lost() -> None:
    jobs = [job(id=f"job-{number:03}", name="x") for number in range(60)]
    lines = frame(watch_view(*jobs), height=30)
    assert len(lines) == 30
    assert any("more lines below" in line for line in lines)


def test_a_question_takes_the_foot() -> None:
    assert frame(watch_view(), question="stop eagle3 on gpubox?")[-1] == "stop eagle3 on gpubox? [y/N]"


def test_log_lines_are_clean_and_errors_coloured() -> None:
    view = watch_view(log=b"start\n 10%\r 20%\r 30%\n\x1b[31mRuntimeError: \xff boom\x1b[0m\n")
    lines = render(view, Screen(width=100, height=45, log=True), MOMENT)
    plain = [line.plain for line in lines]
    assert "   30%" in plain
    [error] = [line for line in lines if "RuntimeError" in line.plain]
    assert error.plain == "  RuntimeError: � boom"
    assert "red" in str(error.style)


# ------------------------------------------------------------------------------------------------------------- changes


def texts(before: Any, after: Any) -> list[str]:
    return [change.text for change in job_changes(before, after, MOMENT)]


def test_the_first_view_tells_the_story_so_far_with_the_hosts_times() -> None:
    changes = job_changes(None, job(), MOMENT)
    lines = [change.line() for change in changes]
    assert "2026-11-29T13:32:00Z gpubox eagle3-20261129-abc234 extract: attempt 1 failed, exit 1, gpu_oom: CUDA out of memory while loading weights, after 12m00s" in lines
    assert [change.at for change in changes[:-1]] == sorted(change.at for change in changes[:-1])
    assert changes[-1].text == "running, ready 14:32 - 14:38"


def test_lines_of_one_answer_are_in_the_order_of_their_times() -> None:
    """Found late, as after a broken link: bars and states have no time of their own, and came before the end all the same."""
    before, after = job(), job(state="failed", ended_at="2026-11-29T13:59:00Z")
    last = after["steps"][2]["attempts"][1]
    last.update(state="failed", ended_at="2026-11-29T13:58:59Z", exit_status=1, bars=[bar(done=60)])
    after["notes"] = [{"at": "2026-11-29T13:50:00Z", "text": "GPU 3 was left out"}]
    after["steps"][3].update(state="skipped", waiting=None)
    changes = job_changes(before, after, MOMENT)
    assert [change.at for change in changes] == sorted(change.at for change in changes)
    assert changes[0].text == "GPU 3 was left out"
    assert changes[-1].text.startswith("failed, after")
    assert {change.at for change in changes} <= {f"2026-11-29T13:{end}Z" for end in ("50:00", "58:59", "59:00")}


def test_lines_of_two_answers_are_in_the_order_of_their_times() -> None:
    """What has no time of its own gets that of the answer, by the host's clock: drawn later, by a clock that is ahead of
    it, "queued" would come an hour after the start that the next answer tells of.
    """
    answered, ahead = NOW - timedelta(hours=1, seconds=0.3), Moment(NOW, MOMENT.zone)
    host = HostView("gpubox", link="connected", looked_at=NOW, skew_s=(answered - NOW).total_seconds())
    queued = job(state="queued", started_at=None, eta=None, steps=[step("work", "queued")])
    started = (answered + timedelta(seconds=0.1)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    running = job(state="running", eta=None, steps=[step("work", "running", [attempt(started_at=started)])])
    first = job_changes(None, queued, ahead, seen_at=host.seen_at)
    second = job_changes(queued, running, ahead, seen_at=host.seen_at)
    assert [change.text for change in first] == ["queued"]
    assert "attempt 1 started" in [change.text for change in second]
    assert first[0].at <= min(change.at for change in second)
    host.link = "reconnecting"
    assert host.seen_at is None, "what is only remembered was not seen just now"


def test_nothing_new_is_no_line() -> None:
    assert texts(job(), job()) == []


def test_a_bar_gets_a_line_at_each_mark_only() -> None:
    after = job()
    after["steps"][2]["attempts"][1]["bars"] = [bar(done=31)]
    assert texts(job(), after) == []
    after["steps"][2]["attempts"][1]["bars"] = [bar(done=32)]
    [line] = texts(job(), after)
    assert line.startswith("attempt 2: Loading safetensors checkpoint shards 32/64 50%, 22.4 s each, ready 14:13")


def test_end_retry_and_lost_are_told() -> None:
    before = job()
    after = copy.deepcopy(before)
    after["steps"][2]["state"], after["steps"][2]["retry_at"] = "retry_wait", "2026-11-29T14:00:10.123Z"
    after["steps"][2]["attempts"][1].update(state="failed", ended_at="2026-11-29T14:00:00Z", exit_status=-9, verdict={"class": "killed", "summary": "killed by SIGKILL"})
    assert texts(before, after) == [
        "attempt 2 failed, ended by signal 9 (SIGKILL), killed: killed by SIGKILL, after 20m00s",
        "waits for the next attempt, at 2026-11-29T14:00:10Z",
    ]
    lost = copy.deepcopy(before)
    lost["state"] = "lost"
    lost["lost"] = {"reason": "the supervisor was killed", "processes": [{"pid": 4711}]}
    assert texts(before, lost) == ["lost, the supervisor was killed; still running: 1 process (4711)"]


def test_notes_and_waiting_are_told_once() -> None:
    before, after = job(), job(notes=[{"at": "2026-11-29T13:59:00Z", "text": "hang suspected"}])
    after["steps"][3].update(state="gated", waiting="GPU 0 is held by pid 99 of user other")
    assert texts(before, after) == ["hang suspected", "gated, GPU 0 is held by pid 99 of user other"]
    assert texts(after, copy.deepcopy(after)) == []


def test_hostile_text_stays_on_one_clean_line() -> None:
    after = job(notes=[{"at": None, "text": "evil\n2026-01-01T00:00:00Z fake line\x1b[2J"}])
    [line] = [change.line() for change in job_changes(job(), after, MOMENT)]
    assert "\n" not in line
    assert "\x1b" not in line
    assert host_change("box", "a\nb", MOMENT).line() == "2026-11-29T14:00:00Z box: a b"


# -------------------------------------------------------------------------------------------------------------- status


def test_status_of_a_pipeline() -> None:
    assert [line.plain for line in status_lines([job()], [], MOMENT)] == [
        "eagle3-20261129-abc234  running  on gpubox  1h59m  ready 14:32 - 14:38",
        "  serve     succeeded   took 1h00m",
        "  generate  succeeded   took 40m00s",
        "  extract   running     attempt 2, load_weights, Loading safetensors checkpoint shards 28/64 44%, 14:13, 13m35s left, for 20m00s",
        "  train     queued      needs extract",
    ]


def test_status_of_an_unreachable_host_shows_age_and_reason() -> None:
    host = {"name": "gpubox", "reachable": False, "skew_s": None, "error": {"message": "timed out", "hint": "check the VPN"}, "unreadable": {}}
    lines = [line.plain for line in status_lines([job(reachable=False, age_s=3700.0)], [host], MOMENT)]
    assert lines[0].endswith("(host unreachable, last seen 1h01m ago)")
    assert lines[-2:] == ["gpubox: timed out", "  check the VPN"]


def test_the_newest_notes_of_a_job_are_shown_but_in_a_list_not_of_one_that_succeeded() -> None:
    notes = [{"at": (NOW - timedelta(minutes=9 - n)).isoformat(), "text": f"note {n}\x1b[31m"} for n in range(4)]
    notes.append({"at": None, "text": "seen from another machine"})
    shown = [line.plain for line in status_lines([job(notes=notes)], [], MOMENT)]
    assert shown[-4:] == [
        "  note (7m00s ago): note 2",
        "  note (6m00s ago): note 3",
        "  note: seen from another machine",
        "  2 earlier notes: orch status eagle3-20261129-abc234 --json",
    ]
    well = job(state="succeeded", notes=notes)
    assert [line.plain for line in status_lines([well], [], MOMENT)][-4:] == shown[-4:]
    assert not any("note" in line.plain for line in status_lines([well, well], [], MOMENT))


def test_skew_is_shown_over_two_seconds() -> None:
    host = {"name": "gpubox", "reachable": True, "skew_s": -3600.0, "error": None, "unreadable": {"bad-job": "spec.json is torn"}}
    lines = [line.plain for line in status_lines([], [host], MOMENT)]
    assert "gpubox: the host's clock is 1h00m behind this laptop's" in lines
    assert "gpubox: job bad-job: spec.json is torn" in lines


def test_etas_follow_the_reader_clock() -> None:
    later = Moment(NOW + timedelta(hours=9, minutes=45), MOMENT.zone)
    assert "ready Mon 30 Nov 00:17 - Mon 30 Nov 00:23" in status_lines([job()], [], later)[0].plain


# ----------------------------------------------------------------------------------------------------------------- why


def test_why_fits_a_screen_and_says_what_to_do() -> None:
    answer = {
        "job": "j-1", "host": "gpubox", "state": "failed", "step": "extract", "attempt": 1, "verdict": OOM, "exit_status": 1,
        "evidence": [f"line {number}" for number in range(30)], "changed_next": {"gpu_memory_utilization": {"from": 0.9, "to": 0.85}},
        "incident": "/data/orch/jobs/j-1/steps/1-extract/attempts/1/incident",
        "attempts": [
            {"step": "extract", "n": 1, "state": "failed", "exit_status": 1, "class": "gpu_oom", "changes": None},
            {"step": "extract", "n": 2, "state": "running", "exit_status": None, "class": None, "changes": {"a": 1}},
        ],
    }  # fmt: skip
    lines = [line.plain for line in why_lines(answer)]
    assert len(lines) <= 30
    text = "\n".join(lines)
    for words in ("gpu_oom", "log line 120: torch.OutOfMemoryError", "-> lower gpu_memory_utilization", "0.9 -> 0.85", "22 more with --json", "incident"):
        assert words in text, text


def test_why_of_a_job_without_failure() -> None:
    answer = {"job": "j-1", "step": "work", "attempt": 1, "verdict": None, "exit_status": 0, "evidence": []}
    assert "No failure is recorded for this attempt." in [line.plain for line in why_lines(answer)]


def test_keys_are_split_and_unknown_sequences_swallowed() -> None:
    assert list(split_keys("q\x1b[Aj\x1bOB\x1b[15~\x1b[1;5Cx ?")) == ["q", "up", "j", "down", "x", "space", "?"]
    assert list(split_keys("\x1b")) == ["escape"]


def test_samples_are_whole() -> None:
    assert step("a", "queued")["attempts"] == []
    assert attempt(3)["n"] == 3
