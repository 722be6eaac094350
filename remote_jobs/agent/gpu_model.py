"""What one reading of nvidia-smi says, whatever form it was printed in.

The readers (`smi_xml`, `smi_table`, `smi_csv`) fill these classes and `gpus` judges them, so a verdict never
depends on which form was at hand. Data only: no I/O, no parsing, stdlib, Python 3.8.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import FrozenSet, List, Optional

MEMORY = "memory"
PROCESSES = "processes"
UTILIZATION = "utilization"

VGPU_NAME = re.compile(r"^GRID |-\d+[ABCQ]$")
"""Product names of vGPU guests, such as `GRID T4-16Q` and `NVIDIA A100-40C`."""


@dataclass
class GpuProcess:
    """One row of nvidia-smi's process list: a process appears once per GPU it uses."""

    pid: Optional[int]
    name: str
    memory_mib: Optional[int] = None
    type: str = "C"
    """As printed: C (compute), G (graphics), C+G, M+C (through MPS)."""
    gpu_instance: Optional[int] = None
    owner: str = "unknown"
    """`job:<id>`, `user:<name>` or `unknown`; filled in by the gate, which can see /proc."""
    detail: str = ""
    """For people: since when, command line. Never part of a decision."""

    @property
    def kind(self) -> str:
        """`graphics` for display processes (types G and C+G), else `compute`."""
        return "graphics" if "G" in self.type.upper() else "compute"


@dataclass
class MigDevice:
    """One MIG device of a GPU, memory in MiB."""

    gpu_instance: Optional[int]
    memory_used_mib: Optional[int]
    memory_total_mib: Optional[int]


@dataclass
class Gpu:
    """One GPU as printed. None means that the output does not say, never zero."""

    index: Optional[int]
    uuid: Optional[str] = None
    bus_id: Optional[str] = None
    name: Optional[str] = None
    memory_used_mib: Optional[int] = None
    memory_total_mib: Optional[int] = None
    memory_reserved_mib: Optional[int] = None
    """The driver's own reservation, where the output lists it beside `used` (drivers from 510 on)."""
    utilization_pct: Optional[int] = None
    power_w: Optional[int] = None
    """Read from the full report (`-q`) only: people watch it, nothing is judged by it."""
    compute_capability: Optional[str] = None
    mig_enabled: bool = False
    mig_devices: List[MigDevice] = field(default_factory=list)
    virtual: bool = False
    """A vGPU guest: the hypervisor's share counts as used and belongs to nobody here."""
    display_memory_hidden: bool = False
    """Windows' WDDM: the desktop's memory counts as used and no process is listed for it."""
    processes: List[GpuProcess] = field(default_factory=list)
    complete: bool = True
    """False when the text ends inside this GPU's part, so that its processes may be missing."""
    faults: List[str] = field(default_factory=list)
    """Reasons why this GPU must not be used, worst first. Empty: healthy as far as the output tells."""
    notes: List[str] = field(default_factory=list)
    """Oddities that do not forbid its use."""
    shows: FrozenSet[str] = frozenset((MEMORY, PROCESSES, UTILIZATION))
    """What this form of output shows at all (`nvidia-smi -L` shows nothing but names)."""

    @property
    def compute(self) -> List[GpuProcess]:
        """Processes that compute on this GPU."""
        return [p for p in self.processes if p.kind == "compute"]

    @property
    def graphics(self) -> List[GpuProcess]:
        """Display processes of this GPU; their memory is not foreign."""
        return [p for p in self.processes if p.kind == "graphics"]


@dataclass
class SmiReading:
    """Everything one text of nvidia-smi said, before anybody judged it."""

    form: str = "unknown"
    """xml, text (`-q`), table, csv, list (`-L`), pmon, dmon, error, unknown."""
    gpus: List[Gpu] = field(default_factory=list)
    driver_version: Optional[str] = None
    cuda_version: Optional[str] = None
    attached: Optional[int] = None
    """How many GPUs nvidia-smi itself says are attached (XML and `-q`)."""
    errors: List[str] = field(default_factory=list)
    """nvidia-smi's own error lines, each with what it means."""
    notes: List[str] = field(default_factory=list)
    listed_processes: bool = False
    """A list of processes was printed, even when it is empty (`--query-compute-apps`)."""
    cut: bool = False
    """The text ends in the middle."""
