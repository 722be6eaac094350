"""Reads the plain table of `nvidia-smi`, whole or as people paste it.

Pasted tables lose lines, columns' blanks, right borders and indices, and gain quote marks, prompts and colours.
So rows are recognised by what their cells look like, never by column positions. Table generations: two lines per
GPU (drivers up to 440), three with MIG (450 to 590), process rows without a type (drivers before 352), with a
type, and with GI and CI ids. Pure, stdlib, Python 3.8.
"""

from __future__ import annotations

import re
from typing import List, Optional, Tuple

from remote_jobs.agent.gpu_model import PROCESSES, VGPU_NAME, Gpu, GpuProcess, MigDevice, SmiReading
from remote_jobs.agent.smi_errors import LOST

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_QUOTE = re.compile(r"^\s*(?:[>#$%]\s*)+(?=[|+])")
_HEADER = re.compile(
    r"NVIDIA-SMI\s+(?P<smi>\d[\dXx.]*)(?:.*?(?:Driver|KMD) Version:\s*(?P<driver>[\d.]+))?"
    r"(?:.*?CUDA (?:UMD )?Version:\s*(?P<cuda>[\d.]+))?"
)
_BORDER = re.compile(r"^(?P<prefix>.*?)\+[-=]{20,}")
_NAME_CELL = re.compile(
    r"^(?:GPU\s+(?=\d))?(?:(?P<index>\d+)(?=\s|$))?\s*(?P<name>.*?)\s*(?P<mode>\bOn|\bOff|N/A|WDDM|TCC|MCDM|ERR!)?$"
)
_BUS_CELL = re.compile(
    r"^(?P<bus>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{1,2}:[0-9A-Fa-f]{1,2}\.[0-9A-Fa-f]|N/A(?=\s)|ERR!(?=\s))\s*(?P<display>On|Off|N/A|ERR!)?$"
)
_INDEXED = re.compile(r"^\d+\s+[A-Za-z]")
_SIZE = re.compile(r"(?P<used>\d+)\s*Mi?B\s*/\s*(?P<total>\d+)\s*Mi?B")
_SENSOR_CELL = re.compile(
    r"^(?:\d+\s?%|N/A|ERR!|\[[^\]]*\])?\s*(?:\d+\s?C|N/A|ERR!)\s+(?:P\d+|N/A|ERR!)\b|^ERR!"
)
_UTIL = re.compile(r"^(\d+)\s*%")
_MIG_IDS = re.compile(r"^(?P<gpu>\d+)\s+(?P<gi>\d+|N/A)\s+(?P<ci>\d+|N/A)\s+(?P<dev>\d+)$")
_MIG_MODE = re.compile(r"^(Enabled|Disabled|N/A)(\*?)$")
_PROCESS = re.compile(
    r"^[\s|]*(?P<gpu>\d+)\s+"
    r"(?:(?P<gi>\d+|N/A)\s+(?P<ci>\d+|N/A)\s+)?"
    r"(?P<pid>\d+|N/A|-)\s+"
    r"(?:(?P<type>C\+G|G\+C|M\+C\+G|M\+C|C\+M|C|G|M)\s+)?"
    r"(?P<name>\S.*?|)\s*"
    r"(?:(?<=\s)(?P<memory>\d+\s*Mi?B|N/A|\d+(?:M|Mi)?\.\.\.)\s*)?\|?\s*$"
)
_PROCESSES_TITLE = re.compile(r"\b(?:Compute )?Processes:|\bPID\s+(?:Type\s+)?Process name", re.IGNORECASE)
_MIG_TITLE = re.compile(r"\bMIG devices:|\bGI\s+CI\s+MIG\b")
_NOT_SUPPORTED = re.compile(r"^\W*(?P<gpu>\d+)\s+\[?Not Supported", re.IGNORECASE)
_UNREADABLE = "the driver cannot read this GPU (%s): look for Xid lines in dmesg"
_TOO_MANY_ERRORS = 3
"""A fan or a power sensor that cannot be read says nothing about computing; several at once do."""


