"""How fast is `explain`, and in how much memory? 100 MB of ordinary lines, of bar updates, and of error lines.

    python -m bench.logs [--mb 100] [--python /path/to/python3.8]

Targets: ordinary lines 20 MB/s, pure bar updates 5 MB/s, memory under 60 MB, each on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.report import Report, Row

ROOT = Path(__file__).resolve().parents[1]
CHILD = """
import json, resource, sys, time
sys.path.insert(0, sys.argv[1])
from remote_jobs.logs.source import explain_file
before = time.process_time()
answer = explain_file(sys.argv[2])
print(json.dumps([time.process_time() - before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))
"""


def ordinary() -> Iterator[bytes]:
    """A serving log: engine statistics, access lines, trainer metrics, library chatter."""
    n = 0
    while True:
        n += 1
        yield (
            b"(APIServer pid=22227) INFO 11-29 13:%02d:%02d [loggers.py:250] Engine 000: Avg prompt throughput: %d.3 tokens/s, Avg generation throughput: 210.5 tokens/s, Running: 12 reqs, Waiting: 0 reqs, GPU KV cache usage: 3.1%%, Prefix cache hit rate: 0.0%%\n"
            % (n // 60 % 60, n % 60, n)
            + b'(APIServer pid=22227) INFO:     127.0.0.1:%d - "POST /v1/completions HTTP/1.1" 200 OK\n' % (n % 60000)
            + b"{'loss': '1.%d', 'grad_norm': '0.3536', 'learning_rate': '1.401e-05', 'epoch': '0.08889'}\n" % n
            + b"[INFO|tokenization_utils_base.py:3221] 2026-02-10 19:47:39,764 >> chat template saved in ./out/run/chat_template.jinja\n"
        )


def bars() -> Iterator[bytes]:
    """Nothing but tqdm updates, in one endless line."""
    n = 0
    while True:
        n += 1
        yield "\r  {:2d}%|{:10}| {}/1000000 [{:02d}:{:02d}<1:12:13,  {}.{:02d}it/s, loss=1.2]".format(
            n // 10000 % 100, "█" * (n // 100000 % 10), n % 1000000, n // 3000 % 60, n // 50 % 60, n % 90, n % 100
        ).encode()


def errors() -> Iterator[bytes]:
    """A server that logs a caught traceback for every request."""
    n = 0
    while True:
        n += 1
        yield (
            b'ERROR:    Exception in ASGI application\nTraceback (most recent call last):\n  File "/opt/a.py", line %d, in run\n'
            b"    result = await app(scope)\nRuntimeError: request %d failed\n" % (n, n)
        )


def varied() -> Iterator[bytes]:
    """Lines of which no two are alike: paths, words and hashes at random."""
    rng = random.Random(4)
    words = ["loading", "tokens", "model", "layer", "cache", "batch", "router", "expert", "draft", "verify", "sample", "row", "vector", "weight", "shard"]
    while True:
        yield b"2026-05-09 01:08:20,139 - %s.%s - INFO - %s\n" % (
            rng.choice(words).encode(),
            rng.choice(words).encode(),
            " ".join(rng.choices(words, k=rng.randrange(6, 16))).encode() + b" %x" % rng.getrandbits(64),
        )


KINDS = {
    "ordinary lines": (ordinary, 20.0),
    "varied lines": (varied, 20.0),
    "bar updates": (bars, 5.0),
    "error lines": (errors, None),
}
MEMORY_MIB = 60.0


def measure(size_mb: int, python: str = sys.executable) -> list[dict[str, object]]:
    """Write each kind to a temporary file, read it in a child; speed in CPU seconds, memory as its peak RSS."""
    rows: list[dict[str, object]] = []
    for name, (make, target) in KINDS.items():
        with tempfile.NamedTemporaryFile(suffix=".log", delete=False) as out:
            pieces = make()
            size = 0
            while size < size_mb << 20:
                size += out.write(b"".join(next(pieces) for _ in range(1000)))
        try:
            done = subprocess.run([python, "-c", CHILD, str(ROOT), out.name], capture_output=True, text=True, check=True)
        finally:
            os.unlink(out.name)
        cpu_s, rss_mib = json.loads(done.stdout)
        speed = round(size / 2**20 / cpu_s, 1)
        rows.append({"log": name, "mb": size >> 20, "mb_per_s": speed, "target_mb_per_s": target, "rss_mib": round(rss_mib, 1)})
    return rows


def run(report: Report) -> None:
    """The section of `make bench`."""
    for row in measure(100):
        target = row["target_mb_per_s"]
        limit = None if target is None else float(str(target))
        report.add(Row("logs", f"explain, 100 MB of {row['log']}", "MB/s", [float(str(row["mb_per_s"]))], limit=limit, at_least=True))
        report.add(Row("logs", f"memory, {row['log']}", "MiB", [float(str(row["rss_mib"]))], limit=MEMORY_MIB))


def main() -> int:
    """Print one line per kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = measure(args.mb, args.python)
    if args.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print("{log:16} {mb:4} MB  {mb_per_s:6} MB/s (target {target_mb_per_s})  {rss_mib} MiB".format(**row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
