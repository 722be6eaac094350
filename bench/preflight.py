"""What gate and preflight add to a launch: a checkpoint of 64 shards, over a real sshd on loopback, two idle GPUs.

`python -m bench preflight`, or `python -m bench.preflight` for the parts of it as JSON. Promised: at most 3 s.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.report import Report, Row
from tests.preflight.world import World, write_checkpoint
from tests.sshd.server import Sshd
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 3.0
REPETITIONS = 7
GATE = """
import json, sys, time
sys.path.insert(0, {root!r})
from remote_jobs.agent import gate
print(json.dumps(gate.look(2, [0, 1], {jobs!r}).to_json()))
"""


def sixty_four_shards(folder: Path) -> World:
    """A sound world whose checkpoint has 64 shards with headers as long as a large MoE model's (600 tensors each)."""
    world = World(folder)
    write_checkpoint(folder / "big", shards=64, layers=64, per_layer=600)
    (folder / "big" / "config.json").write_text(json.dumps({**_config(folder), "num_hidden_layers": 64}))
    for step in world.spec["steps"]:
        step["params"]["model"] = str(folder / "big")
    return world


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "model" / "config.json").read_text())
    return config


def measure(repetitions: int = REPETITIONS) -> dict[str, Any]:
    """Seconds of gate and checks over one kept ssh connection, and of the slowest checks inside."""
    with tempfile.TemporaryDirectory(prefix="orch-bench-") as text, Sshd(Path(text) / "sshd") as sshd:
        folder = Path(text)
        world = sixty_four_shards(folder / "world")
        ssh = ["ssh", "-F", str(sshd.ssh_config), "-S", str(folder / "mux")]
        master = subprocess.Popen([*ssh, "-M", "-N", sshd.alias])
        try:
            wait_until((folder / "mux").exists, "the ssh master listens")
            gate_s, checks_s, rows = [], [], []
            variables = " ".join(f"{name}='{value}'" for name, value in world.environment().items())
            start = f"cd {ROOT} && {variables} {sys.executable} -I -S"
            program = GATE.format(root=str(ROOT), jobs=str(world.root / "jobs"))
            checks = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from remote_jobs.agent.checks.__main__ import main; main()"
            for _ in range(repetitions):
                gate_s.append(timed([*ssh, sshd.alias, f"{start} -"], program)[0])
                took, answer = timed(
                    [*ssh, sshd.alias, f'{start} -c "{checks}"'], json.dumps(world.request())
                )
                checks_s.append(took)
                rows = json.loads(answer)["checks"]
        finally:
            master.terminate()
            master.wait()
            world.close()
    fails = [row for row in rows if row["verdict"] == "fail"]
    if fails:
        raise SystemExit(f"the sound world fails: {fails}")
    slowest = sorted(rows, key=lambda row: -row["took_s"])[:4]
    return {
        "gate_s": gate_s,
        "checks_s": checks_s,
        "both_s": [a + b for a, b in zip(gate_s, checks_s, strict=True)],
        "slowest": [[row["step"], row["name"], row["took_s"]] for row in slowest],
        "checkpoint_s": max(row["took_s"] for row in rows if row["name"] == "checkpoint"),
    }


def timed(argv: list[str], given: str) -> tuple[float, str]:
    """Seconds and output of a command."""
    started = time.perf_counter()
    done = subprocess.run(argv, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{argv[-1][:200]} failed: {done.stderr[-800:]}")
    return time.perf_counter() - started, done.stdout


def run(report: Report) -> None:
    """The section of `make bench`."""
    figures = measure()
    report.add(
        Row(
            "preflight",
            "gate + preflight, 64 shards, loopback",
            "s",
            figures["both_s"],
            LIMIT_S,
            f"<= {LIMIT_S:g} s",
        )
    )
    report.add(Row("preflight", "of it: gate", "s", figures["gate_s"]))
    report.add(Row("preflight", "of it: headers of 64 shards", "s", [figures["checkpoint_s"]], 2.0, "<= 2 s"))


if __name__ == "__main__":
    print(json.dumps({**measure(), "load_1m": os.getloadavg()[0]}))
