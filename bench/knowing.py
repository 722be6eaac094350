"""How long from the job's exit until the waiting controller says so, against polling with plain ssh."""

from __future__ import annotations

import subprocess
import threading
import time

from bench.report import Report, Row
from bench.stand import ssh, stand
from tests.faults.stage import Stage
from tests.support.waiting import wait_until

RUN = "until [ -e go ]; do sleep 0.01; done; date +%s.%N > ended"


def _known_after(stage: Stage, repetitions: int) -> tuple[list[float], float]:
    """Delays of `orch wait`, one job after the other, and new connections a minute while waiting."""
    delays, connections, waited_s = [], 0, 0.0
    for number in range(repetitions):
        work = stage.folder / f"known-{number}"
        plan = stage.laptop.plan([{"name": "work", "run": RUN}], name=f"known-{number}", workdir=str(work))
        job = stage.laptop.launch(plan)
        before = stage.sshd.connections()
        with stage.laptop.started("wait", job) as process:
            wait_until(lambda before=before: stage.sshd.connections() > before, "the waiter is connected")
            opened, since = stage.sshd.connections(), time.monotonic()
            time.sleep(1.0 + 0.37 * number % 1.0)  # not a synchronisation: the moment of the exit should be anywhere
            (work / "go").touch()
            assert process.stdout is not None
            line = process.stdout.readline()
            known = time.time()
            assert b"succeeded" in line, line
            connections += stage.sshd.connections() - opened
            waited_s += time.monotonic() - since
        delays.append(known - float((work / "ended").read_text()))
    return delays, connections * 60 / waited_s


def _polled(stage: Stage, every_s: float, repetitions: int) -> list[float]:
    """What people do: a loop of `ssh host test -e done` with a pause, several jobs side by side."""
    delays = []

    def one(number: int) -> None:
        work = stage.folder / f"polled-{every_s:g}-{number}"
        work.mkdir()
        moment = time.time() + 1 + every_s * (number + 0.5) / repetitions
        while True:
            done = subprocess.run(ssh(stage, f"test $(date +%s%N) -gt {int(moment * 1e9)}"), check=False).returncode
            if done == 0:
                delays.append(time.time() - moment)
                return
            time.sleep(every_s)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(repetitions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return delays


def run(report: Report) -> None:
    """Measure on loopback and at 150 ms round trip."""
    for rtt_s, repetitions in ((0.0, 9), (0.15, 7)):
        with stand(rtt_s) as stage:
            where = f"RTT {rtt_s * 1000:.0f} ms" if rtt_s else "loopback"
            delays, connections = _known_after(stage, repetitions)
            peer = _polled(stage, 2.0, 3)
            text = "<= 1.5 RT + 0.25 s" if rtt_s else "<= 0.25 s"
            report.add(Row(
                "know", f"exit -> controller knows, {where}", "s", delays, 1.5 * rtt_s + 0.25, text, peer,
                "ssh every 2 s"))  # fmt: skip
            report.add(Row("know", f"new connections while waiting, {where}", "/min", [connections], 0.0))


