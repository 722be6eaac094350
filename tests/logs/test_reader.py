"""One answer for every way of cutting the stream; nothing crashes; no input takes more than linear time."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remote_jobs.logs import Follower, LogReader, explain_bytes, iter_updates

DATA = Path(__file__).resolve().parents[1] / "data" / "logs"
LOGS = sorted(DATA.rglob("*.log"))
SMALL = [path for path in LOGS if path.stat().st_size < 9000]

PIECES = [
    b"\n", b"\r", b"\r\n", b" ", b"[", b"]", b"0", b"17", b"/", b"%", b"|", b"<", b":", b",", b"?", b"it/s", b"s/it",
    b"Loading:  10%|#  | 1/10 [00:01<00:09,  1.00s/it]", b"Loading:  20%|#  | 2/10 [00:02<00:08,  1.00s/it]",
    b"5it [00:02, 2.3it/s]", b"iter 3/7", b"(Worker_TP0 pid=7) ", b"\x1b[36m", b"\x1b[A", b"\xff\xfe", "█".encode(),
    b"Traceback (most recent call last):\n", b'  File "x.py", line 3, in f\n', b"ValueError: bad\n",
    b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n", b"ERROR 05-16 05:26:20 [core.py:1] ",
    b"Application startup complete.\n", b"::orch {\"phase\": \"extract\", \"state\": \"start\", \"total\": 4}\n", b"::orch {\n",
    b"Do you wish to run the custom code? [y/N] ", b"{'loss': nan, 'grad_norm': nan}\n", b"exitcode: -9", b"Killed",
    b"Xid (PCI:0000:5d:00): 79", b"'train_runtime': 1.0", b"INFO ", b" 200 OK", b"Exception ignored in: <x>\n",
]  # fmt: skip
texts = st.lists(st.one_of(st.sampled_from(PIECES), st.binary(max_size=6)), max_size=60).map(b"".join)
QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=120)


def fed(data, cuts, exit_status=None):
    reader = LogReader()
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        reader.feed(data[start:end])
    return reader.finish(exit_status)


@QUICK
@given(texts, st.data())
def test_any_cutting_of_the_stream_gives_the_same_answer(data, draw):
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=10)))
    status = draw.draw(st.sampled_from([None, 0, 1, -9]))
    assert fed(data, cuts, status) == explain_bytes(data, status)


@pytest.mark.parametrize("data", [b"iter3/7\n [0:02,\n", b"iter\n3/7 x\n[0:02,", b"iter 3/7 [\n1:02<", b"iter 3/7 ok\n9/9 [00:01<00:02, 1it/s]\n"])
def test_what_a_counter_is_does_not_depend_on_its_neighbours(data):
    assert fed(data, list(range(1, len(data)))) == explain_bytes(data)


@pytest.mark.parametrize("path", SMALL[::7], ids=lambda path: path.name)
def test_byte_by_byte_gives_the_same_answer(path):
    data = path.read_bytes()
    assert fed(data, list(range(1, len(data)))) == explain_bytes(data)


@pytest.mark.parametrize("path", LOGS[:20], ids=lambda path: path.name)
def test_random_cuts_of_real_logs_give_the_same_answer_and_updates(path):
    data = path.read_bytes()
    rng = random.Random(7)
    whole = explain_bytes(data)
    updates = list(iter_updates(iter([data])))
    for _ in range(4):
        cuts = sorted(rng.randrange(len(data)) for _ in range(rng.randrange(1, 60)))
        assert fed(data, cuts) == whole
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        assert list(iter_updates(iter(pieces))) == updates


BAR_PIECES = [
    f"{head}{label}{100 * done // total:3d}%|#  | {done}/{total} [00:0{done % 10}<00:09,  {rate}]".encode()
    for head in ("\r", "\n", "\n(Worker_TP0 pid=7) ")
    for label in ("", "Loading: ", "eval: ")
    for done, total in ((0, 4), (1, 4), (2, 4), (4, 4), (3, 9))
    for rate in ("1.00s/it]", "2.00it/s, loss=1]", "?it/s]")
]


@QUICK
@given(st.lists(st.sampled_from([*BAR_PIECES, b"\nINFO x", b" glued", b"\n"]), max_size=80).map(b"".join))
def test_bars_are_the_same_whether_every_update_is_read_or_only_the_last(data):
    seen = []
    reader = LogReader(seen.append)
    reader.feed(data)
    assert reader.finish() == explain_bytes(data)


def test_a_damaged_rate_is_unknown():
    bars = explain_bytes(b"\r 10%|#  | 1/10 [00:01<00:09, .it/s]\r 20%|#  | 2/10 [00:02<00:08, 1.2.3it/s]")["bars"]
    assert [(bar["done"], bar["s_per_item"]) for bar in bars] == [(2, None)]


@QUICK
@given(texts, st.data())
def test_the_follower_ends_with_the_bars_and_phases_of_explain(data, draw):
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=10)))
    follower = Follower()
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        follower.feed(data[start:end])
    follower.feed(b"\n")  # the last segment is complete now
    whole = explain_bytes(data + b"\n")
    seen = follower.snapshot()
    strip = lambda bars: [{key: bar[key] for key in ("label", "done", "total", "line")} for bar in bars]  # noqa: E731
    if len(whole["bars"]) <= 64:
        assert strip(seen["bars"]) == strip(whole["bars"])
    if whole["failure"] is None:
        assert seen["phases"] == whole["phases"]


def fuzz_seconds():
    """30 s in `make test`'s own setting; the long run is `make bench` (bench/fuzz_logs.py)."""
    return float(os.environ.get("ORCH_FUZZ_S", "30"))


