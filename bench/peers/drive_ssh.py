"""What people do: nohup over ssh, then a loop of ssh that tails the log and looks whether the pid is there."""

import subprocess
import time

from driving import ready, say, start

verb, config = start()
every_s = float(config.options["every_s"])
work = str(config.work)
if verb == "run":
    ready()
    script = f"mkdir -p '{work}' && cd '{work}' && (nohup {config.command} > log 2>&1 < /dev/null & echo $! > pid)"
    subprocess.run(config.ssh(script), check=True, stdin=subprocess.DEVNULL)
while True:
    look = config.ssh(f"cd '{work}' && tail -c 4096 log && kill -0 $(cat pid)")
    if subprocess.run(look, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode:
        say("ended gone")
        break
    time.sleep(every_s)
