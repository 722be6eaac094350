"""Reads nvidia-smi's lists: `--query-gpu`, `--query-compute-apps`, `-L`, `pmon`, `dmon`.

CSV is read with or without header and units. Without a header the columns are told by what their values look
like; what stays ambiguous is said in a note. Pure, stdlib, Python 3.8.
"""

from __future__ import annotations

import re
from typing import Dict, List, Optional, Sequence, Tuple

from remote_jobs.agent.gpu_model import MEMORY, PROCESSES, UTILIZATION, VGPU_NAME, Gpu, GpuProcess, SmiReading
from remote_jobs.agent.smi_errors import LOST, meaning, says_nothing

_UUID = re.compile(r"^(?:GPU|MIG)-[0-9A-Fa-f/-]{6,}")
_BUS = re.compile(r"^[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]$")
_MIB = re.compile(r"^(\d+)\s*Mi?B$")
_PERCENT = re.compile(r"^(\d+)\s*%$")
_INT = re.compile(r"^\d+$")
_UNIT = re.compile(r"\s*\[[^\]]*\]$")
_LIST = re.compile(r"^\s*GPU\s+(\d+):\s*(.*?)\s*\(UUID:\s*((?:GPU-)?[^)]*)\)")
_GPU_FIELDS = frozenset(
    (
        *("index", "uuid", "gpu_uuid", "name", "gpu_name", "memory.used", "memory.total", "memory.free"),
        *(
            "memory.reserved",
            "utilization.gpu",
            "utilization.memory",
            "pci.bus_id",
            "gpu_bus_id",
            "timestamp",
        ),
        *("driver_version", "count", "serial", "gpu_serial", "temperature.gpu", "pstate", "power.draw"),
        *("compute_cap", "compute_mode", "mig.mode.current", "minor_number"),
    )
)
_APP_FIELDS = frozenset(("pid", "process_name", "used_memory", "used_gpu_memory"))
SMALLEST_TOTAL_MIB = 512
"""No GPU has less memory: below it, a number without unit is a percentage, a temperature or watts."""
Row = Dict[str, str]


def read_lists(text: str, *, headed_only: bool = False) -> SmiReading:
    """Read every list found in the text, one after the other, into one reading joined by uuid, bus id and index.

    `headed_only` leaves out what has no header, for texts that hold a table as well.
    """
    reading = SmiReading(form="csv")
    fields: Optional[List[str]] = None
    bare: List[List[str]] = []
    monitor: Optional[List[str]] = None
    for raw in text.splitlines():
        line = raw.strip()
        if not line:
            continue
        listed = _LIST.match(line)
        if listed:
            reading.form = "list" if not any(g.shows for g in reading.gpus) else reading.form
            _place(reading, int(listed.group(1)), listed.group(3), None, listed.group(2))
            continue
        if headed_only and "|" in line:
            continue
        if line.startswith("#") and not headed_only:
            names = line.lstrip("#").split()
            if names and names[0].lower() == "gpu":
                monitor = [name.lower() for name in names]
                reading.form = "pmon" if "pid" in monitor else "dmon"
            continue
        if monitor is not None and re.match(r"^\d+\s", line):
            _monitor_row(line.split(), monitor, reading)
            continue
        header = _header(line)
        if header is not None:
            fields = header
            reading.form = "csv"
            if _APP_FIELDS & set(fields):
                reading.listed_processes = True
            continue
        if (
            "," not in line
            and fields is None
            and not (_UUID.match(line) or _INT.match(line) or _MIB.match(line))
        ):
            continue
        if meaning(line) and "," not in line:
            continue
        cells = [cell.strip() for cell in line.split(",")]
        if fields is not None and len(cells) >= len(fields):
            _row(dict(zip(fields, _merge_name(cells, fields))), reading)
        else:
            bare.append(cells)
    if bare and fields is None and not headed_only:
        _read_bare(bare, reading)
    return reading


