"""A job that goes from phase to phase only when it is let: load, work, save. The test's hand is a file `go-<phase>`.

It records what tests must know: one line per started copy in `starts`, a lock that a second copy at the same time
would not get (`SECOND-COPY` appears), the worker's pid in `worker`, and `saved` at the end.
Usage: phased.py [exit status]; standard library, Python 3.8.
"""

import fcntl
import json
import os
import subprocess
import sys
import time


def say(phase, state):
    print("::orch " + json.dumps({"phase": phase, "state": state}), flush=True)


def worker():
    while os.getppid() == int(sys.argv[2]):
        time.sleep(0.05)


def main():
    with open("starts", "a") as file:
        file.write("{}\n".format(os.getpid()))
    lock = open("one-copy", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        open("SECOND-COPY", "w").close()
    child = subprocess.Popen([sys.executable, os.path.abspath(__file__), "--worker", str(os.getpid())])
    with open("worker.tmp", "w") as file:
        file.write(str(child.pid))
    os.replace("worker.tmp", "worker")
    for phase in ("load", "work", "save"):
        say(phase, "start")
        open("reached-" + phase, "w").close()
        while not os.path.exists("go-" + phase):
            if child.poll() is not None:
                print("worker died with {}".format(child.returncode), flush=True)
                sys.exit(1)
            time.sleep(0.03)
        say(phase, "done")
    with open("saved", "w") as file:
        file.write("all of it\n")
    child.kill()
    child.wait()
    sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)


if __name__ == "__main__":
    worker() if sys.argv[1:2] == ["--worker"] else main()
