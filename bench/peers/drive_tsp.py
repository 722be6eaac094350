"""task-spooler on the host: `ssh host tsp COMMAND`, then `ssh host tsp -w ID` until it returns."""

import subprocess

from driving import ready, say, start

verb, config = start()
tsp = "TS_SOCKET=$HOME/tsp.socket TMPDIR=$HOME tsp"
number = config.folder / f"id-{config.work.name}"
if verb == "run":
    ready()
    answer = subprocess.run(
        config.ssh(f"{tsp} {config.command}"), check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    number.write_text(answer.stdout.strip())
waited = subprocess.run(
    config.ssh(f"{tsp} -w {number.read_text()}"), stdin=subprocess.DEVNULL, capture_output=True, check=False
)
code = waited.returncode
if code == 255:  # ssh's own failure, and what tsp says of a job that a signal ended: only a second question tells
    told = subprocess.run(
        config.ssh(f"{tsp} -i {number.read_text()}"), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    how = next((line for line in told.stdout.splitlines() if line.startswith("Exit status")), "")
    say(f"ended failed {how}" if how else "ended gave-up ssh ended")
else:
    say(f"ended failed exit status {code}" if code else "ended ok")
