"""Splitting: the same segments however the stream was cut; prefixes of every known writer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remote_jobs.logs.lines import MAX_SEGMENT, Cursor, Splitter, iter_segments, read_prefix, strip_ansi


def segments(chunks):
    """(line, seg, text) of all non-empty segments, read one after the other."""
    splitter = Splitter()
    found = []
    for block in [*map(splitter.feed, chunks), splitter.flush()]:
        if block is None or not block.data:
            continue
        cursor = Cursor(block)
        while cursor.at < len(block.data):
            segment = cursor.segment_at(cursor.at)
            found.append((segment.line, segment.seg, block.data[segment.start : segment.end]))
    return found


def plainly(data):
    """The definition, written naively."""
    return [
        (number, seg, piece[:MAX_SEGMENT])
        for number, line in enumerate(data.split(b"\n"), 1)
        for seg, piece in enumerate(line.split(b"\r"))
    ]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([b"a", b"\n", b"\r", b"\r\n", b"bar: 1/2", b"\xff", b""]), max_size=40), st.data())
def test_segments_are_those_of_the_definition_for_every_cut(pieces, data):
    whole = b"".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    chunks = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    got = [entry for entry in segments(chunks) if entry[2]]
    assert got == [entry for entry in plainly(whole) if entry[2]]


def test_a_segment_longer_than_the_limit_is_cut_and_what_follows_is_read():
    whole = b"x" * (3 * MAX_SEGMENT) + b"\rnext\nlast"
    for step in (1000, 65536, 1 << 20):
        chunks = [whole[at : at + step] for at in range(0, len(whole), step)]
        assert segments(chunks) == [(1, 0, b"x" * MAX_SEGMENT), (1, 1, b"next"), (2, 0, b"last")]


def test_iter_segments_numbers_like_the_cases():
    assert [(s.line, s.seg) for s in iter_segments(b"a\rb\n\n\rc")] == [(1, 0), (1, 1), (2, 0), (3, 0), (3, 1)]


@pytest.mark.parametrize(
    ("text", "worker", "pid", "level", "rest"),
    [
        ("(EngineCore_DP0 pid=12) INFO 05-12 03:16:16 [weight_utils.py:856] hi", "EngineCore_DP0", 12, "INFO", "hi"),
        ("(Worker_TP0_EP1 pid=7) x", "Worker_TP0_EP1", 7, "", "x"),
        ("(VllmWorker rank=1 pid=2445156) x", "VllmWorker", 2445156, "", "x"),
        ("(WorkerDict pid=530044, ip=10.0.0.2) x", "WorkerDict", 530044, "", "x"),
        ("(raylet) [2026-03-20 09:12:55,732 E 515268 515299] (raylet) disk", "raylet", None, "", "[2026-03-20 09:12:55,732 E 515268 515299] (raylet) disk"),
        ("(vLLMHttpServer pid=1) (Worker pid=2) x", "Worker", 2, "", "x"),
        ("[rank3]: Traceback", "rank3", None, "", "Traceback"),
        ("[default0]:x", "default0", None, "", "x"),
        ("[rank0]:[W601 10:00:00.123 ProcessGroupNCCL.cpp:1496] Warning", "rank0", None, "WARNING", "Warning"),
        ("W0509 01:08:29.457000 103231 torch/distributed/elastic/multiprocessing/api.py:901] Sending", None, 103231, "WARNING", "Sending"),
        ("2026-05-12T03:16:16.123456789Z stderr F ValueError: x", None, None, "", "ValueError: x"),
        ("Jun 01 10:00:00 node1 python[4242]: x", "python", 4242, "", "x"),
        ("vllm-1  | x", "vllm-1", None, "", "x"),
        ("[pod/train-0/main] x", "train-0/main", None, "", "x"),
        ("2026-05-09 01:08:20,139 - root - INFO - hello", None, None, "INFO", "hello"),
        ("2026-11-29 13:15:07.595 | INFO     | speculators.utils.loading:_resolve_file:163 - Loading", None, None, "INFO", "Loading"),
        ("[INFO|trainer.py:1580] 2026-02-10 19:08:17,314 >>   Num Epochs = 3", None, None, "INFO", "  Num Epochs = 3"),
        ("[13:13:34] INFO     HTTP Request", None, None, "INFO", "HTTP Request"),
        ("           WARNING  Received", None, None, "WARNING", "Received"),
        ("[2025-04-23 21:31:41 TP2] Scheduler", "TP2", None, "", "Scheduler"),
        ("3: out", "3", None, "", "out"),
        ("plain text", None, None, "", "plain text"),
        ("ValueError: x", None, None, "", "ValueError: x"),
        ("INFO:     Application startup complete.", None, None, "INFO", "    Application startup complete."),
    ],
)
def test_prefixes(text, worker, pid, level, rest):
    prefix = read_prefix(text)
    assert (prefix.worker, prefix.pid, prefix.level) == (worker, pid, level)
    assert text[prefix.size :].lstrip() == rest.lstrip()


def test_ansi_codes_are_removed():
    assert strip_ansi(b"\x1b[1;36m(A pid=1)\x1b[0;0m x\x1b[A\x1b]0;title\x07!") == b"(A pid=1) x!"