def lines_of(text: str) -> List[str]:
    """The text's lines without colours, carriage returns and prefixes (quote marks, `node1: `), with plain bars."""
    cleaned = _ANSI.sub("", text).replace("\u2502", "|").replace("\u2503", "|").replace("\xa0", " ")
    lines = [line.rstrip("\r") for line in cleaned.split("\n")]
    borders = (_BORDER.match(line) for line in lines)
    prefix = next((border.group("prefix") for border in borders if border), "")
    if prefix:
        lines = [line[len(prefix) :] if line.startswith(prefix) else line for line in lines]
    return [_QUOTE.sub("", line).rstrip() for line in lines]


def read_table(text: str) -> SmiReading:
    """Read the last complete table of the text (`nvidia-smi -l` prints one after the other)."""
    snapshots: List[List[str]] = [[]]
    seen_header = False
    for line in lines_of(text):
        if _HEADER.search(line):
            if seen_header:
                snapshots.append([])
            seen_header = True
        snapshots[-1].append(line)
    readings = [_Reader().read(lines) for lines in snapshots]
    last = readings[-1]
    if len(readings) > 1 and len(last.gpus) < len(readings[-2].gpus) and last.cut:
        last = readings[-2]
        last.notes.append("the last table is cut; the one before it was read")
    return last


