"""Reads `nvidia-smi -q -x` and the same report as text (`nvidia-smi -q`).

Both become one tree of lower-case keys, so that the meaning is written down once. Schema differences between
driver generations (nvsmi_device v5 to v13) are lists of alternative paths. Nothing here is trusted to be there:
a missing or unreadable value is None. Pure, stdlib, Python 3.8.
"""

from __future__ import annotations

import re
from typing import Any, Dict, Iterable, List, Optional, Tuple, Union
from xml.etree import ElementTree as ET

from remote_jobs.agent.gpu_model import VGPU_NAME, Gpu, GpuProcess, MigDevice, SmiReading
from remote_jobs.agent.smi_errors import LOST, says_nothing

Tree = Dict[str, List[Union[str, "Tree"]]]

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f]")
_BARE_AMPERSAND = re.compile(r"&(?!#?\w+;)")
_FREE_TEXT = re.compile(r"(<(process_name|product_name)>)(.*?)(</\2>)", re.DOTALL)
_NUMBER = re.compile(r"-?\d+")
UNREADABLE = re.compile(r"ERR!|Unknown Error|Unable to|GPU requires reset", re.IGNORECASE)

FAULTS_WHEN_YES: Tuple[Tuple[str, str], ...] = (
    ("remapped_rows/remapped_row_failure", "row remapping failed: the GPU needs replacement"),
    ("remapped_rows/remapping_failure_occurred", "row remapping failed: the GPU needs replacement"),
    ("ecc_errors/unrepairable_memory", "unrepairable memory: the GPU needs replacement"),
    ("remapped_rows/remapped_row_pending", "row remap pending: reset the GPU (`nvidia-smi -r`) or reboot"),
    ("remapped_rows/pending", "row remap pending: reset the GPU (`nvidia-smi -r`) or reboot"),
    ("ecc_errors/channel_repair_pending", "memory channel repair pending: reset the GPU or reboot"),
    ("ecc_errors/tpc_repair_pending", "TPC repair pending: reset the GPU or reboot"),
    ("retired_pages/pending_retirement", "page retirement pending: reset the GPU or reboot"),
    ("retired_pages/pending_blacklist", "page retirement pending: reset the GPU or reboot"),
    ("retired_pages/pending_page_blacklist", "page retirement pending: reset the GPU or reboot"),
)
UNCORRECTED_PATHS = (
    "ecc_errors/volatile/sram_uncorrectable",
    "ecc_errors/volatile/sram_uncorrectable_parity",
    "ecc_errors/volatile/sram_uncorrectable_secded",
    "ecc_errors/volatile/sram_uncorrectable_sec-ded",
    "ecc_errors/volatile/dram_uncorrectable",
    "ecc_errors/volatile/double_bit/total",
)
# Before driver 535: power_readings; then gpu_power_readings; split into average and instant from 570 on.
POWER_PATHS = tuple(
    f"{block}/{name}"
    for block in ("gpu_power_readings", "power_readings")
    for name in ("instant_power_draw", "power_draw", "average_power_draw")
)


def read_xml(text: str) -> SmiReading:
    """Read XML of any driver generation; a document cut in the middle gives what was complete."""
    start = max(text.rfind("<?xml"), text.rfind("<nvidia_smi_log"))
    opening = text.rfind("<nvidia_smi_log")
    document = text[opening if opening >= 0 else max(start, 0) :]
    document = _CONTROL.sub("", document)
    document = _FREE_TEXT.sub(lambda m: m.group(1) + _escape(m.group(3)) + m.group(4), document)
    document = _BARE_AMPERSAND.sub("&amp;", document)
    parser: Any = ET.XMLPullParser(("start", "end"))  # its stubs differ between type checkers' releases
    root: Optional[ET.Element] = None
    closed = False
    ended: List[ET.Element] = []
    try:
        # Line by line: what stands before the fault has been handed out by then.
        for line in document.splitlines(keepends=True):
            parser.feed(line)
            for event, element in parser.read_events():
                if root is None:
                    root = element
                if event == "end" and element.tag == "gpu":
                    ended.append(element)
                closed = closed or (event == "end" and element is root)
            if closed:
                break
    except ET.ParseError:
        pass
    reading = SmiReading(form="xml", cut=not closed)
    if root is None:
        return reading
    tree = _element_tree(root)
    elements = root.findall("gpu")
    _fill(reading, tree, elements)
    for gpu, element in zip(reading.gpus, elements):
        gpu.complete = gpu.complete and any(element is whole for whole in ended)
    return reading


