"""The grammar of bars, and which update belongs to which bar."""

from __future__ import annotations

import pytest

from remote_jobs.logs import explain_bytes
from remote_jobs.logs.bars import BarTracker, BarUpdate, parse_bars, parse_counter, text_behind_bars


def one(text):
    updates = parse_bars(text.encode(), 1, 0)
    assert len(updates) == 1, updates
    return tuple(updates[0][2:9])


# text -> (label, done, total, percent, elapsed_s, remaining_s, s_per_item)
GRAMMAR = {
    " 39% Completed | 25/64 [10:20<18:40, 28.73s/it]": ("", 25, 64, 39, 620, 1120, 28.73),
    "Loading safetensors checkpoint shards:   0% Completed | 0/49 [00:00<?, ?it/s]": ("Loading safetensors checkpoint shards", 0, 49, 0, 0, None, None),
    "Multi-thread loading shards: 50% Completed | 32/64 [00:10<00:10,  3.20it/s]": ("Multi-thread loading shards", 32, 64, 50, 10, 10, 0.3125),
    "  5%|▌         | 10/200 [00:10<03:10,  1.00s/it]": ("", 10, 200, 5, 10, 190, 1.0),
    "a: b: c:  50%|#####     | 5/10 [1:02:03<1 day, 2:03:04, 3.2s/it, loss=[1,2]]": ("a: b: c", 5, 10, 50, 3723, 93784, 3.2),
    "train:  92%|█████████▏| 860/936 [45:07:11<4:20:10, 205.41s/it]": ("train", 860, 936, 92, 162431, 15610, 205.41),
    "Loading weights:   0%|          | 1/760 [00:00<00:00, 9009.93it/s, Materializing param=lm_head.weight]": ("Loading weights", 1, 760, 0, 0, 0, 0.000111),
    "Map (num_proc=8):   0%|          | 0/100000 [00:00<?, ? examples/s]": ("Map (num_proc=8)", 0, 100000, 0, 0, None, None),
    "Saving the dataset (1/1 shards): 100%|##########| 64/64 [00:00<00:00, 15964.05 examples/s]": ("Saving the dataset (1/1 shards)", 64, 64, 100, 0, 0, 6.3e-05),
    "Generating train split: 1000 examples [00:01, 632.12 examples/s]": ("Generating train split", 1000, None, None, 1, None, 0.001582),
    "5it [00:02,  2.30it/s]": ("", 5, None, None, 2, None, 0.434783),
    "0it [00:00, ?it/s]": ("", 0, None, None, 0, None, None),
    "model-00001-of-00064.safetensors:  12%|█▏        | 1.20G/9.80G [00:10<01:12, 118MB/s]": ("model-00001-of-00064.safetensors", 1200000000, 9800000000, 12, 10, 72, 0.0),
    "tok:  10%|█ | 1.02k/10.0k [00:10<01:30, 1.50kit/s]": ("tok", 1020, 10000, 10, 10, 90, 0.000667),
    "Epoch 0   7% ━━━╸     1/14  [ 0:00:01 < -:--:-- , ? it/s ]": ("Epoch 0", 1, 14, 7, 1, None, None),
    "Epoch 1 100% ━━━━━━━━ 14/14  [ 0:00:02 < 0:00:00 , 8 it/s ]": ("Epoch 1", 14, 14, 100, 2, 0, 0.125),
    "Processed prompts:   1%|  | 3/256 [00:00<00:24, 10.45it/s, est. speed input: 5352.34 toks/s, output: 10.45 toks/s]": ("Processed prompts", 3, 256, 1, 0, 24, 0.095694),
    "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):   6%|▌  | 3/51 [00:00<00:02, 22.79it/s]": ("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE)", 3, 51, 6, 0, 2, 0.043879),
    "Generating responses:  56%|█████▋    | 9/16 [00:00<00:00, 15.54sample/s, ok=9, err=0]": ("Generating responses", 9, 16, 56, 0, 0, 0.06435),
    "(EngineCore_DP0 pid=12) Loading pt checkpoint shards:  50% Completed | 1/2 [00:01<00:01,  1.10s/it]": ("Loading pt checkpoint shards", 1, 2, 50, 1, 1, 1.1),
    "[rank0]: train:  10%|█         | 1/10 [00:10<01:30, 10.00s/it]": ("train", 1, 10, 10, 10, 90, 10.0),
    "2026-05-01T00:00:00.1Z stderr F  10%|█         | 1/10 [00:10<01:30, 10.00s/it]": ("", 1, 10, 10, 10, 90, 10.0),
    " 10%|█         | 1/10 [00:10<01:30, 10.00s/it]\x1b[32m [repeated 8x across cluster]\x1b[0m": ("", 1, 10, 10, 10, 90, 10.0),
    "100%|█████| 339/339 [39:19<00:00,  5.97s/it][INFO|trainer.py:3778] 2026-02-10 19:47:37,563 >> Saving": ("", 339, 339, 100, 2359, 0, 5.97),
}


