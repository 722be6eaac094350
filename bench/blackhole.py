"""Ten minutes in a tunnel: every packet between laptop and host vanishes, without a word, on a real TCP connection.

    python -m bench blackhole            600 s
    python -m bench.blackhole 60         a short one, for trying

In the dark the job's first attempt is killed, the host tries again by itself, and the second attempt ends. A watcher
that was there before must neither give up nor call anything failed or lost; a question is answered with "unreachable"
and exit status 3; a launch begun in the dark is refused and leaves nothing behind. Needs root and `ip`, as
tests/netem.py does.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from bench.report import Report, Row
from tests.netem import Wan
from tests.sshd.server import Sshd
from tests.support.jobdir import JobDir, kill
from tests.support.laptop import Laptop
from tests.support.waiting import wait_until

HOLE_S = 600.0
ASKED_EVERY_S = 60.0
ANSWER_LIMIT_S = 30.0
"""A question to a host that is not there must end by then."""
SEEN_LIMIT_S = 60.0
"""From the link's return to the watcher's last line: its longest pause between two tries to connect."""
RUN = "date +%s.%N >> starts; [ $ORCH_ATTEMPT = 2 ] && { sleep 1; echo done >> out; exit 0; }; sleep 3600"


def run(report: Report, hole_s: float = HOLE_S) -> None:
    """The section of `python -m bench`."""
    with tempfile.TemporaryDirectory(prefix="orch-hole-") as name:
        folder = Path(name)
        with (
            Wan(folder / "wan", delay_ms=50) as wan,
            Sshd(folder / "sshd", address=wan.far_address, command_prefix=wan.far) as far,
        ):
            entry = far.inventory_entry(root=str(folder / "root"))
            laptop = Laptop(folder / "laptop", {"box": entry}, command_prefix=wan.near)
            try:
                _play(report, folder, wan, laptop, hole_s)
            finally:
                wan.set(up=1)
                for path in (folder / "root" / "jobs").glob("*"):
                    JobDir(folder / "root", path.name).end_everything()


def _play(report: Report, folder: Path, wan: Wan, laptop: Laptop, hole_s: float) -> None:
    work, wrong = folder / "work", []
    job = JobDir(folder / "root", laptop.launch(laptop.plan([{"name": "a", "run": RUN}], workdir=str(work))))
    job.wait_for_kind("attempt_started")
    questions: list[float] = []
    with laptop.started("watch", job.id) as watcher:
        assert watcher.stdout is not None
        watcher.stdout.readline()
        wan.set(up=0)
        dark_at = time.monotonic()
        kill(job.main)
        other = laptop.plan([{"name": "b", "run": "true"}], name="other", workdir=str(work))
        refused = laptop.run("launch", other, "--no-preflight", within_s=120)
        if refused.status != 3:
            wrong.append(f"a launch in the dark ends with {refused.status}: {refused.err[-300:]}")
        while time.monotonic() < dark_at + hole_s:
            began = time.monotonic()
            asked = laptop.run("status", job.id, "--json", within_s=120)
            questions.append(time.monotonic() - began)
            seen = asked.json["jobs"][0]
            if asked.status != 3 or seen["reachable"] or seen["state"] in ("failed", "lost"):
                wrong.append(f"status in the dark: exit {asked.status}, {seen['state']}, reachable {seen['reachable']}")
            if watcher.poll() is not None:
                wrong.append(f"the watcher gave up after {time.monotonic() - dark_at:.0f} s")
                break
            time.sleep(max(0.0, min(ASKED_EVERY_S - questions[-1], dark_at + hole_s - time.monotonic())))
        finished_in_the_dark = "finished" in job.kinds()
        wan.set(up=1)
        light_at = time.monotonic()
        out, _ = watcher.communicate(timeout=300)
        seen_s = time.monotonic() - light_at
    told = out.decode(errors="replace").replace("connection lost", "")
    if watcher.returncode != 0 or "succeeded" not in told or "lost" in told:
        wrong.append(f"the watcher ended with {watcher.returncode} and said: {told[-500:]}")
    if not finished_in_the_dark or (work / "out").read_text() != "done\n":
        wrong.append(f"the host did not go on by itself: {job.kinds()}")
    again = laptop.run("launch", other, "--no-preflight", "--json", within_s=60, expect=0).json
    laptop.run("wait", again["job"], within_s=60, expect=0)
    wait_until(lambda: not job.supervisors(), "the supervisor has left")
    ids = {path.name for path in (folder / "root" / "jobs").iterdir()}
    if ids != {job.id, again["job"]} or job.kinds().count("attempt_started") != 2:
        wrong.append(f"copies: {sorted(ids)}, {job.kinds()}")
    add = report.add
    add(Row("blackhole", f"wrong answers, black hole of {hole_s:.0f} s", "", [len(wrong)], 0))
    add(Row("blackhole", "status in the dark", "s", questions, ANSWER_LIMIT_S))
    add(Row("blackhole", "light again -> the watcher knows the end", "s", [seen_s], SEEN_LIMIT_S))
    for text in wrong:
        report.say(f"   WRONG {text}")


def main(argv: list[str]) -> int:
    """A hole of another length."""
    report = Report()
    run(report, float(argv[0]) if argv else HOLE_S)
    print(report.table())
    return 1 if any(row.holds is False for row in report.rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
