"""Many hosts and jobs in one process, for the cost of watching them: SSH servers (asyncssh) that start the real agent,
and jobs as their supervisors write them: a held lock, state.json replaced once a second, now and then an event.

    python -m bench.crowd FOLDER HOSTS JOBS_PER_HOST

Prints one JSON line {"ports": [...]} once all listen. FOLDER/events.jsonl gets [number, wall clock] of each event, whose
phase is called e<number>; FOLDER/stats.json how many connections were made. Ends at the end of its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from orchestrator.services import demo_host
from remote_jobs import protocol
from remote_jobs.agent.fold import Fold
from remote_jobs.agent.jobdir import Layout, Lock, write_json

EVENT_EVERY_S = 0.5
BAR_TOTAL = 3600


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Job:
    """One job in its third step, as its supervisor would write it."""

    def __init__(self, root: Path, host: str, number: int) -> None:
        name = f"job{number}-20261129-{number:06d}"
        steps = [
            {"name": "serve", "run": "serve", "service": {"port": 1}},
            {"name": "generate", "run": "generate", "needs": ["serve"]},
            {"name": "extract", "run": "extract", "needs": ["generate"]},
            {"name": "train", "run": "train", "needs": ["extract"]},
        ]
        spec = protocol.JobSpec(
            id=name, name=f"job{number}", host=host, workdir=str(root), plan_sha256="0" * 64, created_at=now(),
            release="0" * 16, steps=[protocol.to_dict(protocol.from_dict(protocol.StepSpec, step)) for step in steps],
        )  # fmt: skip
        layout = Layout(str(root))
        layout.prepare()
        self.dir = layout.job(name)
        Path(self.dir.path).mkdir()
        write_json(self.dir.spec_path, protocol.to_dict(spec), durable=False)
        self.lock = Lock(self.dir.lock_path())
        assert self.lock.acquire()
        self.state = Fold(spec).state
        self.state.update(state="running", started_at=now(), seq=3, supervisor={"pid": os.getpid()})
        self.steps = self.state["steps"]
        for step, state in zip(self.steps, ("succeeded", "succeeded", "running"), strict=False):
            ended = None if state == "running" else now()
            attempt = {
                "n": 1, "state": state, "started_at": now(), "ended_at": ended, "exit_status": None if ended is None else 0,
                "verdict": None, "phases": [], "bars": [], "pid": None, "changes": None, "gpus": None,
            }  # fmt: skip
            step.update(state=state, attempts=[attempt])
        self.attempt = self.steps[2]["attempts"][0]
        self.done = number * 7
        self.write()

    def write(self) -> None:
        done = self.done % BAR_TOTAL
        self.attempt["bars"] = [
            {
                "label": "Extracting hidden states", "instance": 1, "worker": None, "pid": None, "done": done,
                "total": BAR_TOTAL, "percent": 100 * done // BAR_TOTAL, "elapsed_s": done, "remaining_s": BAR_TOTAL - done,
                "s_per_item": 1.0, "eta_s": float(BAR_TOTAL - done), "eta_low_s": 0.95 * (BAR_TOTAL - done),
                "eta_high_s": 1.05 * (BAR_TOTAL - done), "line": 3, "seg": done,
            }
        ]  # fmt: skip
        left = BAR_TOTAL - done
        self.state["eta"] = {"at": now(), "low_s": left * 0.95, "high_s": left * 1.05, "confidence": "good"}
        self.state["beat_at"] = now()
        write_json(self.dir.state_path, self.state, durable=False)

    def event(self, number: int) -> None:
        for phase in self.attempt["phases"]:
            phase.update(state="done", took_s=1.0)
        phase = {"name": f"e{number:05d}", "state": "running", "started_line": number, "ended_line": None, "took_s": None}
        self.attempt["phases"] = [*self.attempt["phases"][-8:], {**phase, "started_at": now()}]
        self.state["seq"] += 1
        self.write()


async def serve(folder: Path, hosts: int, each: int) -> None:
    import asyncssh

    home = folder / "home"
    home.mkdir()
    key = asyncssh.generate_private_key("ssh-ed25519")
    client = asyncssh.generate_private_key("ssh-ed25519")
    (folder / "id").touch(mode=0o600)
    client.write_private_key(folder / "id")
    client.write_public_key(folder / "id.pub")
    env = {name: value for name, value in os.environ.items() if not name.startswith("ORCH_")}
    env.update({"HOME": str(home), demo_host.TOKEN_ENV: "crowd-" + str(os.getpid())})
    made = 0

    class Counted(asyncssh.SSHServer):
        def connection_made(self, _conn: Any) -> None:
            nonlocal made
            made += 1
            (folder / "stats.json").write_text(json.dumps({"connections": made}))

    async def handle(process: Any) -> None:
        await demo_host._run(process, env, home)  # noqa: SLF001 - the demo's host, fifty times

    ports = []
    for _ in range(hosts):
        server = await asyncssh.create_server(
            Counted, "127.0.0.1", 0, server_host_keys=[key], authorized_client_keys=str(folder / "id.pub"),
            process_factory=handle, encoding=None,
        )  # fmt: skip
        ports.append(server.sockets[0].getsockname()[1])
    public = " ".join(key.export_public_key().decode().split()[:2])
    (folder / "known_hosts").write_text("".join(f"[127.0.0.1]:{port} {public}\n" for port in ports))
    jobs = [
        Job(folder / f"root{host}", f"host{host:02d}", host * each + number) for host in range(hosts) for number in range(each)
    ]
    print(json.dumps({"ports": ports}), flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, ended.set)
    work = asyncio.create_task(live(jobs, folder))
    await ended.wait()
    work.cancel()
    demo_host.end_marked_processes(env[demo_host.TOKEN_ENV])


async def live(jobs: list[Job], folder: Path) -> None:
    """Each job's state once a second, spread over it; an event of one job every half second."""
    number, turn = 0, 0
    slice_s = 0.05
    share = max(1, round(len(jobs) * slice_s))
    next_event = time.monotonic() + 1.0
    with (folder / "events.jsonl").open("a", buffering=1) as events:
        while True:
            began = time.monotonic()
            for _ in range(share):
                job = jobs[turn % len(jobs)]
                job.done += 1
                job.write()
                turn += 1
            if began >= next_event:
                next_event = began + EVENT_EVERY_S
                number += 1
                at = time.time()
                jobs[(number * 37) % len(jobs)].event(number)
                events.write(json.dumps([number, at]) + "\n")
            await asyncio.sleep(max(0.0, began + slice_s - time.monotonic()))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
