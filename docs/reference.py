"""Write the pages that are the program itself in other words: docs/cli.md, and docs/schemas/ for editors.

    python docs/reference.py            # rewrite them
    python docs/reference.py --check    # exit 1 and say which differs

tests/api fails when one differs from the program.
"""

from __future__ import annotations

import enum
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import typer

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from orchestrator.cli.app import app  # noqa: E402 - a script in docs/ finds the package through the line above
from orchestrator.cli.commands import SUMMARY, TABLE  # noqa: E402
from orchestrator.core.json_schema import inventory_schema, plan_schema  # noqa: E402

ENVIRONMENT = {
    "ORCH_INVENTORY": "Inventory, instead of ./inventory.yaml and the one in the user's configuration folder (`--inventory`).",
    "ORCH_HOST": "Host, where a command takes `--host`.",
    "ORCH_HOME": "Folder of the local ledger.",
    "ORCH_NOTIFY": "Apprise URLs, separated by spaces, for `orch watch --notify`.",
    "ORCH_WATCH_INTERVAL": "`orch watch --interval`.",
    "ORCH_HISTORY_LIMIT": "`orch history --limit`.",
    "ORCH_SSH_CONFIG": "ssh configuration to use instead of ~/.ssh/config.",
    "ORCH_DEBUG": "Set: a bug in orch shows its traceback.",
    "NO_COLOR": "Set: no colours (https://no-color.org).",
}
HOST_ENVIRONMENT = {
    "ORCH_PATCH_DIRS": "Folders of patch sets of your own, as in PATH (writing-steps.md); in `env:` it holds for the host's jobs.",
    "ORCH_NVIDIA_SMI": "Path of nvidia-smi, instead of the one on the PATH and the places where drivers put it.",
    "ORCH_CLAIMS_DIR": "Folder of the GPU claims, where `/var/tmp` is shared between machines. Default: `/var/tmp/orch-claims`.",
    "ORCH_ROOT": "Folder for overlays of `remote_jobs.patches.activate` in a script that orch did not start.",
}
STEP_ENVIRONMENT = {
    "ORCH_JOB": "The job's id; by it the job's processes are known: leave it to your children.",
    "ORCH_STEP": "Name of the step.",
    "ORCH_ATTEMPT": "Number of the attempt, from 1.",
    "ORCH_WORKDIR": "The plan's `workdir`.",
    "ORCH_FILES": "Folder with the plan's `files:`.",
    "ORCH_OUTPUT": "Folder that `orch fetch` brings: the step's `output`.",
    "ORCH_NEEDS_{}_OUTPUT": "The same of a step that this one needs, its name in capitals.",
    "ORCH_GPUS": "How many GPUs were claimed; which ones is in `CUDA_VISIBLE_DEVICES`.",
    "ORCH_SPLIT_INDEX": "Of a step with `split:`: which range this is, from 1.",
    "ORCH_SPLIT_COUNT": "Of how many.",
    "ORCH_NODES": "On Slurm with `nodes: N`: how many.",
    "ORCH_NODELIST": "Their names, separated by commas.",
    "ORCH_SRUN": "The command that starts one process on each of them, as a JSON list.",
    "ORCH_STOP_FILE": "A file that appears when the processes on the nodes are to end.",
    "ORCH_PATCHES": "Patch sets of this attempt with their hashes, or `none`.",
    "ORCH_PATCHES_SHA256": "One hash of all of them.",
    "ORCH_NOTIFY_": "What a command of `notify:` is told (notify.md): `ORCH_NOTIFY_TITLE`, `_TEXT`, `_KIND` and so on.",
}
STATUSES = {
    0: "done as asked",
    1: "the job failed or was stopped",
    2: "wrong usage, an invalid plan or inventory, or not possible in the state that the job is in",
    3: "the host is unreachable or refused",
    4: "the gate is closed, or a preflight check failed",
    5: "the job is lost, or unknown",
    124: "`--timeout` is over; the job goes on",
    130: "Ctrl-C; jobs on hosts go on",
}