def _header(line: str) -> Optional[List[str]]:
    names = [_UNIT.sub("", cell.strip()).lower() for cell in line.split(",")]
    known = sum(
        name in _GPU_FIELDS or name in _APP_FIELDS or ("." in name and " " not in name) for name in names
    )
    if known == 0 or any(name in ("", "n/a") for name in names):
        return None
    if any(_UUID.match(cell.strip()) or _MIB.match(cell.strip()) for cell in line.split(",")):
        return None
    sure = sum(name in _GPU_FIELDS or name in _APP_FIELDS for name in names)
    return names if sure and known * 2 >= len(names) else None


def _merge_name(cells: List[str], fields: Sequence[str]) -> List[str]:
    """Put a process name that itself holds commas back together."""
    extra = len(cells) - len(fields)
    for wanted in ("process_name", "name"):
        if extra > 0 and wanted in fields:
            at = list(fields).index(wanted)
            return [*cells[:at], ", ".join(cells[at : at + extra + 1]), *cells[at + extra + 1 :]]
    return cells


def _place(
    reading: SmiReading, index: Optional[int], uuid: Optional[str], bus: Optional[str], name: Optional[str]
) -> Gpu:
    """The GPU that the identifiers mean: a known one or a new one."""
    for gpu in reading.gpus:
        if (
            (uuid and gpu.uuid == uuid)
            or (bus and gpu.bus_id == bus)
            or (index is not None and gpu.index == index)
        ):
            break
    else:
        gpu = Gpu(index=index, shows=frozenset())
        reading.gpus.append(gpu)
    gpu.index = index if gpu.index is None else gpu.index
    gpu.uuid, gpu.bus_id, gpu.name = gpu.uuid or uuid, gpu.bus_id or bus, gpu.name or name
    gpu.virtual = bool(VGPU_NAME.search(gpu.name or ""))
    return gpu


def _number(value: Optional[str]) -> Optional[int]:
    found = re.match(r"^-?\d+", value or "")
    return int(found.group()) if found else None


def _known(value: Optional[str]) -> Optional[str]:
    return value if value and not says_nothing(value) else None


def _row(row: Row, reading: SmiReading) -> None:
    uuid = _known(row.get("uuid") or row.get("gpu_uuid"))
    bus = _known(row.get("pci.bus_id") or row.get("gpu_bus_id"))
    is_app = bool(_APP_FIELDS & set(row))
    index = _number(row.get("index"))
    name = _known(row.get("name") or row.get("gpu_name"))
    if is_app:
        gpu = (
            _place(reading, index, uuid, bus, name)
            if uuid or bus or index is not None
            else _nameless(reading)
        )
        gpu.shows = gpu.shows | {PROCESSES}
        gpu.processes.append(
            GpuProcess(
                pid=_number(row.get("pid")),
                name=row.get("process_name", ""),
                memory_mib=_number(row.get("used_memory") or row.get("used_gpu_memory")),
            )
        )
        return
    if index is None and uuid is None and bus is None:
        index = len(reading.gpus)
    gpu = _place(reading, index, uuid, bus, name)
    if gpu.index is None:
        gpu.index = reading.gpus.index(gpu)
    _fill(gpu, row)
    reading.driver_version = _known(row.get("driver_version")) or reading.driver_version


def _nameless(reading: SmiReading) -> Gpu:
    """Where a process goes whose row names no GPU: the only one there is, or one without a name."""
    if len(reading.gpus) == 1:
        return reading.gpus[0]
    for gpu in reading.gpus:
        if gpu.index is None and gpu.uuid is None and gpu.bus_id is None:
            return gpu
    gpu = Gpu(index=None, shows=frozenset())
    reading.gpus.append(gpu)
    return gpu


