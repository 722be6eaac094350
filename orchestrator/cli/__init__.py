"""The commands: parse, call one service, render, map errors to exit statuses. Heavy imports happen inside commands."""

import sys

if sys.argv and sys.argv[0].replace("\\", "/").rpartition("/")[2] in {"orch", "orch.exe"}:
    # The program, not somebody who imports it: Ctrl-C is ours from the first import on.
    from orchestrator.cli import interrupt

    interrupt.install()