def cli_page() -> str:
    """docs/cli.md."""
    root = typer.main.get_command(app)
    parts = [
        "# The command line", "",
        f"<!-- written by docs/reference.py: change the commands, not this page -->\n\n{SUMMARY}", "",
        "`orch --help` and `orch COMMAND --help` say the same in a terminal.", "",
        table(("Command", ""), [(f"[`orch {name}`](#orch-{name})", line) for name, (_, line) in TABLE.items()]), "",
        "## Exit status", "", table(("", ""), [(str(status), words) for status, words in STATUSES.items()]), "",
        "## Environment", "", "Read on the laptop:", "", *variables(ENVIRONMENT),
        "Read on the host, from the environment that a login over SSH has there:", "", *variables(HOST_ENVIRONMENT),
        "Set by orch for what a plan runs:", "", *variables(STEP_ENVIRONMENT),
    ]  # fmt: skip
    for name in TABLE:
        parts += command(root.commands[name], f"orch {name}", "##")  # type: ignore[attr-defined]
    return "\n".join(parts).rstrip() + "\n"


def variables(found: dict[str, str]) -> list[str]:
    """A table of variables."""
    shown = [(f"`{name.replace('{}', 'STEP')}{'*' if name.endswith('_') else ''}`", words) for name, words in found.items()]
    return [table(("Variable", ""), shown), ""]


def command(found: Any, name: str, heading: str) -> list[str]:
    """One command and those below it."""
    arguments = [item for item in found.params if item.param_type_name == "argument"]
    options = [item for item in found.params if item.param_type_name == "option" and "--help" not in item.opts]
    below = dict(getattr(found, "commands", {}))
    usage = [name, *(["[OPTIONS]"] if options else []), *(shown(item) for item in arguments), *(["COMMAND"] if below else [])]
    text, _, examples = inspect.cleandoc(found.help or "").partition("\f")
    parts = [f"{heading} {name}", "", "```text", " ".join(usage), "```", "", paragraphs(text), ""]
    rows = [(f"`{shown(item).strip('[]')}`", help_of(item)) for item in arguments]
    rows += [(option_names(item), help_of(item)) for item in options]
    if rows:
        parts += [table(("", ""), rows), ""]
    examples = inspect.cleandoc((found.epilog or "").replace("\b", "")).removeprefix("Examples:")
    if examples.strip():
        parts += ["```sh", inspect.cleandoc(examples).strip(), "```", ""]
    for key, inner in sorted(below.items()):
        parts += command(inner, f"{name} {key}", heading + "#")
    return parts


def paragraphs(text: str) -> str:
    """The help's own paragraphs, each on one line."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def shown(item: Any) -> str:
    """An argument as in the usage line."""
    name = item.metavar or item.name.upper()
    name = name if item.nargs == 1 else f"{name}..."
    return name if item.required else f"[{name}]"


def option_names(item: Any) -> str:
    """An option with its short form and its value."""
    names = sorted([*item.opts, *item.secondary_opts], key=lambda name: (name in item.secondary_opts, not name.startswith("--")))
    value = "" if item.is_flag else f" {item.metavar or item.name.upper()}"
    return ", ".join(f"`{name}{value if i == 0 else ''}`" for i, name in enumerate(names))


def help_of(item: Any) -> str:
    """Its help, its default and its variable."""
    words = [" ".join((item.help or "").split())]
    kind = item.type_descriptor.annotation
    choices = [str(choice.value) for choice in kind] if inspect.isclass(kind) and issubclass(kind, enum.Enum) else []
    if any(choice not in words[0] for choice in choices):
        words.append("One of " + ", ".join(f"`{choice}`" for choice in choices) + ".")
    if item.param_type_name == "option" and not item.is_flag and item.default not in (None, (), [], "") and item.show_default:
        words.append(f"Default: `{item.default}`.")
    variables = [item.envvar] if isinstance(item.envvar, str) else list(item.envvar or [])
    if variables:
        words.append("Environment: " + ", ".join(f"`{name}`" for name in variables) + ".")
    return " ".join(filter(None, words))


def table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    """A Markdown table of two columns."""
    lines = [head, ("---", "---"), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def pages() -> dict[Path, str]:
    """Path below docs/ -> its whole text."""
    schemas = {"plan": plan_schema(), "inventory": inventory_schema()}
    found = {Path("cli.md"): cli_page()}
    for name, schema in schemas.items():
        found[Path("schemas") / f"{name}.schema.json"] = json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
    return found


def differing() -> list[str]:
    """Pages that are not what the program says now."""
    return [
        f"docs/{path}"
        for path, text in pages().items()
        if not (DOCS / path).exists() or (DOCS / path).read_text(encoding="utf-8") != text
    ]


def main() -> int:
    """Rewrite or check."""
    if "--check" in sys.argv[1:]:
        for name in differing():
            print(f"{name} differs from the program: run python docs/reference.py")
        return 1 if differing() else 0
    for path, text in pages().items():
        (DOCS / path).parent.mkdir(exist_ok=True)
        (DOCS / path).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
