"""A process that wants GPUs, for the claim tests: `claimant FOLDER JOB GPUS HOST_GPUS [UID]`.

Says `waiting <reason>` and `held <indices>`, one line each; lets go at `release` on stdin, and exits at its end.
With `child` it starts a sleeping heir of the descriptors and says its pid.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys

from remote_jobs.agent.claims import Claimer


def main() -> None:
    folder, job, gpus, host_gpus = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    if len(sys.argv) > 5:
        os.setuid(int(sys.argv[5]))
    wanted = [int(i) for i in gpus[1:].split(",")] if gpus.startswith("=") else int(gpus)
    claimer = Claimer(folder)
    said = ""
    while True:
        claim, reason = claimer.claim(job, "step", wanted, host_gpus)
        if claim is not None:
            break
        if reason != said:
            print("waiting", reason, flush=True)
            said = reason
        if select.select([sys.stdin], [], [], 0.02)[0] and not sys.stdin.readline():
            return
    print("held", ",".join(map(str, claim.indices)), flush=True)
    for line in sys.stdin:
        if line.strip() == "release":
            claim.release()
            print("released", flush=True)
        if line.strip() == "child":
            heir = subprocess.Popen(["sleep", "60"], pass_fds=claim.fds)
            print("heir", heir.pid, flush=True)


main()
