"""What a minute of watching one printing job costs: laptop, host and supervisor; against `ssh tail` every 2 s."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time

import psutil

from bench.report import Report, Row
from bench.stand import cpu_s, rss_mib, ssh, stand
from tests.faults.stage import Controller
from tests.support.jobdir import agents
from tests.support.waiting import wait_until

MINUTE_S = float(os.environ.get("ORCH_BENCH_MINUTE_S", "60"))
WARM_UP_S = 35.0
# A bar twice a second, as tqdm prints it, and a line every 2 s.
PRINTER = """\
import sys, time
for i in range(100000):
    print("\\rsamples:  %d%%|###   | %d/100000 [00:%02d<09:59,  2.00it/s]" % (i / 1000, i, i % 60), end="")
    if i % 4 == 0:
        print("\\nINFO step %d loss %.3f" % (i, 1 / (i + 1)))
    time.sleep(0.5)
"""


def _peer_minute(argv: list[str], seconds: float, result: dict[str, float]) -> None:
    """CPU of a loop of plain ssh commands, every 2 s, in a thread; the commands are children reaped here."""
    used = 0.0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, _, usage = os.wait4(process.pid, 0)
        process.returncode = 0
        used += usage.ru_utime + usage.ru_stime
        result["connections"] = result.get("connections", 0) + 1
        time.sleep(2.0)
    result["cpu_s"] = used


def run(report: Report) -> None:
    """One minute beside each other: `orch watch` in plain mode and the ssh loop (CPU is counted per process)."""
    with stand() as stage:
        script = stage.folder / "printer.py"
        script.write_text(PRINTER)
        step = {"name": "work", "run": "python3 {files}/printer.py", "files": [str(script)]}
        job_id = stage.laptop.launch(stage.laptop.plan([step], **stage.top))
        [job] = stage.jobs()
        log = job.log(1, "work")
        wait_until(lambda: log.exists() and log.stat().st_size, "the job prints")
        with stage.laptop.started("watch", job_id) as process:
            Controller(process)  # reads what it prints
            time.sleep(WARM_UP_S)  # start-up (half a minute of close looks) is not what is measured
            [agent] = agents(stage.root)
            sessions = stage.sshd.sessions()
            before = stage.sshd.connections()
            supervisor = job.supervisor
            laptop, agents_share, supervisors_share = cpu_s([process.pid]), cpu_s([agent]), cpu_s([supervisor])
            sshd, wakeups = cpu_s(sessions), _switches([agent, supervisor])
            time.sleep(MINUTE_S)
            scale = 60.0 / MINUTE_S
            laptop = (cpu_s([process.pid]) - laptop) * scale
            agents_share = (cpu_s([agent]) - agents_share) * scale
            supervisors_share = (cpu_s([supervisor]) - supervisors_share) * scale
            sshd = (cpu_s(sessions) - sshd) * scale
            wakeups = (_switches([agent, supervisor]) - wakeups) * scale
            connections = (stage.sshd.connections() - before) * scale
            peak = rss_mib(supervisor)
            agent_peak = rss_mib(agent)
        peer: dict[str, float] = {}
        _peer_minute(ssh(stage, f"tail -c 4096 '{log}'"), MINUTE_S / 3, peer)
        peer_cpu, peer_connections = peer["cpu_s"] * scale * 3, peer["connections"] * scale * 3
        name = "ssh tail every 2 s"
        report.add(Row("watch", "laptop CPU a minute", "s", [laptop], 0.3, peer=[peer_cpu], peer_name=name))
        report.add(Row("watch", "host CPU a minute, agent + supervisor", "s", [agents_share + supervisors_share], 0.2))
        report.add(Row("watch", "  of that the supervisor", "s", [supervisors_share]))
        report.add(Row("watch", "host CPU a minute, sshd session", "s", [sshd]))
        report.add(Row("watch", "wake-ups a second, agent + supervisor", "/s", [wakeups / 60]))
        report.add(Row("watch", "supervisor RSS, peak", "MiB", [peak], 25.0))
        report.add(Row("watch", "agent RSS, peak", "MiB", [agent_peak]))
        report.add(Row("watch", "new connections a minute", "/min", [connections], 0.0, peer=[peer_connections],
                       peer_name=name))  # fmt: skip


def _switches(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            total += psutil.Process(pid).num_ctx_switches().voluntary
    return float(total)