def _fill(gpu: Gpu, row: Row) -> None:
    used, total, free = (_number(row.get("memory." + key)) for key in ("used", "total", "free"))
    if used is None and total is not None and free is not None and "memory.used" not in row:
        used = max(0, total - free - (_number(row.get("memory.reserved")) or 0))
    if "memory.used" in row or used is not None:
        gpu.shows = gpu.shows | {MEMORY}
    if "utilization.gpu" in row:
        gpu.shows = gpu.shows | {UTILIZATION}
    gpu.memory_used_mib, gpu.memory_total_mib = used, total
    gpu.memory_reserved_mib = _number(row.get("memory.reserved"))
    gpu.utilization_pct = _number(row.get("utilization.gpu"))
    gpu.compute_capability = _known(row.get("compute_cap"))
    gpu.mig_enabled = row.get("mig.mode.current", "").lower() == "enabled"
    for field, reason in (
        ("remapped_rows.failure", "row remapping failed: the GPU needs replacement"),
        ("remapped_rows.pending", "row remap pending: reset the GPU (`nvidia-smi -r`) or reboot"),
        ("retired_pages.pending", "page retirement pending: reset the GPU or reboot"),
    ):
        if row.get(field, "").lower() == "yes":
            gpu.faults.append(reason)
    uncorrected = _number(row.get("ecc.errors.uncorrected.volatile.total"))
    if uncorrected:
        gpu.faults.append(
            "%d uncorrected ECC errors since the driver was loaded: reset the GPU or reboot" % uncorrected
        )
    if row.get("compute_mode", "").lower() == "prohibited":
        gpu.faults.append("compute mode is Prohibited: `sudo nvidia-smi -c DEFAULT`")
    joined = " ".join(row.values())
    if LOST.search(joined):
        gpu.faults.append("GPU is lost: reboot the host (look for Xid 79 in dmesg)")
    elif any(mark in row.get("memory.used", "") for mark in ("Unknown Error", "ERR!")):
        gpu.faults.append("the driver cannot read this GPU's memory: look for Xid lines in dmesg")


def _monitor_row(cells: List[str], columns: Sequence[str], reading: SmiReading) -> None:
    """One sample of `pmon` or `dmon`; a later sample of the same GPU replaces the earlier one."""
    row = dict(zip(columns, cells))
    gpu = _place(reading, int(row["gpu"]), None, None, None)
    if "pid" in columns:
        gpu.shows = gpu.shows | {PROCESSES}
        pid = _number(row.get("pid"))
        if pid is not None and all(p.pid != pid for p in gpu.processes):
            name = " ".join(cells[len(columns) - 1 :])
            gpu.processes.append(
                GpuProcess(pid=pid, name=name, memory_mib=_number(row.get("fb")), type=row.get("type", "C"))
            )
        return
    gpu.shows = gpu.shows | {UTILIZATION}
    gpu.utilization_pct = _number(row.get("sm"))
    if "fb" in row:
        gpu.shows = gpu.shows | {MEMORY}
        gpu.memory_used_mib = _number(row.get("fb"))


def _read_bare(rows: List[List[str]], reading: SmiReading) -> None:
    """CSV without a header: find out what the columns are, then read it like one with a header."""
    width = max(len(row) for row in rows)
    rows = [row for row in rows if len(row) == width] if width > 1 else rows
    fields, unsure = guess_fields(rows)
    if fields is None:
        return
    if unsure:
        reading.notes.append(
            "CSV without header: the columns were taken as %s" % ", ".join(f for f in fields if f)
        )
    for row in rows:
        _row({field: cell for field, cell in zip(fields, row) if field}, reading)


