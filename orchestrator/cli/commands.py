"""What there is to type: each command's module and the line of it that `orch --help` prints, and that whole text.

Why as data: `orch --help` answers without importing typer, and typer's own list without importing the commands (tests
keep both equal to what the commands say of themselves).  Must import nothing at all.
"""

from __future__ import annotations

TABLE: dict[str, tuple[str, str]] = {
    "demo": ("demo", "See a whole job run, crash, retry and finish on this machine."),
    "init": ("hosts", "Probe a host and write `inventory.yaml` and a first plan that runs there."),
    "hosts": ("hosts", "List the hosts of the inventory; `orch hosts check` asks them what they are."),
    "gpus": ("hosts", "Show every GPU, who holds it and whether it is clean; exits 4 when one is not."),
    "preflight": (
        "launch",
        "Check in a minute what would else fail after twenty; exits 4 when a check fails.",
    ),
    "launch": ("launch", "Start a plan on a host and print the job id alone on stdout."),
    "status": ("status", "Show where jobs stand."),
    "watch": ("watch", "Show progress until the jobs end."),
    "wait": ("status", "Block until the job has ended, and exit as it did."),
    "logs": (
        "logs",
        "Print a step's log: the newest attempt of the step that matters now, unless told otherwise.",
    ),
    "why": ("status", "Tell what a failed attempt died of, the evidence, and what the next one changes."),
    "stop": ("control", "Stop a job; final until `orch retry`."),
    "retry": ("control", "Take a failed, stopped or lost job up again."),
    "extend": ("control", "Give the steps of a job more time than their `timeout_s`."),
    "fetch": ("fetch", "Bring files of a job here."),
    "merge": ("merge", "Make one output of the fetched ranges of an extraction that was split over hosts."),
    "forward": ("forward", "Forward a local port to a service of a job, until the job ends or Ctrl-C."),
    "history": (
        "history",
        "List past and present jobs with durations, attempts, verdicts, GPU hours; or one job in time.",
    ),
    "report": (
        "history",
        "Write one HTML page about a job, to send to a colleague: timeline, attempts, verdicts, GPU use.",
    ),
    "explain": (
        "explain",
        "Say what a log shows: progress bars, phases, the end in sight, and what it died of.",
    ),
    "patch": ("patch", "Show or apply the verified patch sets for vLLM and speculators."),
    "gc": ("upkeep", "Show, and with --apply delete, what old jobs left on hosts: records, releases, uploads."),
    "doctor": ("upkeep", "Print what a bug report needs: versions, ssh, files, hosts; secrets and addresses masked."),
    "completion": (
        "completion",
        "Print the script that lets a shell complete commands, hosts, plans and job ids.",
    ),
}
"""Command -> (module of orchestrator.cli, first sentence of its help), in the order in which a newcomer meets them."""

SUMMARY = "Run hours-long GPU jobs on a host over SSH: launched detached, watched, retried, explained."
EXAMPLES = (
    "orch demo                          # see a whole job crash, retry and finish, on this machine",
    "orch init gpubox                   # probe a host, write inventory.yaml and a first plan",
    "orch launch plans/extract.yaml     # start; prints the job id",
    "orch watch                         # look at everything; q or Ctrl-C leaves the jobs alone",
    "orch why JOB                       # what a failed attempt died of",
)
HELP_COLUMNS = 114
"""Terminals at least this wide show the help as `help_text` prints it; narrower ones need it wrapped."""


def help_text() -> str:
    """`orch --help`, as typer would print it."""
    width = max(map(len, TABLE))
    return "\n".join(
        [
            "Usage: orch [OPTIONS] COMMAND [ARGS]...",
            "",
            f"  {SUMMARY}",
            "",
            "Options:",
            "  --inventory FILE  Inventory for every command.",
            "  --version         Print the version.",
            "  -h, --help        Show this message and exit.",
            "",
            "Commands:",
            *(f"  {name:<{width}}  {line}" for name, (_, line) in TABLE.items()),
            "",
            "  Examples:",
            *(f"    {line}" for line in EXAMPLES),
            "",
        ]
    )
