"""How good are our forecasts against tqdm's own remaining time? Prints medians for real and generated loads apart.

    python -m bench.eta [--seeds 40] [--json]

Real loads: the bars of committed logs that ran to their end (tests/data/logs). Generated ones: fixed seeds, six kinds
(constant, accelerating, burst from the page cache, stall, NFS jitter, slow first item), each also as a repeated load
whose earlier runs are known (history). Judged at 25, 50 and 75 % of the items by the absolute error in seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from pathlib import Path

from bench.report import Report, Row
from remote_jobs.logs import eta
from remote_jobs.logs.bars import BarTracker
from remote_jobs.logs.reader import iter_updates

DATA = Path(__file__).resolve().parents[1] / "tests" / "data" / "logs"
MARKS = (0.25, 0.5, 0.75)
LOAD_LABELS = ("shards", "Loading", "Multi-thread")


def generate(kind: str, seed: int) -> list[float]:
    """Seconds that each item of one load takes."""
    rng = random.Random(f"{kind}-{seed}")
    items = rng.choice([16, 32, 49, 64, 96, 191])
    base = rng.choice([0.8, 3.0, 9.0, 19.0, 30.0])
    # Shards are of equal size but for the last, the remainder; the disk adds a few per cent (see the real loads).
    sizes = [1.0] * (items - 1) + [rng.uniform(0.05, 1.0)]
    took = [base * size * rng.lognormvariate(0, 0.06) for size in sizes]
    if kind == "accelerating":
        took = [value * (2.5 - 2.0 * at / items) for at, value in enumerate(took)]
    elif kind == "cache burst":
        cached = int(items * rng.uniform(0.08, 0.4))
        took = [value * (0.05 if at < cached else 1.0) for at, value in enumerate(took)]
    elif kind == "stall":
        for _ in range(rng.choice([1, 2, 3])):
            took[rng.randrange(items)] += base * rng.uniform(8, 25)
    elif kind == "nfs jitter":
        took = [value * rng.lognormvariate(0, 0.6) for value in took]
    elif kind == "slow first":
        took[0] += base * rng.uniform(20, 100)
    return took


KINDS = ("constant", "accelerating", "cache burst", "stall", "nfs jitter", "slow first")


def as_printed(took: list[float]) -> tuple[list[tuple[float, int]], list[float], list[float]]:
    """Samples as a bar prints them (whole seconds), and tqdm's remaining time at each (its EMA, smoothing 0.3), and the exact clock."""
    now = ema_dt = ema_dn = 0.0
    samples: list[tuple[float, int]] = [(0.0, 0)]
    remaining = [float("nan")]
    exact = [0.0]
    for done, seconds in enumerate(took, 1):
        now += seconds
        ema_dt = 0.3 * seconds + 0.7 * ema_dt
        ema_dn = 0.3 * 1 + 0.7 * ema_dn
        samples.append((float(int(now)), done))
        exact.append(now)
        remaining.append(float(int((len(took) - done) * ema_dt / ema_dn)))
    return samples, remaining, exact


def judge(samples, printed, truth_s, total, history=None, printed_rates=None, exact=None):
    """(our absolute error, tqdm's) at each mark."""
    errors = []
    for mark in MARKS:
        goal = mark * total
        at = next((n for n, (_, done) in enumerate(samples) if done >= goal), None)
        if at is None or at == 0 or samples[at][1] >= total or printed[at] is None:
            continue
        actual_s = truth_s - (exact[at] if exact else samples[at][0])
        rate = printed_rates[at] if printed_rates else None
        made = eta.forecast(samples[: at + 1], total, history=history, printed_s_per_item=rate, last_is_smaller=True)
        if made is not None:
            errors.append((abs(made.remaining_s - actual_s), abs(printed[at] - actual_s), made.low_s <= actual_s <= made.high_s))
    return errors


def real_loads():
    """Completed bars of at least 3 items and 5 seconds in the committed logs."""
    for path in sorted(DATA.rglob("*.log")):
        tracker = BarTracker()
        histories: dict[int, list] = {}
        with path.open("rb") as stream:
            for update in iter_updates(iter(lambda s=stream: s.read(1 << 20), b"")):
                histories.setdefault(id(tracker.take(update)), []).append(update)
        for updates in histories.values():
            last = updates[-1]
            if not any(word in last.label for word in LOAD_LABELS) or last.elapsed_s is None:
                continue
            if last.total and last.done >= last.total >= 3 and last.elapsed_s >= 5:
                yield path.name, last.label, updates


def summary(name, errors):
    ours = statistics.median(e[0] for e in errors)
    theirs = statistics.median(e[1] for e in errors)
    within = sum(e[2] for e in errors) / len(errors)
    return {"loads": name, "forecasts": len(errors), "ours_s": round(ours, 2), "tqdm_s": round(theirs, 2),
            "ratio": round(ours / theirs, 2) if theirs else None, "within_range": round(within, 2)}


def measure(seeds: int) -> list[dict[str, object]]:
    """One row per kind of load, real ones first."""
    rows = []
    real = []
    for _name, _label, updates in real_loads():
        samples = [(float(u.elapsed_s), u.done) for u in updates]
        printed = [u.remaining_s for u in updates]
        rates = [u.s_per_item for u in updates]
        real += judge(samples, printed, float(updates[-1].elapsed_s), updates[-1].total, printed_rates=rates)
    rows.append(summary("real", real))
    every: list = []
    every_known: list = []
    for kind in KINDS:
        cold = []
        known = []
        for seed in range(seeds):
            took = generate(kind, seed)
            samples, printed, exact = as_printed(took)
            cold += judge(samples, printed, sum(took), len(took), exact=exact)
            # Earlier runs of the same load on the same host: the same model, another day's weather.
            rng = random.Random(f"days-{kind}-{seed}")
            earlier = [sum(took) / len(took) * rng.lognormvariate(0, 0.15) for _ in range(3)]
            known += judge(samples, printed, sum(took), len(took), history=eta.learn(earlier), exact=exact)
        rows.append(summary(f"generated, {kind}", cold))
        every += cold
        every_known += known
    rows.append(summary("generated, all", every))
    rows.append(summary("generated, all, with history", every_known))
    rows.append(summary("real and generated", real + every))
    return rows


def run(report: Report) -> None:
    """The section of `make bench`: our median error as a share of tqdm's, at most half."""
    for row in measure(40):
        limited = row["loads"] in {"real", "generated, all", "real and generated"}
        ratio = row["ratio"]
        if ratio is not None:
            report.add(Row("eta", f"{row['loads']}: error / tqdm's", "", [float(str(ratio))], limit=0.5 if limited else None))


def main() -> int:
    """Run all loads, print one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = measure(args.seeds)
    if args.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print("{loads:32} {forecasts:4} forecasts  median error ours {ours_s:8} s  tqdm {tqdm_s:8} s  ratio {ratio}  in range {within_range}".format(**row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