def _escape(text: str) -> str:
    return _BARE_AMPERSAND.sub("&amp;", text).replace("<", "&lt;").replace(">", "&gt;")


def _fill(reading: SmiReading, tree: Tree, elements: Iterable[ET.Element]) -> None:
    reading.driver_version = text_at(tree, "driver_version")
    reading.cuda_version = text_at(tree, "cuda_version")
    reading.attached = number_at(tree, "attached_gpus")
    nodes = [(_element_tree(e), e.get("id")) for e in elements]
    reading.gpus = [gpu_from_tree(node, index, bus_id) for index, (node, bus_id) in enumerate(nodes)]
    _renumber(reading, [node for node, _ in nodes])


def _renumber(reading: SmiReading, nodes: List[Tree]) -> None:
    """The report carries no index: it is the place in the list, unless some GPUs are not described."""
    minors = [number_at(node, "minor_number") for node in nodes]
    if reading.attached in (None, len(nodes)) or None in minors or len(set(minors)) != len(minors):
        return
    for gpu, minor in zip(reading.gpus, minors):
        gpu.index = minor


def _element_tree(element: ET.Element) -> Tree:
    tree: Tree = {}
    for child in element:
        value: Union[str, Tree] = _element_tree(child) if len(child) else (child.text or "").strip()
        tree.setdefault(child.tag.lower(), []).append(value)
    return tree


def read_query_text(text: str) -> SmiReading:
    """Read `nvidia-smi -q` (the indented text form, also with `-d`)."""
    reading = SmiReading(form="text")
    text = text[text.rfind("NVSMI LOG") :] if "NVSMI LOG" in text else text
    root: Tree = {}
    gpus: List[Tuple[Tree, str]] = []
    stack: List[Tuple[int, Tree]] = [(-1, root)]
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("==="):
            continue
        header = re.match(r"^\s*GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])\s*$", line)
        if header:
            node: Tree = {}
            gpus.append((node, header.group(1)))
            stack = [(-1, root), (len(line) - len(line.lstrip()), node)]
            continue
        indent = len(line) - len(line.lstrip())
        key, separator, value = line.strip().partition(" : ")
        if not separator and line.rstrip().endswith(" :"):
            key, separator, value = line.strip()[:-1], ":", ""
        key = _key(key)
        while len(stack) > 1 and stack[-1][0] >= indent:
            stack.pop()
        parent = stack[-1][1]
        # "Process ID : 12" opens a block although it has a value; its fields are indented deeper.
        if separator and key != "process_id":
            parent.setdefault(key, []).append(value.strip())
        else:
            child: Tree = {"pid": [value.strip()]} if separator else {}
            parent.setdefault("process_info" if separator else key, []).append(child)
            stack.append((indent, child))
    reading.driver_version = text_at(root, "driver_version")
    reading.cuda_version = text_at(root, "cuda_version")
    reading.attached = number_at(root, "attached_gpus")
    reading.gpus = [gpu_from_tree(node, index, bus_id) for index, (node, bus_id) in enumerate(gpus)]
    _renumber(reading, [node for node, _ in gpus])
    return reading


def _key(text: str) -> str:
    return re.sub(r"[\s/]+", "_", text.strip().lower())


def values_at(tree: Tree, path: str) -> List[Union[str, Tree]]:
    """All values under a slash-separated path of keys."""
    level: List[Tree] = [tree]
    keys = path.split("/")
    for key in keys[:-1]:
        level = [child for node in level for child in node.get(key, []) if isinstance(child, dict)]
    return [value for node in level for value in node.get(keys[-1], [])]


def text_at(tree: Tree, *paths: str) -> Optional[str]:
    """First text among the paths that says something; N/A and its relatives are None."""
    for path in paths:
        for value in values_at(tree, path):
            if isinstance(value, str) and not says_nothing(value):
                return value
    return None


def number_at(tree: Tree, *paths: str) -> Optional[int]:
    """First number among the paths (units dropped: all sizes here are MiB), or None."""
    for path in paths:
        for value in values_at(tree, path):
            found = _NUMBER.match(value) if isinstance(value, str) else None
            if found:
                return int(found.group())
    return None


