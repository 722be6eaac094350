"""AiiDA: a CalcJob through core.ssh and core.direct, run by its daemon (SQLite profile, ZeroMQ broker), awaited by polling the node.

The profile, the computer and the daemon are there before the clock starts. `safe_interval` and `poll_s` are AiiDA's own settings.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from driving import ready, say, start

verb, config = start()
os.environ["AIIDA_PATH"] = str(config.folder)
verdi = str(Path(sys.executable).with_name("verdi"))


def run_verdi(*arguments):
    """A command of AiiDA's own CLI."""
    done = subprocess.run([verdi, *arguments], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(f"verdi {' '.join(arguments)}: {done.stdout[-400:]} {done.stderr[-400:]}")


node_file = config.folder / f"node-{config.work.name}"
stamp = config.folder / "complete"
if not stamp.exists():
    run_verdi("presto", "--use-zeromq", "--profile-name", "bench")
    poll = config.options.get("poll_s")
    run_verdi(
        "computer", "setup", "-n", "--label", "box", "--hostname", config.address, "--transport", "core.ssh",
        "--scheduler", "core.direct", "--work-dir", str(config.folder / "remote"), "--mpirun-command", "",
        "--mpiprocs-per-machine", "1",
    )  # fmt: skip
    safe = ["--safe-interval", str(config.options["safe_interval"])] if "safe_interval" in config.options else []
    run_verdi(
        "computer", "configure", "core.ssh", "box", "-n", "--username", config.user, "--port", str(config.port),
        "--key-filename", config.key, "--no-look-for-keys", "--no-allow-agent", *safe,
    )  # fmt: skip
    script = config.folder / "job.sh"
    script.write_text(f'#!/bin/sh\nexec {config.host_python} -I -S {config.payload} "$1"\n')
    script.chmod(0o755)
    run_verdi(
        "code", "create", "core.code.installed", "-n", "--label", "job", "--computer", "box",
        "--filepath-executable", str(script), "--default-calc-job-plugin", "core.templatereplacer",
    )  # fmt: skip
    if poll is not None:
        from aiida import load_profile, orm

        load_profile("bench")
        orm.load_computer("box").set_minimum_job_poll_interval(poll)
    stamp.touch()
run_verdi("daemon", "start", "1")

from aiida import load_profile, orm  # noqa: E402 - AIIDA_PATH and the profile come first
from aiida.engine import submit  # noqa: E402

load_profile("bench")
if verb == "run":
    builder = orm.load_code("job@box").get_builder()
    builder.template = orm.Dict({"cmdline_params": [str(config.work)], "output_file_name": "out"})
    builder.metadata.options.resources = {"num_machines": 1, "num_mpiprocs_per_machine": 1}
    builder.metadata.options.withmpi = False
    ready()
    node = submit(builder)
    node_file.write_text(str(node.pk))
node = orm.load_node(int(node_file.read_text()))
while not node.is_terminated:
    if node.paused:
        say("ended gave-up paused for a person")
        break
    time.sleep(0.2)
else:
    say(f"ended {'ok' if node.is_finished_ok else 'failed'} {node.process_state.value} [{node.exit_status}] {node.exit_message}")