def guess_fields(rows: List[List[str]]) -> Tuple[Optional[List[str]], bool]:
    """Column names for rows without a header, and whether that took a guess; None when nothing is recognised."""
    width = len(rows[0])
    columns = [[row[i] for row in rows] for i in range(width)]
    kinds = [_kind(column) for column in columns]
    fields = [{"uuid": "uuid", "bus": "pci.bus_id", "percent": ""}.get(kind, "") for kind in kinds]
    if "percent" in kinds:
        fields[kinds.index("percent")] = "utilization.gpu"
    numbers = [i for i, kind in enumerate(kinds) if kind == "int"]
    sizes = [i for i, kind in enumerate(kinds) if kind == "mib"]
    texts = [i for i, kind in enumerate(kinds) if kind == "text"]
    counts_up = bool(numbers) and _counts_up(columns[numbers[0]])
    is_apps = len(sizes) <= 1 and bool(numbers) and not (counts_up and numbers[0] == 0)
    if is_apps and (sizes or (texts and len(numbers) <= 2) or width <= 2) and "percent" not in kinds:
        return _app_fields(fields, numbers, sizes, texts), False
    if not (sizes or numbers or "percent" in kinds or "uuid" in kinds):
        return None, False
    if numbers and numbers[0] == 0 and counts_up:
        fields[0] = "index"
        numbers = numbers[1:]
    if texts:
        fields[texts[0]] = "name"
    memory = sizes if len(sizes) > 1 or (sizes and not numbers) else sizes + numbers
    unsure = _memory_fields(fields, memory, columns)
    if "percent" not in kinds and not sizes:
        rest = [i for i in numbers if not fields[i] and all(_value(c) <= 100 for c in columns[i])]
        if len(rest) == 1:
            fields[rest[0]] = "utilization.gpu"
    return (fields, unsure) if any(fields) else (None, False)


def _app_fields(fields: List[str], numbers: List[int], sizes: List[int], texts: List[int]) -> List[str]:
    fields[numbers[0]] = "pid"
    if sizes:
        fields[sizes[0]] = "used_memory"
    elif len(numbers) > 1:
        fields[numbers[1]] = "used_memory"
    if texts:
        fields[texts[-1]] = "process_name"
    return fields


def _memory_fields(fields: List[str], memory: List[int], columns: List[List[str]]) -> bool:
    """Name the memory columns: the largest is the total, its neighbour is used. True when that is a guess."""
    if not memory:
        return False
    peaks = {i: max(_value(c) for c in columns[i]) for i in memory}
    total = max(memory, key=lambda i: peaks[i])
    if len(memory) == 1:
        fields[memory[0]] = "memory.used"
        return True
    if peaks[total] < SMALLEST_TOTAL_MIB:
        return False
    fields[total] = "memory.total"
    before, after = total - 1, total + 1
    if before in memory and after in memory:
        used = after if peaks[after] > 100 >= peaks[before] else before
        used = after if fields[before] else used
    else:
        used = (
            before
            if before in memory
            else after
            if after in memory
            else min(memory, key=lambda i: abs(i - total))
        )
    fields[used] = "memory.used"
    return True


def _value(cell: str) -> int:
    found = re.match(r"^\d+", cell)
    return int(found.group()) if found else 0


def _counts_up(column: List[str]) -> bool:
    numbers = [int(cell) for cell in column if _INT.match(cell)]
    return (
        bool(numbers) and numbers == sorted(set(numbers)) and numbers[-1] < 64 and len(numbers) == len(column)
    )


def _kind(column: List[str]) -> str:
    cells = [cell for cell in column if not says_nothing(cell)]
    for name, pattern in (
        ("uuid", _UUID),
        ("bus", _BUS),
        ("mib", _MIB),
        ("percent", _PERCENT),
        ("int", _INT),
    ):
        if cells and all(pattern.match(cell) for cell in cells):
            return name
    return (
        "text"
        if cells and any(re.search(r"[A-Za-z/]", c) for c in cells) and not _ignorable(cells)
        else "other"
    )


def _ignorable(cells: List[str]) -> bool:
    """Text columns that are no product or process name: dates, versions, states, sizes of other kinds."""
    return all(
        re.match(
            r"^(\d[\d./: -]*|P\d+|Enabled|Disabled|Default|Yes|No|On|Off|[\d.]+ (W|MHz|C|KB/s)|Exclusive_Process)$",
            c,
        )
        for c in cells
    )
