"""A night on one host: many short jobs, 30 % of attempts killed at random, the controller started and killed at random.

    python -m bench overnight            100 jobs
    python -m bench.overnight 12         a small one, for trying

Every job must end in the right state with every unit of its work done exactly as asked; printed are attempts, work that
was lost, and how long a restart took beyond its backoff. The seed is fixed.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from bench.report import Report, Row
from bench.stand import stand
from tests.faults.stage import Stage
from tests.support.jobdir import JobDir, kill
from tests.support.waiting import wait_until

JOBS = 100
SEED = 5
KILLED_SHARE = 0.3
AT_ONCE = 12
"""Jobs under way at a time; the machine has few cores, and a night is long."""
PAUSE_S = 2.0
"""Between two random controllers."""
UNITS, UNIT_S = 5, 0.6
# A unit that was begun and not kept is lost work; `begun` and `kept` are one line each.
RUN = f"""
mkdir -p out; exec 9>lock; flock -n 9 || touch SECOND-COPY
for n in $(seq {UNITS}); do
  [ -e out/$n ] && continue
  echo $n >> begun; sleep {UNIT_S} 9>&-; echo $n >> kept; touch out/$n
done
"""
HOPELESS = "echo \"ModuleNotFoundError: No module named 'speculators'\" >&2; exit 1"
HOPELESS_EVERY = 10
"""Each tenth job cannot succeed: the right state for it is failed, after one attempt."""
RESTART_LIMIT_S = 2.0


@dataclass
class Night:
    """What was done to the jobs and what became of them."""

    stage: Stage
    count: int
    rng: random.Random
    jobs: dict[int, JobDir] = field(default_factory=dict)
    killed_attempts: int = 0
    killed_controllers: int = 0
    controllers: int = 0
    wrong: list[str] = field(default_factory=list)

    def hopeless(self, number: int) -> bool:
        """Whether this job is one that cannot succeed."""
        return number % HOPELESS_EVERY == HOPELESS_EVERY - 1

    def work(self, number: int) -> Path:
        """The job's work folder."""
        return self.stage.folder / f"work-{number}"

    def plan(self, number: int) -> Path:
        """A plan with one step that goes on from the units that it finds."""
        step = {"name": "work", "run": RUN, "done": {"count": "out/*", "equals": UNITS}, "retry": {"attempts": 20}}
        if self.hopeless(number):
            step = {"name": "work", "run": HOPELESS}
        return self.stage.laptop.plan([step], name=f"night-{number}", workdir=str(self.work(number)))


def launch(night: Night, number: int) -> None:
    """`orch launch`, killed at random now and then; the same command again takes the job up, never starts a second."""
    plan = night.plan(number)
    while True:
        night.controllers += 1
        with night.stage.laptop.started("launch", plan, "--no-preflight") as process:
            limit_s = night.rng.uniform(0.2, 1.5) if night.rng.random() < KILLED_SHARE else 60.0
            try:
                out, _ = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                night.killed_controllers += 1
                process.kill()
                out, _ = process.communicate()
        if out.strip():  # told, whatever came then: the same command once more would mean another job
            night.jobs[number] = JobDir(night.stage.root, out.decode().strip())
            return


def torment_jobs(night: Night, over: threading.Event) -> None:
    """Kill 30 % of the attempts, each somewhere in its life, by the pid that its event names."""
    rng = random.Random(SEED + 1)
    decided: set[tuple[str, int]] = set()
    due: list[tuple[float, JobDir, int]] = []
    finished: set[str] = set()
    while not over.wait(0.1):
        for job in [job for job in night.jobs.values() if job.id not in finished]:
            kinds = job.kinds()
            n = kinds.count("attempt_started")
            if "finished" in kinds:
                finished.add(job.id)
            if not n or (job.id, n) in decided or "finished" in kinds:
                continue
            decided.add((job.id, n))
            if rng.random() < KILLED_SHARE:
                due.append((time.monotonic() + rng.uniform(0, UNITS * UNIT_S * 0.6), job, n))
        for item in [item for item in due if item[0] <= time.monotonic()]:
            due.remove(item)
            _, job, n = item
            kinds = job.kinds()
            if kinds.count("attempt_started") == n and kinds.count("attempt_ended") < n:
                kill(job.main)
                night.killed_attempts += 1


def torment_controllers(night: Night, over: threading.Event) -> None:
    """Controllers that wait or ask, one after the other, each killed after a random time."""
    rng = random.Random(SEED + 2)
    while not over.wait(rng.uniform(0, PAUSE_S)):
        jobs = list(night.jobs.values())
        arguments: list[str] = ["status", "--json"]
        if jobs and rng.random() < 0.7:
            arguments = ["wait", rng.choice(jobs).id]
        night.controllers += 1
        with night.stage.laptop.started(*arguments) as process, contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=rng.uniform(0.3, 4.0))
        if process.returncode == -signal.SIGKILL:
            night.killed_controllers += 1