def mutate(rng, data):
    """Cut, repeat, swap and damage a log."""
    kind = rng.randrange(6)
    at, to = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    if kind == 0:
        return data[at:to]
    if kind == 1:
        return data[:at] + data[at : at + 300] * rng.randrange(1, 20) + data[to:]
    if kind == 2:
        return data[:at] + bytes(rng.randrange(256) for _ in range(rng.randrange(40))) + data[at:]
    if kind == 3:
        return data.replace(b"\n", rng.choice([b"", b"\r", b"\r\n", b" "]))
    if kind == 4:
        return b"".join(rng.sample(data.splitlines(keepends=True), k=len(data.splitlines())))
    return data[:at] + rng.choice(PIECES) * rng.randrange(1, 200) + data[at:]


def test_damaged_logs_never_raise():
    rng = random.Random(20261129)
    logs = [path.read_bytes() for path in LOGS if path.stat().st_size < 40_000]
    end = time.monotonic() + fuzz_seconds()
    rounds = 0
    while time.monotonic() < end or rounds < 20:
        data = mutate(rng, rng.choice(logs))
        if rng.random() < 0.3:
            data = mutate(rng, data)
        explain_bytes(data, rng.choice([None, None, 0, 1, -9, 137]))
        rounds += 1


HOSTILE = {
    "brackets": b"[",
    "digits": b"7",
    "carriage returns": b"\r",
    "spaces": b" ",
    "percent": b"%|",
    "slashes": b"1/2 ",
    "clock": b"[00:01<",
    "bar starts": b"10%|# | 1/10 [00:01<00:09, ",
    "escapes": b"\x1b[",
    "parentheses": b"(a pid=1) ",
    "error words": b"error ",
    "traceback": b"Traceback (most recent call last) ",
    "colons": b"Error: ",
    "quotes": b"KeyError: '",
    "newlines": b"\n",
    "steps": b"step 1/2 ",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_ten_megabytes_of_one_thing_take_linear_time(name):
    piece = HOSTILE[name]

    def cpu_s(size):
        data = piece * (size // len(piece))
        before = time.process_time()
        explain_bytes(data)
        return time.process_time() - before

    small, large = cpu_s(1_250_000), cpu_s(10_000_000)
    assert large < 12.0
    assert large < 24 * max(small, 0.02)  # 8 times the input; a square law would take 64 times as long


def test_long_lines_keep_what_stands_at_their_start():
    data = b"ValueError: something\n" + b"x" * 5_000_000 + b"\nRuntimeError: CUDA error: out of memory " + b"y" * 3_000_000
    failure = explain_bytes(data, 1)["failure"]
    assert failure["class"] == "gpu_oom"
    assert failure["root_cause"]["line"] == 3
    assert len(failure["root_cause"]["text"]) < 5000
