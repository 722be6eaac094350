"""Forecasts: shapes of loads that mislead tqdm, history, ranges, scores."""

from __future__ import annotations

import importlib.util
import statistics
from pathlib import Path

import pytest

from remote_jobs.logs.eta import Forecast, forecast, forecast_job, learn, score


def load(paces):
    now, samples = 0.0, [(0.0, 0)]
    for done, pace in enumerate(paces, 1):
        now += pace
        samples.append((float(int(now)), done))
    return samples


def test_a_constant_load_is_forecast_well():
    made = forecast(load([10.0] * 20), 40)
    assert made.remaining_s == pytest.approx(200, rel=0.05)
    assert made.low_s < 200 < made.high_s
    assert made.confidence == "high"


def test_one_stall_does_not_spoil_the_forecast():
    made = forecast(load([10.0] * 10 + [300.0] + [10.0] * 5), 32)
    assert made.remaining_s == pytest.approx(160, rel=0.3)


def test_a_burst_from_the_page_cache_is_left_behind():
    made = forecast(load([0.3] * 10 + [20.0] * 6), 64)
    assert made.remaining_s == pytest.approx(48 * 20, rel=0.1)


def test_a_first_item_of_a_hundred_times_the_rest_is_no_sample():
    made = forecast(load([200.0, 2.0, 2.0, 2.0, 2.0]), 50)
    assert made.remaining_s == pytest.approx(90, rel=0.2)


def test_an_accelerating_load_is_carried_on():
    paces = [20.0 - 0.25 * n for n in range(64)]
    made = forecast(load(paces[:32]), 64)
    assert made.remaining_s == pytest.approx(sum(paces[32:]), rel=0.2)


def test_history_helps_most_at_the_start():
    samples = load([1.0] * 3)  # so far from the page cache
    alone = forecast(samples, 64)
    known = forecast(samples, 64, history=learn([19.0, 20.0, 21.0]))
    truth_s = 64 * 20.0 - 3
    assert abs(known.remaining_s - truth_s) < 0.5 * abs(alone.remaining_s - truth_s)
    late = forecast(load([10.0] * 60), 64, history=learn([20.0]))
    assert late.remaining_s < 80


def test_edges():
    assert forecast([], 10) is None
    assert forecast([(0.0, 0)], 10) is None
    assert forecast([(0.0, 0)], 10, history=learn([2.0])).remaining_s == pytest.approx(20)
    assert forecast([(5.0, 10)], 10) == Forecast(0.0, 0.0, 0.0, "high")
    assert forecast([(0.0, 0), (0.0, 500)], 1000, printed_s_per_item=0.001).remaining_s == pytest.approx(0.5)
    assert learn([]) is None
    quiet = forecast(load([10.0] * 20), 40, quiet_s=100)
    assert quiet.remaining_s == pytest.approx(100, rel=0.1)


def test_a_job_adds_its_later_phases_and_widens_the_range():
    bar = Forecast(100.0, 80.0, 130.0, "high")
    made = forecast_job([(60.0, 0.5), (30.0, 0.5)], bar)
    assert made.remaining_s == 190.0
    assert made.low_s < 170
    assert made.high_s > 190
    assert forecast_job([], bar).confidence == "medium"
    assert forecast_job([], None) is None


def test_forecasts_are_scored_afterwards():
    result = score(Forecast(100.0, 80.0, 130.0, "high"), 125.0)
    assert (result.error_s, result.relative, result.within) == (25.0, 0.2, True)


def test_median_error_is_at_most_half_of_tqdms_own():
    path = Path(__file__).resolve().parents[2] / "bench" / "eta.py"
    spec = importlib.util.spec_from_file_location("bench_eta", path)
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    errors, known = [], []
    for kind in bench.KINDS:
        for seed in range(20):
            took = bench.generate(kind, seed)
            samples, printed, exact = bench.as_printed(took)
            errors += bench.judge(samples, printed, sum(took), len(took), exact=exact)
    real = []
    for _, _, updates in bench.real_loads():
        samples = [(float(u.elapsed_s), u.done) for u in updates]
        real += bench.judge(samples, [u.remaining_s for u in updates], samples[-1][0], updates[-1].total, printed_rates=[u.s_per_item for u in updates])
    for sample in (errors, real, errors + real):
        ours = statistics.median(error[0] for error in sample)
        theirs = statistics.median(error[1] for error in sample)
        known.append(ours / theirs)
    assert max(known) <= 0.55
