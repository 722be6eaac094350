"""How long from the wish to the running process: on an open connection, cold, and as a whole command."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

from bench.report import Report, Row
from bench.stand import PYTHON, environment, plain_ssh_s, ssh, stand
from tests.faults.stage import Stage
from tests.support.waiting import wait_until

RUN = "date +%s.%N > started.tmp; mv started.tmp started"


def _started_at(work: Path) -> float:
    mark = work / "started"
    wait_until(mark.exists, "the process runs", every_s=0.002)
    return float(mark.read_text())


def _plans(stage: Stage, kind: str, repetitions: int, run: str = RUN) -> list[tuple[Path, Path]]:
    found = []
    for number in range(repetitions):
        work = stage.folder / f"{kind}-{number}"
        step = {"name": "work", "run": run}
        found.append((stage.laptop.plan([step], name=f"{kind}-{number}", workdir=str(work)), work))
    return found


def in_one_process(stage: Stage, how: str, repetitions: int, *, kind: str = "", run: str = RUN) -> list[float]:
    """Launches by a controller that is already loaded; `open` keeps its connection, `cold` makes a new one each time.

    Args:
        kind: names the plans (default: ``how``).
        run: the job; with one of the caller's own, no times are taken.
    """
    plans = _plans(stage, kind or how, repetitions, run)
    argv = [PYTHON, "-m", "bench.launch_timer", how, str(stage.laptop.inventory), *(str(plan) for plan, _ in plans)]
    answer = subprocess.run(argv, env=environment(stage), capture_output=True, text=True, check=False)
    if answer.returncode:
        raise SystemExit(f"launch_timer failed: {answer.stderr}")
    asked = json.loads(answer.stdout)
    if run != RUN:
        return []
    return [_started_at(work) - at for at, (_, work) in zip(asked, plans, strict=True)]


def _whole_command(stage: Stage, repetitions: int) -> list[float]:
    took = []
    for plan, work in _plans(stage, "command", repetitions):
        asked = time.time()
        stage.laptop.run("launch", plan, "--no-preflight", expect=0)
        took.append(_started_at(work) - asked)
    return took


def _peer(stage: Stage, repetitions: int) -> list[float]:
    """What people do: ssh host 'setsid -f nohup ...'."""
    took = []
    for number in range(repetitions):
        work = stage.folder / f"peer-{number}"
        work.mkdir()
        asked = time.time()
        script = f"cd {work} && setsid -f sh -c '{RUN}' >/dev/null 2>&1 </dev/null"
        subprocess.run(ssh(stage, script), check=True, stdin=subprocess.DEVNULL)
        took.append(_started_at(work) - asked)
    return took


def run(report: Report) -> None:
    """Measure on loopback and at 150 ms round trip."""
    for rtt_s, repetitions in ((0.0, 9), (0.15, 5)):
        with stand(rtt_s) as stage:
            where = f"RTT {rtt_s * 1000:.0f} ms" if rtt_s else "loopback"
            stage.laptop.run("launch", _plans(stage, "first", 1)[0][0], "--no-preflight", expect=0)
            true_s = plain_ssh_s(stage, repetitions)
            peer = _peer(stage, repetitions)
            opened = in_one_process(stage, "open", repetitions)
            report.add(Row(
                "launch", f"open connection -> running, {where}", "s", opened, 3 * rtt_s + 0.15, "<= 3 RT + 0.15 s",
                peer, "ssh setsid -f"))  # fmt: skip
            cold = in_one_process(stage, "cold", repetitions)
            limit = 1.5 * sorted(true_s)[len(true_s) // 2]
            report.add(Row(
                "launch", f"cold, connection included -> running, {where}", "s", cold, limit, "<= 1.5 x ssh true",
                true_s, "ssh host true"))  # fmt: skip
            whole = _whole_command(stage, repetitions)
            report.add(Row(
                "launch", f"`orch launch`, from the shell -> running, {where}", "s", whole, peer=peer,
                peer_name="ssh setsid -f"))  # fmt: skip
