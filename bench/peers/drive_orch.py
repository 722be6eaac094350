"""orch, as its user types it: `orch launch PLAN`, then `orch watch JOB` into a pipe. Start-up of Python is in the figures."""

import json
import os
import subprocess

from driving import ready, say, start

verb, config = start()
orch = config.options["orch"]
inventory = config.folder / "inventory.yaml"
job = config.folder / f"job-{config.work.name}"
environment = {**os.environ, "ORCH_HOME": str(config.folder / "ledger"), "ORCH_INVENTORY": str(inventory), "TERM": "dumb"}
if verb == "run":
    host = {
        "ssh": f"{config.user}@{config.address}:{config.port}",
        "identity_file": config.key,
        "known_hosts": config.known_hosts,
        "gpus": 0,
    }
    step = {"name": "work", "run": config.command, "retry": {"attempts": 1}}
    plan = config.folder / f"{config.work.name}.yaml"
    plan.write_text(
        json.dumps({"name": config.work.name, "host": "box", "workdir": str(config.work), "steps": [step]})
    )
    inventory.write_text(json.dumps({"hosts": {"box": host}}))
    ready()
    answer = subprocess.run(
        [orch, "launch", str(plan), "--no-preflight"], env=environment, check=True, stdin=subprocess.DEVNULL,
        capture_output=True, text=True,
    )  # fmt: skip
    job.write_text(answer.stdout.strip())
watched = subprocess.run(
    [orch, "watch", job.read_text()], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
)
code = watched.returncode
names = {0: "ended ok", 1: "ended failed", 5: "ended lost"}
say(names.get(code, f"ended gave-up exit status {code} {watched.stderr[-200:]!r}"))
