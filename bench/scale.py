"""How cost grows: with hosts, with running jobs on one host, with the size of a log. Each beside plain OpenSSH.

Sizes can be cut for a small machine: ORCH_BENCH_HOSTS=1,10 ORCH_BENCH_JOBS=1,20 ORCH_BENCH_LOG_MB=1,100 python -m bench scale
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from bench.launching import in_one_process
from bench.report import Report, Row
from bench.stand import ssh, stand, timed
from tests.faults.stage import Stage
from tests.support.jobdir import JobDir
from tests.support.waiting import wait_until

REPETITIONS = 3
COUNTED_S = 20.0
TAIL = b"".join(b"INFO step %d loss 0.1234\n" % number for number in range(4096))


def _sizes(name: str, default: str) -> list[int]:
    return [int(word) for word in os.environ.get(name, default).split(",")]


HOSTS = _sizes("ORCH_BENCH_HOSTS", "1,10,50")
JOBS = _sizes("ORCH_BENCH_JOBS", "1,20,200")
LOG_MB = _sizes("ORCH_BENCH_LOG_MB", "1,100,1000,10000")


def run(report: Report) -> None:
    """The section of `python -m bench`."""
    with stand() as stage:
        hosts(report, stage)
    with stand() as stage:
        jobs(report, stage)
    with stand() as stage:
        logs(report, stage)


def status_s(stage: Stage, *arguments: object) -> tuple[float, float]:
    """(wall, CPU) seconds of one `orch status --json` from the shell."""
    with stage.laptop.started("status", "--json", *arguments) as process:
        began = time.perf_counter()
        assert process.stdout is not None
        process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        took = time.perf_counter() - began
    assert process.returncode == 0
    return took, usage.ru_utime + usage.ru_stime


def hosts(report: Report, stage: Stage) -> None:
    """One job seen through 1, 10, 50 inventory entries of one sshd: so many connections and agents."""
    stage.laptop.launch(stage.laptop.plan([{"name": "work", "run": "sleep 600"}], **stage.top))
    entry = dict(stage.sshd.inventory_entry(**stage.entry), ssh=f"{stage.sshd.user}@127.0.0.1:{stage.cable.port}")
    argv = ssh(stage, "true")
    for count in HOSTS:
        stage.laptop.write_inventory({"box" if n == 0 else f"box{n}": entry for n in range(count)})
        status_s(stage)
        before = stage.sshd.connections()
        seen = [status_s(stage) for _ in range(REPETITIONS)]
        connections = (stage.sshd.connections() - before) / REPETITIONS
        one_by_one = timed(lambda count=count: [subprocess.run(argv, check=True) for _ in range(count)])
        where = f"{count} host{'s' * (count > 1)}"
        report.add(Row("scale", f"`orch status`, {where}", "s", [wall for wall, _ in seen], peer=[one_by_one],
                       peer_name="ssh host true, one by one"))  # fmt: skip
        report.add(Row("scale", f"  its CPU on the laptop, {where}", "s", [cpu for _, cpu in seen]))
        report.add(Row("scale", f"  its connections, {where}", "", [connections], float(count)))


def jobs(report: Report, stage: Stage) -> None:
    """1, 20, 200 jobs that run at the same time on one host."""
    running: list[JobDir] = []
    for count in JOBS:
        in_one_process(stage, "open", count - len(running), kind=f"of-{count}", run="echo working; exec sleep 900")
        running = stage.jobs()
        wait_until(lambda running=running: all(job.main for job in running), "every job runs", within_s=120)
        supervisors = [job.supervisor for job in running]
        time.sleep(5)  # the first seconds of a job are watched closely
        before = sum(map(_on_cpu_s, supervisors))
        time.sleep(COUNTED_S)
        cost = (sum(map(_on_cpu_s, supervisors)) - before) * 60 / COUNTED_S
        seen = [status_s(stage) for _ in range(REPETITIONS)]
        where = f"{count} running job{'s' * (count > 1)}"
        report.add(Row("scale", f"`orch status`, {where}", "s", [wall for wall, _ in seen]))
        report.add(Row("scale", f"  its CPU on the laptop, {where}", "s", [cpu for _, cpu in seen]))
        report.add(Row("scale", f"  host CPU a minute of all supervisors, {where}", "s", [cost]))
        report.add(Row("scale", f"  memory of all supervisors (PSS), {where}", "MiB", [sum(map(_pss_mib, supervisors))]))


def _on_cpu_s(pid: int) -> float:
    """CPU of one process in s, from the scheduler's own count: the ticks of /proc/PID/stat are too coarse for so little."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def _pss_mib(pid: int) -> float:
    """Proportional set size in MiB: shared pages are counted once over all processes."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise LookupError(pid)


def logs(report: Report, stage: Stage) -> None:
    """The log of an ended job grows to 10 GB (sparse, with real lines at the end): the last lines cost the same."""
    job_id = stage.laptop.launch(stage.laptop.plan([{"name": "work", "run": "echo working"}], **stage.top))
    stage.laptop.run("wait", job_id, expect=0)
    [job] = stage.jobs()
    log = job.log(1, "work")
    argv = ssh(stage, f"tail -n 100 '{log}'")
    for size_mb in LOG_MB:
        with log.open("r+b") as file:
            file.truncate(0)
            file.truncate(size_mb * 1_000_000 - len(TAIL))
            file.seek(0, os.SEEK_END)
            file.write(TAIL)
        took = [timed(lambda: stage.laptop.run("logs", job_id, "--tail", "100", expect=0)) for _ in range(REPETITIONS)]
        peer = [timed(lambda: subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)) for _ in range(REPETITIONS)]
        seen = [status_s(stage, job_id)[0] for _ in range(REPETITIONS)]
        where = f"log of {size_mb:,} MB"
        report.add(Row("scale", f"`orch logs --tail 100`, {where}", "s", took, peer=peer, peer_name="ssh host tail -n 100"))
        report.add(Row("scale", f"`orch status`, {where}", "s", seen))
