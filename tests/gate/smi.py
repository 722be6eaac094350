"""A stand-in nvidia-smi for the PATH: the real XML with the processes of a state file, as long as they live."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

PROGRAM = """#!{python} -S
import json, os, sys, time
state = json.load(open({state!r}))
if state.get("hang_s"):
    time.sleep(state["hang_s"])
if any(a.startswith("--query-gpu") for a in sys.argv):
    print("\\n".join([state.get("query", "9.0, 580.159.04")] * 2))
    sys.exit(0)
if "text" in state:
    sys.stdout.write(state["text"])
    sys.exit(state.get("status", 0))
if "-L" in sys.argv:
    sys.exit(0)
def alive(pid):
    try:
        return open("/proc/%d/stat" % pid).read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
text = open(state["base"]).read()
if state.get("gpus"):  # as many as asked for, made of the first
    begin, end = text.index("<gpu id="), text.index("</gpu>") + 6
    one, tail = text[begin:end], text[text.rindex("</gpu>") + 6:]
    several = [one.replace("00000000:00:06.0", "00000000:%02X:00.0" % (16 + i)).replace("GPU-00000000-", "GPU-%08d-" % i)
               .replace("<minor_number>0", "<minor_number>%d" % i) for i in range(state["gpus"])]
    several = [block for i, block in enumerate(several) if i not in state.get("gone", [])]
    text = text[:begin] + "".join(several) + tail
    text = text.replace("<attached_gpus>2", "<attached_gpus>%d" % state["gpus"])
parts = text.split("<processes>")
for gpu in range(len(parts) - 1):
    rows = [p for p in state["processes"] if p["gpu"] == gpu and (p.get("ghost") or alive(p["pid"]))]
    used = sum(p["mib"] for p in rows) + state.get("used_mib", {{}}).get(str(gpu), 0)
    head, mark, tail = parts[gpu].rpartition("<used>0 MiB</used>\\n\\t\\t\\t<free>143156 MiB</free>")
    if mark:
        parts[gpu] = head + "<used>%d MiB</used><free>0 MiB</free>" % used + tail
    if gpu in state.get("lost", []):
        head, mark, tail = parts[gpu].rpartition("<product_name>")
        parts[gpu] = head + mark + "GPU is lost" + tail[tail.index("</product_name>"):]
    infos = "".join("<process_info><pid>%d</pid><type>%s</type><process_name>%s</process_name>"
                    "<used_memory>%d MiB</used_memory></process_info>"
                    % (p["pid"], p.get("type", "C"), p.get("name", "python"), p["mib"]) for p in rows)
    parts[gpu + 1] = infos + parts[gpu + 1]
print("<processes>".join(parts))
"""


class FakeSmi:
    """`path` holds the program `nvidia-smi`; `hold` puts a process on a GPU."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._state_file = path / "state.json"
        base = Path(__file__).parents[1] / "data" / "nvidia_smi" / "query_idle.xml"
        self.state: dict[str, Any] = {"base": str(base), "processes": []}
        self.save()
        program = path / "nvidia-smi"
        program.write_text(PROGRAM.format(python=sys.executable, state=str(self._state_file)))
        program.chmod(0o755)

    def save(self, **changes: Any) -> None:
        """Write the state that the next call of nvidia-smi reads."""
        self.state.update(changes)
        new = self._state_file.with_suffix(".new")
        new.write_text(json.dumps(self.state))
        os.replace(new, self._state_file)

    def hold(self, gpu: int, pid: int, mib: int = 1000, **more: Any) -> None:
        """A process on a GPU, listed while it lives (`ghost=True`: also when it does not)."""
        self.state["processes"].append({"gpu": gpu, "pid": pid, "mib": mib, **more})
        self.save()
