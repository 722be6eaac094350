"""JSON schemas of plan and inventory, made from the models: editors complete and check the files with them.

A schema cannot say all that `load_plan` checks (what must fit together); whatever it refuses, the reader refuses too.
Published as docs/schemas/*.json by docs/reference.py. Pure.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from orchestrator.core.inventory import InventoryFile
from orchestrator.core.plan import Plan
from orchestrator.core.retry import FAILURE_CLASSES
from orchestrator.core.steps import BUILTIN

DIALECT = "https://json-schema.org/draft/2020-12/schema"

WORDS: dict[str, str] = {
    # plan
    "Plan.name": "What the plan is called; job ids begin with it.",
    "Plan.host": "Host of the inventory to run on, unless --host says another.",
    "Plan.workdir": "Working folder of every step on the host; made when missing.",
    "Plan.python": "Python of the built-in steps on the host (the one that vLLM lives in).",
    "Plan.env": "Environment variables of every step; secrets as {from: env}, {env: NAME}, {file: PATH} or {keyring: SERVICE/USER}.",
    "Plan.gate": "The check that the GPUs are free, before each attempt.",
    "Plan.log_limit": "Largest size of one attempt's log; beyond it the middle is cut out. Default 5 GiB.",
    "Plan.restart_after_reboot": "Take the job up by itself when the host has restarted.",
    "Plan.notify": "Who hears of the job's ends, retries and hangs.",
    "Plan.steps": "What to run. Steps without needs start at once.",
    "Gate.wait": "How long an attempt may wait for GPUs that foreign processes hold. Default 30m.",
    "Gate.memory_mib": "Memory in use on a GPU that still counts as free.",
    "Gate.reap": "own: end orphans of earlier jobs of yours; none: end nothing.",
    "Step.name": "Name of the step, unique in the plan.",
    "Step.uses": "A built-in step; or write run.",
    "Step.run": "A shell command line, run in workdir.",
    "Step.with": "Parameters of the built-in step.",
    "Step.needs": "Steps that must have succeeded (a service: be ready) before this one starts.",
    "Step.gpus": "How many GPUs the step claims.",
    "Step.env": "Environment variables of this step.",
    "Step.files": "Local files to send along; they land in {files}, which is on PATH and PYTHONPATH.",
    "Step.retry": "attempts: all tries, the first included; and one block a failure class, such as gpu_oom.",
    "Step.done": "Success as checked work, beside exit status 0.",
    "Step.service": "The step stays up until those that need it are done.",
    "Step.grace_s": "Time between TERM and KILL when it is stopped.",
    "Step.timeout_s": "Longest time of one attempt.",
    "Step.hang_s": "Silence after which an attempt counts as hanging; 0: never. Default: learned.",
    "Step.output": "Where the step writes, for {steps.NAME.output} and orch fetch.",
    "Step.python": "Python of this step instead of the plan's.",
    "Step.patches": "auto, none, or names of patch sets (orch patch list).",
    "Step.nodes": "Machines that the step runs on (Slurm).",
    "Step.split": "Run the step as so many parts beside each other.",
    "Done.count": "Pattern of files below workdir.",
    "Done.equals": "Exactly so many.",
    "Done.at_least": "At least so many.",
    "Service.ready": "How it shows that it is up.",
    "Service.timeout_s": "How long that may take. Default 30m.",
    "Ready.http": "URL that answers with 2xx.",
    "Ready.port": "TCP port of the host that accepts.",
    "Ready.log": "Text in its log.",
    # notify
    "Target.apprise": "Apprise URL, sent from a laptop that watches.",
    "Target.webhook": "http(s) URL that the host's supervisor posts JSON to.",
    "Target.command": "Shell command on the host; the message is in ORCH_NOTIFY_* and on stdin.",
    "Target.heartbeat": "http(s) URL asked for while the supervisor lives.",
    "Target.on": "Which events. Default: success, failure, hang, lost.",
    "Target.eta_slip": "Also when the expected end moves by more than this.",
    "Target.format": "Body of the webhook: json, or text with a Title header (ntfy).",
    "Target.headers": "HTTP headers of the webhook; values may be secrets.",
    "Target.env": "Environment variables of the command; values may be secrets.",
    "Target.every": "Time between heartbeats. Default 5m.",
    "Target.end": "URL posted to when the job has ended, to pause the heartbeat's alarm.",
    # inventory
    "InventoryFile.hosts": "The hosts by name.",
    "InventoryFile.groups": "Names for sets of hosts.",
    "Host.ssh": "Alias of your ssh configuration, or user@host:port. Default: the host's name.",
    "Host.gpus": "GPUs that the host should have.",
    "Host.root": "Folder of orch on the host, on a disk. Default ~/.orchestrator.",
    "Host.python": "Python of the built-in steps (the one that vLLM lives in).",
    "Host.agent_python": "Python 3.8 or newer for orch itself. Default: python3 on the PATH.",
    "Host.scheduler": "direct, or slurm for a login node.",
    "Host.partition": "Slurm partition.",
    "Host.account": "Slurm account.",
    "Host.qos": "Slurm quality of service.",
    "Host.constraint": "Slurm constraint.",
    "Host.reservation": "Slurm reservation.",
    "Host.gres": "How Slurm calls the GPUs.",
    "Host.time_limit": "Slurm time limit.",
    "Host.sbatch": "More options for sbatch.",
    "Host.array_limit": "So many tasks of one array at a time.",
    "Host.queue_interval_s": "How often squeue may be asked.",
    "Host.transport": "paramiko, or openssh for Kerberos, FIDO keys and ControlMaster.",
    "Host.identity_file": "Private key on this laptop.",
    "Host.known_hosts": "File of known host keys on this laptop.",
    "Host.min_look_interval_s": "Look at this host no more often than this.",
    "Host.env": "Environment variables of every job on this host; plan and step win.",
    "Host.notify": "Who hears of jobs on this host.",
    "Host.group": "Group that the host belongs to.",
    "Host.allow_tmpfs": "Accept a root that is gone after a reboot.",
}
"""One sentence for each key, shown by editors; a test keeps it complete."""


def plan_schema() -> dict[str, Any]:
    """Schema of a plan."""
    schema = _schema(Plan, "A plan of orch: what to run.")
    step = schema["$defs"]["Step"]
    step["properties"]["uses"] = {"enum": sorted(BUILTIN), "description": WORDS["Step.uses"]}
    attempts = {"type": "integer", "minimum": 1, "description": "All tries, the first included: the cap over every class."}
    step["properties"]["retry"] = {
        "type": ["object", "null"],
        "description": WORDS["Step.retry"],
        "properties": {"attempts": attempts, **{name: {"type": ["object", "null"]} for name in FAILURE_CLASSES}},
        "additionalProperties": False,
    }
    step["oneOf"] = [{"required": ["uses"]}, {"required": ["run"]}]
    step["allOf"] = [
        {"if": {"properties": {"uses": {"const": name}}, "required": ["uses"]}, "then": {"properties": {"with": _params(name)}}}
        for name in sorted(BUILTIN)
    ]  # fmt: skip
    return schema


def inventory_schema() -> dict[str, Any]:
    """Schema of an inventory."""
    schema = _schema(InventoryFile, "An inventory of orch: the hosts and how to reach them.")
    schema["$defs"]["Host"]["required"] = []  # `gpubox: {gpus: 8}`: the name is the alias
    schema["properties"]["hosts"]["additionalProperties"] = {"anyOf": [{"$ref": "#/$defs/Host"}, {"type": "null"}]}
    return schema


def _params(name: str) -> dict[str, Any]:
    """Parameters of a built-in step; flags of vLLM and speculators beyond those pass, newer ones too."""
    step = BUILTIN[name]
    own = step.params.model_json_schema(by_alias=True, mode="validation")
    _tidy(own, name)
    properties = dict(own.get("properties") or {})
    for flag in sorted(step.flags):
        properties.setdefault(flag, {})
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": bool(step.flags)}


def _schema(model: type[BaseModel], title: str) -> dict[str, Any]:
    found = model.model_json_schema(by_alias=True, mode="validation")
    definitions = found.pop("$defs", {})
    for name, part in (*definitions.items(), (model.__name__, found)):
        for key, value in (part.get("properties") or {}).items():
            words = WORDS.get(f"{name}.{key}")
            if words:
                value["description"] = words
            if key == "notify":
                part["properties"][key] = _notify(words or "")
    target = definitions.get("Target")
    if target is not None:
        kinds = target["properties"]["on"]["items"]
        target["properties"]["on"] = {"anyOf": [kinds, {"type": "array", "items": kinds}], "description": WORDS["Target.on"]}
    schema = {"$schema": DIALECT, "title": title, **{k: v for k, v in found.items() if k != "title"}, "$defs": definitions}
    _tidy(schema, "")
    return schema


def _notify(words: str) -> dict[str, Any]:
    one = {
        "anyOf": [
            {"type": "string", "pattern": "://", "description": "An Apprise URL, or an http(s) webhook."},
            {"$ref": "#/$defs/Target"},
        ]
    }
    return {"description": words, "anyOf": [*one["anyOf"], {"type": "array", "items": one}, {"type": "null"}]}


def _tidy(value: Any, parent: str) -> None:
    """Drop what helps nobody: generated titles, defaults of null; empty keys (`needs:`) are allowed everywhere."""
    if isinstance(value, list):
        for item in value:
            _tidy(item, parent)
        return
    if not isinstance(value, dict):
        return
    if parent == "properties":
        for name, schema in value.items():
            if isinstance(schema, dict):
                schema.pop("title", None)
                if schema.get("default", 0) in (None, [], {}):
                    schema.pop("default", None)
                if isinstance(schema.get("type"), str) and name != "name":
                    schema["type"] = [schema["type"], "null"]
                    if "enum" in schema:
                        schema["enum"] = [*schema["enum"], None]
                elif "$ref" in schema:
                    schema["anyOf"] = [{"$ref": schema.pop("$ref")}, {"type": "null"}]
                elif isinstance(schema.get("anyOf"), list) and {"type": "null"} not in schema["anyOf"]:
                    schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]
    for key, item in value.items():
        _tidy(item, key)
