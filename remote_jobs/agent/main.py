"""Entry of everything that runs on the host with the system's Python (`python3 -I -S <release> COMMAND`).

Commands: agent (look server), supervise (one job), resume (jobs that a reboot cut short), explain (a log), checks (preflight).  Standard library only.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import List, Optional

MINIMUM = (3, 8)


def main(argv: Optional[List[str]] = None) -> int:
    """Run a host command; its exit status."""
    if sys.version_info < MINIMUM:
        sys.stderr.write("orch needs Python 3.8 or newer on the host, this is {}\n".format(sys.version.split()[0]))
        return 3
    os.umask(0o077)
    arguments = sys.argv[1:] if argv is None else argv
    if arguments and arguments[0] == "explain":
        from remote_jobs.logs.__main__ import main as explain

        return int(explain(arguments[1:]) or 0)
    if arguments and arguments[0] == "checks":
        from remote_jobs.agent.checks.__main__ import main as checks

        return int(checks(arguments[1:]) or 0)
    parser = argparse.ArgumentParser(prog="orch host")
    commands = parser.add_subparsers(dest="command", required=True)
    agent = commands.add_parser("agent")
    agent.add_argument("--root", required=True)
    agent.add_argument("--release", default="")
    supervising = commands.add_parser("supervise")
    supervising.add_argument("--root", required=True)
    supervising.add_argument("--job", required=True)
    supervising.add_argument("--slurm", action="store_true")  # as the batch script of an allocation
    supervising.add_argument("--settle", action="store_true")  # on a login node: write records, start nothing
    resume = commands.add_parser("resume")  # at boot, by a line that a person has installed: see reboot.py
    resume.add_argument("--root", required=True)
    args = parser.parse_args(arguments)
    if args.command == "supervise":
        from remote_jobs.agent import supervise

        if args.slurm:
            return supervise.main_in_slurm(args.root, args.job)
        return (supervise.main_settle if args.settle else supervise.main)(args.root, args.job)
    from remote_jobs.agent.jobdir import Layout
    from remote_jobs.agent.server import Server

    layout = Layout(args.root)
    if args.command == "resume":
        from remote_jobs.agent import reboot

        reboot.resume(layout)
        return 0
    layout.prepare()
    return Server(layout, args.release).run()


if __name__ == "__main__":
    sys.exit(main())
