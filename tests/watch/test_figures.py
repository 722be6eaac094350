"""Loss and rates read from logs of real runs, in whatever pieces they come; a log's end followed by byte offset."""

from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.metrics import Metrics, values
from orchestrator.services.logfeed import TAIL_BYTES, LogFeed

REAL = Path(__file__).parents[1] / "data" / "logs" / "real"
TRAIN = (REAL / "speculators09_train_ok.log").read_bytes()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{'loss': 0.5123, 'grad_norm': 1.5, 'learning_rate': 5e-05, 'epoch': 0.1}", {"loss": 0.5123}),
        ("{'eval_loss': 0.4, 'eval_samples_per_second': 12.5}", {"val loss": 0.4, "samples/s": 12.5}),
        (" iteration 100/ 500 | lm loss: 9.823E+00 | loss scale: 1.0 |", {"loss": 9.823}),
        ("step 12 loss 0.33 tokens/s: 1,100", {"loss": 0.33, "tokens/s": 1100.0}),
        ("Epoch 2: train_loss=0.25, val_loss=0.31, 812.5 tok/s", {"loss": 0.25, "val loss": 0.31, "tokens/s": 812.5}),
        ("Avg prompt throughput: 549.6 tokens/s, Avg generation throughput: 5.1 tokens/s, Running: 0 reqs", {"prompt tokens/s": 549.6, "output tokens/s": 5.1}),
        ("Processed prompts: 9%|9| 1/2 [00:01<00:01, est. speed input: 81.5 toks/s, output: 3.2 toks/s]", {"prompt tokens/s": 81.5, "output tokens/s": 3.2}),
        ("loss/loss_fn='kl_div', loss/ttt_steps=3, loss/ttt_step_loss_decay=1.000", {}),
        ("train/loss_0=0.117, a lossless 7 codec, 300 tokens, no loss of data", {}),
    ],
)  # fmt: skip
def test_figures_of_known_programs(line: str, expected: dict[str, float]) -> None:
    assert dict(values(line)) == expected


def test_a_loss_that_is_no_number_is_kept() -> None:
    [(name, value)] = values("loss: nan")
    assert name == "loss"
    assert math.isnan(value)


def test_a_real_training_shows_its_loss_and_rate() -> None:
    metrics = Metrics()
    metrics.feed(TRAIN)
    found = metrics.snapshot()
    assert (len(found["loss"]), found["loss"][0], found["loss"][-1]) == (28, 0.347, 0.153)
    assert found["val loss"] == (0.195, 0.158)
    assert len(found["tokens/s"]) == 28


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 4000), max_size=30))
def test_pieces_change_nothing(sizes: list[int]) -> None:
    whole, pieces = Metrics(), Metrics()
    whole.feed(TRAIN)
    at = 0
    for size in [*sizes, len(TRAIN)]:
        pieces.feed(TRAIN[at : at + size])
        at += size
    assert pieces.snapshot() == whole.snapshot()


# ------------------------------------------------------------------------------------------------------------- the feed


def piece(data: bytes, start: int, size: int, **more: Any) -> dict[str, Any]:
    """A look's answer with a piece of a log, as the agent writes it."""
    part = data[start : start + size]
    item = {
        "job": "j", "step": "s", "attempt": 1, "inode": 7, "offset": start, "end": start + len(part), "size": len(data),
        "data_b64": base64.b64encode(part).decode(), "skipped_bytes": 0, "caught_up": start + len(part) >= len(data),
        "rotated": False, "missing": False, **more,
    }  # fmt: skip
    return {"logs": [item]}


def test_two_looks_at_once_show_no_line_twice() -> None:
    data = b"".join(b"line %d\n" % number for number in range(100))
    feed = LogFeed("j", "s")
    assert feed.cursor(0)["offset"] == -1
    feed.take(piece(data[:300], 0, 300))
    feed.take(piece(data[:500], 300, 200))
    feed.take(piece(data[:500], 300, 200))  # the long poll's answer after that of a key press
    tail = feed.take(piece(data, 400, 10_000))  # overlaps
    assert tail is not None
    assert tail.data == data
    assert feed.cursor(1)["offset"] == len(data)
    assert feed.take({"logs": []}) is None


def test_a_log_faster_than_the_link_is_followed_at_its_end() -> None:
    feed = LogFeed("j", "s")
    feed.take(piece(b"x" * 100_000, 0, TAIL_BYTES, caught_up=False))
    assert feed.cursor(1)["offset"] == -1, "the next look asks for the end again"
    tail = feed.take(piece(b"x" * 100_000 + b"y" * 50, 100_000, 50))
    assert tail is not None
    assert tail.data == b"y" * 50


def test_a_new_attempt_and_a_replaced_file_start_anew() -> None:
    feed = LogFeed("j", "s")
    feed.take(piece(b"loss 0.5\n", 0, 100))
    assert feed.cursor(2) == {**feed.cursor(2), "attempt": 2, "offset": -1, "inode": 0}
    tail = feed.take(piece(b"loss 0.9\n", 0, 100, attempt=2))
    assert tail is not None
    assert (tail.data, tail.metrics, tail.attempt) == (b"loss 0.9\n", {"loss": (0.9,)}, 2)
    assert feed.take(piece(b"old\n", 9, 100, attempt=1)).data == b"loss 0.9\n"  # type: ignore[union-attr]
    tail = feed.take(piece(b"new\n", 0, 100, attempt=2, inode=8, rotated=True))
    assert tail is not None
    assert tail.data == b"new\n"
