"""Reads anything nvidia-smi prints and says which GPUs are clean: the JSON of `orch gpus`.

Clean is judged here and nowhere else, from data alone, so that the gate on a host, `orch gpus HOST` and
`orch gpus --from FILE` cannot disagree. Imports the readers and the data model only: no I/O, no clock, stdlib,
Python 3.8.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

from remote_jobs.agent import smi_csv, smi_errors, smi_table, smi_xml
from remote_jobs.agent.gpu_model import MEMORY, PROCESSES, UTILIZATION, Gpu, GpuProcess, SmiReading

Json = Dict[str, object]

MEMORY_THRESHOLD_MIB = 15
"""Idle GPUs show 0 to 14 MiB as used, by driver generation; the smallest CUDA context takes well over 100 MiB."""
MIG_SLICE_MIB = 40
"""What an empty MIG slice itself takes: 5 MiB (driver 535) to 36 MiB (570 and later); a GPU has up to 7."""
MIG_SLICES = 7
DISPLAY_EXTRA_MIN_MIB, DISPLAY_EXTRA_MAX_MIB = 256, 1024
"""A display's frame buffers and contexts belong to no process in the list: as much again as its processes
show, within these bounds. The lower bound stays below a CUDA context of current GPUs."""
UNKNOWN_DISPLAY_MIB = 4096
"""Taken for a display whose processes show N/A (Windows, WSL), at most a third of the memory: desktops there
were seen with 0.7 to 3.3 GiB."""
UNLISTED_RESERVE_MIB = 45
"""Where the output has no `reserved` beside `used` (every plain table), the driver's own share is part of
`used`: 37 MiB on an idle GH200, 55 MiB on an idle K80."""
COHERENT = re.compile(r"\bG[HB]\d{2,3}\b.*|\bGrace\b")
"""Coherent-memory boards keep that share in `used` even where `reserved` is listed."""
VGPU_SHARE = 0.12
"""A vGPU guest shows the hypervisor's share as used: measured 5 to 10 % of its memory."""
BUSY_PCT = 5


@dataclass
class Verdict:
    """Clean or not, and the reason in one line."""

    clean: bool
    why: str


@dataclass
class GpuReport:
    """One reading and its verdicts, in the order of `reading.gpus`."""

    reading: SmiReading
    threshold_mib: int = MEMORY_THRESHOLD_MIB

    @property
    def gpus(self) -> List[Gpu]:
        """The GPUs, ordered as printed."""
        return self.reading.gpus

    def verdict(self, gpu: Gpu) -> Verdict:
        """Whether this one GPU is clean."""
        return judge_gpu(gpu, self.threshold_mib)

    def overall(self, expected: Optional[int] = None) -> Verdict:
        """Whether all GPUs are clean, none is missing and nvidia-smi did not complain."""
        return judge_all(self, expected)

    def to_json(self, expected: Optional[int] = None) -> Json:
        """The document of `orch gpus --json` (schema 1). `expected` is the host's GPU count, None if unknown."""
        overall = self.overall(expected)
        return {
            "schema": 1,
            "gpus": [_gpu_json(gpu, self.verdict(gpu)) for gpu in self.gpus],
            "clean": overall.clean,
            "expected": expected,
            "why": overall.why,
        }


def parse(text: str, threshold_mib: int = MEMORY_THRESHOLD_MIB) -> GpuReport:
    """Read nvidia-smi's output in any of its forms. Never raises: text that is none of them is an error report."""
    text = text.lstrip("\ufeff").replace("\r\n", "\n")
    return GpuReport(_read(text), threshold_mib)


def _read(text: str) -> SmiReading:
    errors = smi_errors.find(text)
    if "<nvidia_smi_log" in text or text.lstrip().startswith("<?xml"):
        reading = smi_xml.read_xml(text)
        outside = re.sub(r"<nvidia_smi_log.*?(?:</nvidia_smi_log>|\Z)", "", text, flags=re.DOTALL)
        errors = smi_errors.find(outside)
    elif "NVSMI LOG" in text or re.search(
        r"^GPU [0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d\s*$", text, re.M
    ):
        reading = smi_xml.read_query_text(text)
    else:
        reading = smi_table.read_table(text)
        if reading.gpus:
            _join(reading, smi_csv.read_lists(text, headed_only=True))
        else:
            reading = smi_csv.read_lists(text)
    reading.errors = errors
    reading.notes += smi_errors.warnings(text)
    if not reading.gpus and not reading.listed_processes:
        reading.form = "error" if errors else "unknown"
        if not errors:
            reading.errors = [_unreadable(text)]
    return reading