def judge(night: Night) -> None:
    """What a stranger with an empty ledger is told must be the right state, and the work folder must agree."""
    stranger = night.stage.another_laptop("stranger")
    seen = {job["id"]: job for job in stranger.run("status", "--json", expect=0).json["jobs"]}
    for number in range(night.count):
        job = night.jobs[number]
        state = seen.get(job.id, {}).get("state")
        wanted = "failed" if night.hopeless(number) else "succeeded"
        attempts = job.kinds().count("attempt_started")
        out = night.work(number) / "out"
        units = len(list(out.iterdir())) if out.is_dir() else 0
        if state != wanted or (wanted == "failed" and attempts != 1) or (wanted == "succeeded" and units != UNITS):
            night.wrong.append(f"{job.id}: {state} instead of {wanted}, {attempts} attempts, {units} units")
        if (night.work(number) / "SECOND-COPY").exists():
            night.wrong.append(f"{job.id}: two copies ran at once")
        if job.supervisors() or job.marked():
            night.wrong.append(f"{job.id}: something is left running")
    if len(night.stage.jobs()) != night.count:
        night.wrong.append(f"{len(night.stage.jobs())} job folders instead of {night.count}")


def lines(path: Path) -> int:
    """Lines of a file that may not be there."""
    return len(path.read_text().splitlines()) if path.exists() else 0


def restarts_s(job: JobDir) -> list[tuple[float, float]]:
    """(seconds from the end of an attempt to the next start, of which beyond the backoff) for each retry."""
    found = []
    ended = due = None
    for event in job.events():
        at = datetime.fromisoformat(event["at"]).timestamp()
        if event["kind"] == "attempt_ended":
            ended = at
        elif event["kind"] == "retry_scheduled":
            due = at + event["data"]["delay_s"]
        elif event["kind"] == "attempt_started" and ended is not None and due is not None:
            found.append((at - ended, max(0.0, at - due)))
    return found


def play(report: Report, count: int) -> Night:
    """The whole night."""
    with stand() as stage:
        night = Night(stage, count, random.Random(SEED))
        over = threading.Event()
        workers: list[Callable[[Night, threading.Event], None]] = [torment_jobs, torment_controllers]
        threads = [threading.Thread(target=worker, args=(night, over)) for worker in workers]
        for thread in threads:
            thread.start()
        started = time.monotonic()
        try:
            for number in range(count):
                wait_until(lambda: under_way(night) < AT_ONCE, "a place is free", within_s=300, every_s=0.2)
                launch(night, number)
            wait_until(lambda: not under_way(night), "every job has ended", within_s=600, every_s=0.5,
                       seen=lambda: [job.kinds()[-3:] for job in night.jobs.values() if "finished" not in job.kinds()])  # fmt: skip
        finally:
            over.set()
            for thread in threads:
                thread.join()
        took_s = time.monotonic() - started
        for job in night.jobs.values():
            wait_until(lambda job=job: not job.supervisors(), "its supervisor has left")
        judge(night)
        rows(report, night, took_s)
        return night


def under_way(night: Night) -> int:
    """Jobs that have not ended."""
    return sum("finished" not in job.kinds() for job in night.jobs.values())


def rows(report: Report, night: Night, took_s: float) -> None:
    """The figures."""
    attempts = [job.kinds().count("attempt_started") for job in night.jobs.values()]
    restarts = [pair for job in night.jobs.values() for pair in restarts_s(job)]
    begun = sum(lines(night.work(number) / "begun") for number in range(night.count))
    kept = sum(lines(night.work(number) / "kept") for number in range(night.count))
    right = night.count - len({text.partition(":")[0] for text in night.wrong})
    add = report.add
    add(Row("overnight", "jobs that ended in the right state", "jobs", [right], night.count, f"= {night.count}", at_least=True))
    add(Row("overnight", f"attempts ({night.killed_attempts} killed)", "attempts", [sum(attempts)]))
    add(Row("overnight", "work begun and lost", "%", [100 * (begun - kept) / max(1, begun)]))
    if restarts:
        beyond = [late for _, late in restarts]
        add(Row("overnight", "restart, beyond its backoff", "s", beyond, RESTART_LIMIT_S))
        add(Row("overnight", "from a death to the next start, backoff included", "s", [whole for whole, _ in restarts]))
    add(Row("overnight", f"controllers ({night.killed_controllers} killed)", "commands", [night.controllers]))
    add(Row("overnight", "the whole night", "s", [took_s]))
    for text in night.wrong:
        report.say(f"   WRONG {text}")


def run(report: Report) -> None:
    """The section of `python -m bench`."""
    play(report, JOBS)


def main(argv: list[str]) -> int:
    """A night of another size."""
    report = Report()
    night = play(report, int(argv[0]) if argv else JOBS)
    print(f"\n{report.table()}\n\n{json.dumps(report.machine())}")
    return 1 if night.wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