@pytest.mark.parametrize(("text", "expected"), GRAMMAR.items(), ids=[str(n) for n in range(len(GRAMMAR))])
def test_each_form_is_read_as_printed(text, expected):
    assert one(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "[13:13:34] INFO     HTTP Request",
        "[12:30, foo 3/4]",
        'INFO: 127.0.0.1:5 - "POST /v1 HTTP/1.1" 200',
        "{'loss': 1.2, 'epoch': 0.1}",
        "took [00:10] 3/4",
        "ratio 3/4 [see 1:2]",
        "",
    ],
)
def test_other_text_is_no_bar(text):
    assert parse_bars(text.encode(), 1, 0) == []


def test_two_bars_in_one_segment_are_both_read():
    text = " 50%|#    | 1/2 [00:01<00:01,  1.00s/it]eval:  10%|#  | 1/10 [00:00<00:05,  2.00it/s]"
    assert [(u.label, u.done, u.total) for u in parse_bars(text.encode(), 1, 0)] == [("", 1, 2), ("eval", 1, 10)]


def test_text_glued_behind_a_bar_is_kept_apart():
    assert text_behind_bars(b" 50%|#    | 1/2 [00:01<00:01,  1.00s/it]Traceback (most recent call last):") == b"Traceback (most recent call last):"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("iter 100/2000 loss 3.2", ("iter", 100, 2000, None)),
        ("step 5/10", ("step", 5, 10, None)),
        (" iteration       10/  500000 | consumed samples:  2560", ("iteration", 10, 500000, None)),
        ("Epoch [3/10], Step [100/600], Loss: 1.2", ("Step", 100, 600, None)),
        ("Prefetching checkpoint files: 30% (19/64)", ("Prefetching checkpoint files", 19, 64, 30)),
        ("lr/AdamW=0.001, global_step=16", ("global_step", 16, None, None)),
    ],
)
def test_counters_without_a_clock(text, expected):
    update = parse_counter(text, 1, 0, None, None)
    assert (update.label, update.done, update.total, update.percent) == expected


@pytest.mark.parametrize("text", ["HTTP/1.1 200", "2026/05/12", "files 3/2", "step 3/1", "batch 1/2/3", "see step 3/4.txt"])
def test_other_fractions_are_no_counters(text):
    assert parse_counter(text, 1, 0, None, None) is None


def update(done, total=10, elapsed=0, label="load", worker=None, line=1):
    return BarUpdate(line, 0, label, done, total, None, elapsed, None, None, worker, None)


def states(tracker):
    return [(bar.update.worker, bar.instance, bar.update.done, bar.update.total) for bar in tracker.bars]


def test_a_restart_with_the_same_total_is_a_new_instance():
    tracker = BarTracker()
    for done, elapsed in [(0, 0), (5, 50), (10, 100), (10, 101), (0, 0), (4, 40)]:
        tracker.take(update(done, elapsed=elapsed))
    assert states(tracker) == [(None, 1, 10, 10), (None, 2, 4, 10)]


def test_the_drafter_is_a_new_instance_though_its_total_differs():
    tracker = BarTracker()
    for done, total in [(0, 49), (49, 49), (0, 1), (1, 1)]:
        tracker.take(update(done, total))
    assert states(tracker) == [(None, 1, 49, 49), (None, 2, 1, 1)]


def test_two_writers_are_two_bars():
    tracker = BarTracker()
    for worker, done in [("A", 0), ("B", 0), ("A", 5), ("B", 2), ("A", 6), ("B", 3)]:
        tracker.take(update(done, worker=worker))
    assert states(tracker) == [("A", 1, 6, 10), ("B", 1, 3, 10)]


def test_two_writers_without_names_are_told_apart_by_count_and_clock():
    tracker = BarTracker()
    for done, elapsed in [(1, 10), (4, 40), (2, 41), (5, 50), (3, 52), (6, 60), (4, 62)]:
        tracker.take(update(done, elapsed=elapsed))
    assert states(tracker) == [(None, 1, 6, 10), (None, 2, 4, 10)]


def test_memory_is_bounded_over_many_epochs():
    tracker = BarTracker(limit=50)
    for epoch in range(1000):
        for done in (0, 5, 10):
            tracker.take(update(done, elapsed=done, line=epoch))
    assert len(tracker.bars) == 50
    assert tracker.bars[-1].instance == 1000
    assert tracker.forgotten == 950
    many = BarTracker()
    for done in range(100_000):
        many.take(update(done, 100_000, elapsed=done))
    assert len(many.bars[0].samples) <= 256
    assert many.bars[0].samples[0] == (0.0, 0)


def test_the_worker_comes_from_the_start_of_the_line():
    answer = explain_bytes(b"(Worker_TP0 pid=7) \rLoading:  10%|#  | 1/10 [00:01<00:09,  1.00s/it]\r")
    assert [(b["worker"], b["pid"], b["seg"]) for b in answer["bars"]] == [("Worker_TP0", 7, 1)]