def _unreadable(text: str) -> str:
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if not first:
        return "empty output: nvidia-smi printed nothing"
    return "nothing here reads like nvidia-smi's output; it begins with %r" % first[:80]


def _join(table: SmiReading, lists: SmiReading) -> None:
    """Complete a table by the lists printed in the same text: uuids, and sizes the table had cut."""
    for other in lists.gpus:
        twin = next((g for g in table.gpus if g.index == other.index and other.index is not None), None)
        for process in other.processes:
            known = [p for g in table.gpus for p in g.processes if p.pid == process.pid]
            for same in known:
                same.memory_mib = process.memory_mib if same.memory_mib is None else same.memory_mib
                twin = twin or next(g for g in table.gpus if same in g.processes)
            if not known:
                (twin or _stranger(table, other)).processes.append(process)
        if twin is not None:
            twin.uuid = twin.uuid or other.uuid
            twin.faults += [f for f in other.faults if f not in twin.faults]
            twin.memory_reserved_mib = twin.memory_reserved_mib or other.memory_reserved_mib


def _stranger(table: SmiReading, other: Gpu) -> Gpu:
    gpu = Gpu(index=None, uuid=other.uuid, shows=frozenset((PROCESSES,)))
    table.gpus.append(gpu)
    return gpu


def judge_gpu(gpu: Gpu, threshold_mib: int = MEMORY_THRESHOLD_MIB) -> Verdict:
    """Healthy, no compute process, and no memory that only somebody else's work can explain."""
    if gpu.faults:
        return Verdict(False, "; ".join(gpu.faults))
    if gpu.compute:
        return Verdict(False, "in use: %s" % _holders(gpu.compute))
    if not gpu.complete:
        return Verdict(False, "the output is cut inside this GPU; ask for `nvidia-smi -q -x` again")
    used = memory_used(gpu)
    if used is None:
        return _judge_without_memory(gpu)
    allowed, why_allowed = allowed_mib(gpu, threshold_mib)
    if used > allowed:
        return Verdict(False, _foreign_memory(gpu, used, allowed))
    return Verdict(True, "; ".join(["idle: %d MiB used%s" % (used, why_allowed), *gpu.notes]))


def memory_used(gpu: Gpu) -> Optional[int]:
    """Used memory in MiB: the GPU's own figure, or its MIG devices' sum where that is larger."""
    # Compute instances of one GPU instance share its memory and all show the same figure.
    shared: Dict[object, int] = {}
    for place, device in enumerate(gpu.mig_devices):
        key = place if device.gpu_instance is None else ("gi", device.gpu_instance)
        shared[key] = max(shared.get(key, 0), device.memory_used_mib or 0)
    known = [v for v in (gpu.memory_used_mib, sum(shared.values()) if shared else None) if v is not None]
    return max(known) if known else None