class _Reader:
    """State while walking down one table: which section, which GPU."""

    def __init__(self) -> None:
        self.reading = SmiReading(form="table")
        self.section = ""
        self.current: Optional[Gpu] = None
        self.wsl = False
        """In WSL the Linux tool and the Windows driver have different versions, and the desktop is invisible."""

    def read(self, lines: List[str]) -> SmiReading:
        for line in lines:
            self._line(line)
        self.reading.cut = self.section == "gpus"
        return self.reading

    def _line(self, line: str) -> None:
        header = _HEADER.search(line)
        if header:
            self.reading.driver_version = header.group("driver") or header.group("smi")
            self.reading.cuda_version = header.group("cuda")
            self.wsl = header.group("driver") not in (None, header.group("smi"))
        elif _PROCESSES_TITLE.search(line):
            self.section = "processes"
        elif _MIG_TITLE.search(line):
            self.section = "mig"
        elif self._cells(_split(line)) or self._process_row(line):
            pass
        elif self.current is not None and self.section == "gpus" and LOST.search(line):
            self.current.faults.append("GPU is lost: reboot the host (look for Xid 79 in dmesg)")

    def _cells(self, cells: List[str]) -> bool:
        """Rows that are told apart by their cells: a GPU's two or three lines, a MIG device's first."""
        if len(cells) < 2:
            return False
        for position, cell in enumerate(cells):
            bus = _BUS_CELL.match(cell) if position else None
            # Two times N/A is an address only beside an index: sensors and utilisation print it as well.
            if bus and (":" in bus.group("bus") or _INDEXED.match(cells[position - 1])):
                after = cells[position + 1 :]
                self._gpu_row(cells[position - 1], bus, after)
                joined = next((_SIZE.search(other) for other in after if _SIZE.search(other)), None)
                if joined:
                    self._memory_row(after, joined)
                return True
        size = next((_SIZE.search(cell) for cell in cells if _SIZE.search(cell)), None)
        if self.section == "mig":
            ids = _MIG_IDS.match(cells[0])
            if ids and size:
                self._mig_row(ids, size)
            return True
        if self.section == "processes":
            return False
        if size or (len(cells) > 2 and _SENSOR_CELL.match(cells[0])):
            self._memory_row(cells, size)
            return True
        mode = _MIG_MODE.match(cells[-1])
        if mode and self.current is not None and not any(cells[:-1]):
            self.current.mig_enabled = mode.group(1) == "Enabled"
            if mode.group(2):
                self.current.notes.append("a change of MIG mode is pending")
            return True
        return False

    def _gpu_at(self, index: int) -> Gpu:
        for gpu in self.reading.gpus:
            if gpu.index == index:
                return gpu
        gpu = Gpu(index=index)
        self.reading.gpus.append(gpu)
        return gpu

    def _gpu_row(self, name_cell: str, bus: "re.Match[str]", after: List[str]) -> None:
        found = _NAME_CELL.match(name_cell)
        index = found.group("index") if found else None
        name = found.group("name").strip() if found else ""
        gpu = self._gpu_at(int(index) if index is not None else len(self.reading.gpus))
        self.current, self.section = gpu, "gpus"
        gpu.bus_id = bus.group("bus") if ":" in bus.group("bus") else None
        gpu.complete = False  # until its memory line is seen
        if "ERR!" in name or "Unknown Error" in name:
            gpu.faults.append(_UNREADABLE % "ERR!")
        gpu.name = name or None
        gpu.virtual = bool(VGPU_NAME.search(name))
        windows = bool(found and found.group("mode") == "WDDM")
        gpu.display_memory_hidden = windows or (self.wsl and bus.group("display") == "On")
        ecc = after[0] if after else ""
        if ecc.isdigit() and int(ecc) > 0:
            gpu.faults.append(
                "%s uncorrected ECC errors since the driver was loaded: reset the GPU or reboot" % ecc
            )

    def _memory_row(self, cells: List[str], size: "Optional[re.Match[str]]") -> None:
        """A GPU's second line: sensors | memory | utilisation and compute mode."""
        gpu = self.current if self.section == "gpus" and self.current is not None else None
        if gpu is None or gpu.memory_used_mib is not None:
            # Only these lines were pasted (`nvidia-smi | grep MiB`): their order is the index.
            gpu = self._gpu_at(len(self.reading.gpus))
        self.current, self.section = gpu, "gpus"
        if size:
            gpu.memory_used_mib, gpu.memory_total_mib = int(size.group("used")), int(size.group("total"))
        elif len(cells) > 1 and ("ERR!" in cells[1] or "Unknown" in cells[1]):
            gpu.faults.append(_UNREADABLE % "ERR! instead of its memory")
        gpu.complete = True
        utilization = _UTIL.match(cells[-1])
        if utilization:
            gpu.utilization_pct = int(utilization.group(1))
        if "Prohibited" in cells[-1]:
            gpu.faults.append("compute mode is Prohibited: `sudo nvidia-smi -c DEFAULT`")
        errors = sum(cell.count("ERR!") for cell in cells)
        if errors >= _TOO_MANY_ERRORS and not gpu.faults:
            gpu.faults.append(_UNREADABLE % ("%d x ERR!" % errors))
        elif errors and not gpu.faults:
            gpu.notes.append("%d sensor value(s) cannot be read (ERR!)" % errors)

    def _mig_row(self, ids: "re.Match[str]", size: "re.Match[str]") -> None:
        gpu = self._gpu_at(int(ids.group("gpu")))
        gpu.mig_enabled = True
        gpu.mig_devices.append(
            MigDevice(_int(ids.group("gi")), int(size.group("used")), int(size.group("total")))
        )

    def _process_row(self, line: str) -> bool:
        unsupported = _NOT_SUPPORTED.search(line) if self.section == "processes" else None
        if unsupported:
            self._gpu_at(int(unsupported.group("gpu"))).notes.append("this GPU does not list its processes")
            return True
        row = _PROCESS.match(line)
        if row is None or not _is_process(row, line, self.section):
            return False
        self.section = "processes"
        gpu, process = _process(row)
        if not any(known.index == gpu for known in self.reading.gpus):
            self._gpu_at(gpu).shows = frozenset((PROCESSES,))
        self._gpu_at(gpu).processes.append(process)
        return True


def _split(line: str) -> List[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")] if "|" in line else []


def _int(text: Optional[str]) -> Optional[int]:
    return int(text) if text is not None and text.isdigit() else None


def _is_process(row: "re.Match[str]", line: str, section: str) -> bool:
    """Two numbers alone prove nothing: ask for the section, a type, or a bar with a memory column."""
    if line.strip().strip("|").count("|"):
        return False
    if section == "processes":
        return row.group("type") is not None or row.group("memory") is not None
    return row.group("type") is not None and (row.group("memory") is not None or row.group("gi") is not None)


def _process(row: "re.Match[str]") -> Tuple[int, GpuProcess]:
    # "11474..." is a size cut at eight characters: its last digits are unknown, so it is None.
    known = re.match(r"(\d+)\s*Mi?B$", row.group("memory") or "")
    return int(row.group("gpu")), GpuProcess(
        pid=_int(row.group("pid")),
        name=row.group("name").strip(),
        memory_mib=int(known.group(1)) if known else None,
        type=row.group("type") or "C",
        gpu_instance=_int(row.group("gi")),
    )