def gpu_from_tree(node: Tree, index: int, bus_id: Optional[str]) -> Gpu:
    """One GPU out of its subtree."""
    name = text_at(node, "product_name")
    gpu = Gpu(
        index=index,
        uuid=text_at(node, "uuid", "gpu_uuid"),
        bus_id=bus_id or text_at(node, "pci/pci_bus_id", "pci/bus_id"),
        name=name,
        memory_used_mib=number_at(node, "fb_memory_usage/used", "memory_usage/used"),
        memory_total_mib=number_at(node, "fb_memory_usage/total", "memory_usage/total"),
        memory_reserved_mib=number_at(node, "fb_memory_usage/reserved"),
        utilization_pct=number_at(node, "utilization/gpu_util", "utilization/gpu"),
        power_w=number_at(node, *POWER_PATHS),
        mig_enabled=(text_at(node, "mig_mode/current_mig", "mig_mode/current") or "").lower() == "enabled",
    )
    gpu.display_memory_hidden = text_at(node, "driver_model/current_dm", "driver_model/current") == "WDDM"
    mode = text_at(
        node, "gpu_virtualization_mode/virtualization_mode", "gpu_virtualization_mode/virtualization-mode"
    )
    gpu.virtual = (mode or "").upper().startswith("VGPU") or bool(VGPU_NAME.search(name or ""))
    for device in values_at(node, "mig_devices/mig_device") + values_at(node, "mig_device"):
        if isinstance(device, dict):
            gpu.mig_devices.append(
                MigDevice(
                    number_at(device, "gpu_instance_id"),
                    number_at(device, "fb_memory_usage/used"),
                    number_at(device, "fb_memory_usage/total"),
                )
            )
    gpu.processes = [_process(p) for p in _process_trees(node)]
    gpu.faults = list(_faults(node))
    gpu.complete = bool(gpu.name or gpu.uuid or gpu.memory_used_mib is not None)
    return gpu


def _process_trees(node: Tree) -> Iterable[Tree]:
    for path in ("processes/process_info", "compute_processes/process_info", "process_info"):
        for value in values_at(node, path):
            if isinstance(value, dict) and (value.get("pid") or value.get("process_name")):
                yield value


def _process(tree: Tree) -> GpuProcess:
    raw_name = next((v for k in ("process_name", "name") for v in tree.get(k, []) if isinstance(v, str)), "")
    return GpuProcess(
        pid=number_at(tree, "pid"),
        name=raw_name,
        memory_mib=number_at(tree, "used_memory", "used_gpu_memory"),
        type=text_at(tree, "type") or "C",
        gpu_instance=number_at(tree, "gpu_instance_id"),
    )


def _faults(node: Tree) -> Iterable[str]:
    everything = " ".join(_texts(node))
    if LOST.search(everything):
        yield "GPU is lost: reboot the host (look for Xid 79 in dmesg)"
    memory = " ".join(str(v) for v in values_at(node, "fb_memory_usage/used"))
    if UNREADABLE.search(memory) or len(UNREADABLE.findall(everything)) > 2:
        yield "the driver cannot read this GPU (ERR!/Unknown Error): look for Xid lines in dmesg"
    for path, reason in FAULTS_WHEN_YES:
        if (text_at(node, path) or "").lower().startswith("yes"):
            yield reason
    uncorrected = sum(number_at(node, path) or 0 for path in UNCORRECTED_PATHS)
    if uncorrected > 0:
        yield "%d uncorrected ECC errors since the driver was loaded: reset the GPU or reboot" % uncorrected
    action = text_at(node, "gpu_recovery_action")
    if action:
        yield "the driver asks for recovery: %s" % action
    state = text_at(node, "fabric/state")
    status = text_at(node, "fabric/status")
    if state and (state.lower() != "completed" or (status or "success").lower() != "success"):
        yield "NVLink fabric is not ready (%s, %s): start nvidia-fabricmanager" % (
            state,
            status or "no status",
        )
    if (text_at(node, "compute_mode") or "").lower() == "prohibited":
        yield "compute mode is Prohibited: `sudo nvidia-smi -c DEFAULT`"


def _texts(node: Tree) -> Iterable[str]:
    for key, values in node.items():
        if key in ("processes", "process_info", "supported_clocks", "fan_speed"):
            continue
        for value in values:
            if isinstance(value, dict):
                yield from _texts(value)
            else:
                yield value