def allowed_mib(gpu: Gpu, threshold_mib: int = MEMORY_THRESHOLD_MIB) -> Tuple[int, str]:
    """How much used memory is nobody's work, and by what it is explained (for the reader)."""
    allowed, reason = threshold_mib, ""
    total = gpu.memory_total_mib or 0
    unlisted = gpu.memory_reserved_mib is None or bool(COHERENT.search(gpu.name or ""))
    allowed += UNLISTED_RESERVE_MIB if unlisted else 0
    if gpu.mig_enabled:
        allowed, reason = allowed + MIG_SLICE_MIB * MIG_SLICES, " by MIG itself"
    if gpu.virtual:
        allowed, reason = allowed + int(total * VGPU_SHARE), " by the hypervisor"
    if gpu.display_memory_hidden:
        allowed, reason = allowed + min(UNKNOWN_DISPLAY_MIB, total // 3), " by the desktop"
    if gpu.graphics:
        shown = sum(p.memory_mib or 0 for p in gpu.graphics)
        if any(p.memory_mib is None for p in gpu.graphics):
            extra = max(0, min(UNKNOWN_DISPLAY_MIB, total // 3) - shown)
        else:
            extra = min(DISPLAY_EXTRA_MAX_MIB, max(DISPLAY_EXTRA_MIN_MIB, shown))
        allowed, reason = allowed + shown + extra, " by the display (%s)" % _holders(gpu.graphics)
    return allowed, reason


def _judge_without_memory(gpu: Gpu) -> Verdict:
    hint = "; ask for `nvidia-smi -q -x`"
    if MEMORY in gpu.shows:
        if gpu.utilization_pct is not None and gpu.utilization_pct > BUSY_PCT and not gpu.graphics:
            return Verdict(
                False, "no process visible, memory not reported, but %d %% busy" % gpu.utilization_pct
            )
        return Verdict(True, "no compute process, and this GPU does not report its memory")
    if PROCESSES in gpu.shows:
        return Verdict(True, "no compute process listed (this output does not show memory)")
    if UTILIZATION in gpu.shows:
        return Verdict(False, "this output shows neither memory nor processes" + hint)
    return Verdict(False, "this output only names the GPU" + hint)


def _holders(processes: List[GpuProcess], most: int = 3) -> str:
    parts = []
    for process in processes[:most]:
        size = "" if process.memory_mib is None else ", %d MiB" % process.memory_mib
        owner = "" if process.owner == "unknown" else ", %s" % process.owner
        parts.append("%s (pid %s%s%s)" % (process.name or "?", process.pid, size, owner))
    more = len(processes) - most
    return ", ".join(parts) + (" and %d more" % more if more > 0 else "")


def _foreign_memory(gpu: Gpu, used: int, allowed: int) -> str:
    if gpu.graphics:
        return "%d MiB used, but its display processes explain at most %d MiB" % (used, allowed)
    return (
        "%d MiB used and no process visible: another container or user holds it, or a dead process has not let go"
        " (as root: `fuser -v /dev/nvidia*`)" % used
    )


def judge_all(report: GpuReport, expected: Optional[int] = None) -> Verdict:
    """The whole host: every GPU clean, the expected number there, nvidia-smi without complaint."""
    reading = report.reading
    if reading.errors:
        return Verdict(False, "; ".join(reading.errors))
    if expected is not None and len(reading.gpus) < expected:
        return Verdict(
            False, "%d of %d GPUs answer%s" % (len(reading.gpus), expected, _missing(reading, expected))
        )
    if not reading.gpus:
        return Verdict(expected in (None, 0), "no compute process listed (this output does not show memory)")
    dirty = [
        (gpu, verdict) for gpu, verdict in ((g, report.verdict(g)) for g in reading.gpus) if not verdict.clean
    ]
    if dirty:
        return Verdict(False, "; ".join("GPU %s: %s" % (_label(gpu), verdict.why) for gpu, verdict in dirty))
    notes = list(reading.notes)
    if reading.cut and reading.attached is not None and reading.attached > len(reading.gpus):
        return Verdict(
            False, "the output is cut: %d of %d GPUs are there" % (len(reading.gpus), reading.attached)
        )
    if reading.attached is not None and reading.attached > len(reading.gpus):
        notes.append("nvidia-smi counts %d GPUs, %d are described" % (reading.attached, len(reading.gpus)))
    return Verdict(True, "; ".join(["%d GPU(s) clean" % len(reading.gpus), *notes]))


def _missing(reading: SmiReading, expected: int) -> str:
    there = {gpu.index for gpu in reading.gpus}
    gone = [str(i) for i in range(expected) if i not in there]
    return ": index %s missing (look for Xid lines in dmesg)" % ", ".join(gone) if gone else ""


def _label(gpu: Gpu) -> str:
    return str(gpu.index) if gpu.index is not None else gpu.uuid or gpu.bus_id or "?"


def _gpu_json(gpu: Gpu, verdict: Verdict) -> Json:
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "memory_used_mib": gpu.memory_used_mib,
        "memory_total_mib": gpu.memory_total_mib,
        "utilization_pct": gpu.utilization_pct,
        "processes": [
            {"pid": p.pid, "name": p.name, "memory_mib": p.memory_mib, "kind": p.kind, "owner": p.owner}
            for p in gpu.processes
        ],
        "health": gpu.faults[0] if gpu.faults else "ok",
        "clean": verdict.clean,
        "why": verdict.why,
    }
